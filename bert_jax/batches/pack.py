# SPDX-License-Identifier: Apache-2.0
"""Lays rows of a task into the rows of a batch, as a pure function of their lengths.

Every host and every restart computes the same layouts, so they are never sent or stored. Each row of a batch holds
either one row of the task, padded to the longest in the batch, or several, one after the other ("packed").
Letters: `batch.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.batch import Row


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


def layout_alone(sizes: Sizes, numbers: np.ndarray, num_rows: int, length: int) -> Layout:
    """Returns the batch that gives each of these rows of the task a row of its own."""
    return Layout(
        [[number] for number in numbers.tolist()],
        num_rows,
        length,
        int(sizes.sequences.max(initial=1)),
    )


def layout_packed(sizes: Sizes, numbers: np.ndarray, shape: Shape) -> Layout:
    """Returns the batch that packs these rows of the task into few rows."""
    packed = best_fit(sizes.of(numbers), shape.length, shape.num_places)
    bins = [numbers[members].tolist() for members in packed]
    num_rows = next(
        (size for size in shape.num_rows if size >= len(bins)),
        -(-len(bins) // shape.group) * shape.group,
    )
    return Layout(bins, num_rows, shape.length, shape.num_places)


def best_fit(sizes: Sizes, length: int, num_places: int) -> list[list[int]]:
    """Returns which rows of the task share each row of `length` tokens and `num_places` sequences.

    Rows are placed longest first, each where it leaves the least room ("best fit decreasing").
    """
    widest = int(sizes.sequences.max(initial=1))
    bins: list[list[int]] = []
    places_left: list[int] = []
    # bins by the number of tokens they have room for
    with_room: list[list[int]] = [[] for _ in range(length + 1)]
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
