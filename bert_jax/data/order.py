# SPDX-License-Identifier: Apache-2.0
"""The order of the rows of a training run, as pure functions of (seed, step) in NumPy.

`shuffled` is a permutation of all rows, for data with random access. `StreamOrder` is a permutation in levels, for data
that are read from far away in blocks of neighbouring rows (docs/decisions/0022-streaming.md):

1. All blocks, in an order drawn once from the seed, are one sequence of rows.
2. Streams divide that sequence into equal stretches: the rows of a batch come from all of them, as many from each.
3. In each epoch a stream goes through its blocks in another order, and shuffles the rows in windows of a few blocks.

The number of streams belongs to the run, not to its hosts. A host takes the places of the batch that it computes, and
so reads the blocks of the streams behind them.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


def shuffled(indices: np.ndarray, num_items: int, *key: int) -> np.ndarray:
    """Returns where a pseudo-random permutation of range(num_items) sends each index, [n] int64.

    A Feistel network over the next even number of bits, walked until it falls inside the range: any index
    costs a few operations and no memory, however many items there are. `key` chooses the permutation: a seed, an
    epoch and more.
    """
    if num_items == 1:
        return np.zeros_like(indices, np.int64)
    # Halves of equal length: what lies outside of the range is then less than three quarters, so
    # few steps lead back in.
    half_bits = np.uint64((int(num_items - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << int(half_bits)) - 1)
    keys = np.random.SeedSequence(key).generate_state(6, np.uint64)

    def permute(values: np.ndarray) -> np.ndarray:
        left = values >> half_bits
        right = values & mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & mask)
        return (left << half_bits) | right

    values = permute(indices.astype(np.uint64))
    while (outside := values >= num_items).any():
        values[outside] = permute(values[outside])
    return values.astype(np.int64)


def mix(values: np.ndarray) -> np.ndarray:
    """Returns splitmix64's hash of 64-bit words. Source: Steele et al. 2014."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def choose_streams(most: int, batch_size: int) -> int:
    """Returns the number of streams: the largest divisor of the batch size that is not above `most`.

    A batch then has as many rows of each stream. Hosts have equal shares of a batch, so whole streams wherever their
    number divides that of the streams.
    """
    return max(
        divisor for divisor in range(1, min(most, batch_size) + 1) if batch_size % divisor == 0
    )


class StreamWindow(NamedTuple):
    """One window of a stream."""

    stream: int
    epoch: int
    number: int


class Turns(NamedTuple):
    """Some turns of a stream, one after the other, that lie in one window."""

    window: StreamWindow
    places: slice  # in the batch's places that were asked for
    first: int  # the first row's place in the window


@dataclass(frozen=True, eq=False)
class StreamOrder:
    """The order of rows in streams. A row's number is its place in the split, all shards one after the other.

    Row number g of a run, counted over all epochs, is turn g // V of stream g % V, V being the number of streams. So
    an epoch is N consecutive numbers, each stream has N / V of them (rounded up or down), and all end it together.
    """

    block_rows: np.ndarray  # int64 [K]: the rows of each block, in the order of the split
    num_streams: int  # V
    window_rows: int  # W: rows of a stream that are shuffled together
    seed: int

    @functools.cached_property
    def num_rows(self) -> int:
        """N, the rows of an epoch."""
        return int(self.block_rows.sum())

    def parts(
        self, step: int, places: np.ndarray, batch_size: int, rows_before: int = 0
    ) -> list[Turns]:
        """Returns the windows with the rows of some places [n], ascending, of the batch at a step.

        The places of a batch are in order of streams. Batches start after `rows_before` rows, which an earlier phase
        has taken.
        """
        first = rows_before + step * batch_size
        streams = np.arange(self.num_streams)
        # of the first row of each stream in the batch
        turns = self._turns_before(first, streams)
        counts = self._turns_before(first + batch_size, streams) - turns
        starts = np.append(0, np.cumsum(counts))
        homes = np.searchsorted(starts, places, side="right") - 1
        found: list[Turns] = []
        edges = [0, *(np.flatnonzero(np.diff(homes)) + 1).tolist(), len(homes)]
        for begin, end in zip(edges, edges[1:]):
            stream = int(homes[begin])
            own = turns[stream] + places[begin:end] - starts[stream]
            found += self._parts(stream, own, begin)
        return found

    def _parts(self, stream: int, turns: np.ndarray, begin: int) -> list[Turns]:
        """Returns the windows of some turns of a stream, ascending; `begin` is the place of the first one."""
        epochs = (turns * self.num_streams + stream) // self.num_rows
        # in the epoch
        numbers = turns - self._turns_before(epochs * self.num_rows, stream)
        shift = self.shift(stream)
        windows, inside = np.divmod(numbers + shift, self.window_rows)
        # The first window is cut at its front: its rows begin at 0 all the same.
        inside -= np.where(windows == 0, shift, 0)
        # A new part begins with each window, and where places are left out.
        cuts = (np.diff(epochs) != 0) | (np.diff(windows) != 0) | (np.diff(turns) != 1)
        edges = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(turns)]
        return [
            Turns(
                StreamWindow(stream, int(epochs[start]), int(windows[start])),
                slice(begin + start, begin + end),
                int(inside[start]),
            )
            for start, end in zip(edges, edges[1:])
        ]

    def shift(self, stream: int) -> int:
        """Returns the rows that the first window of a stream is shorter by, so that windows do not all end at once."""
        return self.window_rows * stream // self.num_streams

    def rows(self, window: StreamWindow) -> np.ndarray:
        """Returns the rows of a window, int64, in the order of training."""
        stretches = self.stretches(window)
        ends = np.cumsum(stretches[:, 1])
        numbers = np.arange(ends[-1])
        homes = np.searchsorted(ends, numbers, side="right")
        rows = stretches[homes, 0] + numbers - (ends - stretches[:, 1])[homes]
        # 0 and 1 in the last place are the orders of the blocks.
        key = (self.seed, window.epoch, window.stream, window.number + 2)
        return rows[shuffled(numbers, len(rows), *key)]

    def stretches(self, window: StreamWindow) -> np.ndarray:
        """Returns the first row and the number of rows of each stretch of rows in a window, int64 [S, 2].

        A stretch lies inside one block.
        """
        pieces = self._pieces(window.stream, window.epoch)
        ends = np.cumsum(pieces[:, 1])
        begin, end = self._bounds(window)
        return _cut(pieces, ends, begin, min(end, int(ends[-1])))

    def blocks(self, window: StreamWindow) -> np.ndarray:
        """Returns the numbers of the blocks that have rows of a window, int64."""
        return np.unique(
            np.searchsorted(self._block_ends, self.stretches(window)[:, 0], side="right")
        )

    def next(self, window: StreamWindow) -> StreamWindow:
        """Returns the window that a stream comes to after this one."""
        _, end = self._bounds(window)
        if end < self._lengths(window.epoch)[window.stream]:
            return window._replace(number=window.number + 1)
        after = window._replace(epoch=window.epoch + 1, number=0)
        while not self._lengths(after.epoch)[after.stream]:  # fewer rows than streams
            after = after._replace(epoch=after.epoch + 1)
        return after

    def first_turn(self, window: StreamWindow) -> int:
        """Returns the turn of its stream with which a window begins."""
        begin, _ = self._bounds(window)
        return self._turns_before(window.epoch * self.num_rows, window.stream) + begin

    def _turns_before(self, row: Any, stream: Any) -> Any:
        """Returns the turns of a stream before a row of the run, rounded up: turn t of stream s is row t V + s."""
        return -(-(row - stream) // self.num_streams)

    def _lengths(self, epoch: int) -> np.ndarray:
        """Returns the rows of each stream in an epoch, int64 [V]."""
        streams = np.arange(self.num_streams)
        begin = epoch * self.num_rows
        after = self._turns_before(begin + self.num_rows, streams)
        return after - self._turns_before(begin, streams)

    def _bounds(self, window: StreamWindow) -> tuple[int, int]:
        """Returns the first row of a window among those of its stream in its epoch, and where it ends at the latest."""
        end = (window.number + 1) * self.window_rows - self.shift(window.stream)
        return max(0, end - self.window_rows), end

    @functools.cached_property
    def _block_ends(self) -> np.ndarray:
        return np.cumsum(self.block_rows)

    @functools.cached_property
    def _sequence(self) -> tuple[np.ndarray, np.ndarray]:
        """The blocks as stretches [K, 2], in the order of the sequence, and where each ends."""
        order = shuffled(np.arange(len(self.block_rows)), len(self.block_rows), self.seed, 0, 0, 1)
        firsts = self._block_ends - self.block_rows
        blocks = np.stack([firsts, self.block_rows], axis=1)[order]
        return blocks, np.cumsum(blocks[:, 1])

    def _pieces(self, stream: int, epoch: int) -> np.ndarray:
        """Returns the blocks of a stream in an epoch, in order, as stretches [P, 2]; those at its ends may be cut."""
        lengths = self._lengths(epoch)
        begin = int(lengths[:stream].sum())
        pieces = _cut(*self._sequence, begin, begin + int(lengths[stream]))
        order = shuffled(np.arange(len(pieces)), len(pieces), self.seed, epoch, stream, 1)
        return pieces[order]


def _cut(stretches: np.ndarray, ends: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Returns rows `begin` to `end` of stretches, (first row, number of rows) [S, 2], that end at `ends`."""
    first = np.searchsorted(ends, begin, side="right")
    last = np.searchsorted(ends, end, side="left")
    cut = stretches[first : last + 1].copy()
    skipped = begin - int(ends[first] - stretches[first, 1])
    cut[0] += (skipped, -skipped)
    cut[-1, 1] -= int(ends[last]) - end
    return cut[cut[:, 1] > 0]  # a block may have no row that is asked for
