# SPDX-License-Identifier: Apache-2.0
"""What layers are made of: dense layers, layer norm, activations, dropout. Source: google-research/bert modeling.py."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from bert_jax.devices.sharding import whole
from bert_jax.model.attention import SAVED
from bert_jax.model.derivatives import with_rule
from bert_jax.model.keys import bits_of_rows
from bert_jax.model.product import add_bias, product, widened
from bert_jax.model.tables import look_up
from bert_jax.settings.model import ModelConfig

# of every matrix: at two standard deviations, not rescaled
truncated_normal = jax.nn.initializers.truncated_normal


def padded_normal(
    key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike, stddev: float, size: int
) -> jax.Array:
    """Returns what a table of words starts with: random rows for `size` words, and zero rows for padding."""
    words = truncated_normal(stddev)(key, (size, *shape[1:]), dtype)
    return jnp.zeros(shape, dtype).at[:size].set(words)


def words_table(config: ModelConfig, name: str) -> nn.Embed:
    """Returns a table of words, whose rows that pad the vocabulary are 0."""
    initial = functools.partial(
        padded_normal, stddev=config.initializer_stddev, size=config.vocab_size
    )
    size, width = config.padded_vocab_size, config.embedding_width
    return nn.Embed(size, width, embedding_init=initial, name=name)


def small_rows(config: ModelConfig, name: str, size: int, ids: jax.Array) -> jax.Array:
    """Returns the rows `ids` [B, L] of a table of `size` rows, a module of the one that calls this."""
    initial = truncated_normal(config.initializer_stddev)
    table = nn.Embed(size, config.embedding_width, embedding_init=initial, name=name).embedding
    # Replicated first: a sharded lookup would need communication.
    return look_up(config.compute_dtype, config.matmul_precision, whole(table), ids)


ACTIVATIONS = {
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    # With erf, as the references compute it; jax.nn.gelu uses erfc, which costs more than twice as much on a CPU.
    "gelu_exact": lambda x: 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5)),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


# What a layer keeps for the backward pass, by `ModelConfig.remat`; it keeps all with "none".
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(SAVED),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Dense(nn.Module):
    """A dense layer in the compute dtype."""

    config: ModelConfig
    features: int
    # "" is the compute dtype; logits keep float32, because they are compared
    result_dtype: str = ""
    # False returns the product and the bias [features], for a kernel that adds them
    add: bool = True
    has_bias: bool = True
    stddev: float | None = None  # of the initial matrix, if not the model's

    @nn.compact
    def __call__(self, inputs: jax.Array) -> Any:
        """Returns [..., features] of inputs [..., in]."""
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        initial = truncated_normal(
            config.initializer_stddev if self.stddev is None else self.stddev
        )
        kernel = self.param("kernel", initial, (inputs.shape[-1], self.features), jnp.float32)
        bias = (
            self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
            if self.has_bias
            else None
        )
        rows = inputs.astype(dtype).reshape(-1, inputs.shape[-1])
        result = self.result_dtype or config.compute_dtype
        multiplied = product(
            "ri,io->ro", rows, kernel, config.gradient_dtype, config.matmul_precision, result
        )
        multiplied = checkpoint_name(multiplied.reshape(*inputs.shape[:-1], self.features), SAVED)
        return add_bias(multiplied, bias) if self.add else (multiplied, bias)


def layer_norm(config: ModelConfig, name: str = "norm") -> nn.LayerNorm | nn.RMSNorm:
    """Returns layer norm, or the norm that `ModelConfig.norm_kind` is, over the last axis, in float32.

    Flax's fast variance E[x^2] - E[x]^2 is not used: rounding can make it negative, and epsilon is only 1e-12. The
    backward pass recomputes layer norm from its input, which is cheap and saves keeping float32 arrays. (XLA may keep
    them all the same where layers are unrolled.)
    """
    norm = functools.partial(nn.remat(nn.LayerNorm, prevent_cse=False), use_bias=config.norm_bias)
    if config.norm_kind == "rms":
        norm = nn.remat(nn.RMSNorm, prevent_cse=False)
    return norm(
        epsilon=config.layer_norm_epsilon,
        dtype=config.wide_dtype,
        use_fast_variance=False,
        name=name,
    )


def _activate_forward(
    name: str, product: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    return activate(name, product, bias), (product, bias)


def _activate_backward(
    name: str, saved: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array, ...]:
    # Without a barrier XLA finds that the forward pass has computed the same, and keeps that in memory.
    again = jax.lax.platform_dependent(
        saved, cuda=jax.lax.optimization_barrier, default=lambda arrays: arrays
    )
    _, pull_back = jax.vjp(functools.partial(_activation, name), *again)
    return pull_back(gradient)


def _activation(name: str, product: jax.Array, bias: jax.Array | None) -> jax.Array:
    if product.dtype != jnp.bfloat16:
        return ACTIVATIONS[name](add_bias(product, bias))
    # XLA for CPUs rounds bfloat16 after each operation, which takes longer than the operations; others do not.
    wide = lambda inputs: ACTIVATIONS[name](inputs.astype(jnp.float32)).astype(inputs.dtype)  # noqa: E731
    return jax.lax.platform_dependent(add_bias(product, bias), cpu=wide, default=ACTIVATIONS[name])


@with_rule(_activate_forward, _activate_backward, static=1)
def activate(name: str, product: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Returns the activation, one of `ACTIVATIONS`, of product + bias; the backward pass recomputes it from both."""
    return _activation(name, product, bias)


class Dropout(nn.Module):
    """Dropout: sets a share of the numbers to 0 and scales the others up, so that the mean stays.

    16 random bits decide about a number, so the rate is exact to 1 / 131,072; the scale is that of the rounded rate.
    The scale is not rounded to the dtype of the inputs; the result is. Two numbers share a draw of 32 bits, because
    generating bits is the most expensive part of dropout without hardware support.
    """

    rate: float
    # whether the first axis is the rows of a batch, which then have keys of their own
    of_rows: bool = True

    @nn.compact
    def __call__(self, inputs: jax.Array, deterministic: bool) -> jax.Array:
        """Returns inputs [B, ..., C] after dropout; unchanged if `deterministic`."""
        kept = round((1 - self.rate) * 2**16)  # of 2^16
        if deterministic or kept == 2**16:
            return inputs
        # Halved along the tokens: that axis is never sharded, and columns are lanes of the vector unit.
        axis = inputs.ndim - 2 if inputs.ndim > 2 else 1
        size = inputs.shape[axis]
        draw = bits_of_rows if self.of_rows else jax.random.bits
        halved = (*inputs.shape[:axis], -(-size // 2), *inputs.shape[axis + 1 :])
        bits = draw(self.make_rng("dropout"), halved)
        # Compared before they are put together, so that at most a byte for each number is written to memory.
        keeps = jnp.concatenate([(bits & 0xFFFF) < kept, (bits >> 16) < kept], axis=axis)
        keeps = jax.lax.slice_in_dim(keeps, 0, size, axis=axis)
        scaled = (widened(inputs) * (2**16 / kept)).astype(inputs.dtype)
        return jnp.where(keeps, scaled, 0)
