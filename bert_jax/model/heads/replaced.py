# SPDX-License-Identifier: Apache-2.0
"""Which tokens were replaced: the head of ELECTRA's discriminator. `replacing` trains it, with a generator.

Source: Clark et al. 2020; transformers' modeling_electra.py.
"""

import jax
import numpy as np
from flax import linen as nn

from bert_jax.batch import Batch
from bert_jax.model.bert import Encoded
from bert_jax.model.heads.base import Head, Model
from bert_jax.model.heads.labels import Spot
from bert_jax.model.parts import Dense, activate
from bert_jax.settings.model import ModelConfig


class Discriminator(nn.Module):
    """Dense, activation, dense."""

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Returns [B, L, 1] float32: above 0 where a token of hidden vectors [B, L, H] seems replaced."""
        config = self.config
        dense = Dense(config, config.hidden_size, name="transform")
        hidden = activate(config.words_activation, dense(hidden))
        return Dense(config, 1, "float32", name="output")(hidden)


class Replaced(Head):
    """The logits [B, L, 1] of all tokens."""

    name = "replaced_tokens"
    parts = ("discriminator",)
    num_outputs = 1
    architecture = "ElectraForPreTraining"
    family = "electra"

    def logits(
        self, model: Model, encoded: Encoded, batch: Batch, deterministic: bool
    ) -> jax.Array:
        return Discriminator(model.config, name="discriminator")(encoded.hidden)

    def outputs(self, outputs: np.ndarray, spot: Spot) -> np.ndarray:
        return outputs[spot.tokens]


REPLACED = Replaced()
