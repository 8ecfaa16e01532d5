# SPDX-License-Identifier: Apache-2.0
"""Which rows a training batch has, as a pure function of the seed and the step: of a corpus, of a task.

There is no state between batches, so a resumed run and any number of hosts see the same batches, and nothing needs to
be restored.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data.order import shuffled

_CHUNK = 50  # batches of a shuffled stretch of the data that are sorted by length together


def train_rows(
    step: int,
    positions: np.ndarray,
    batch_size: int,
    num_rows: int,
    seed: int,
    rows_before: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row [n] int64 and the epoch [n] int32 of each position in the global batch at a step.

    Batches run through a new permutation of all rows in each epoch, and over the edge between epochs. They start
    after `rows_before` rows, which an earlier phase has taken in batches of another size.
    """
    numbers = rows_before + step * batch_size + positions.astype(np.int64)
    epochs = numbers // num_rows
    rows = np.empty_like(numbers)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        rows[inside] = shuffled(numbers[inside] % num_rows, num_rows, seed, int(epoch))
    return rows, epochs.astype(np.int32)


class Mix(NamedTuple):
    """How an epoch draws from the sources of the data, whose rows follow one another."""

    rows: tuple[int, ...]  # of each source
    drawn: tuple[int, ...]  # rows that an epoch takes of each source
    apart: bool = False  # whether each batch has rows of one source

    def num_steps(self, batch_size: int) -> int:
        """Returns the batches of an epoch; the last, with `apart` the last of each source, may not be full."""
        drawn = self.drawn if self.apart else (sum(self.drawn),)
        return sum(-(-count // batch_size) for count in drawn)

    @property
    def is_plain(self) -> bool:
        """Whether an epoch takes every row once, and mixes all."""
        return self.drawn == self.rows and not (self.apart and len(self.rows) > 1)

    def draw(self, seed: int, epoch: int) -> list[np.ndarray]:
        """Returns the row numbers that an epoch takes of each source.

        A source goes through a new permutation of its rows whenever all were taken, over the edges of epochs.
        """
        first = 0
        drawn = []
        for source, (num_rows, count) in enumerate(zip(self.rows, self.drawn)):
            places = epoch * count + np.arange(count)
            numbers = np.empty(count, np.int64)
            for turn in np.unique(places // num_rows):
                inside = places // num_rows == turn
                key = seed, source, int(turn)
                numbers[inside] = shuffled(places[inside] % num_rows, num_rows, *key)
            drawn.append(first + numbers)
            first += num_rows
        return drawn


def mix_by_weights(rows: tuple[int, ...], weights: tuple[float, ...], apart: bool = False) -> Mix:
    """Returns the mix whose epoch has as many rows as there are, divided over the sources by weights.

    Without weights each row is taken once.
    """
    if not weights:
        return Mix(rows, rows, apart)
    total = sum(rows)
    ends = np.cumsum(weights) / np.sum(weights)
    # ends are rounded and not counts, so that the counts add up
    places = np.rint(ends * total).astype(np.int64)
    return Mix(rows, tuple(np.diff(places, prepend=0).tolist()), apart)


def plan_epoch(
    lengths: np.ndarray,
    batch_size: int,
    seed: int,
    epoch: int,
    bucket: bool = True,
    mix: Mix | None = None,
) -> list[np.ndarray]:
    """Returns the row numbers of each batch of an epoch. Every row occurs once; at most one batch is not full.

    With `bucket`, stretches of the shuffled data, several batches long, are sorted by length and cut into batches, so
    that a batch holds rows of similar lengths; the batches are then shuffled. Without it, batches are random.
    A `mix` takes other rows than each once, or keeps sources apart.
    """
    rng = np.random.default_rng([seed, epoch])
    if mix is None or mix.is_plain:
        return _cut(rng.permutation(len(lengths)), lengths, batch_size, rng, bucket)
    drawn = mix.draw(seed, epoch)
    if not mix.apart:
        order = rng.permutation(np.concatenate(drawn))
        return _cut(order, lengths, batch_size, rng, bucket)
    drawn = [order for order in drawn if len(order)]
    batches = [batch for order in drawn for batch in _cut(order, lengths, batch_size, rng, bucket)]
    return [batches[index] for index in rng.permutation(len(batches))]


class StreamedPlan:
    """Which rows batches have, where each source is read in an order of its own, in which it can be streamed.

    A random order says from which source each row of an epoch is, or with `apart` each batch. With `bucket`, batches of
    rows of similar lengths are made of some batches that follow one another.
    """

    def __init__(
        self,
        mix: Mix,
        lengths: np.ndarray,
        batch_size: int,
        seed: int,
        bucket: bool,
        take: Sequence[Callable[[int, int], np.ndarray]],
    ) -> None:
        """Makes the plan. `take[s](begin, end)` are the rows at these places of source s, counted over all epochs."""
        self._mix = mix
        self._lengths = lengths
        self._take = take
        self._size = batch_size
        self._seed = seed
        self._bucket = bucket
        self._num_steps = mix.num_steps(batch_size)
        self._at_once = max(1, min(_CHUNK, self._num_steps // 4))
        self._epoch = -1
        self._stretch = (-1, -1)
        self._labels = np.zeros(0, np.int64)
        self._ends = np.zeros(0, np.int64)
        self._batches: list[np.ndarray] = []

    def at(self, step: int) -> np.ndarray:
        """Returns the numbers of the rows of the batch at a step."""
        epoch, index = divmod(step, self._num_steps)
        stretch, place = divmod(index, self._at_once)
        if epoch != self._epoch:
            self._epoch, (self._labels, self._ends) = epoch, self._draw(epoch)
        if self._stretch != (epoch, stretch):
            self._stretch = epoch, stretch
            self._batches = self._plan(epoch, stretch * self._at_once)
        return self._batches[place]

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each row of an epoch, and where each batch ends."""
        mix = self._mix
        size = self._size
        rng = np.random.default_rng([self._seed, epoch])
        sources = np.arange(len(mix.rows), dtype=np.int32)
        if not mix.apart:
            labels = rng.permutation(np.repeat(sources, mix.drawn))
            return labels, np.minimum(np.arange(1, self._num_steps + 1) * size, len(labels))
        of_batches = rng.permutation(np.repeat(sources, [-(-drawn // size) for drawn in mix.drawn]))
        sizes = np.full(self._num_steps, size)
        for source, drawn in enumerate(mix.drawn):
            (places,) = np.nonzero(of_batches == source)
            if len(places):  # the last one may not be full
                sizes[places[-1]] = drawn - size * (len(places) - 1)
        return np.repeat(of_batches, sizes), np.cumsum(sizes)

    def _plan(self, epoch: int, first: int) -> list[np.ndarray]:
        """Returns the batches first, first + 1, ... of a stretch of an epoch."""
        ends = self._ends[first : first + self._at_once]
        mix = self._mix
        begin = int(self._ends[first - 1]) if first else 0
        labels = self._labels[begin : ends[-1]]
        before = np.bincount(self._labels[:begin], minlength=len(mix.rows))
        numbers = np.empty(len(labels), np.int64)
        start = 0
        for source, (num_rows, drawn) in enumerate(zip(mix.rows, mix.drawn)):
            (places,) = np.nonzero(labels == source)
            if len(places):
                place = epoch * drawn + int(before[source])
                end = place + len(places)
                taken = start + self._take[source](place, end)
                if self._bucket and mix.apart:
                    like = np.argsort(self._lengths[taken], kind="stable")
                    taken = taken[like]
                numbers[places] = taken
            start += num_rows
        if self._bucket and not mix.apart:
            like = np.argsort(self._lengths[numbers], kind="stable")
            numbers = numbers[like]
        batches = np.split(numbers, ends[:-1] - begin)
        if not self._bucket:
            return batches
        rng = np.random.default_rng([self._seed, epoch, first])
        return [batches[index] for index in rng.permutation(len(batches))]


def _cut(
    order: np.ndarray, lengths: np.ndarray, batch_size: int, rng: np.random.Generator, bucket: bool
) -> list[np.ndarray]:
    """Returns batches of rows in this order, or with `bucket` of like lengths."""
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
