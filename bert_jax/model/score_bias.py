# SPDX-License-Identifier: Apache-2.0
"""A learned bias of the scores of attention: one for each head and each bucket of distances, the same in all layers.

It depends on the distance alone, so it is right inside a packed row, in blocks of long rows and in windows.
Source: Raffel et al. 2020, "T5", section 2.1; Song et al. 2020, "MPNet".
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


def bias_of(table: jax.Array, queries: int, keys: int, ahead: jax.Array | int = 0) -> jax.Array:
    """Returns the biases [D, N, Q, K] of Q queries and K keys, of which the first is `ahead` of the first query.

    `table` [D, N, `BUCKETS`] has a copy for each of D groups of rows. Both passes are sums and products: a scatter
    would add up the gradient in any order on a GPU.
    """
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
