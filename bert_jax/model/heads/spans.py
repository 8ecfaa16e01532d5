# SPDX-License-Identifier: Apache-2.0
"""Spans of tokens that answer a question. Source: google-research/bert run_squad.py, create_model."""

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
from bert_jax.model.sequences import in_sequences
from bert_jax.model.teaching import class_divergence


class Spans(Linear):
    """Two numbers for each token: for the answer to begin and to end there."""

    name = "question_answering"
    parts = ("span",)
    num_outputs = 2
    of_tokens = True
    has_dropout = False
    answers = 2
    has_windows = True
    most_tokens = "max_query_length"
    about_exported = "logits [B, L, 2], for the answer to begin and to end at a token."
    architecture = "BertForQuestionAnswering"
    pipeline = "question-answering"

    def losses(self, logits: jax.Array, batch: Batch, weights: jax.Array) -> dict[str, Pair]:
        """Returns cross entropy and accuracy of the start and of the end, over the tokens of the sequence."""
        both = jnp.broadcast_to(weights[..., None], (*batch.cls_positions.shape, self.num_outputs))
        labels_of(batch, *both.shape)
        check_shapes("losses", logits=(logits, (*batch.token_ids.shape, self.num_outputs)))
        return label_losses(_of_sequences(logits, batch), batch, both)

    def divergence(
        self, logits: jax.Array, teacher: jax.Array, batch: Batch, temperature: float
    ) -> jax.Array:
        """Returns the divergence of the start and of the end, added, over the tokens of the sequence."""
        student, target = (
            _of_sequences(values / temperature, batch) for values in (logits, teacher)
        )
        return class_divergence(student, target).sum(axis=-1)

    def no_labels(self, num_rows: int, length: int, num_places: int, label: Any) -> np.ndarray:
        return np.zeros((num_rows, num_places, 2), np.int32)

    def write_label(self, labels: np.ndarray, label: Any, spot: Spot) -> None:
        tokens = spot.tokens.stop - spot.tokens.start
        labels[spot.places] = as_label(labels, label, 2, below=tokens) + spot.tokens.start

    def outputs(self, outputs: np.ndarray, spot: Spot) -> np.ndarray:
        return outputs[spot.tokens]

    def constant(self, labels: Sequence[Any], num_outputs: int) -> np.ndarray:
        """Returns outputs that prefer nothing: decoded, an empty span."""
        return np.zeros(num_outputs, np.float32)

    def usual_task(self, num_outputs: int) -> str:
        return "squad1"


def _of_sequences(logits: jax.Array, batch: Batch) -> jax.Array:
    """Returns the logits of each sequence, [B, M, 2, L]: none at the tokens of others."""
    inside = in_sequences(batch.sequence_ids, batch.cls_positions.shape[1])[:, :, None]
    return jnp.where(inside, jnp.swapaxes(logits, 1, 2)[:, None], MASKED_SCORE)


SPANS = Spans()
