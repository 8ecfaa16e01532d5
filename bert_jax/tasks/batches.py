# SPDX-License-Identifier: Apache-2.0
"""Turns rows of a task into global batches. The batch at a step is a pure function of (seed, step)."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import Batch, pad_rows
from bert_jax.data.pipeline import on_mesh, prefetch
from bert_jax.devices.sharding import ROW_AXES
from bert_jax.model.heads.base import Head
from bert_jax.model.heads.labels import Spot
from bert_jax.model.on_cpu import length_step
from bert_jax.settings.finetuning import FinetuneDataConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.tasks.base import Row
from bert_jax.tasks.layouts import (
    Layout,
    Shape,
    Sizes,
    choose_lengths,
    choose_shape,
    epoch_flops,
    layout_alone,
    layout_packed,
    plan_epoch,
    sizes_of,
    steps_per_epoch,
    train_length,
)


def row_group(mesh: Mesh, accumulate: int = 1) -> int:
    """Returns a number that divides the number of rows of every batch."""
    return accumulate * int(np.prod([mesh.shape[axis] for axis in ROW_AXES]))


@dataclasses.dataclass(frozen=True)
class Batching:
    """How the rows of a task become training batches."""

    batch_size: int  # rows of the task
    seed: int
    bucket: bool  # batches of like lengths, where they are not packed
    lengths: tuple[int, ...]  # that rows are padded to if not packed
    shape: Shape | None = None  # of packed batches; None gives each row of the task a row of its own
    texts: int = 0  # at most in a row, if each text is laid out by itself; 0 lays out whole rows
    num_parts: int = 0  # texts of a batch, on average, in that case


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
    multiple, size = length_step(model.attention), data.batch_size
    texts = max(len(row.lengths) for row in rows) if apart else 0
    num_parts = -(-size * sum(len(row.lengths) for row in rows) // len(rows)) if apart else size
    alone = Batching(size, data.seed, data.bucket, (), None, texts, num_parts)
    lengths = choose_lengths(sizes_for(rows, alone), size, data.bucket, multiple, num_steps)
    alone = dataclasses.replace(alone, lengths=lengths)
    if pack == "off":
        return alone

    def packed(group: int) -> Batching:
        parts = sizes_of(_texts_apart(rows) if apart else rows)
        return dataclasses.replace(alone, shape=choose_shape(parts, num_parts, model, multiple, group, num_steps))

    def cost(batching: Batching) -> float:
        return flops_of_epoch(sizes_for(rows, batching), batching, model)

    return packed(group) if pack == "on" or cost(packed(1)) < cost(alone) else alone


def sizes_for(rows: Sequence[Row], batching: Batching) -> Sizes:
    """Returns the sizes that batches lay out: those of packed texts, of the longest text of each row, or of rows."""
    if not batching.texts:
        return sizes_of(rows)
    if batching.shape is not None:
        return sizes_of(_texts_apart(rows))
    return Sizes(np.array([max(row.lengths) for row in rows], np.int64), np.ones(len(rows), np.int64))


def _texts_apart(rows: Sequence[Row]) -> list[Row]:
    """Returns a row for each text, with a label as `Head.labels_of_batch` takes it; `example` is the row's number.

    The label of a row is its score, and a number for each text.
    """
    most, text_rows = max(len(row.lengths) for row in rows), []
    for number, row in enumerate(rows):
        ends = np.cumsum(row.lengths)[:-1]
        parts = zip(np.split(row.token_ids, ends), np.split(row.type_ids, ends), row.label[1:])
        for kind, (token_ids, type_ids, text) in enumerate(parts):
            label = (most, kind, text, row.label[0])
            text_rows.append(Row(number, token_ids, type_ids, (len(token_ids),), label))
    return text_rows


def flops_of_epoch(sizes: Sizes, batching: Batching, model: ModelConfig) -> float:
    """Returns the FLOPs of the forward passes of an epoch, padding included."""
    if batching.shape is not None:
        return epoch_flops(sizes, batching.num_parts or batching.batch_size, model, batching.bucket, batching.shape)
    rows = epoch_flops(sizes, batching.batch_size, model, batching.bucket, batching.lengths)
    return rows * max(batching.texts, 1)


def train_batches(rows: Sequence[Row], head: Head, first_step: int, batching: Batching, mesh: Mesh) -> Iterator[Batch]:
    """Yields the batches at first_step, first_step + 1, ... without end.

    At each step, packed batches have the same rows of the task as unpacked batches without `bucket`.
    """
    parts = _texts_apart(rows) if batching.texts else rows
    sizes, row_sizes = sizes_of(parts), sizes_for(rows, dataclasses.replace(batching, shape=None))
    ends = np.cumsum([len(row.lengths) for row in rows])[:-1] if batching.texts else np.arange(1, len(rows))
    parts_of = np.split(np.arange(len(parts)), ends)  # the parts of each row
    size, seed, shape = batching.batch_size, batching.seed, batching.shape
    bucket = batching.bucket and shape is None
    num_steps = steps_per_epoch(len(rows), size)
    plans: dict[int, list[np.ndarray]] = {}  # of the epoch under way

    def make(step: int) -> Batch:
        epoch, index = divmod(step, num_steps)
        if epoch not in plans:
            plans.clear()
            plans[epoch] = plan_epoch(row_sizes.tokens, size, seed, epoch, bucket)
        numbers = np.concatenate([parts_of[number] for number in plans[epoch][index]])
        if shape is not None:
            return _on_mesh(parts, layout_packed(sizes, numbers, shape), head, mesh, size)
        length = train_length(sizes.tokens[numbers], batching.lengths)
        return _on_mesh(parts, layout_alone(sizes, numbers, size * max(batching.texts, 1), length), head, mesh, size)

    return prefetch(make, first_step)


def eval_batches(
    rows: Sequence[Row], head: Head, layouts: Sequence[Layout], mesh: Mesh
) -> Iterator[tuple[Layout, Batch]]:
    """Yields the batch of each layout."""
    for layout in layouts:
        yield layout, _on_mesh(rows, layout, head, mesh)


def _on_mesh(rows: Sequence[Row], layout: Layout, head: Head, mesh: Mesh, num_examples: int = 0) -> Batch:
    """Returns the batch of a layout; if the head has labels of the whole batch, they are of `num_examples`."""
    bins = [[rows[number] for number in members] for members in layout.bins]

    def make(lines: np.ndarray) -> Batch:
        chosen = [bins[line] if line < len(bins) else [] for line in lines]
        return batch_of_rows(chosen, layout.length, layout.num_places, head, whole=bins)

    batch = on_mesh(mesh, layout.num_rows, make)
    if not head.needs_whole_batch or not num_examples:
        return batch
    labels = head.labels_of_batch(bins, layout.num_places, num_examples)
    return batch._replace(labels=on_mesh(mesh, num_examples, lambda lines: jax.tree.map(lambda a: a[lines], labels)))


def batch_of_rows(
    bins: Sequence[Sequence[Row]],
    length: int,
    num_places: int,
    head: Head,
    whole: Sequence[Sequence[Row]] | None = None,
) -> Batch:
    """Returns a batch as numpy arrays, padded to `length` tokens and `num_places` sequences.

    Args:
      bins: for each row of the batch, the rows of the task in it; if there are none, it is empty: no token, no
        sequence, no answer.
      length: L.
      num_places: M.
      head: decides the form of the labels. They are left out if a row of the task has none.
      whole: all bins of the batch, if this is one host's part of it: every host must run the same program, and one may
        have only empty rows.
    """
    batch = pad_rows(
        [_joined([row.token_ids for row in members]) for members in bins],
        length,
        [_joined([row.type_ids for row in members]) for members in bins],
        [[size for row in members for size in row.lengths] for members in bins],
        num_places,
    )
    known = [row.label for members in (bins if whole is None else whole) for row in members]
    if not known or any(label is None for label in known) or head.needs_whole_batch:
        return batch
    labels = head.no_labels(len(bins), length, num_places, known[0])
    for line, members in enumerate(bins):
        for row, spot in _spots(members):
            head.write_label(labels[line], row.label, spot)
            batch.sequence_weights[line, spot.places] *= row.weight
    return batch._replace(labels=labels)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray | tuple[()]:
    return np.concatenate(parts) if parts else ()


def _spots(members: Sequence[Row]) -> Iterator[tuple[Row, Spot]]:
    """Yields each row of the task in a row of a batch, and its spot there."""
    start = first = 0
    for row in members:
        end, last = start + len(row.token_ids), first + len(row.lengths)
        yield row, Spot(slice(start, end), slice(first, last))
        start, first = end, last


def unpadded_outputs(members: Sequence[Row], outputs: np.ndarray, head: Head) -> list[np.ndarray]:
    """Returns the unpadded outputs of each row of the task in a row of a batch, as `Task.decode` takes them."""
    return [head.outputs(outputs, spot) for _, spot in _spots(members)]
