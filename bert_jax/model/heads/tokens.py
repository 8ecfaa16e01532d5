# SPDX-License-Identifier: Apache-2.0
"""Classes of tokens. Tokens without a label and rows that pad the batch weigh nothing; the reference counts them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.model.heads.base import Head, Linear
from bert_jax.model.heads.labels import Spot, most_frequent, token_outputs


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
    partial(Linear, of_tokens=True),
    weights=_weights,
    no_labels=_no_labels,
    write_label=_write_label,
    outputs=token_outputs,
    constant=_constant,
    usual_task=lambda num_outputs: "ner",
    has_windows=True,
    of_tokens=True,
    takes_words=True,
    probe="tokens",
    about_exported="logits [B, L, K], in the order of the labels; those of a word are at its first token.",
    architecture="BertForTokenClassification",
    pipeline="token-classification",
    has_labels=True,
)
