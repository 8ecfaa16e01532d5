# SPDX-License-Identifier: Apache-2.0
"""One of several sequences: each has a number, and the softmax over the choices of an example decides."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.heads.base import Linear
from bert_jax.model.heads.labels import Spot, as_label, label_losses, labels_of
from bert_jax.model.inputs import check_shapes
from bert_jax.model.losses import Pair
from bert_jax.model.teaching import class_divergence


class Choices(Linear):
    """A number for each choice. The label of an example stands at its first choice, and -1 at the others."""

    name = "multiple_choice"
    num_outputs = 1
    is_of_several = True
    about_exported = (
        "logits [B], one for each row; the rows of a question's choices compete with each other."
    )
    architecture = "BertForMultipleChoice"
    pipeline = "multiple-choice"

    def weights(self, batch: Batch) -> jax.Array:
        """Returns [B, M]: 1 at the first choice of each example."""
        return batch.sequence_weights * (labels_of(batch, *batch.cls_positions.shape) >= 0)

    def losses(self, logits: jax.Array, batch: Batch, weights: jax.Array) -> dict[str, Pair]:
        """Returns cross entropy and accuracy over the choices of an example."""
        check_shapes("losses", logits=(logits, (*batch.cls_positions.shape, 1)))
        return label_losses(_of_examples(logits, batch), batch, weights)

    def divergence(
        self, logits: jax.Array, teacher: jax.Array, batch: Batch, temperature: float
    ) -> jax.Array:
        """Returns the divergence over the choices of an example, [B, M]."""
        student, target = (
            _of_examples(values / temperature, batch) for values in (logits, teacher)
        )
        return class_divergence(student, target)

    def no_labels(self, num_rows: int, length: int, num_places: int, label: Any) -> np.ndarray:
        return np.full((num_rows, num_places), -1, np.int32)

    def write_label(self, labels: np.ndarray, label: Any, spot: Spot) -> None:
        choices = spot.places.stop - spot.places.start
        labels[spot.places.start] = as_label(labels, label, below=choices) + spot.places.start

    def outputs(self, outputs: np.ndarray, spot: Spot) -> np.ndarray:
        """Returns the number of each choice, [M]."""
        return outputs[spot.places, 0]

    def constant(self, labels: Sequence[Any], num_outputs: int) -> np.ndarray:
        """Returns outputs that prefer nothing: decoded, the first choice."""
        return np.zeros(num_outputs, np.float32)

    def usual_task(self, num_outputs: int) -> str:
        return "choice"

    def exported(self, logits: jax.Array) -> jax.Array:
        return logits[:, 0, 0]


def _of_examples(logits: jax.Array, batch: Batch) -> jax.Array:
    """Returns for each choice the logits of its example, [B, M, M]: none at the choices of others."""
    example = jnp.cumsum(batch.labels >= 0, axis=1)  # [B, M]
    same = (example[:, :, None] == example[:, None, :]) & (batch.sequence_weights > 0)[:, None, :]
    return jnp.where(same, logits[:, None, :, 0], MASKED_SCORE)


CHOICES = Choices()
