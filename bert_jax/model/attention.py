# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention and its mask. Source: paper, section 3; Vaswani et al. 2017."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bert_jax.model.product import product

# Added in place of masked scores: its softmax is 0, and it fits every float type with float32's range.
MASKED_SCORE = -1e9

# The name of the arrays that `ModelConfig.remat` "dots" keeps for the backward pass; it recomputes all others.
SAVED = "product"


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attends: jax.Array,
    drop: Callable[[jax.Array], jax.Array],
    precision: str = "default",
) -> tuple[jax.Array, jax.Array]:
    """Returns the context of each head, [B, L, N, D] in the dtype of `value`, and the probabilities [B, N, L, L].

    query, key and value have the shape of the context. `attends` [B, L, L] bool says which keys each query may see;
    `drop` is the dropout of probabilities; `precision` is that of `product`.
    """
    scores = product("BQND,BKND->BNQK", query, key, precision=precision)
    # A query that may see nothing (padding) gets equal, finite scores: uniform attention and no NaN.
    scores = jnp.where(attends[:, None], scores * query.shape[-1] ** -0.5, MASKED_SCORE)
    probabilities = jax.nn.softmax(scores, axis=-1)
    context = product("BNQK,BKND->BQND", drop(probabilities).astype(value.dtype), value, precision=precision)
    return context.astype(value.dtype), probabilities


def attention_mask(sequence_ids: jax.Array, causal: bool = False) -> jax.Array:
    """Returns [B, L, L] bool: query and key are in one sequence, and neither is padding.

    If `causal`, no key comes after its query.
    """
    same = sequence_ids[:, :, None] == sequence_ids[:, None, :]
    attends = same & (sequence_ids != 0)[:, None, :]
    return jnp.tril(attends) if causal else attends
