# SPDX-License-Identifier: Apache-2.0
"""Classes of tokens. Tokens without a label and rows that pad the batch weigh nothing; the reference counts them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from bert_jax.batch import Batch
from bert_jax.model.encoder import Encoded
from bert_jax.model.heads.base import Head, logits_of
from bert_jax.model.heads.labels import Spot, most_frequent, token_outputs
from bert_jax.model.layers import Dropout
from bert_jax.settings.model import ModelConfig


class TokenClassifier(nn.Module):
    """Dropout and a dense layer on the last layer's vector of each token."""

    config: ModelConfig
    num_outputs: int

    @nn.compact
    def __call__(self, encoded: Encoded, batch: Batch, deterministic: bool) -> jax.Array:
        """Returns float32 logits [B, L, K]."""
        features = Dropout(self.config.hidden_dropout_rate)(encoded.hidden, deterministic)
        return logits_of(self.config, self.num_outputs, "classifier")(features)


def _weights(batch: Batch) -> jax.Array:
    return (batch.labels >= 0).astype(jnp.float32) * (batch.sequence_ids > 0)


def _no_labels(num_rows: int, length: int, num_places: int, label: Any) -> np.ndarray:
    return np.full((num_rows, length), -1, np.int32)


def _write_label(labels: np.ndarray, label: Any, spot: Spot) -> None:
    labels[spot.tokens] = label


def _constant(labels: Sequence[Any], num_outputs: int) -> np.ndarray:
    return most_frequent(np.concatenate(labels), num_outputs)


TOKENS = Head(
    "token_classification",
    ("classifier",),
    TokenClassifier,
    weights=_weights,
    no_labels=_no_labels,
    write_label=_write_label,
    outputs=token_outputs,
    constant=_constant,
    usual_task=lambda num_outputs: "ner",
    has_windows=True,
    takes_words=True,
    probe="tokens",
    about_exported="logits [B, L, K], in the order of the labels; those of a word are at its first token.",
    architecture="BertForTokenClassification",
    pipeline="token-classification",
    has_labels=True,
)
