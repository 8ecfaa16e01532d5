# SPDX-License-Identifier: Apache-2.0
"""Spans of tokens that answer a question. Source: google-research/bert run_squad.py, create_model."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.heads.base import Head, Linear
from bert_jax.model.heads.labels import Spot, constant_zeros, label_losses, token_outputs
from bert_jax.model.losses import Pair
from bert_jax.model.teaching import class_divergence


def _losses(logits: jax.Array, batch: Batch, weights: jax.Array) -> dict[str, Pair]:
    """Returns cross entropy and accuracy of the start and of the end, over the tokens of the sequence."""
    return label_losses(_of_sequences(logits, batch), batch, jnp.broadcast_to(weights[..., None], batch.labels.shape))


def _divergence(logits: jax.Array, teacher: jax.Array, batch: Batch, temperature: float) -> jax.Array:
    """Returns the divergence of the start and of the end, added, over the tokens of the sequence."""
    student, target = (_of_sequences(values / temperature, batch) for values in (logits, teacher))
    return class_divergence(student, target).sum(axis=-1)


def _of_sequences(logits: jax.Array, batch: Batch) -> jax.Array:
    """Returns the logits of each sequence, [B, M, 2, L]: none at the tokens of others."""
    places = jnp.arange(1, batch.cls_positions.shape[1] + 1)
    inside = (batch.sequence_ids[:, None, :] == places[:, None])[:, :, None]  # [B, M, 1, L]
    return jnp.where(inside, jnp.swapaxes(logits, 1, 2)[:, None], MASKED_SCORE)


def _no_labels(num_rows: int, length: int, num_places: int, label: Any) -> np.ndarray:
    return np.zeros((num_rows, num_places, 2), np.int32)


def _write_label(labels: np.ndarray, label: Any, spot: Spot) -> None:
    labels[spot.places] = np.add(label, spot.tokens.start)


SPANS = Head(
    "question_answering",
    ("span",),
    partial(Linear, part="span", of_tokens=True, has_dropout=False),
    num_outputs=2,
    answers=2,
    losses=_losses,
    divergence=_divergence,
    no_labels=_no_labels,
    write_label=_write_label,
    outputs=token_outputs,
    constant=constant_zeros,
    usual_task=lambda num_outputs: "squad1",
    has_windows=True,
    of_tokens=True,
    most_tokens="max_query_length",
    probe="tokens",
    about_exported="logits [B, L, 2], for the answer to begin and to end at a token.",
    architecture="BertForQuestionAnswering",
    pipeline="question-answering",
)
