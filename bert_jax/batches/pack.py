# SPDX-License-Identifier: Apache-2.0
"""Lays rows of a task into the rows of a batch, as a pure function of their lengths.

Every host and every restart computes the same layouts, so they are never sent or stored. Each row of a batch holds
either one row of the task, padded to the longest in the batch, or several, one after the other ("packed").
Letters: `batch.py`.
"""

import abc
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

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


class Streamed(Protocol):
    """Rows in an order in which they can be read in blocks."""

    def train_rows(
        self, step: int, places: np.ndarray, batch_size: int, rows_before: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row [n] and the epoch [n] of each place, ascending, of the batch at a step."""
        ...

    def gather(self, row_indices: np.ndarray) -> np.ndarray:
        """Returns the rows [n] with these indices [n], in their order."""
        ...

    def keep(self, rows: np.ndarray) -> None:
        """Leaves out all rows but these, ascending: `train_rows` numbers those that stay, and `gather` all."""
        ...

    def close(self) -> None:
        """Stops reading ahead."""
        ...


class StoredRows(Sequence[Row]):
    """Rows of a task that are read when a batch has them, and not before: there may be any number.

    What is needed of all rows is their lengths. Batches are laid out by these alone.
    """

    lengths: np.ndarray  # [R, M] unsigned: the tokens of each sequence, 0 after the last
    stretches: tuple[int, ...]  # rows of each source; they follow one another
    weights: tuple[float, ...] = ()  # of the sources; () takes each row once
    fingerprint: str  # a sha256 of inputs and labels
    # of each source, if they are read while a run trains, in an order for it; () if they are on this machine
    streams: "Sequence[Streamed]" = ()

    @abc.abstractmethod
    def take(self, numbers: np.ndarray) -> list[Row]:
        """Returns the rows with these numbers, in their order."""

    def __len__(self) -> int:
        return len(self.lengths)

    def like(self, rows: "StoredRows") -> None:
        """Takes over what is not of single rows from others, which these are made of."""
        self.stretches = rows.stretches
        self.weights = rows.weights
        self.fingerprint = rows.fingerprint
        self.streams = rows.streams

    def close(self) -> None:
        """Stops reading ahead."""
        for stream in self.streams:
            stream.close()


def rows_with(rows: Sequence[Row], numbers: np.ndarray) -> list[Row]:
    """Returns the rows with these numbers, in their order."""
    if isinstance(rows, StoredRows):
        return rows.take(numbers)
    return [rows[number] for number in numbers.tolist()]


def sizes_of(rows: Sequence[Row]) -> Sizes:
    """Returns the sizes of rows."""
    if isinstance(rows, StoredRows):
        return Sizes(
            rows.lengths.sum(axis=1, dtype=np.int32), np.count_nonzero(rows.lengths, axis=1)
        )
    tokens = np.array([len(row.token_ids) for row in rows], np.int64)
    return Sizes(tokens, np.array([len(row.lengths) for row in rows], np.int64))


def sizes_apart(rows: Sequence[Row]) -> Sizes:
    """Returns the sizes of the sequences of all rows, each by itself."""
    if isinstance(rows, StoredRows):
        lengths = rows.lengths[rows.lengths > 0].astype(np.int32)
    else:
        lengths = np.array([length for row in rows for length in row.lengths], np.int64)
    # a view of a single number: there may be many millions of sequences
    return Sizes(lengths, np.broadcast_to(np.int64(1), lengths.shape))


def longest_of(rows: Sequence[Row]) -> np.ndarray:
    """Returns the tokens of the longest sequence of each row, [R]."""
    if isinstance(rows, StoredRows):
        return rows.lengths.max(axis=1).astype(np.int32)
    return np.array([max(row.lengths) for row in rows], np.int64)


def most_sequences(rows: Sequence[Row]) -> int:
    """Returns the number of sequences of the row that has most."""
    if isinstance(rows, StoredRows):
        return rows.lengths.shape[1]
    return max(len(row.lengths) for row in rows)


def layout_alone(numbers: Iterable[int], num_rows: int, length: int, num_places: int) -> Layout:
    """Returns the batch that gives each of these rows of the task a row of its own."""
    return Layout([[number] for number in numbers], num_rows, length, num_places)


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
    tokens = sizes.tokens.tolist()
    sequences = sizes.sequences.tolist()
    for number in np.argsort(-sizes.tokens, kind="stable").tolist():
        size = tokens[number]
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room = length
            chosen = len(bins)
            bins.append([])
            places_left.append(num_places)
        bins[chosen].append(number)
        room -= size
        places_left[chosen] -= sequences[number]
        if room and places_left[chosen] >= widest:
            with_room[room].append(chosen)
            rooms |= 1 << room
    return bins
