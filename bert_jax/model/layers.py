# SPDX-License-Identifier: Apache-2.0
"""The layers of BERT. Source: google-research/bert modeling.py; paper, section 3.

Matrix products run in the configured compute dtype and accumulate in float32; layer norm and softmax are
computed in float32. Dimension letters: `batch.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from bert_jax.devices.sharding import whole
from bert_jax.model.attention import SAVED, attend
from bert_jax.model.keys import bits_of_rows
from bert_jax.model.product import add_bias, product
from bert_jax.model.tables import copy_to_rows, look_up
from bert_jax.settings.model import ModelConfig

ACTIVATIONS = {
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    # With erf, as the references compute it; jax.nn.gelu uses erfc, which costs more than twice as much on a CPU.
    "gelu_exact": lambda x: 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5)),
}


def truncated_normal(config: ModelConfig) -> jax.nn.initializers.Initializer:
    """Returns the initializer of every matrix: normal, truncated at two standard deviations and not rescaled."""
    return jax.nn.initializers.truncated_normal(config.initializer_stddev)


class Dense(nn.Module):
    """A dense layer in the compute dtype."""

    config: ModelConfig
    features: int
    result_dtype: str = ""  # "" is the compute dtype; logits keep float32, because they are compared
    add: bool = True  # False returns the product and the bias [features], for a kernel that adds them

    @nn.compact
    def __call__(self, inputs: jax.Array) -> Any:
        """Returns [..., features] of inputs [..., in]."""
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        kernel = self.param("kernel", truncated_normal(config), (inputs.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        rows = inputs.astype(dtype).reshape(-1, inputs.shape[-1])
        result = self.result_dtype or config.compute_dtype
        multiplied = product("ri,io->ro", rows, kernel, config.gradient_dtype, config.matmul_precision, result)
        multiplied = checkpoint_name(multiplied.reshape(*inputs.shape[:-1], self.features), SAVED)
        return add_bias(multiplied, bias) if self.add else (multiplied, bias)


def layer_norm(config: ModelConfig, name: str = "norm") -> nn.LayerNorm:
    """Returns layer norm over the last axis, in float32.

    Flax's fast variance E[x^2] - E[x]^2 is not used: rounding can make it negative, and epsilon is only 1e-12. The
    backward pass recomputes layer norm from its input, which is cheap and saves keeping float32 arrays. (XLA may keep
    them all the same where layers are unrolled.)
    """
    norm = nn.remat(nn.LayerNorm, prevent_cse=False)
    return norm(epsilon=config.layer_norm_epsilon, dtype=jnp.float32, use_fast_variance=False, name=name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def activate(name: str, product: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns the activation, one of `ACTIVATIONS`, of product + bias; the backward pass recomputes it from both."""
    return _activation(name, product, bias)


def _activate_forward(name: str, product: jax.Array, bias: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return activate(name, product, bias), (product, bias)


def _activate_backward(name: str, saved: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
    # Without a barrier XLA finds that the forward pass has computed the same, and keeps that in memory.
    again = jax.lax.platform_dependent(saved, cuda=jax.lax.optimization_barrier, default=lambda arrays: arrays)
    _, pull_back = jax.vjp(functools.partial(_activation, name), *again)
    return pull_back(gradient)


def _activation(name: str, product: jax.Array, bias: jax.Array) -> jax.Array:
    # XLA for CPUs rounds bfloat16 after each operation, which takes longer than the operations; others do not.
    wide = lambda inputs: ACTIVATIONS[name](inputs.astype(jnp.float32)).astype(inputs.dtype)  # noqa: E731
    return jax.lax.platform_dependent(add_bias(product, bias), cpu=wide, default=ACTIVATIONS[name])


activate.defvjp(_activate_forward, _activate_backward)


class Dropout(nn.Module):
    """Dropout: sets a share of the numbers to 0 and scales the others up, so that the mean stays.

    16 random bits decide about a number, so the rate is exact to 1 / 131,072; the scale is that of the rounded rate.
    The scale is not rounded to the dtype of the inputs; the result is. Two numbers share a draw of 32 bits, because
    generating bits is the most expensive part of dropout without hardware support.
    """

    rate: float

    @nn.compact
    def __call__(self, inputs: jax.Array, deterministic: bool) -> jax.Array:
        """Returns inputs [..., R, C] after dropout; unchanged if `deterministic`."""
        kept = round((1 - self.rate) * 2**16)  # of 2^16
        if deterministic or kept == 2**16:
            return inputs
        *outer, rows, columns = inputs.shape
        # Halved along the rows: that axis is never sharded, and columns are lanes of the vector unit.
        bits = bits_of_rows(self.make_rng("dropout"), (*outer, -(-rows // 2), columns))
        # Compared before they are put together: what may be written to memory is then a byte for each number.
        keeps = jnp.concatenate([(bits & 0xFFFF) < kept, (bits >> 16) < kept], axis=-2)[..., :rows, :]
        scaled = (inputs.astype(jnp.float32) * (2**16 / kept)).astype(inputs.dtype)
        return jnp.where(keeps, scaled, 0)


class Embeddings(nn.Module):
    """Word + position + type embeddings, layer norm, dropout."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, token_ids: jax.Array, type_ids: jax.Array, positions: jax.Array, deterministic: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the embedded tokens [B, L, H] in the compute dtype, and copies of the word table [D, V padded, H]."""
        config = self.config

        def table(rows: int, name: str, init: Callable[..., jax.Array]) -> nn.Embed:
            return nn.Embed(rows, config.hidden_size, embedding_init=init, name=name)

        def small_rows(name: str, size: int, ids: jax.Array) -> jax.Array:
            # Replicated first: a sharded lookup would need communication.
            embedding = whole(table(size, name, truncated_normal(config)).embedding)
            return look_up(config.compute_dtype, config.matmul_precision, embedding, ids)

        words = table(config.padded_vocab_size, "word", self._padded_init)
        copies = copy_to_rows(words.embedding, token_ids.shape[0], config.gradient_dtype)
        looked_up = jax.vmap(lambda table, ids: jnp.take(table, ids, axis=0))(
            copies, token_ids.astype(jnp.int32).reshape(copies.shape[0], -1)
        )
        summed = (
            looked_up.reshape(*token_ids.shape, -1)
            + small_rows("position", config.max_positions, positions)
            + small_rows("type", config.type_vocab_size, type_ids.astype(jnp.int32))
        )
        embedded = layer_norm(config)(summed)
        embedded = Dropout(config.hidden_dropout_rate)(embedded, deterministic)
        return embedded.astype(config.compute_dtype), copies

    def _padded_init(self, key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns random rows for the vocabulary and zero rows for its padding."""
        table = truncated_normal(self.config)(key, (self.config.vocab_size, shape[1]), dtype)
        return jnp.zeros(shape, dtype).at[: self.config.vocab_size].set(table)


class Attention(nn.Module):
    """Multi-head self-attention: LN(x + dropout(attention(x)))."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, hidden: jax.Array, attends: jax.Array, deterministic: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns [B, L, H], and the probabilities of attention [B, N, L, L], which fused attention does not have.

        `attends` [B, L, L] bool says which keys each query may see; for fused attention it is the sequence ids [B, L].
        """
        config, probabilities = self.config, None
        rate = config.attention_dropout_rate
        query, key, value = (Dense(config, config.hidden_size, name=name)(hidden) for name in ("query", "key", "value"))
        if attends.ndim == 2:
            from bert_jax.model.fused_attention import fused_attention  # importing Pallas is slow

            draws = rate > 0 and not deterministic
            context = fused_attention(
                *(query, key, value, attends),
                num_heads=config.num_heads,
                causal=config.causal,
                rate=rate if draws else 0.0,
                dropout_key=self.make_rng("dropout") if draws else None,
                precision=config.matmul_precision,
            )
        else:
            heads = (*hidden.shape[:2], config.num_heads, config.head_size)
            query, key, value = (array.reshape(heads) for array in (query, key, value))
            drop = functools.partial(Dropout(rate), deterministic=deterministic)
            context, probabilities = attend(query, key, value, attends, drop, config.matmul_precision)
            context = checkpoint_name(context.reshape(hidden.shape), SAVED)
        update = Dense(config, config.hidden_size, name="output")(context)
        update = Dropout(config.hidden_dropout_rate)(update, deterministic)
        return layer_norm(config)(hidden + update).astype(config.compute_dtype), probabilities


class FeedForward(nn.Module):
    """The feed-forward block: LN(x + dropout(W2 gelu(W1 x)))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array, deterministic: bool) -> jax.Array:
        """Returns [B, L, H]."""
        config = self.config
        dense = Dense(config, config.intermediate_size, add=False, name="intermediate")
        widened = activate(config.activation, *dense(hidden))
        update = Dense(config, config.hidden_size, name="output")(widened)  # pyright: ignore[reportArgumentType]
        update = Dropout(config.hidden_dropout_rate)(update, deterministic)
        return layer_norm(config)(hidden + update).astype(config.compute_dtype)


class Layer(nn.Module):
    """One layer of the encoder."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, hidden: jax.Array, attends: jax.Array, deterministic: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns [B, L, H] in the compute dtype, and the probabilities of `Attention`."""
        hidden, probabilities = Attention(self.config, name="attention")(hidden, attends, deterministic)
        return FeedForward(self.config, name="mlp")(hidden, deterministic), probabilities
