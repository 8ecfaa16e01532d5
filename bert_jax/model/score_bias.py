# SPDX-License-Identifier: Apache-2.0
"""A bias of the scores of attention, the same in all layers: learned for each bucket of distances, or a slope.

It depends on the distance alone, so it is right inside a packed row, in blocks of long rows and in windows.
Source: Raffel et al. 2020, "T5", section 2.1; Song et al. 2020, "MPNet"; for slopes
Press et al. 2022, "ALiBi", section 3, here for keys on both sides.
"""

import jax
import jax.numpy as jnp
import numpy as np

BUCKETS = 32
_FARTHEST = 128  # tokens; keys that are farther away share the last bucket


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
        return -table[..., None] * away.astype(table.dtype)
    distances = ahead + jnp.arange(1 - queries, keys)
    places = jnp.clip(distances, -_FARTHEST, _FARTHEST) + _FARTHEST
    one_hot = jax.nn.one_hot(jnp.asarray(_OF_DISTANCES)[places], BUCKETS, dtype=table.dtype)
    exact = jax.lax.Precision.HIGHEST
    by_distance = jnp.einsum("DNb,db->DNd", table, one_hot, precision=exact)
    # In rows that are one longer than what is repeated, each begins one distance later than the one before: these are
    # the biases of the queries, the last query first.
    width, heads = queries + keys, table.shape[:2]
    padded = jnp.pad(by_distance, [(0, 0), (0, 0), (0, 1)])
    repeated = jnp.broadcast_to(padded[:, :, None], (*heads, queries, width))
    flat = [repeated.reshape(*heads, queries * width), padded[:, :, :queries]]
    rows = jnp.concatenate(flat, axis=-1).reshape(*heads, queries, width + 1)
    return rows[..., ::-1, :keys]


def add_bias(scores: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns scores [B, N, Q, K] with the biases [D, N, Q, K] added to those of B / D rows each."""
    if len(bias) == 1:
        return scores + bias
    of_groups = scores.reshape(len(bias), -1, *scores.shape[1:])
    return (of_groups + bias[:, None]).reshape(scores.shape)
