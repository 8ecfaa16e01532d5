# SPDX-License-Identifier: Apache-2.0
"""The layers of BERT. Source: google-research/bert modeling.py; paper, section 3.

Matrix products run in the configured compute dtype and accumulate in float32; layer norm and softmax are
computed in float32. Dimension letters: `batch.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from bert_jax.devices.sharding import whole
from bert_jax.model.attention import SAVED, attend, rotary_frequencies, rotate
from bert_jax.model.keys import bits_of_rows
from bert_jax.model.product import add_bias, product
from bert_jax.model.tables import copy_to_rows, look_up
from bert_jax.settings.model import ModelConfig

truncated_normal = jax.nn.initializers.truncated_normal  # of every matrix: at two standard deviations, not rescaled
ACTIVATIONS = {
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    # With erf, as the references compute it; jax.nn.gelu uses erfc, which costs more than twice as much on a CPU.
    "gelu_exact": lambda x: 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5)),
    "relu": jax.nn.relu,
}


class Stream(NamedTuple):
    """The activations between layers. With norm before a block, its input and the sum it adds to are two arrays."""

    hidden: jax.Array  # [B, L, H]: the input of the next block
    summed: jax.Array | None  # [B, L, H] before the norm; None with norm after the sum, where `hidden` is added to

    def add(self, config: ModelConfig, update: jax.Array) -> "Stream":
        """Returns the stream after a block. The norm is that of the module that calls this."""
        summed = (self.hidden if self.summed is None else self.summed) + update
        hidden = layer_norm(config)(summed).astype(config.compute_dtype)
        return Stream(hidden, None if config.norm == "after" else summed)


class Sight(NamedTuple):
    """Which keys the queries of a batch see, and their positions."""

    attends: jax.Array  # [B, L, L] bool; or the sequence ids [B, L], where the scores of a row are not stored
    local: jax.Array | None  # [B, L, L] bool: the mask of local layers, if there are any and `attends` is not ids
    positions: jax.Array  # [B, L] in the sequence


class Dense(nn.Module):
    """A dense layer in the compute dtype."""

    config: ModelConfig
    features: int
    result_dtype: str = ""  # "" is the compute dtype; logits keep float32, because they are compared
    add: bool = True  # False returns the product and the bias [features], for a kernel that adds them
    has_bias: bool = True
    stddev: float | None = None  # of the initial matrix, if not the model's

    @nn.compact
    def __call__(self, inputs: jax.Array) -> Any:
        """Returns [..., features] of inputs [..., in]."""
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        initial = truncated_normal(config.initializer_stddev if self.stddev is None else self.stddev)
        kernel = self.param("kernel", initial, (inputs.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32) if self.has_bias else None
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
    norm = functools.partial(nn.remat(nn.LayerNorm, prevent_cse=False), use_bias=config.norm_bias)
    return norm(epsilon=config.layer_norm_epsilon, dtype=jnp.float32, use_fast_variance=False, name=name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def activate(name: str, product: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Returns the activation, one of `ACTIVATIONS`, of product + bias; the backward pass recomputes it from both."""
    return _activation(name, product, bias)


def _activate_forward(name: str, product: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, tuple[Any, ...]]:
    return activate(name, product, bias), (product, bias)


def _activate_backward(name: str, saved: tuple[Any, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
    # Without a barrier XLA finds that the forward pass has computed the same, and keeps that in memory.
    again = jax.lax.platform_dependent(saved, cuda=jax.lax.optimization_barrier, default=lambda arrays: arrays)
    _, pull_back = jax.vjp(functools.partial(_activation, name), *again)
    return pull_back(gradient)


def _activation(name: str, product: jax.Array, bias: jax.Array | None) -> jax.Array:
    if product.dtype == jnp.float32:
        return ACTIVATIONS[name](add_bias(product, bias))
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
        """Returns inputs [B, ..., C] after dropout; unchanged if `deterministic`."""
        kept = round((1 - self.rate) * 2**16)  # of 2^16
        if deterministic or kept == 2**16:
            return inputs
        # Halved along the tokens: that axis is never sharded, and columns are lanes of the vector unit. The rows of the
        # batch, the first axis, each have a key of their own.
        axis = inputs.ndim - 2 if inputs.ndim > 2 else 1
        size = inputs.shape[axis]
        bits = bits_of_rows(self.make_rng("dropout"), (*inputs.shape[:axis], -(-size // 2), *inputs.shape[axis + 1 :]))
        # Compared before they are put together, so that at most a byte for each number is written to memory.
        keeps = jnp.concatenate([(bits & 0xFFFF) < kept, (bits >> 16) < kept], axis=axis)
        keeps = jax.lax.slice_in_dim(keeps, 0, size, axis=axis)
        scaled = (inputs.astype(jnp.float32) * (2**16 / kept)).astype(inputs.dtype)
        return jnp.where(keeps, scaled, 0)


class Embeddings(nn.Module):
    """Word + position + type embeddings, as far as there are any, layer norm, dropout."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, token_ids: jax.Array, type_ids: jax.Array, positions: jax.Array, deterministic: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the embedded tokens [B, L, H] in the compute dtype, and copies of the word table [D, V padded, H].

        The table is `ModelConfig.embedding_size` wide, if that is set.
        """
        config = self.config

        def table(rows: int, name: str, init: Callable[..., jax.Array]) -> nn.Embed:
            return nn.Embed(rows, config.embedding_width, embedding_init=init, name=name)

        def small_rows(name: str, size: int, ids: jax.Array) -> jax.Array:
            # Replicated first: a sharded lookup would need communication.
            embedding = whole(table(size, name, truncated_normal(config.initializer_stddev)).embedding)
            return look_up(config.compute_dtype, config.matmul_precision, embedding, ids)

        words = table(config.padded_vocab_size, "word", self._padded_init)
        copies = copy_to_rows(words.embedding, token_ids.shape[0], config.gradient_dtype)
        looked_up = jax.vmap(lambda table, ids: jnp.take(table, ids, axis=0))(
            copies, token_ids.astype(jnp.int32).reshape(copies.shape[0], -1)
        )
        summed = looked_up.reshape(*token_ids.shape, config.embedding_width)
        if config.positions == "learned":
            offset = config.position_offset
            summed = summed + small_rows("position", config.max_positions + offset, positions + offset)
        if config.type_vocab_size:
            types = type_ids.astype(jnp.int32) if config.type_vocab_size > 1 else jnp.zeros(type_ids.shape, jnp.int32)
            summed = summed + small_rows("type", config.type_vocab_size, types)
        embedded = layer_norm(config)(summed)
        embedded = Dropout(config.hidden_dropout_rate)(embedded, deterministic).astype(config.compute_dtype)
        if config.embedding_width != config.hidden_size:
            embedded = Dense(config, config.hidden_size, name="project")(embedded)
        return embedded, copies

    def _padded_init(self, key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns random rows for the vocabulary and zero rows for its padding."""
        table = truncated_normal(self.config.initializer_stddev)(key, (self.config.vocab_size, shape[1]), dtype)
        return jnp.zeros(shape, dtype).at[: self.config.vocab_size].set(table)


class Attention(nn.Module):
    """Multi-head self-attention: LN(x + dropout(attention(x)))."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, stream: Stream, sight: Sight, is_global: jax.Array | None, deterministic: bool
    ) -> tuple[Stream, jax.Array | None]:
        """Returns the stream, and the probabilities of attention [B, N, L, L], if `sight` has masks of that shape.

        `is_global` [] bool: whether the layer sees whole sequences; None if all layers do.
        """
        config, probabilities = self.config, None
        dense = functools.partial(Dense, config, config.hidden_size, has_bias=config.dense_bias)
        query, key, value = (dense(name=name)(stream.hidden) for name in ("query", "key", "value"))
        if config.positions == "rotary":
            thetas = (config.rotary_theta, config.local_rotary_theta)
            wide, narrow = (rotary_frequencies(theta, config.head_size) for theta in thetas)
            frequencies = jnp.asarray(wide) if is_global is None else jnp.where(is_global, wide, narrow)
            turn = jax.checkpoint(functools.partial(rotate, head_size=config.head_size))
            query, key = (turn(array, sight.positions, frequencies) for array in (query, key))
        if sight.attends.ndim == 2:
            context = self._attend_by_ids(query, key, value, sight.attends, is_global, deterministic)
        else:
            heads = (*value.shape[:2], config.num_heads, config.head_size)
            query, key, value = (array.reshape(heads) for array in (query, key, value))
            drop = functools.partial(Dropout(config.attention_dropout_rate), deterministic=deterministic)
            attends = sight.attends
            if is_global is not None and sight.local is not None:
                attends = jnp.where(is_global, attends, sight.local)
            context, probabilities = attend(query, key, value, attends, drop, config.matmul_precision)
            context = checkpoint_name(context.reshape(stream.hidden.shape), SAVED)
        update = dense(name="output", stddev=config.output_stddev)(context)
        update = Dropout(config.hidden_dropout_rate)(update, deterministic)
        return stream.add(config, update), probabilities

    def _attend_by_ids(
        self, query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array, is_global: Any, deterministic: bool
    ) -> jax.Array:
        """Returns the context [B, L, H] without storing the scores of a row: by a kernel, in blocks or in windows."""
        from bert_jax.model.fused_attention import fused_attention  # importing Pallas is slow

        config, rate = self.config, self.config.attention_dropout_rate
        draws = rate > 0 and not deterministic
        compute = functools.partial(
            fused_attention,
            num_heads=config.num_heads,
            causal=config.causal,
            rate=rate if draws else 0.0,
            dropout_key=self.make_rng("dropout") if draws else None,
            precision=config.matmul_precision,
            use_kernels=config.attention == "fused",
        )
        if is_global is None:
            return compute(query, key, value, ids)
        local = functools.partial(compute, window=config.window)
        return jax.lax.cond(is_global, compute, local, query, key, value, ids)


class FeedForward(nn.Module):
    """The feed-forward block: LN(x + dropout(W2 gelu(W1 x))); gated, LN(x + dropout(W2 (gelu(W1 x) * W3 x)))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream: Stream, deterministic: bool) -> Stream:
        """Returns the stream."""
        config = self.config
        dense = functools.partial(Dense, config, has_bias=config.dense_bias)
        parts = dense(config.intermediate_size, add=False, name="intermediate")(stream.hidden)
        widened: Any = activate(config.activation, *parts)
        if config.feed_forward == "gated":
            widened = widened * dense(config.intermediate_size, name="gate")(stream.hidden)
        update = dense(config.hidden_size, stddev=config.output_stddev, name="output")(widened)
        update = Dropout(config.hidden_dropout_rate)(update, deterministic)
        return stream.add(config, update)


class Layer(nn.Module):
    """One layer of the encoder."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, stream: Stream, sight: Sight, is_global: jax.Array | None, deterministic: bool
    ) -> tuple[Stream, jax.Array | None]:
        """Returns the stream in the compute dtype, and the probabilities of `Attention`."""
        stream, probabilities = Attention(self.config, name="attention")(stream, sight, is_global, deterministic)
        return FeedForward(self.config, name="mlp")(stream, deterministic), probabilities


class Pooler(nn.Module):
    """The layers before the logits of a classifier: dense, activation and, in some families, norm (`Block`)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, vectors: jax.Array, deterministic: bool) -> jax.Array:
        """Returns [..., H] of vectors [..., H]."""
        config, block = self.config, self.config.block
        if block.dropout:
            vectors = Dropout(config.hidden_dropout_rate)(vectors, deterministic)
        dense = Dense(config, config.hidden_size, has_bias=config.dense_bias, stddev=config.output_stddev)
        nn.share_scope(self, dense)
        pooled = (
            jnp.tanh(dense(vectors)) if block.activation == "tanh" else ACTIVATIONS[block.activation](dense(vectors))
        )
        return layer_norm(config)(pooled).astype(config.compute_dtype) if block.norm else pooled
