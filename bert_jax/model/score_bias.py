# SPDX-License-Identifier: Apache-2.0
"""A bias of the scores of attention by distance: learned for each bucket, a slope, or products with vectors.

It depends on the distance alone, or on it and the query or the key, so it is right inside a packed row, in blocks of
long rows and in windows. Source: Raffel et al. 2020, "T5", section 2.1; Song et al. 2020, "MPNet"; for slopes
Press et al. 2022, "ALiBi", section 3, here for keys on both sides; for vectors He et al. 2021, "DeBERTa", section 3.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.model.product import product
from bert_jax.model.tables import look_up

BUCKETS = 32
_FARTHEST = 128  # tokens; keys that are farther away share the last bucket
_BLOCK = 128  # rows whose scores are multiplied at once with vectors of distances


def bucket_of(distance: np.ndarray) -> np.ndarray:
    """Returns the buckets of distances, key - query: half of them are for keys after the query.

    In each half short distances have a bucket of their own, and longer ones share buckets of logarithmic width.
    """
    half = BUCKETS // 2
    exact = half // 2
    away = np.abs(distance)
    growth = np.log(np.maximum(away, exact) / exact) / np.log(_FARTHEST / exact)
    wide = np.minimum(exact + (growth * (half - exact)).astype(int), half - 1)
    return np.where(distance > 0, half, 0) + np.where(away < exact, away, wide)


_OF_DISTANCES = bucket_of(np.arange(-_FARTHEST, _FARTHEST + 1))


def slopes_of(heads: int) -> np.ndarray:
    """Returns ALiBi's slopes [N]: a geometric series down to 2^-8, and between its members if N is no power of two."""
    power = 2 ** (heads.bit_length() - 1)
    exponents = np.arange(1, power + 1) * 8 / power
    between = np.arange(1, 2 * (heads - power), 2) * 4 / power
    return 2.0 ** -np.concatenate([exponents, between])


def bias_of(table: jax.Array, queries: int, keys: int, ahead: jax.Array | int = 0) -> jax.Array:
    """Returns the biases [D, N, Q, K] of Q queries and K keys, of which the first is `ahead` of the first query.

    `table` [D, N, `BUCKETS`] has a copy for each of D groups of rows; [1, N, 1] are slopes, of which each token of
    distance takes one from a score. Both passes are sums and products: a scatter would add up the gradient in any
    order on a GPU.
    """
    if table.shape[-1] == 1:
        away = jnp.abs(ahead + jnp.arange(keys)[None] - jnp.arange(queries)[:, None])
        return -table[..., None] * away[None, None].astype(table.dtype)
    distances = ahead + jnp.arange(1 - queries, keys)
    places = jnp.clip(distances, -_FARTHEST, _FARTHEST) + _FARTHEST
    one_hot = jax.nn.one_hot(jnp.asarray(_OF_DISTANCES)[places], BUCKETS, dtype=table.dtype)
    exact = jax.lax.Precision.HIGHEST
    by_distance = jnp.einsum("DNb,db->DNd", table, one_hot, precision=exact)
    # In rows that are one longer than what is repeated, each begins one distance later than the one before: these are
    # the biases of the queries, the last query first.
    width = queries + keys
    heads = table.shape[:2]
    padded = jnp.pad(by_distance, [(0, 0), (0, 0), (0, 1)])
    repeated = jnp.broadcast_to(padded[:, :, None], (*heads, queries, width))
    flat = [repeated.reshape(*heads, queries * width), padded[:, :, :queries]]
    rows = jnp.concatenate(flat, axis=-1).reshape(*heads, queries, width + 1)
    return rows[..., ::-1, :keys]


class DistanceTable(NamedTuple):
    """The vectors of distances that all layers read."""

    rows: jax.Array  # as in `DistanceVectors`
    vectors: jax.Array  # [T, H]


class DistanceVectors(NamedTuple):
    """Of a layer, what its queries and its keys are multiplied with, besides each other; None is no such term."""

    rows: jax.Array  # [2 M + 1]: the row of each distance, query - key, from -M to M; those beyond have the outer ones
    of_queries: jax.Array | None  # [T, N, D]
    of_keys: jax.Array | None  # [T, N, D]


# Slopes [1, N, 1], or numbers by bucket [D, N, buckets], of all layers; or vectors of one
Biases: TypeAlias = jax.Array | DistanceVectors


def rows_of_distances(buckets: int, farthest: int) -> np.ndarray:
    """Returns `DistanceVectors.rows` of a whole table, whose middle row is that of distance 0, for M = `farthest`.

    With `buckets` that many distances around 0 have rows of their own, and longer ones share rows of logarithmic width;
    with 0 buckets each has its own. Source: the paper's code, by which numbers are rounded up.
    """
    distances = np.arange(-farthest, farthest + 1)
    size = buckets or farthest
    half = buckets // 2
    if buckets:
        away = np.float32(np.maximum(np.abs(distances), half)) / np.float32(half)
        growth = np.log(away) / np.log(np.float32((farthest - 1) / half))
        wide = half + np.ceil(growth * np.float32(half - 1)).astype(int)
        distances = np.where(np.abs(distances) <= half, distances, np.sign(distances) * wide)
    return np.clip(distances + size, 0, 2 * size - 1)


def bias_of_scores(
    biases: Biases,
    query: jax.Array,
    key: jax.Array,
    ahead: jax.Array | int = 0,
    precision: str = "default",
) -> jax.Array:
    """Returns the biases of queries [B, Q, N, D] and keys [B, K, N, D] as `add_bias` takes them.

    The first key is `ahead` of the first query; `precision` is as in `product`.
    """
    queries = query.shape[1]
    keys = key.shape[1]
    if not isinstance(biases, DistanceVectors):
        return bias_of(biases, queries, keys, ahead)
    bias = jnp.zeros((), jnp.float32)
    if biases.of_queries is not None:
        of = functools.partial(_vectors_of, biases.rows, biases.of_queries, precision)
        bias = bias + _products(query, keys, lambda steps: of(-steps - ahead), precision)
    if biases.of_keys is not None:
        of = functools.partial(_vectors_of, biases.rows, biases.of_keys, precision)
        products = _products(key, queries, lambda steps: of(steps - ahead), precision)
        bias = bias + jnp.swapaxes(products, 2, 3)
    return bias


def _vectors_of(
    rows: jax.Array, vectors: jax.Array, precision: str, distances: jax.Array
) -> jax.Array:
    """Returns [W, N, D], the vectors of distances [W]."""
    farthest = len(rows) // 2
    size = vectors.shape[0]
    near = jnp.clip(distances, -farthest, farthest)
    of_distances = rows[near + farthest]
    table = vectors.reshape(size, -1)
    found = look_up(str(table.dtype), precision, table, of_distances)
    return found.reshape(-1, *vectors.shape[1:])


def _products(
    array: jax.Array, count: int, vectors_of: Callable[[jax.Array], jax.Array], precision: str
) -> jax.Array:
    """Returns [B, N, R, count], the products of queries or keys [B, R, N, D] with the vector of each step.

    `vectors_of` returns those of steps [W] from a row to a column. A block of rows is multiplied with the vectors that
    any of it needs, from its last row's to its first row's, and then each row is cut out of what is too much.
    """
    batch, size, heads, width = array.shape
    # in an exported program the size is no number
    num_blocks = -(-size // _BLOCK) if isinstance(size, int) else 1
    block = -(-size // num_blocks)
    whole = num_blocks * block
    vectors = vectors_of(jnp.arange(1 - whole, count + 1))
    first = [whole - (number + 1) * block for number in range(num_blocks)]
    of_blocks = jnp.stack([vectors[each : each + block + count] for each in first])
    rows = jnp.pad(array, [(0, 0), (0, whole - size), (0, 0), (0, 0)])
    rows = rows.reshape(batch, num_blocks, block, heads, width)
    products = product("BXRND,XWND->BNXRW", rows, of_blocks, precision=precision)
    # A row's steps begin one further on than those of the row after it.
    columns = block + count
    flat = products.reshape(batch, heads, num_blocks, block * columns)
    begun = flat[..., block - 1 : block * columns - 1]
    by_row = begun.reshape(batch, heads, num_blocks, block, columns - 1)
    of_rows = by_row[..., :count].reshape(batch, heads, whole, count)
    return of_rows[:, :, :size]


def add_bias(scores: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns scores [B, N, Q, K] with the biases [D, N, Q, K] added to those of B / D rows each."""
    if bias.shape[0] == 1:  # which is no number in an exported program
        return scores + bias
    of_groups = scores.reshape(bias.shape[0], -1, *scores.shape[1:])
    return (of_groups + bias[:, None]).reshape(scores.shape)
