# SPDX-License-Identifier: Apache-2.0
"""Probes: a BiLSTM or a linear classifier on the features of an encoder, which is frozen or trained with it.

Source: paper, section 5.3 and Table 7; section 5.1 and Table 5 for a BiLSTM that is trained with its encoder.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.batch import Batch
from bert_jax.errors import InputError
from bert_jax.model.bert import Encoded
from bert_jax.model.heads.base import Head, Model
from bert_jax.model.heads.sequence import Sequences
from bert_jax.model.heads.spans import Spans
from bert_jax.model.heads.tokens import Tokens
from bert_jax.model.parts import Dense, Dropout
from bert_jax.model.product import in_precision
from bert_jax.model.sequences import mean_of_sequences
from bert_jax.settings.finetuning import ProbeConfig
from bert_jax.settings.model import ModelConfig


class Probe(nn.Module):
    """BiLSTM layers, if any, and a linear classifier of tokens, or of the mean over the tokens of a sequence.

    A BiLSTM reads rows of a single sequence.
    """

    model: ModelConfig
    config: ProbeConfig
    num_classes: int
    pool: bool  # classify sequences rather than tokens

    @nn.compact
    def __call__(
        self, layers: jax.Array, sequence_ids: jax.Array, deterministic: bool, num_places: int = 1
    ) -> jax.Array:
        """Returns float32 logits [B, L, K], or [B, M, K] of sequences.

        layers [num_layers + 1, B, L, H] are the embeddings and every layer; sequence_ids [B, L] as in `Batch`;
        num_places is M.
        """
        with in_precision(self.model.matmul_precision):
            return self._classify(layers, sequence_ids, deterministic, num_places)

    def _classify(
        self, layers: jax.Array, sequence_ids: jax.Array, deterministic: bool, num_places: int
    ) -> jax.Array:
        layers = layers if self.config.train_encoder else jax.lax.stop_gradient(layers)
        features: Any = self._combine(layers.astype(jnp.float32))
        if self.config.kind == "bilstm":
            assert num_places == 1, f"a BiLSTM would run across the {num_places} sequences of a row"
            lengths = jnp.sum(sequence_ids > 0, axis=1)
            for index in range(self.config.num_layers):
                forward, backward = (
                    nn.RNN(nn.OptimizedLSTMCell(self.config.hidden_size, name=f"{name}_{index}"))
                    for name in ("forward", "backward")
                )
                features = nn.Bidirectional(forward, backward, name=f"bilstm_{index}")(
                    features, seq_lengths=lengths
                )
        features = Dropout(self.model.hidden_dropout_rate)(features, deterministic)
        if self.pool:
            features = mean_of_sequences(
                features, sequence_ids, num_places, self.model.matmul_precision
            )
        return Dense(self.model, self.num_classes, "float32", name="classifier")(features)

    def _combine(self, layers: jax.Array) -> jax.Array:
        """Returns one vector per token, [B, L, H] or [B, L, 4 H], from the outputs of all layers."""
        kind = self.config.features
        if kind == "embeddings":
            return layers[0]
        if kind == "last":
            return layers[-1]
        if kind == "second_to_last":
            return layers[-2]
        if kind == "concat_last4":
            return jnp.concatenate(list(layers[-4:]), axis=-1)
        chosen = layers[-4:] if kind == "weighted_last4" else layers[1:]
        weights = jax.nn.softmax(
            self.param("layer_weights", nn.initializers.zeros, (chosen.shape[0],), jnp.float32)
        )
        return jnp.einsum("W,WBLH->BLH", weights, chosen)


class _Probed(Head):
    """A head with a probe in place of its own parts; the rest is as in the class beside it."""

    parts = ("probe",)
    of_tokens = False  # it reads layers
    all_layers = True
    of_sequences: bool = False

    def __init__(self, config: ProbeConfig) -> None:
        self.config = config
        self.is_frozen = not config.train_encoder
        self.can_be_packed = config.kind != "bilstm"  # it would run from one example into the next

    def logits(
        self, model: Model, encoded: Encoded, batch: Batch, deterministic: bool
    ) -> jax.Array:
        assert encoded.layers is not None
        probe = Probe(model.config, self.config, model.num_outputs, self.of_sequences, name="probe")
        return probe(
            encoded.layers, batch.sequence_ids, deterministic, batch.cls_positions.shape[1]
        )


class ProbedSequences(_Probed, Sequences):
    """A probe that classifies sequences."""

    of_sequences = True


class ProbedTokens(_Probed, Tokens):
    """A probe that classifies tokens."""


class ProbedSpans(_Probed, Spans):
    """A probe that finds spans."""


_PROBED = {kind.name: kind for kind in (ProbedSequences, ProbedTokens, ProbedSpans)}


def probed(head: Head, config: ProbeConfig) -> Head:
    """Returns the head with a probe for its parts. Raises: InputError if there are no probes for this head."""
    if head.name not in _PROBED:
        raise InputError(
            f"task.probe.features are not for the head {head.name}; use another task, or fine-tune"
        )
    return _PROBED[head.name](config)
