# SPDX-License-Identifier: Apache-2.0
"""The bare encoder, which has no head of its own."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.batch import Batch
from bert_jax.model.bert import Encoded
from bert_jax.model.heads.base import Head
from bert_jax.settings.model import ModelConfig


class Pooled(nn.Module):
    """The pooled outputs [B, M, H], float32, in place of logits, which the bare encoder lacks."""

    config: ModelConfig
    num_outputs: int

    @nn.compact
    def __call__(self, encoded: Encoded, batch: Batch, deterministic: bool) -> jax.Array:
        assert encoded.pooled is not None
        return encoded.pooled.astype(jnp.float32)


ENCODER = Head("encoder", ("pooler",), Pooled, architecture="BertModel", pipeline="feature-extraction")
