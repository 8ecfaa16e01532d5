# SPDX-License-Identifier: Apache-2.0
"""Rows of a task to global batches. The batch at a step is a pure function of (seed, step)."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import Batch, pad_rows
from bert_jax.data.pipeline import made_ahead, on_mesh
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
    """Returns what the number of rows of a batch is a multiple of."""
    return accumulate * int(np.prod([mesh.shape[axis] for axis in ROW_AXES]))


@dataclasses.dataclass(frozen=True)
class Batching:
    """How the rows of a task become training batches."""

    batch_size: int  # rows of the task
    seed: int
    bucket: bool  # batches of like lengths, where they are not packed
    lengths: tuple[int, ...]  # that rows of their own are padded to
    shape: Shape | None = None  # of packed batches; None gives each row of the task a row of its own


def choose_batching(
    rows: Sequence[Row], data: FinetuneDataConfig, model: ModelConfig, group: int, pack: str, num_steps: int
) -> Batching:
    """Returns how training batches are made: by `pack`, which is "on", "off" or, where it takes fewer FLOPs, "auto".

    `group` is that of `row_group`. What "auto" chooses does not depend on it: a seed has the same batches on any mesh.
    A run of `num_steps` compiles one program or two for them, as that is worth it.
    """
    multiple, sizes, size = length_step(model.attention), sizes_of(rows), data.batch_size
    alone = Batching(size, data.seed, data.bucket, choose_lengths(sizes, size, data.bucket, multiple, num_steps))
    if pack == "off":
        return alone

    def packed(group: int) -> Batching:
        return dataclasses.replace(alone, shape=choose_shape(sizes, size, model, multiple, group, num_steps))

    if pack == "on" or flops_of_epoch(sizes, packed(1), model) < flops_of_epoch(sizes, alone, model):
        return packed(group)
    return alone


def flops_of_epoch(sizes: Sizes, batching: Batching, model: ModelConfig) -> float:
    """Returns the FLOPs of the forward passes of an epoch, padding included."""
    return epoch_flops(sizes, batching.batch_size, model, batching.bucket, batching.shape or batching.lengths)


def train_batches(rows: Sequence[Row], head: Head, first_step: int, batching: Batching, mesh: Mesh) -> Iterator[Batch]:
    """Yields the batches at first_step, first_step + 1, ... without end.

    Packed batches have the same rows of the task at each step as those without `bucket` that are not packed.
    """
    sizes = sizes_of(rows)
    size, seed, shape = batching.batch_size, batching.seed, batching.shape
    bucket = batching.bucket and shape is None
    num_steps = steps_per_epoch(len(rows), size)
    plans: dict[int, list[np.ndarray]] = {}  # of the epoch under way

    def make(step: int) -> Batch:
        epoch, place = divmod(step, num_steps)
        if epoch not in plans:
            plans.clear()
            plans[epoch] = plan_epoch(sizes.tokens, size, seed, epoch, bucket)
        numbers = plans[epoch][place]
        if shape is not None:
            return _on_mesh(rows, layout_packed(sizes, numbers, shape), head, mesh)
        length = train_length(sizes.tokens[numbers], batching.lengths)
        return _on_mesh(rows, layout_alone(sizes, numbers, size, length), head, mesh)

    return made_ahead(make, first_step)


def eval_batches(
    rows: Sequence[Row], head: Head, layouts: Sequence[Layout], mesh: Mesh
) -> Iterator[tuple[Layout, Batch]]:
    """Yields the batch of each layout."""
    for layout in layouts:
        yield layout, _on_mesh(rows, layout, head, mesh)


def _on_mesh(rows: Sequence[Row], layout: Layout, head: Head, mesh: Mesh) -> Batch:
    bins = [[rows[number] for number in members] for members in layout.bins]

    def make(places: np.ndarray) -> Batch:
        chosen = [bins[place] if place < len(bins) else [] for place in places]
        return batch_of_rows(chosen, layout.length, layout.num_places, head, whole=bins)

    return on_mesh(mesh, layout.num_rows, make)


def batch_of_rows(
    bins: Sequence[Sequence[Row]],
    length: int,
    num_places: int,
    head: Head,
    whole: Sequence[Sequence[Row]] | None = None,
) -> Batch:
    """Returns a batch as numpy arrays, padded to `length` tokens and `num_places` sequences.

    Args:
      bins: for each row of the batch, the rows of the task that are in it; without any it is empty: no token, no
        sequence, no answer.
      length: L.
      num_places: M.
      head: decides what labels there are. They are left out where a row of the task has none.
      whole: all bins of a batch of which this is a host's part: every host must run the same program, and one may have
        empty rows alone.
    """
    batch = pad_rows(
        [_joined([row.token_ids for row in members]) for members in bins],
        length,
        [_joined([row.type_ids for row in members]) for members in bins],
        [[each for row in members for each in row.lengths] for members in bins],
        num_places,
    )
    known = [row.label for members in (bins if whole is None else whole) for row in members]
    if not known or any(label is None for label in known):
        return batch
    labels = head.no_labels(len(bins), length, num_places, known[0])
    for line, members in enumerate(bins):
        for row, spot in _spots(members):
            head.write_label(labels[line], row.label, spot)
    return batch._replace(labels=labels)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray | tuple[()]:
    return np.concatenate(parts) if parts else ()


def _spots(members: Sequence[Row]) -> Iterator[tuple[Row, Spot]]:
    """Yields each row of the task that is in a row, and where it is there."""
    start = place = 0
    for row in members:
        end, last = start + len(row.token_ids), place + len(row.lengths)
        yield row, Spot(slice(start, end), slice(place, last))
        start, place = end, last


def unpadded_outputs(members: Sequence[Row], outputs: np.ndarray, head: Head) -> list[np.ndarray]:
    """Returns the outputs of each row of the task that is in a row, without padding, as `Task.decode` takes them."""
    return [head.outputs(outputs, spot) for _, spot in _spots(members)]
