# SPDX-License-Identifier: Apache-2.0
"""Attention of long rows, on every platform: the same numbers as `attend`, of a block of scores at a time.

A global layer takes a block of queries and all keys; a local one takes all blocks at once, each with the keys of itself
and of its two neighbours, so its work grows with the length of a row and not with its square. The backward pass
computes each block again.
"""

import jax
import jax.numpy as jnp

from bert_jax.model.attention import attend
from bert_jax.model.attention_kernels import AttentionShape, keeps_at
from bert_jax.model.score_bias import Biases, bias_of_scores

SCORES = 2**20  # of a head in a block
_SMALLEST = 64  # queries of a block in windows


def in_blocks(shape: AttentionShape, *arrays: jax.Array, biases: Biases | None = None) -> jax.Array:
    """Returns the context [B, L, H] of query, key, value [B, L, H], sequence ids [B, L], keys of dropout [B, N, 2].

    `biases` are those of scores.
    """
    query, key, value, ids, keys = arrays
    rows, size, hidden = query.shape
    scores = size**2
    count = -(-scores // SCORES)
    block = -(-size // count)
    count = -(-size // block)
    of_keys, of_values = (
        array.reshape(rows, size, shape.num_heads, shape.head_size) for array in (key, value)
    )

    def of_block(block_of: tuple[jax.Array, ...]) -> jax.Array:
        queries, queries_ids, start = block_of
        places = start + jnp.arange(block)[None, :, None]
        columns = jnp.arange(size)[None, None, :]
        sees = jnp.abs(queries_ids)[:, :, None] == ids[:, None, :]
        sees &= (ids != 0)[:, None, :]
        sees = sees & (columns <= places) if shape.causal else sees

        def drop(probabilities: jax.Array) -> jax.Array:
            first, second = (keys[:, :, number, None, None] for number in (0, 1))
            kept = keeps_at(shape, size, places[:, None], columns[:, None], first, second)
            return jnp.where(kept, probabilities * shape.rescale, 0)

        queries = queries.reshape(rows, block, shape.num_heads, shape.head_size)
        dropped = drop if shape.drops else (lambda probabilities: probabilities)
        bias = None
        if biases is not None:
            bias = bias_of_scores(biases, queries, of_keys, -start, shape.precision)
        context, _ = attend(queries, of_keys, of_values, sees, dropped, shape.precision, bias)
        return context.reshape(rows, block, hidden)

    blocks = tuple(jnp.moveaxis(_divided(array, block), 1, 0) for array in (query, ids))
    contexts = jax.lax.map(jax.checkpoint(of_block), (*blocks, jnp.arange(count) * block))
    return jnp.moveaxis(contexts, 0, 1).reshape(rows, count * block, hidden)[:, :size]


def in_windows(
    shape: AttentionShape, *arrays: jax.Array, biases: Biases | None = None
) -> jax.Array:
    """Like `in_blocks`, with keys that are at most `shape.window` tokens away."""
    query, key, value, ids, keys = arrays
    rows, size, hidden = query.shape
    block = _window_block(shape)

    def around(array: jax.Array) -> jax.Array:
        """Returns [B, blocks, 3 x block, ...] of [B, L, ...]."""
        edge = jnp.zeros((rows, block, *array.shape[2:]), array.dtype)
        padded = jnp.concatenate([edge, array, edge], axis=1)
        num_blocks = -(-size // block) + 2
        divided = _divided(padded, block)
        divided = divided[:, :num_blocks]
        return jnp.concatenate([divided[:, :-2], divided[:, 1:-1], divided[:, 2:]], axis=2)

    queries_ids = _divided(jnp.abs(ids), block)
    keys_ids = around(ids)
    count = queries_ids.shape[1]
    starts = jnp.arange(count)[:, None] * block
    places = (starts + jnp.arange(block)[None])[None, :, :, None]
    columns = (starts - block + jnp.arange(3 * block)[None])[None, :, None, :]
    sees = queries_ids[:, :, :, None] == keys_ids[:, :, None, :]
    sees &= (keys_ids != 0)[:, :, None, :]
    sees &= abs(places - columns) <= shape.window
    sees = sees & (columns <= places) if shape.causal else sees

    def drop(probabilities: jax.Array) -> jax.Array:
        first, second = (keys[:, None, :, number, None, None] for number in (0, 1))
        kept = keeps_at(
            shape, size, places[:, :, None], columns[:, :, None], first, second
        ).reshape(probabilities.shape)
        return jnp.where(kept, probabilities * shape.rescale, 0)

    of_queries, of_keys, of_values = (
        array.reshape(rows * count, array.shape[2], shape.num_heads, shape.head_size)
        for array in (_divided(query, block), around(key), around(value))
    )
    dropped = drop if shape.drops else (lambda probabilities: probabilities)
    sees = sees.reshape(rows * count, *sees.shape[2:])
    bias = None
    if biases is not None:
        bias = bias_of_scores(biases, of_queries, of_keys, -block, shape.precision)
    context, _ = attend(of_queries, of_keys, of_values, sees, dropped, shape.precision, bias)
    return context.reshape(rows, count * block, hidden)[:, :size]


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
