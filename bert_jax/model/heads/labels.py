# SPDX-License-Identifier: Apache-2.0
"""Labels in a batch, as several heads have them: where they stand, and their losses."""

from typing import NamedTuple

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
    return {
        "loss": cross_entropy(logits, labels, weights),
        "accuracy": accuracy(logits, labels, weights),
    }


def most_frequent(classes: np.ndarray, num_outputs: int) -> np.ndarray:
    """Returns outputs [K], 1 for the most frequent of the classes and 0 for the others; -1 stands for none."""
    counts = np.bincount(classes[classes >= 0].astype(np.int64), minlength=num_outputs)
    return (np.arange(num_outputs) == counts.argmax()).astype(np.float32)
