# SPDX-License-Identifier: Apache-2.0
"""Labels and outputs in a batch, as several heads have them: where they stand, their losses, constant answers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.model.losses import Pair, accuracy, cross_entropy, squared_error


class Spot(NamedTuple):
    """Where an example is in a row of a batch."""

    tokens: slice  # of the L positions
    places: slice  # of the M sequences: one, or as many as there are choices


def class_losses(logits: jax.Array, batch: Batch, weights: jax.Array) -> dict[str, Pair]:
    """Returns cross entropy and accuracy of logits [..., K]; the squared error, if K is 1, which is a regression.

    Labels [..., K] are soft: a probability for each class.
    """
    if batch.labels.ndim == logits.ndim:
        loss = -jnp.sum(batch.labels * jax.nn.log_softmax(logits.astype(jnp.float32)), axis=-1)
        return {"loss": (jnp.sum(loss * weights), jnp.sum(weights)),
                "accuracy": accuracy(logits, jnp.argmax(batch.labels, axis=-1), weights)}  # fmt: skip
    if logits.shape[-1] == 1:
        return {"loss": squared_error(logits[..., 0], batch.labels, weights)}
    return label_losses(logits, batch, weights)


def label_losses(logits: jax.Array, batch: Batch, weights: jax.Array) -> dict[str, Pair]:
    """Returns cross entropy and accuracy of logits [..., K] for the labels [...]; -1 stands for none."""
    labels = jnp.maximum(batch.labels, 0).astype(jnp.int32)
    return {"loss": cross_entropy(logits, labels, weights), "accuracy": accuracy(logits, labels, weights)}


def no_sequence_labels(num_rows: int, length: int, num_places: int, label: Any) -> np.ndarray:
    """Returns zeros [B, M], or [B, M, K] for labels [K] like `label`; float32 if it is of floats, int32 otherwise."""
    kind = np.asarray(label)
    return np.zeros((num_rows, num_places, *kind.shape), np.float32 if kind.dtype.kind == "f" else np.int32)


def write_sequence_label(labels: np.ndarray, label: Any, spot: Spot) -> None:
    """Writes the label of a sequence into the labels of its row, [M]."""
    labels[spot.places] = label


def sequence_outputs(outputs: np.ndarray, spot: Spot) -> np.ndarray:
    """Returns the outputs [K] of a sequence, from those of its row, [M, K]."""
    return outputs[spot.places.start]


def token_outputs(outputs: np.ndarray, spot: Spot) -> np.ndarray:
    """Returns the outputs [L, K] of the tokens of an example, from those of its row."""
    return outputs[spot.tokens]


def constant_class(labels: Sequence[Any], num_outputs: int) -> np.ndarray:
    """Returns outputs [K] with the most frequent class first; for a regression the mean of the labels."""
    if any(np.ndim(label) and np.asarray(label).dtype.kind == "f" for label in labels):  # soft
        return np.mean(np.stack(labels), axis=0).astype(np.float32)
    known = np.concatenate([np.ravel(label) for label in labels])
    if num_outputs == 1:
        return np.array([known.mean()], np.float32)
    return most_frequent(known, num_outputs)


def constant_zeros(labels: Sequence[Any], num_outputs: int) -> np.ndarray:
    """Returns outputs that prefer nothing: decoded, the first choice or an empty span."""
    return np.zeros(num_outputs, np.float32)


def most_frequent(classes: np.ndarray, num_outputs: int) -> np.ndarray:
    """Returns outputs [K], 1 for the most frequent of the classes and 0 for the others; -1 stands for none."""
    counts = np.bincount(classes[classes >= 0].astype(np.int64), minlength=num_outputs)
    return (np.arange(num_outputs) == counts.argmax()).astype(np.float32)
