# SPDX-License-Identifier: Apache-2.0
"""Which tokens were replaced: the head of ELECTRA's discriminator. Its training is not here: no batch has its labels.

Source: Clark et al. 2020; transformers' modeling_electra.py.
"""

import jax
from flax import linen as nn

from bert_jax.batch import Batch
from bert_jax.model.bert import Encoded
from bert_jax.model.heads.base import Head
from bert_jax.model.heads.labels import token_outputs
from bert_jax.model.parts import Dense, activate
from bert_jax.settings.model import ModelConfig


class Discriminator(nn.Module):
    """Dense, activation, dense."""

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Returns [B, L, 1] float32: above 0 where a token of hidden vectors [B, L, H] seems replaced."""
        config = self.config
        hidden = activate(config.activation, *Dense(config, config.hidden_size, add=False, name="transform")(hidden))
        return Dense(config, 1, "float32", name="output")(hidden)


class Replaced(nn.Module):
    """The logits [B, L, 1] of all tokens."""

    config: ModelConfig
    num_outputs: int

    @nn.compact
    def __call__(self, encoded: Encoded, batch: Batch, deterministic: bool) -> jax.Array:
        return Discriminator(self.config, name="discriminator")(encoded.hidden)


REPLACED = Head(
    "replaced_tokens",
    ("discriminator",),
    Replaced,
    num_outputs=1,
    outputs=token_outputs,
    architecture="ElectraForPreTraining",
    family="electra",
)
