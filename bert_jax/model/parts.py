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
    size = config.padded_vocab_size
    width = config.embedding_width
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
    has_bias: bool = True
    stddev: float | None = None  # of the initial matrix, if not the model's

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns [..., features] of inputs [..., in]."""
        config = self.config
        dtype = jnp.dtype(self.config.compute_dtype)
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
        return add_bias(multiplied, bias)


class Norm(nn.Module):
    """Layer norm, or the norm that `ModelConfig.norm_kind` is, over the last axis."""

    config: ModelConfig

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns [..., H] of inputs [..., H], in `ModelConfig.wide_dtype`."""
        config = self.config
        size = inputs.shape[-1:]
        for_all = (1,) * (inputs.ndim - 1) + size

        def param(name: str, initial: jax.nn.initializers.Initializer) -> jax.Array:
            return self.param(name, initial, size, jnp.float32).reshape(for_all)

        scale = param("scale", nn.initializers.ones)
        bias = param("bias", nn.initializers.zeros) if config.norm_bias else None
        return normalize(
            config.norm_kind == "layer",
            config.layer_norm_epsilon,
            config.wide_dtype,
            inputs,
            scale,
            bias,
        )


def layer_norm(config: ModelConfig) -> Norm:
    """Returns the norm "norm", a module of the one that calls this."""
    return Norm(config, name="norm")


def _mean_and_factor(centers: bool, epsilon: float, wide: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean of [..., H], or 0, and 1 / the deviation from it, both [..., 1].

    The fast variance E[x^2] - E[x]^2 is not used: rounding can make it negative, and epsilon is only 1e-12.
    """
    if centers:
        mean = jnp.mean(wide, axis=-1, keepdims=True)
    else:
        mean = jnp.zeros_like(wide[..., :1])
    variance = jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True)
    return mean, jax.lax.rsqrt(variance + epsilon)


def _normalize_forward(
    centers: bool,
    epsilon: float,
    dtype: str,
    inputs: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    return normalize(centers, epsilon, dtype, inputs, scale, bias), (inputs, scale, bias)


def _normalize_backward(
    centers: bool, epsilon: float, dtype: str, saved: tuple[Any, ...], gradient: jax.Array
) -> tuple[Any, ...]:
    inputs, scale, bias = saved
    wide = inputs.astype(dtype)
    # With a barrier XLA keeps two numbers of a row; without it, a float32 array of the size of the inputs.
    mean, factor = jax.lax.platform_dependent(
        _mean_and_factor(centers, epsilon, wide),
        cuda=jax.lax.optimization_barrier,
        default=lambda arrays: arrays,
    )
    normed = (wide - mean) * factor
    scaled = gradient * scale
    along = normed * jnp.mean(scaled * normed, axis=-1, keepdims=True)
    if centers:
        along += jnp.mean(scaled, axis=-1, keepdims=True)
    of_inputs = (scaled - along) * factor
    over_rows = {"axis": range(inputs.ndim - 1), "keepdims": True}
    of_scale = jnp.sum(gradient * normed, **over_rows)
    of_bias = None
    if bias is not None:
        of_bias = jnp.sum(gradient, **over_rows).astype(bias.dtype)
    return (
        of_inputs.astype(inputs.dtype),
        of_scale.astype(scale.dtype),
        of_bias,
    )


@with_rule(_normalize_forward, _normalize_backward, static=3)
def normalize(
    centers: bool,
    epsilon: float,
    dtype: str,
    inputs: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    """Returns inputs [..., H] after layer norm in `dtype`, times scale and plus bias, both [1, ..., 1, H].

    Without `centers` the mean is not subtracted (RMS norm). The backward pass computes the norm again from its inputs,
    which is cheap and saves keeping float32 arrays.
    """
    wide = inputs.astype(dtype)
    mean, factor = _mean_and_factor(centers, epsilon, wide)
    normed = (wide - mean) * (factor * scale)
    return normed if bias is None else normed + bias


def _activate_forward(name: str, inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array]]:
    return activate(name, inputs), (inputs,)


def _activate_backward(
    name: str, saved: tuple[jax.Array], gradient: jax.Array
) -> tuple[jax.Array, ...]:
    # Without a barrier XLA finds that the forward pass has computed the same, and keeps that in memory. CPUs keep it
    # in float32, as they did in versions before.
    barriers = {"cuda": jax.lax.optimization_barrier}
    if saved[0].dtype == jnp.bfloat16:
        barriers["cpu"] = jax.lax.optimization_barrier
    again = jax.lax.platform_dependent(
        saved,
        default=lambda arrays: arrays,
        **barriers,
    )
    _, pull_back = jax.vjp(functools.partial(_activation, name), *again)
    return pull_back(gradient)


def _activation(name: str, inputs: jax.Array) -> jax.Array:
    if inputs.dtype != jnp.bfloat16:
        return ACTIVATIONS[name](inputs)
    # XLA for CPUs rounds bfloat16 after each operation, which takes longer than the operations; others do not.
    wide = lambda inputs: ACTIVATIONS[name](inputs.astype(jnp.float32)).astype(inputs.dtype)  # noqa: E731
    return jax.lax.platform_dependent(inputs, cpu=wide, default=ACTIVATIONS[name])


@with_rule(_activate_forward, _activate_backward, static=1)
def activate(name: str, inputs: jax.Array) -> jax.Array:
    """Returns the activation, one of `ACTIVATIONS`; the backward pass computes it again from its inputs."""
    return _activation(name, inputs)


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
        before = inputs.shape[:axis]
        after = inputs.shape[axis + 1 :]
        size = inputs.shape[axis]
        draw = bits_of_rows if self.of_rows else jax.random.bits
        half = -(-size // 2)
        bits = draw(self.make_rng("dropout"), (*before, half, *after))
        # Two bits of a byte say which of both are kept, so half a byte for each number is written to memory.
        low = (bits & 0xFFFF) < kept
        high = (bits >> 16) < kept
        pairs = low.astype(jnp.uint8) + 2 * high.astype(jnp.uint8)

        def keep(inputs: jax.Array, pairs: jax.Array) -> jax.Array:
            own_bit = jnp.asarray([1, 2], jnp.uint8).reshape(2, 1, *(1,) * len(after))
            keeps = (jnp.expand_dims(pairs, axis) & own_bit) > 0
            keeps = keeps.reshape(*before, 2 * half, *after)
            keeps = jax.lax.slice_in_dim(keeps, 0, size, axis=axis)
            scaled = (widened(inputs) * (2**16 / kept)).astype(inputs.dtype)
            return jnp.where(keeps, scaled, 0)

        # so that loops over layers keep the pairs for the backward pass
        return jax.checkpoint(keep, prevent_cse=False)(inputs, pairs)
