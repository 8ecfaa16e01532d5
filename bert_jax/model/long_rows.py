# SPDX-License-Identifier: Apache-2.0
"""Attention of long rows, on every platform: the same numbers as `attend`, of a block of scores at a time.

A global layer takes a block of queries and all keys; a local one takes all blocks at once, each with the keys of itself
and of its two neighbours, so its work grows with the length of a row and not with its square. The backward pass
computes each block again.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bert_jax.model.attention import attend
from bert_jax.model.attention_kernels import AttentionShape, keeps_at
from bert_jax.model.score_bias import Biases, bias_of_scores

SCORES = 2**20  # of a head in a block
_SMALLEST = 64  # queries of a block in windows


def in_blocks(
    shape: AttentionShape,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sequence_ids: jax.Array,
    dropout_keys: jax.Array,
    biases: Biases | None = None,
) -> jax.Array:
    """Returns the context [B, L, H] of query, key and value [B, L, H], a block of queries after the other.

    `sequence_ids` are [B, L], `dropout_keys` [B, N, 2]; `biases` are those of scores.
    """
    rows, length, hidden = query.shape
    most = -(-(length**2) // SCORES)  # blocks, rounded up
    block = -(-length // most)
    num_blocks = -(-length // block)
    heads = (shape.num_heads, shape.head_size)
    keys = key.reshape(rows, length, *heads)
    values = value.reshape(rows, length, *heads)
    columns = jnp.arange(length)[None, None, :]

    def of_block(inputs: tuple[jax.Array, ...]) -> jax.Array:
        queries, queries_ids, start = inputs
        queries = queries.reshape(rows, block, *heads)
        places = (start + jnp.arange(block))[None, :, None]
        sees = _sees(shape, queries_ids[:, :, None], sequence_ids[:, None], places, columns)
        drop = _dropout(shape, length, dropout_keys, places[:, None], columns[:, None])
        context = _context(shape, queries, keys, values, sees, drop, biases, ahead=-start)
        return context.reshape(rows, block, hidden)

    starts = block * jnp.arange(num_blocks)
    queries, queries_ids = (
        jnp.moveaxis(_divided(array, block), 1, 0) for array in (query, sequence_ids)
    )
    contexts = jax.lax.map(jax.checkpoint(of_block), (queries, queries_ids, starts))
    return jnp.moveaxis(contexts, 0, 1).reshape(rows, num_blocks * block, hidden)[:, :length]


def in_windows(
    shape: AttentionShape,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sequence_ids: jax.Array,
    dropout_keys: jax.Array,
    biases: Biases | None = None,
) -> jax.Array:
    """Like `in_blocks`, with keys that are at most `shape.window` tokens away."""
    rows, length, hidden = query.shape
    block = _window_block(shape)
    num_blocks = -(-length // block)

    def around(array: jax.Array) -> jax.Array:
        """Returns [B, blocks, 3 x block, ...] of [B, L, ...]: each block between its two neighbours."""
        blocks = _divided(array, block)
        edge = jnp.zeros_like(blocks[:, :1])
        blocks = jnp.concatenate([edge, blocks, edge], axis=1)
        return jnp.concatenate([blocks[:, :-2], blocks[:, 1:-1], blocks[:, 2:]], axis=2)

    def by_head(array: jax.Array) -> jax.Array:
        """Returns [B x blocks, tokens, N, D] of [B, blocks, tokens, H]."""
        return array.reshape(rows * num_blocks, array.shape[2], shape.num_heads, shape.head_size)

    starts = block * jnp.arange(num_blocks)[None, :, None, None]
    places = starts + jnp.arange(block)[None, None, :, None]  # [1, blocks, block, 1]
    columns = (
        starts + jnp.arange(-block, 2 * block)[None, None, None, :]
    )  # [1, blocks, 1, 3 x block]
    queries_ids = _divided(sequence_ids, block)[:, :, :, None]
    sees = _sees(shape, queries_ids, around(sequence_ids)[:, :, None], places, columns)
    sees = sees.reshape(rows * num_blocks, block, 3 * block)
    # with an axis for the heads
    drop = _dropout(shape, length, dropout_keys[:, None], places[:, :, None], columns[:, :, None])
    queries = by_head(_divided(query, block))
    keys = by_head(around(key))
    values = by_head(around(value))
    context = _context(shape, queries, keys, values, sees, drop, biases, ahead=-block)
    return context.reshape(rows, num_blocks * block, hidden)[:, :length]


def pays_in_windows(shape: AttentionShape, size: int) -> bool:
    """Returns whether windows have fewer scores than whole rows."""
    return bool(shape.window) and isinstance(size, int) and size > 3 * _window_block(shape)


def _window_block(shape: AttentionShape) -> int:
    return max(shape.window, _SMALLEST)


def _divided(array: jax.Array, block: int) -> jax.Array:
    """Returns [B, blocks, block, ...] of [B, L, ...], with zeros at the end."""
    missing = -array.shape[1] % block
    padded = jnp.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2))
    return padded.reshape(array.shape[0], padded.shape[1] // block, block, *array.shape[2:])


# Below, sequence ids and places in the row, of queries and of keys (columns), broadcast against each other.


def _sees(
    shape: AttentionShape,
    queries_ids: jax.Array,
    keys_ids: jax.Array,
    places: jax.Array,
    columns: jax.Array,
) -> jax.Array:
    """Returns which keys each query sees, as `attention_mask`."""
    sees = (jnp.abs(queries_ids) == keys_ids) & (keys_ids != 0)
    if shape.window:
        sees &= jnp.abs(places - columns) <= shape.window
    if shape.causal:
        sees &= columns <= places
    return sees


def _dropout(
    shape: AttentionShape,
    length: int,
    dropout_keys: jax.Array,
    places: jax.Array,
    columns: jax.Array,
) -> Callable[[jax.Array], jax.Array]:
    """Returns the dropout of probabilities, which draws for each score what whole rows would."""
    if not shape.drops:
        return lambda probabilities: probabilities

    def drop(probabilities: jax.Array) -> jax.Array:
        first = dropout_keys[..., 0, None, None]
        second = dropout_keys[..., 1, None, None]
        kept = keeps_at(shape, length, places, columns, first, second)
        kept = kept.reshape(probabilities.shape)
        return jnp.where(kept, probabilities * shape.rescale, 0)

    return drop


def _context(
    shape: AttentionShape,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    sees: jax.Array,
    drop: Callable[[jax.Array], jax.Array],
    biases: Biases | None,
    ahead: jax.Array | int,
) -> jax.Array:
    """Returns the context of some queries; the first key is `ahead` of the first query."""
    bias = None
    if biases is not None:
        bias = bias_of_scores(biases, queries, keys, ahead, shape.precision)
    context, _ = attend(queries, keys, values, sees, drop, shape.precision, bias)
    return context
