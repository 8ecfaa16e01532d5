# SPDX-License-Identifier: Apache-2.0
"""Assigns rows of a task to batches and to the rows of a batch, as a pure function of lengths and a seed.

Every host and every restart computes the same layouts, so they are never sent or stored. Each row of a batch holds
either one row of the task, padded to the longest in the batch, or several, one after the other ("packed").
Letters: `batch.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.settings.model import ModelConfig
from bert_jax.tasks.base import Row
from bert_jax.text.fitting import filled, padded_length, rows_of
from bert_jax.training.flops import forward_flops

_CHUNK = 50  # batches of a shuffled stretch of the data that are sorted by length together
_ROW_LENGTHS = (32, 64, 96, 128, 192, 256, 384, 512)  # of packed rows, besides the length of the task's longest row
_FEWEST_TOKENS = 6  # per sequence, on average over a packed row; this bounds the number of sequences in it
_COMPILATION = 24  # steps that take about as long as compiling a step
_SAMPLED_BATCHES, _SAMPLED_ROWS = 256, 1 << 17  # at most, to choose a shape by


class Sizes(NamedTuple):
    """The sizes of rows of a task."""

    tokens: np.ndarray  # [R] int
    sequences: np.ndarray  # [R] int; 1, or the number of choices

    def of(self, numbers: np.ndarray) -> "Sizes":
        """Returns the sizes of some of the rows."""
        return Sizes(self.tokens[numbers], self.sequences[numbers])


class Layout(NamedTuple):
    """A batch to make."""

    bins: list[list[int]]  # for each row of the batch, the rows of the task in it, in order
    num_rows: int  # B; the rows beyond `bins` are empty
    length: int  # L
    num_places: int  # M


class Shape(NamedTuple):
    """The shapes of packed training batches."""

    length: int  # L
    num_places: int  # M
    num_rows: tuple[int, ...]  # the B that batches are filled up to, ascending
    group: int  # B is a multiple of it: the devices that rows are divided over x microbatches


def sizes_of(rows: Sequence[Row]) -> Sizes:
    """Returns the sizes of rows."""
    tokens = np.array([len(row.token_ids) for row in rows], np.int64)
    return Sizes(tokens, np.array([len(row.lengths) for row in rows], np.int64))


# The batches of an epoch


def plan_epoch(lengths: np.ndarray, batch_size: int, seed: int, epoch: int, bucket: bool = True) -> list[np.ndarray]:
    """Returns the row numbers of each batch of an epoch. Every row occurs once; at most one batch is not full.

    With `bucket`, stretches of the shuffled data, several batches long, are sorted by length and cut into batches, so
    that a batch holds rows of similar lengths; the batches are then shuffled. Without it, batches are random.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    if not bucket:
        return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    # A small data set is at least four stretches: sorted as a whole, its batches would be the same in every epoch.
    chunk = batch_size * max(1, min(_CHUNK, len(order) // (4 * batch_size)))
    order = np.concatenate(
        [
            piece[np.argsort(lengths[piece], kind="stable")]
            for piece in (order[first : first + chunk] for first in range(0, len(order), chunk))
        ]
    )
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    return [batches[index] for index in rng.permutation(len(batches))]


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Returns the number of batches in an epoch; the last may not be full."""
    return -(-num_rows // batch_size)


# Layouts of a batch


def layout_alone(sizes: Sizes, numbers: np.ndarray, num_rows: int, length: int) -> Layout:
    """Returns the batch that gives each of these rows of the task a row of its own."""
    return Layout([[number] for number in numbers.tolist()], num_rows, length, int(sizes.sequences.max(initial=1)))


def layout_packed(sizes: Sizes, numbers: np.ndarray, shape: Shape) -> Layout:
    """Returns the batch that packs these rows of the task into few rows."""
    packed = best_fit(sizes.of(numbers), shape.length, shape.num_places)
    bins = [numbers[members].tolist() for members in packed]
    num_rows = next((size for size in shape.num_rows if size >= len(bins)), -(-len(bins) // shape.group) * shape.group)
    return Layout(bins, num_rows, shape.length, shape.num_places)


def best_fit(sizes: Sizes, length: int, num_places: int) -> list[list[int]]:
    """Returns which rows of the task share each row of `length` tokens and `num_places` sequences.

    Rows are placed longest first, each where it leaves the least room ("best fit decreasing").
    """
    widest = int(sizes.sequences.max(initial=1))
    bins: list[list[int]] = []
    places_left: list[int] = []
    with_room: list[list[int]] = [[] for _ in range(length + 1)]  # bins by the number of tokens they have room for
    rooms = 0  # the same as a bit mask: bit r is set if a bin has room for r tokens
    tokens, sequences = sizes.tokens.tolist(), sizes.sequences.tolist()
    for number in np.argsort(-sizes.tokens, kind="stable").tolist():
        size = tokens[number]
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen = length, len(bins)
            bins.append([])
            places_left.append(num_places)
        bins[chosen].append(number)
        room -= size
        places_left[chosen] -= sequences[number]
        if room and places_left[chosen] >= widest:
            with_room[room].append(chosen)
            rooms |= 1 << room
    return bins


def row_lengths(longest: int, most: int, multiple: int) -> list[int]:
    """Returns the lengths that packed rows may have, ascending.

    They are at most `most`, the number of the model's positions, since padding has positions too. Only choices that
    are longer together make a longer row.
    """
    most = max(most, longest)
    own = padded_length(longest, most, multiple)
    return sorted({own, *(length for length in _ROW_LENGTHS if own <= length <= most and length % multiple == 0)})


def places_of(length: int, widest: int) -> int:
    """Returns the maximum number of sequences in a packed row; `widest` is the maximum in a row of the task."""
    return max(widest, length // _FEWEST_TOKENS)


# FLOPs


def padded_flops(model: ModelConfig, layouts: Sequence[Layout]) -> float:
    """Returns the FLOPs of a forward pass over the batches, padding included."""
    return sum(_flops(model, layout.num_rows, layout.length, layout.num_places) for layout in layouts)


def needed_flops(model: ModelConfig, rows: Sequence[Row]) -> float:
    """Returns the FLOPs of a forward pass over the tokens of the rows, without padding."""
    lengths = np.array([length for row in rows for length in row.lengths], np.float64)
    return forward_flops(model, float(lengths.sum()), float((lengths**2).sum()), 0, len(lengths))


def _flops(model: ModelConfig, num_rows: float, length: int, num_places: int) -> float:
    return forward_flops(model, num_rows * length, num_rows * length**2, 0, num_rows * num_places)


# Training


def choose_shape(sizes: Sizes, batch_size: int, model: ModelConfig, multiple: int, group: int, num_steps: int) -> Shape:
    """Returns the shapes of training batches of `batch_size` random rows of the task that take the fewest FLOPs.

    The choice is based on a sample of random batches, the same for every seed. The length does not depend on the number
    of devices, so neither does dropout. A run of few steps has a single number of rows.
    """
    widest = int(sizes.sequences.max())
    sample = _sample(sizes, batch_size)

    def num_rows(length: int) -> list[int]:
        return [len(best_fit(batch, length, places_of(length, widest))) for batch in sample]

    counts = {
        length: num_rows(length) for length in row_lengths(int(sizes.tokens.max()), model.max_positions, multiple)
    }

    def cost(length: int) -> float:
        rows, _ = few_sizes(counts[length], num_steps)
        return _flops(model, rows, length, places_of(length, widest))

    length = min(counts, key=cost)
    grouped = [-(-count // group) * group for count in counts[length]]
    return Shape(length, places_of(length, widest), few_sizes(grouped, num_steps)[1], group)


def _sample(sizes: Sizes, batch_size: int) -> list[Sizes]:
    count = max(1, min(_SAMPLED_BATCHES, _SAMPLED_ROWS // batch_size))
    samples: list[Sizes] = []
    epoch = 0
    while len(samples) < count:
        batches = plan_epoch(sizes.tokens, batch_size, 0, epoch, bucket=False)
        full = batches[: max(1, len(sizes.tokens) // batch_size)]
        samples += [sizes.of(numbers) for numbers in full[: count - len(samples)]]
        epoch += 1
    return samples


def few_sizes(counts: Sequence[int], num_steps: int, most: int = 2) -> tuple[float, tuple[int, ...]]:
    """Returns the cost of filling batches up to at most `most` sizes, and these sizes, ascending.

    The cost is the sum of the counts, each rounded up to the next size, plus the cost of compiling every size. One more
    size is worth its compilation if it saves more than that in `num_steps` steps.
    """
    values, times = (array.tolist() for array in np.unique(counts, return_counts=True))
    until = np.cumsum([0, *times]).tolist()
    compilation = _COMPILATION / max(num_steps, 1) * sum(counts)
    best = [(value * until[index + 1] + compilation, (value,)) for index, value in enumerate(values)]
    for _ in range(min(most, len(values)) - 1):  # best[i]: of the counts up to value i, which is the last size
        best = [
            min(
                [
                    best[index],
                    *(
                        (cost + value * (until[index + 1] - until[last + 1]) + compilation, (*few, value))
                        for last, (cost, few) in enumerate(best[:index])
                    ),
                ]
            )
            for index, value in enumerate(values)
        ]
    return best[-1]


def choose_lengths(sizes: Sizes, batch_size: int, bucket: bool, multiple: int, num_steps: int) -> tuple[int, ...]:
    """Returns the lengths, ascending, of training batches that are not packed."""
    longest = int(sizes.tokens.max())
    if not bucket:
        return (longest,)
    batches = plan_epoch(sizes.tokens, batch_size, 0, 0)
    lengths = [padded_length(int(sizes.tokens[numbers].max()), longest, multiple) for numbers in batches]
    return few_sizes(lengths, num_steps, len(batches))[1]


def epoch_flops(sizes: Sizes, batch_size: int, model: ModelConfig, bucket: bool, how: Shape | tuple[int, ...]) -> float:
    """Returns the FLOPs of the forward passes of an epoch: packed into a shape, or padded to some lengths."""
    if isinstance(how, Shape):
        sample = _sample(sizes, batch_size)
        sampled = [layout_packed(batch, np.arange(len(batch.tokens)), how) for batch in sample]
        return padded_flops(model, sampled) / sum(len(batch.tokens) for batch in sample) * len(sizes.tokens)
    batches = plan_epoch(sizes.tokens, batch_size, 0, 0, bucket)
    num_places = int(sizes.sequences.max())
    return sum(_flops(model, batch_size, train_length(sizes.tokens[numbers], how), num_places) for numbers in batches)


def train_length(tokens: np.ndarray, lengths: Sequence[int]) -> int:
    """Returns the length, one of `lengths`, that the rows of a batch are padded to."""
    return next(length for length in lengths if length >= tokens.max())


# Prediction


class Limits(NamedTuple):
    """Limits on the batches of prediction."""

    rows: int  # of a batch that is not packed; packed batches hold at most as many positions
    multiple: int  # of lengths, as `padded_length` takes it
    group: int  # divides `rows`; the number of rows of every batch is a multiple of it
    pack: str  # "on", "off", or "auto", which packs where that takes fewer FLOPs
    tokens: int = 0  # positions of a batch, beyond one row in each of its groups; 0 sets no limit
    one_shape: bool = False  # all batches are one program to compile, for splits that are read once an epoch


def eval_layouts(sizes: Sizes, model: ModelConfig, limits: Limits) -> list[Layout]:
    """Returns batches that hold every row of the task once, longest first. `model` gives the FLOPs."""
    if not len(sizes.tokens):
        return []
    _, multiple, group, pack, tokens, one_shape = limits
    order = np.argsort(-sizes.tokens, kind="stable")
    longest = int(sizes.tokens[order[0]])
    most = max(longest, model.max_positions)
    alone: list[Layout] = []
    first = 0
    while first < len(order):
        length = padded_length(longest if one_shape else int(sizes.tokens[order[first]]), most, multiple)
        full = rows_of(tokens, length, limits.rows, group) if tokens else limits.rows
        numbers = order[first : first + full]
        num_rows = full if not tokens or (one_shape and first) else filled(len(numbers), full, group)
        alone.append(layout_alone(sizes, numbers, num_rows, length))
        first += full
    if pack == "off" or (pack == "auto" and len(order) == 1):  # a single row has nothing to share a row with
        return alone
    positions = max(tokens or alone[0].length * limits.rows, 1)
    # A few thousand rows of all lengths decide the length of packed rows.
    sample = sizes.of(order[:: 1 + len(order) // 4096])
    lengths = row_lengths(longest, most, multiple)
    if tokens:  # otherwise each set of texts could compile a length of its own
        lengths = [length for length in lengths if length in _ROW_LENGTHS] or lengths
    costs = [padded_flops(model, packed_layouts(sample, length, positions, group)) for length in lengths]
    packed = packed_layouts(sizes, lengths[int(np.argmin(costs))], positions, group, one_shape)
    return packed if pack == "on" or padded_flops(model, packed) <= padded_flops(model, alone) else alone


def packed_layouts(sizes: Sizes, length: int, positions: int, group: int, one_shape: bool = False) -> list[Layout]:
    """Returns packed batches of at most about `positions` positions; without `one_shape` the last may be smaller."""
    num_places = places_of(length, int(sizes.sequences.max()))
    bins = best_fit(sizes, length, num_places)
    full = max(group, positions // length // group * group)
    layouts = []
    for first in range(0, len(bins), full):
        batch_bins = bins[first : first + full]
        num_rows = full if one_shape and first else filled(len(batch_bins), full, group)
        layouts.append(Layout(batch_bins, num_rows, length, num_places))
    return layouts
