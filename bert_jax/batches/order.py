# SPDX-License-Identifier: Apache-2.0
"""Which rows a training batch has, as a pure function of the seed and the step: of a corpus, of a task.

There is no state between batches, so a resumed run and any number of hosts see the same batches, and nothing needs to
be restored.
"""

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
        first, drawn = 0, []
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
    total, ends = sum(rows), np.cumsum(weights) / np.sum(weights)
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
    batches = [batch for order in drawn for batch in _cut(order, lengths, batch_size, rng, bucket)]
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
