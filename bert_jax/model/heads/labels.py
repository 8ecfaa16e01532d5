# SPDX-License-Identifier: Apache-2.0
"""Labels in a batch, as several heads have them: where they stand, and their losses."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.errors import InputError
from bert_jax.model.inputs import check_shapes
from bert_jax.model.losses import Pair, accuracy, cross_entropy, squared_error
from bert_jax.model.product import widened


class Spot(NamedTuple):
    """Where an example is in a row of a batch."""

    tokens: slice  # of the L positions
    places: slice  # of the M sequences: one, or as many as there are choices


def labels_of(batch: Batch, *shape: int) -> Any:
    """Returns the labels of a batch. Raises: InputError if it has none, or if they are not of the shape."""
    if batch.labels is None:
        raise InputError("the batch has no labels; give them to make_batch, with the head")
    if shape:
        check_shapes("the batch", labels=(batch.labels, shape))
    return batch.labels


def as_label(labels: np.ndarray, label: Any, *shape: int, below: int | None = None) -> np.ndarray:
    """Returns the label of an example, to be written into `labels`. Raises: InputError if it has no place there.

    It is numbers of a shape, whole ones if `labels` are, and from 0 to `below`, if that is given.
    """
    array = np.asarray(label)
    fits = array.shape == shape and np.can_cast(array.dtype, labels.dtype, "same_kind")
    if not fits or (below is not None and ((array < 0) | (array >= below)).any()):
        kind = "whole numbers" if labels.dtype.kind == "i" else "numbers"
        bound = "" if below is None else f" from 0 to {below - 1}"
        raise InputError(
            f"a label is {label!r:.60}, and its place takes {kind} of the shape {list(shape)}{bound}; correct it"
        )
    return array


def class_losses(logits: jax.Array, batch: Batch, weights: jax.Array) -> dict[str, Pair]:
    """Returns cross entropy and accuracy of logits [..., K]; the squared error, if K is 1, which is a regression.

    Labels [..., K] are soft: a probability for each class.
    """
    labels = labels_of(batch)
    is_one = logits.shape[-1] == 1
    if jnp.issubdtype(labels.dtype, jnp.floating) and labels.ndim == logits.ndim and not is_one:
        check_shapes(
            "soft labels", labels=(labels, logits.shape), weights=(weights, logits.shape[:-1])
        )
        loss = -jnp.sum(labels * jax.nn.log_softmax(widened(logits)), axis=-1)
        return {"loss": (jnp.sum(loss * weights), jnp.sum(weights)),
                "accuracy": accuracy(logits, jnp.argmax(labels, axis=-1), weights)}  # fmt: skip
    if is_one:
        return {"loss": squared_error(logits[..., 0], labels, weights)}
    return label_losses(logits, batch, weights)


def label_losses(logits: jax.Array, batch: Batch, weights: jax.Array) -> dict[str, Pair]:
    """Returns cross entropy and accuracy of logits [..., K] for the labels [...]; -1 stands for none."""
    labels = jnp.maximum(labels_of(batch), 0)
    return {
        "loss": cross_entropy(logits, labels, weights),
        "accuracy": accuracy(logits, labels, weights),
    }


def places_of_texts(
    bins: Sequence[Sequence[Any]], num_places: int, num_examples: int
) -> tuple[np.ndarray, list[tuple[int, Any]]]:
    """Returns where the texts of each example are among the sequences of all rows, [E, T], and its slot of each row.

    `bins` are rows of one text each, whose labels begin with T and the place among these. A text that is not there has
    a place beyond all, each once.
    """
    slots = {
        number: slot
        for slot, number in enumerate(sorted({row.example for rows in bins for row in rows}))
    }
    size = next(int(row.label[0]) for rows in bins for row in rows)
    places = len(bins) * num_places + (1 << 30) + np.arange(num_examples * size, dtype=np.int32)
    places, found = places.reshape(num_examples, size), []
    for line, rows in enumerate(bins):
        for place, row in enumerate(rows):
            slot = slots[row.example]
            places[slot, row.label[1]] = line * num_places + place
            found.append((slot, row))
    return places, found


def most_frequent(classes: np.ndarray, num_outputs: int) -> np.ndarray:
    """Returns outputs [K], 1 for the most frequent of the classes and 0 for the others; -1 stands for none."""
    counts = np.bincount(classes[classes >= 0].astype(np.int64), minlength=num_outputs)
    return (np.arange(num_outputs) == counts.argmax()).astype(np.float32)
