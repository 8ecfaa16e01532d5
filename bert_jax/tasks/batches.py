# SPDX-License-Identifier: Apache-2.0
"""Rows of a task to global batches of like lengths. The batch at a step is a pure function of (seed, step)."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import Batch, pad_rows
from bert_jax.data.pipeline import made_ahead, on_mesh
from bert_jax.tasks.base import Row

_CHUNK = 50  # batches of a shuffled stretch of the data that are sorted by length together


def length_step(attention: str = "plain") -> int:
    """Returns what short lengths are multiples of: 8 on a CPU, 16 elsewhere, 32 for the kernel of fused attention."""
    if jax.default_backend() == "cpu":
        return 8
    return 32 if attention == "fused" else 16


def padded_length(length: int, most: int, multiple: int) -> int:
    """Returns the length that a row is padded to, at most `most`.

    Each length is a program to compile, and padding costs time. So lengths are multiples of `multiple` (`length_step`)
    up to 128, of twice that up to 256, of four times that up to 512, and of 256 beyond: about as much is padding in
    long rows as in short ones.
    """
    multiple = next((multiple * times for end, times in ((128, 1), (256, 2), (512, 4)) if length <= end), 256)
    return min(-(-length // multiple) * multiple, most)


def plan_epoch(lengths: np.ndarray, batch_size: int, seed: int, epoch: int, bucket: bool = True) -> list[np.ndarray]:
    """Returns the row numbers of each batch of an epoch. Every row occurs once; at most one batch is not full.

    With `bucket`, each stretch of some batches of the shuffled data is sorted by length before it is cut into
    batches, so that a batch holds rows of like lengths; the batches are shuffled again.
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


def train_batches(
    rows: Sequence[Row],
    head: str,
    first_step: int,
    batch_size: int,
    seed: int,
    bucket: bool,
    mesh: Mesh,
    multiple: int = 0,
) -> Iterator[Batch]:
    """Yields the batches at first_step, first_step + 1, ... without end; lengths are as `padded_length` gives them."""
    multiple = multiple or length_step()
    lengths = np.array([len(row.token_ids) for row in rows])
    longest = int(lengths.max())
    num_places = max(len(row.lengths) for row in rows)
    num_steps = steps_per_epoch(len(rows), batch_size)
    plans: dict[int, list[np.ndarray]] = {}  # of the epoch under way

    def make(step: int) -> Batch:
        epoch, place = divmod(step, num_steps)
        if epoch not in plans:
            plans.clear()
            plans[epoch] = plan_epoch(lengths, batch_size, seed, epoch, bucket)
        chosen = [rows[index] for index in plans[epoch][place]]
        length = padded_length(max(len(row.token_ids) for row in chosen), longest, multiple) if bucket else longest
        return _on_mesh(chosen, batch_size, length, num_places, head, mesh)

    return made_ahead(make, first_step)


def eval_batches(
    rows: Sequence[Row], head: str, batch_size: int, mesh: Mesh, multiple: int = 0
) -> Iterator[tuple[np.ndarray, Batch]]:
    """Yields row numbers and the batch of these rows, until every row was in a batch; the longest rows come first.

    Padding rows in the last batch have weight 0. Lengths are as `padded_length` gives them.
    """
    if not rows:
        return
    lengths = np.array([len(row.token_ids) for row in rows])
    num_places = max(len(row.lengths) for row in rows)
    order = np.argsort(-lengths, kind="stable")
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        length = padded_length(int(lengths[numbers].max()), int(lengths.max()), multiple or length_step())
        yield numbers, _on_mesh([rows[index] for index in numbers], batch_size, length, num_places, head, mesh)


def _on_mesh(rows: Sequence[Row], batch_size: int, length: int, num_places: int, head: str, mesh: Mesh) -> Batch:
    def make(places: np.ndarray) -> Batch:
        chosen = [rows[place] if place < len(rows) else None for place in places]
        return make_batch(chosen, length, num_places, head, whole=rows)

    return on_mesh(mesh, batch_size, make)


def make_batch(
    rows: Sequence[Row | None], length: int, num_places: int, head: str, whole: Sequence[Row] | None = None
) -> Batch:
    """Returns the batch of some rows as numpy arrays, padded to `length` tokens and `num_places` sequences.

    None is an empty row: no token, no sequence, no answer. Labels are left out where a row has none. Of a host's part
    of a batch, `whole` are all of its rows: every host must run the same program, and one may have empty rows alone.
    """
    batch = pad_rows(
        [() if row is None else row.token_ids for row in rows],
        length,
        [() if row is None else row.type_ids for row in rows],
        [() if row is None else row.lengths for row in rows],
        num_places,
    )
    known = [row.label for row in (rows if whole is None else whole) if row is not None]
    labels = _no_labels(len(rows), length, num_places, head, known)
    for index, row in enumerate(rows):
        if row is None or labels is None:
            continue
        if head == "token_classification":
            labels[index, : len(row.token_ids)] = row.label
        else:
            labels[index] = row.label
    return batch._replace(labels=labels)


def _no_labels(num_rows: int, length: int, num_places: int, head: str, known: Sequence[object]) -> np.ndarray | None:
    """Returns an array of empty labels for a batch, or None if a row has no label."""
    if any(label is None for label in known) or not known:
        return None
    if head == "token_classification":
        return np.full((num_rows, length), -1, np.int32)
    if head == "sequence_classification":
        return np.zeros((num_rows, num_places), np.float32 if isinstance(known[0], float) else np.int32)
    return np.zeros((num_rows, 2 if head == "question_answering" else 1), np.int32)


def unpadded_outputs(row: Row, outputs: np.ndarray, head: str) -> np.ndarray:
    """Returns the outputs of a row without padding, as `Task.decode` takes them."""
    if head == "sequence_classification":
        return outputs[0]
    if head == "multiple_choice":
        return outputs[: len(row.lengths), 0]
    return outputs[: len(row.token_ids)]
