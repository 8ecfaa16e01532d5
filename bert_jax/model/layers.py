# SPDX-License-Identifier: Apache-2.0
"""The layers of BERT. Source: google-research/bert modeling.py; paper, section 3.

Matrix products run in the configured compute dtype and accumulate in float32; layer norm and softmax are
computed in float32. Dimension letters: `batch.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.config import ModelConfig

ACTIVATIONS = {
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}

# Large enough to leave nothing after softmax, small enough for every float type with float32's range.
MASKED_SCORE = -1e9


def truncated_normal(config: ModelConfig) -> jax.nn.initializers.Initializer:
    """Returns the initializer of every matrix: normal, cut at two deviations and not rescaled."""
    return jax.nn.initializers.truncated_normal(config.initializer_stddev)


def dense(config: ModelConfig, features: int, name: str) -> nn.Dense:
    """Returns a Dense layer [..., in] -> [..., features] in the compute dtype."""
    return nn.Dense(
        features,
        name=name,
        dtype=jnp.dtype(config.compute_dtype),
        kernel_init=truncated_normal(config),
        dot_general=_accumulate_in_float32,
    )


def layer_norm(config: ModelConfig, name: str = "norm") -> nn.LayerNorm:
    """Returns layer norm over the last axis, in float32.

    Not Flax's fast variance E[x^2] - E[x]^2: it can come out below zero, and epsilon is only 1e-12.
    """
    return nn.LayerNorm(epsilon=config.layer_norm_epsilon, dtype=jnp.float32, use_fast_variance=False, name=name)


class Embeddings(nn.Module):
    """Word + position + type embeddings, layer norm, dropout."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, token_ids: jax.Array, type_ids: jax.Array, positions: jax.Array, deterministic: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the embedded tokens [B, L, H] in the compute dtype, and the word table [V padded, H]."""
        config = self.config

        def table(rows: int, name: str, init: Any) -> nn.Embed:
            return nn.Embed(rows, config.hidden_size, embedding_init=init, name=name)

        words = table(config.padded_vocab_size, "word", self._padded_init)
        summed = (
            words(token_ids.astype(jnp.int32))
            + table(config.max_positions, "position", truncated_normal(config))(positions)
            + table(config.type_vocab_size, "type", truncated_normal(config))(type_ids.astype(jnp.int32))
        )
        embedded = layer_norm(config)(summed)
        embedded = nn.Dropout(config.hidden_dropout_rate)(embedded, deterministic=deterministic)
        return embedded.astype(config.compute_dtype), words.embedding

    def _padded_init(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Returns random rows for the vocabulary and zero rows for its padding."""
        table = truncated_normal(self.config)(key, (self.config.vocab_size, shape[1]), dtype)
        return jnp.zeros(shape, dtype).at[: self.config.vocab_size].set(table)


class Attention(nn.Module):
    """Multi-head self-attention: LN(x + dropout(attention(x)))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array, attends: jax.Array, deterministic: bool) -> jax.Array:
        """Returns [B, L, H]. `attends` [B, L, L] bool says which keys each query may see."""
        config = self.config

        def heads(name: str) -> jax.Array:
            projected = dense(config, config.hidden_size, name)(hidden)
            return projected.reshape(*hidden.shape[:2], config.num_heads, config.head_size)

        query, key, value = heads("query"), heads("key"), heads("value")
        scores = jnp.einsum("BQND,BKND->BNQK", query, key, preferred_element_type=jnp.float32)
        # A query that may see nothing (padding) gets equal, finite scores: uniform attention and no NaN.
        scores = jnp.where(attends[:, None], scores * config.head_size**-0.5, MASKED_SCORE)
        probabilities = jax.nn.softmax(scores, axis=-1)
        probabilities = nn.Dropout(config.attention_dropout_rate)(probabilities, deterministic=deterministic)
        context = jnp.einsum(
            "BNQK,BKND->BQND", probabilities.astype(value.dtype), value, preferred_element_type=jnp.float32
        )
        context = context.astype(value.dtype).reshape(hidden.shape)
        return residual(config, hidden, dense(config, config.hidden_size, "output")(context), deterministic)


class FeedForward(nn.Module):
    """The feed-forward block: LN(x + dropout(W2 gelu(W1 x)))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array, deterministic: bool) -> jax.Array:
        """Returns [B, L, H]."""
        config = self.config
        widened = ACTIVATIONS[config.activation](dense(config, config.intermediate_size, "intermediate")(hidden))
        return residual(config, hidden, dense(config, config.hidden_size, "output")(widened), deterministic)


class Layer(nn.Module):
    """One layer of the encoder."""

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array, attends: jax.Array, deterministic: bool) -> jax.Array:
        """Returns [B, L, H] in the compute dtype."""
        hidden = Attention(self.config, name="attention")(hidden, attends, deterministic)
        return FeedForward(self.config, name="mlp")(hidden, deterministic)


def residual(config: ModelConfig, hidden: jax.Array, update: jax.Array, deterministic: bool) -> jax.Array:
    """Returns LN(hidden + dropout(update)) in the compute dtype; a part of the module that calls it."""
    update = nn.Dropout(config.hidden_dropout_rate)(update, deterministic=deterministic)
    return layer_norm(config)(hidden + update).astype(config.compute_dtype)


def _accumulate_in_float32(lhs: jax.Array, rhs: jax.Array, dimension_numbers, **options) -> jax.Array:
    """Returns lax.dot_general with float32 sums, in the dtype of its inputs.

    On accelerators this is what the hardware does; on a CPU it also picks the fast bfloat16 kernel.
    """
    options["preferred_element_type"] = jnp.float32
    return jax.lax.dot_general(lhs, rhs, dimension_numbers, **options).astype(lhs.dtype)
