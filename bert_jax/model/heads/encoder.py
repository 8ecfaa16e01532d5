# SPDX-License-Identifier: Apache-2.0
"""The bare encoder, which has no head of its own."""

import jax

from bert_jax.batch import Batch
from bert_jax.model.bert import Encoded
from bert_jax.model.heads.base import Head, Model
from bert_jax.model.product import widened


class Bare(Head):
    """The pooled outputs [B, M, H], float32, in place of logits, which the bare encoder lacks."""

    name = "encoder"
    parts = ("pooler",)
    architecture = "BertModel"
    pipeline = "feature-extraction"

    def logits(
        self, model: Model, encoded: Encoded, batch: Batch, deterministic: bool
    ) -> jax.Array:
        assert encoded.pooled is not None
        return widened(encoded.pooled)


ENCODER = Bare()
