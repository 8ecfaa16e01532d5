# SPDX-License-Identifier: Apache-2.0
"""The training batches of a task: its rows become global batches. The batch at a step is a function of (seed, step)."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import Batch, Row
from bert_jax.batches.load import prefetch
from bert_jax.batches.make import batch_of_layout, texts_apart
from bert_jax.batches.order import Mix, StreamedPlan, mix_by_weights, plan_epoch
from bert_jax.batches.pack import (
    Layout,
    Shape,
    Sizes,
    StoredRows,
    Streamed,
    layout_alone,
    layout_packed,
    longest_of,
    most_sequences,
    rows_with,
    sizes_apart,
    sizes_of,
)
from bert_jax.batches.shapes import (
    choose_lengths,
    choose_shape,
    length_step,
    padded_flops,
    sample_batches,
)
from bert_jax.errors import InputError
from bert_jax.model.heads.base import Head
from bert_jax.settings.finetuning import FinetuneDataConfig
from bert_jax.settings.model import ModelConfig

_MOST_BATCHES = 1 << 14  # whose FLOPs are counted


@dataclasses.dataclass(frozen=True)
class Batching:
    """How the rows of a task become training batches."""

    batch_size: int  # rows of the task
    seed: int
    bucket: bool  # batches of like lengths, where they are not packed
    lengths: tuple[int, ...]  # that rows are padded to if not packed
    # of packed batches; None gives each row of the task a row of its own
    shape: Shape | None = None
    widest: int = 1  # sequences of what is laid out by itself, at most
    texts: int = 0  # at most in a row, if each text is laid out by itself; 0 lays out whole rows
    num_parts: int = 0  # texts of a batch, on average, in that case
    mix: Mix | None = None  # how an epoch draws from several sources

    def num_steps(self, num_rows: int) -> int:
        """Returns the batches of an epoch of so many rows; the last may not be full."""
        mix = self.mix or Mix((num_rows,), (num_rows,))
        return mix.num_steps(self.batch_size)

    def sizes(self, rows: Sequence[Row]) -> Sizes:
        """Returns the sizes that batches lay out: of packed texts, of the longest text of each row, or of rows."""
        if not self.texts:
            return sizes_of(rows)
        if self.shape is not None:
            return sizes_apart(rows)
        longest = longest_of(rows)
        return Sizes(longest, np.ones_like(longest))

    def layout(self, sizes: Sizes, numbers: np.ndarray) -> Layout:
        """Returns the batch that holds some of the rows of these sizes."""
        if self.shape is not None:
            return layout_packed(sizes, numbers, self.shape)
        longest = sizes.tokens[numbers].max()
        length = next(length for length in self.lengths if length >= longest)
        num_rows = self.batch_size * max(self.texts, 1)
        return layout_alone(numbers.tolist(), num_rows, length, self.widest)

    def flops(self, rows: Sequence[Row], model: ModelConfig) -> float:
        """Returns the FLOPs of the forward passes of an epoch, padding included; of packed batches from a sample."""
        sizes = self.sizes(rows)
        if self.shape is None:
            # of so many that laying out all takes long, some: every n-th
            batches = plan_epoch(sizes.tokens, self.batch_size, 0, 0, self.bucket)
            batches = batches[:: 1 + len(batches) // _MOST_BATCHES]
        else:
            batches = sample_batches(sizes, self.num_parts or self.batch_size)
        total = padded_flops(model, (self.layout(sizes, numbers) for numbers in batches))
        return total / sum(map(len, batches)) * len(sizes.tokens)


def choose_batching(
    rows: Sequence[Row],
    data: FinetuneDataConfig,
    model: ModelConfig,
    group: int,
    pack: str,
    num_steps: int,
    apart: bool = False,
) -> Batching:
    """Returns how to make training batches; `pack` is "on", "off" or "auto", which packs if that takes fewer FLOPs.

    `group` comes from `row_group`. The choice of "auto" does not depend on it: a seed has the same batches on any mesh.
    A run of `num_steps` compiles one program or two for them, whichever is cheaper. With `apart`, the texts of a row
    need not share a row of a batch.
    """
    multiple = length_step(model.attention)
    size = data.batch_size
    most = most_sequences(rows)
    parts = sizes_apart(rows) if apart else sizes_of(rows)
    num_parts = -(-size * len(parts.tokens) // len(rows)) if apart else size
    alone = Batching(
        batch_size=size,
        seed=data.seed,
        bucket=data.bucket,
        lengths=(),
        widest=1 if apart else most,
        texts=most if apart else 0,
        num_parts=num_parts,
        mix=mix_of(rows, data),
    )
    # those of many millions of rows take seconds, and packed batches have none of them
    if pack != "on" or not isinstance(rows, StoredRows):
        lengths = choose_lengths(alone.sizes(rows), size, data.bucket, multiple, num_steps)
        alone = dataclasses.replace(alone, lengths=lengths)
    if pack == "off":
        return alone

    def packed(group: int) -> Batching:
        return dataclasses.replace(
            alone, shape=choose_shape(parts, num_parts, model, multiple, group, num_steps)
        )

    fewer = pack == "on" or packed(1).flops(rows, model) < alone.flops(rows, model)
    return packed(group) if fewer else alone


def mix_of(rows: Sequence[Row], data: FinetuneDataConfig) -> Mix:
    """Returns how an epoch draws rows. Raises: InputError if sources are to be kept apart, and there is one."""
    stretches = rows.stretches if isinstance(rows, StoredRows) else (len(rows),)
    if data.source_batches and len(stretches) == 1:
        raise InputError(
            "data.source_batches keeps the sources of prepared pairs apart, and these data have one; leave it out"
        )
    weights = rows.weights if isinstance(rows, StoredRows) else ()
    return mix_by_weights(stretches, weights, data.source_batches)


def _rows_of(stream: Streamed, begin: int, end: int) -> np.ndarray:
    """Returns the rows of a stream from a place on, counted over all epochs, up to another."""
    return stream.train_rows(0, np.arange(begin, end), end)[0]


def train_batches(
    rows: Sequence[Row], head: Head, first_step: int, batching: Batching, mesh: Mesh
) -> Iterator[Batch]:
    """Yields the batches at first_step, first_step + 1, ... without end.

    At each step, packed batches have the same rows of the task as unpacked batches without `bucket`.
    """
    lengths = dataclasses.replace(batching, shape=None).sizes(rows).tokens
    size = batching.batch_size
    bucket = batching.bucket and batching.shape is None
    num_steps = batching.num_steps(len(rows))
    plans: dict[int, list[np.ndarray]] = {}  # of the epoch under way
    streamed = None
    if isinstance(rows, StoredRows) and rows.streams:
        streamed = StreamedPlan(
            mix=batching.mix or Mix(rows.stretches, rows.stretches),
            lengths=lengths,
            batch_size=size,
            seed=batching.seed,
            bucket=bucket,
            take=[partial(_rows_of, stream) for stream in rows.streams],
        )

    def numbers_at(step: int) -> np.ndarray:
        if streamed is not None:
            return streamed.at(step)
        epoch, index = divmod(step, num_steps)
        if epoch not in plans:
            plans.clear()
            plans[epoch] = plan_epoch(lengths, size, batching.seed, epoch, bucket, batching.mix)
        return plans[epoch][index]

    def make(step: int) -> Batch:
        numbers = numbers_at(step)
        parts = rows_with(rows, numbers)
        if batching.texts:
            parts = texts_apart(parts, batching.texts, numbers.tolist())
        layout = batching.layout(sizes_of(parts), np.arange(len(parts)))
        return batch_of_layout(parts, layout, head, mesh, size)

    return prefetch(make, first_step)
