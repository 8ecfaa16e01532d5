# SPDX-License-Identifier: Apache-2.0
"""Classes of tokens. Tokens without a label and rows that pad the batch weigh nothing; the reference counts them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.model.heads.base import Linear
from bert_jax.model.heads.labels import Spot, as_label, labels_of, most_frequent


class Tokens(Linear):
    """A class for each token that has a label; -1 stands for none."""

    name = "token_classification"
    parts = ("classifier",)
    of_tokens = True
    has_windows = True
    takes_words = True
    about_exported = (
        "logits [B, L, K], in the order of the labels; those of a word are at its first token."
    )
    architecture = "BertForTokenClassification"
    pipeline = "token-classification"
    has_labels = True

    def weights(self, batch: Batch) -> jax.Array:
        labels = labels_of(batch, *batch.token_ids.shape)
        return (labels >= 0).astype(jnp.float32) * (batch.sequence_ids > 0)

    def no_labels(self, num_rows: int, length: int, num_places: int, label: Any) -> np.ndarray:
        return np.full((num_rows, length), -1, np.int32)

    def write_label(self, labels: np.ndarray, label: Any, spot: Spot) -> None:
        tokens = spot.tokens.stop - spot.tokens.start
        labels[spot.tokens] = as_label(labels, label, tokens)

    def outputs(self, outputs: np.ndarray, spot: Spot) -> np.ndarray:
        return outputs[spot.tokens]

    def constant(self, labels: Sequence[Any], num_outputs: int) -> np.ndarray:
        return most_frequent(np.concatenate(labels), num_outputs)

    def usual_task(self, num_outputs: int) -> str:
        return "ner"


TOKENS = Tokens()
