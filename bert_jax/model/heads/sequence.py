# SPDX-License-Identifier: Apache-2.0
"""Classes of sequences, or numbers. Source: google-research/bert run_classifier.py, create_model."""

import jax
from flax import linen as nn

from bert_jax.batch import Batch
from bert_jax.model.encoder import Encoded
from bert_jax.model.heads.base import Head, logits_of
from bert_jax.model.layers import Dropout
from bert_jax.settings.model import ModelConfig


class SequenceClassifier(nn.Module):
    """Dropout and a dense layer on the pooled output of each sequence."""

    config: ModelConfig
    num_outputs: int

    @nn.compact
    def __call__(self, encoded: Encoded, batch: Batch, deterministic: bool) -> jax.Array:
        """Returns float32 logits [B, M, K]."""
        assert encoded.pooled is not None
        features = Dropout(self.config.hidden_dropout_rate)(encoded.pooled, deterministic)
        return logits_of(self.config, self.num_outputs, "classifier")(features)


SEQUENCES = Head(
    "sequence_classification",
    ("pooler", "classifier"),
    SequenceClassifier,
    usual_task=lambda num_outputs: "regression" if num_outputs == 1 else "classification",
    probe="sequences",
    exported=lambda logits: logits[:, 0],
    about_exported="logits [B, K], in the order of the labels; of a regression [B, 1], the number.",
    architecture="BertForSequenceClassification",
    pipeline="text-classification",
    has_labels=True,
    has_problem_type=True,
)
