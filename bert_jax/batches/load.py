# SPDX-License-Identifier: Apache-2.0
"""The batches of pre-training: rows on disk to global batches. That of a step is a pure function of (seed, step)."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import Batch
from bert_jax.batches.make import on_mesh
from bert_jax.batches.order import train_rows
from bert_jax.batches.stream import StreamedSplit
from bert_jax.data.blocks import RowSource
from bert_jax.data.records import unpack_word_starts
from bert_jax.devices.sharding import row_sharding

Item = TypeVar("Item")


def rows_to_batch(rows: np.ndarray, epochs: np.ndarray) -> Batch:
    """Returns the batch of some rows (a structured array of row format v1), as numpy arrays.

    Rows with static masks give their predictions too, the same in every epoch. An empty row has none.
    """
    row_length = rows["token_ids"].shape[1]
    lengths = rows["lengths"].astype(np.int32)  # [B, M]
    starts = np.cumsum(lengths, axis=1) - lengths
    positions = np.arange(row_length)
    sequence_ids = np.zeros((len(rows), row_length), np.uint8)
    type_ids = np.zeros((len(rows), row_length), np.uint8)
    for slot in range(lengths.shape[1]):
        start, length, first = (
            array[:, slot, None] for array in (starts, lengths, rows["first_lengths"])
        )
        inside = (positions >= start) & (positions < start + length)
        sequence_ids[inside] = slot + 1
        type_ids[inside & (positions >= start + first)] = 1
    batch = Batch(
        token_ids=rows["token_ids"],
        type_ids=type_ids,
        sequence_ids=sequence_ids,
        cls_positions=np.where(lengths > 0, starts, 0).astype(np.int32),
        sequence_weights=(lengths > 0).astype(np.float32),
        next_sentence_labels=rows["labels"].astype(np.int32),
        sequence_numbers=rows["numbers"],
        epochs=epochs,
        word_starts=unpack_word_starts(rows["word_starts"], row_length),
    )
    if "mlm_counts" not in (rows.dtype.names or ()):
        return batch
    counts = np.where(lengths.any(axis=1), rows["mlm_counts"], 0)
    return batch._replace(
        mlm_positions=rows["mlm_positions"].astype(np.int32),
        mlm_labels=rows["mlm_labels"].astype(np.int32),
        mlm_weights=(np.arange(rows["mlm_positions"].shape[1]) < counts[:, None]).astype(
            np.float32
        ),
    )


def abstract_batch(row: np.dtype, batch_size: int = 1, mesh: Mesh | None = None) -> Batch:
    """Returns the shapes and dtypes of a batch of rows of a record (`row_dtype`), and on a mesh its shardings."""
    sharding = None if mesh is None else row_sharding(mesh)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (batch_size, *leaf.shape[1:]), leaf.dtype, sharding=sharding
        ),
        rows_to_batch(np.zeros(1, row), np.zeros(1, np.int32)),
    )


def train_batch(
    split: RowSource, step: int, batch_size: int, seed: int, mesh: Mesh, rows_before: int = 0
) -> Batch:
    """Returns the global training batch at a step, on the mesh."""

    def make_rows(positions: np.ndarray) -> Batch:
        if isinstance(split, StreamedSplit):  # in an order that is made for reading whole blocks
            rows, epochs = split.train_rows(step, positions, batch_size, rows_before)
        else:
            rows, epochs = train_rows(
                step, positions, batch_size, split.num_rows, seed, rows_before
            )
        return rows_to_batch(split.gather(rows), epochs)

    return on_mesh(mesh, batch_size, make_rows)


def train_batches(
    split: RowSource, first_step: int, batch_size: int, seed: int, mesh: Mesh, rows_before: int = 0
) -> Iterator[Batch]:
    """Yields the batches at first_step, first_step + 1, ... for ever."""
    return prefetch(
        lambda step: train_batch(split, step, batch_size, seed, mesh, rows_before), first_step
    )


def prefetch(make: Callable[[int], Item], first_step: int) -> Iterator[Item]:
    """Yields make(first_step), make(first_step + 1), ... for ever, made two steps ahead in a thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
        ahead = [thread.submit(make, first_step + i) for i in range(2)]
        step = first_step + 2
        while True:
            yield ahead.pop(0).result()
            ahead.append(thread.submit(make, step))
            step += 1


def eval_batches(split: RowSource, batch_size: int, mesh: Mesh) -> Iterator[Batch]:
    """Yields all rows of a split once, in order; positions left over in the last batch have weight 0."""
    for first in range(0, split.num_rows, batch_size):

        def make_rows(positions: np.ndarray, first: int = first) -> Batch:
            numbers = first + positions
            missing = numbers >= split.num_rows
            rows = split.gather(np.where(missing, 0, numbers))
            rows["lengths"][missing] = 0  # an empty row: no token, no sequence, no prediction
            return rows_to_batch(rows, np.zeros(len(positions), np.int32))

        yield on_mesh(mesh, batch_size, make_rows)
