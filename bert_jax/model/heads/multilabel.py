# SPDX-License-Identifier: Apache-2.0
"""Any number of labels for a sequence: each has a probability of its own, and its own cross entropy.

Source: transformers' BertForSequenceClassification with problem_type multi_label_classification; labels may be soft.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.model.heads.labels import labels_of
from bert_jax.model.heads.sequence import Sequences
from bert_jax.model.inputs import check_shapes
from bert_jax.model.losses import Pair
from bert_jax.model.product import widened
from bert_jax.model.teaching import class_divergence


class Multilabel(Sequences):
    """A classifier of sequences whose classes do not exclude each other."""

    name = "multilabel_classification"
    about_exported = (
        "logits [B, K], in the order of the labels; the sigmoid of each is its probability."
    )
    problem_types = ("multi_label_classification",)

    def losses(self, logits: jax.Array, batch: Batch, weights: jax.Array) -> dict[str, Pair]:
        """Returns the mean cross entropy and the mean accuracy over the labels [B, M, K]."""
        logits, labels = widened(logits), labels_of(batch, *logits.shape)
        check_shapes("losses", weights=(weights, logits.shape[:-1]))
        losses = jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))
        right = (logits > 0) == (labels > 0.5)
        total = jnp.sum(weights)
        return {
            "loss": (jnp.sum(losses.mean(axis=-1) * weights), total),
            "accuracy": (jnp.sum(right.mean(axis=-1) * weights), total),
        }

    def divergence(
        self, logits: jax.Array, teacher: jax.Array, batch: Batch, temperature: float
    ) -> jax.Array:
        """Returns the mean over the labels of the divergence of their probabilities."""
        student, target = (
            jnp.stack([values, jnp.zeros_like(values)], axis=-1) for values in (logits, teacher)
        )
        return class_divergence(student, target, batch, temperature).mean(axis=-1)

    def constant(self, labels: Sequence[Any], num_outputs: int) -> np.ndarray:
        """Returns the logits [K] of how often each label is given."""
        share = np.clip(np.mean(np.stack(labels), axis=0), 1e-6, 1 - 1e-6)
        return np.log(share / (1 - share)).astype(np.float32)

    def usual_task(self, num_outputs: int) -> str:
        return "multilabel"


MULTILABEL = Multilabel()
