# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention and its mask. Source: paper, section 3; Vaswani et al. 2017."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.model.product import product, widened
from bert_jax.model.score_bias import DistanceTable, add_bias
from bert_jax.model.sequences import positions_in_sequence
from bert_jax.settings.model import ModelConfig

# Added in place of masked scores: its softmax is 0, and it fits every float type with float32's range.
MASKED_SCORE = -1e9

# Tokens of a row whose scores may be stored; scores of longer rows are computed in blocks (`long_rows`).
LONGEST_WHOLE = 1024

# The name of the arrays that `ModelConfig.remat` "dots" keeps for the backward pass; it recomputes all others.
SAVED = "product"


class Sight(NamedTuple):
    """Which keys the queries of a batch see, and their positions."""

    # [B, L, L] bool; or the sequence ids [B, L], where the scores of a row are not stored
    attends: jax.Array
    # [B, L, L] bool: the mask of local layers, if there are any and `attends` is not ids
    local: jax.Array | None
    positions: jax.Array  # [B, L] in the sequence
    # [D, N, buckets]: biases of scores, a copy for each of D groups of rows; or [1, N, 1]: slopes; or vectors, of which
    # each layer makes its own (`score_bias`)
    biases: jax.Array | DistanceTable | None = None

    def mask(self, is_global: bool) -> jax.Array:
        """Returns the mask [B, L, L] of a layer that sees whole sequences if `is_global`."""
        return self.attends if is_global or self.local is None else self.local


def what_is_seen(config: ModelConfig, batch: Batch, keep_attentions: bool) -> Sight:
    """Returns what each token sees: as ids where the scores of a row are not stored, else as masks."""
    sequence_ids = batch.sequence_ids
    positions = positions_in_sequence(sequence_ids)
    length = sequence_ids.shape[1]  # no number in an exported program
    in_blocks = isinstance(length, int) and (config.num_local > 0 or length > LONGEST_WHOLE)
    # Kernels and blocks never have the probabilities, and read all rows alike.
    needs_masks = keep_attentions or batch.causal is not None
    if (config.has_kernels or in_blocks) and not needs_masks:
        return Sight(sequence_ids, None, positions)
    causal = config.causal if batch.causal is None else batch.causal
    local = attention_mask(sequence_ids, causal, config.window) if config.num_local else None
    return Sight(attention_mask(sequence_ids, causal), local, positions)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attends: jax.Array,
    drop: Callable[[jax.Array], jax.Array],
    precision: str = "default",
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the context of each head, [B, L, N, D] in the dtype of `value`, and the probabilities [B, N, L, L].

    query, key and value have the shape of the context. `attends` [B, L, L] bool marks the keys that each query may see;
    `drop` is the dropout of probabilities; `precision` is as in `product`. `bias` is added to scores, as by `add_bias`.
    """
    scores = product("BQND,BKND->BNQK", query, key, precision=precision)
    seen, scores = attends[:, None], scores * query.shape[-1] ** -0.5
    if bias is not None:
        scores = add_bias(scores, bias)
    # A query that may see nothing (padding) gets equal, finite scores: uniform attention and no NaN.
    scores = jnp.where(seen, scores, MASKED_SCORE)
    probabilities = jax.nn.softmax(scores, axis=-1)
    context = product(
        "BNQK,BKND->BQND", drop(probabilities).astype(value.dtype), value, precision=precision
    )
    return context.astype(value.dtype), probabilities


def attention_mask(
    sequence_ids: jax.Array, causal: bool | jax.Array = False, window: int = 0
) -> jax.Array:
    """Returns [B, L, L] bool: query and key are in one sequence, neither is padding, and the key is seen.

    If `causal`, or in rows where `causal` [B] is True, no key comes after its query. With a `window` no key is more
    tokens away from its query.
    """
    same = jnp.abs(sequence_ids)[:, :, None] == sequence_ids[:, None, :]
    attends = same & (sequence_ids != 0)[:, None, :]
    if window:
        attends = jnp.triu(jnp.tril(attends, window), -window)
    if not isinstance(causal, bool):
        return jnp.where(causal[:, None, None], jnp.tril(attends), attends)
    return jnp.tril(attends) if causal else attends


def turn_heads(
    config: ModelConfig,
    query: jax.Array,
    key: jax.Array,
    positions: jax.Array,
    is_global: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys [B, L, H] turned by their positions; local layers have frequencies of their own."""
    theta = config.rotary_theta if is_global else config.local_rotary_theta
    frequencies = rotary_frequencies(theta, config.head_size) / np.float32(config.rotary_stretch)
    frequencies = jnp.asarray(frequencies)
    # Computed again in the backward pass: cheaper than to keep float32 copies of both.
    turn = jax.checkpoint(functools.partial(rotate, head_size=config.head_size))
    return turn(query, positions, frequencies), turn(key, positions, frequencies)


def repeat_heads(config: ModelConfig, array: jax.Array) -> jax.Array:
    """Returns keys or values [B, L, H] of [B, L, key heads x D]: each head as often as query heads read it."""
    if config.key_size == config.hidden_size:
        return array
    heads = array.reshape(*array.shape[:2], -1, config.head_size)
    repeated = jnp.repeat(heads, config.hidden_size // config.key_size, axis=2)
    return repeated.reshape(*array.shape[:2], config.hidden_size)


def rotate(
    array: jax.Array, positions: jax.Array, frequencies: jax.Array, head_size: int
) -> jax.Array:
    """Returns queries or keys [B, L, H] with the two halves of each head turned, in float32, by its position [B, L].

    `frequencies` [D / 2] are radians per position (`rotary_frequencies`). Source: Su et al. 2021, "RoFormer"; halves
    rather than neighbours are pairs, as in GPT-NeoX and transformers.
    """
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None]
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    heads = widened(array).reshape(*array.shape[:2], array.shape[2] // head_size, head_size)
    first, second = jnp.split(heads, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(array.shape).astype(array.dtype)


def rotary_frequencies(theta: float, head_size: int) -> np.ndarray:
    """Returns [D / 2] float32, from 1 radian per position down to almost 1 / theta."""
    return 1 / np.float32(theta) ** (
        np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    )
