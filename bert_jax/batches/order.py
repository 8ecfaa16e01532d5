# SPDX-License-Identifier: Apache-2.0
"""Which rows a training batch has, as a pure function of the seed and the step: of a corpus, of a task.

There is no state between batches, so a resumed run and any number of hosts see the same batches, and nothing needs to
be restored.
"""

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


def plan_epoch(
    lengths: np.ndarray, batch_size: int, seed: int, epoch: int, bucket: bool = True
) -> list[np.ndarray]:
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
