# SPDX-License-Identifier: Apache-2.0
"""Exact search: the nearest of many vectors by cosine, block by block, the queries divided over this host's devices."""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.devices.sharding import in_no_mesh
from bert_jax.model.heads.embedding import normalized

BLOCK = 8192  # vectors that are searched at once, for at most as many queries
_QUERIES = 1024


class Nearest(NamedTuple):
    """The nearest vectors of each query, best first."""

    cosines: np.ndarray  # [Q, k] float32; -inf where there are fewer than k vectors
    numbers: np.ndarray  # [Q, k] int32: their indices among all vectors, or -1


def in_blocks(vectors: np.ndarray) -> Iterable[np.ndarray]:
    """Yields the vectors [n, K] block by block."""
    return (vectors[first : first + BLOCK] for first in range(0, len(vectors), BLOCK))


@in_no_mesh()
def nearest(queries: np.ndarray, blocks: Iterable[np.ndarray], k: int) -> Nearest:
    """Returns the k nearest of all vectors of the blocks [n, K] for queries [Q, K]. Ties go to the first vectors."""
    devices = jax.local_devices()
    by_query = NamedSharding(Mesh(np.array(devices), ("queries",)), PartitionSpec("queries"))
    whole = NamedSharding(by_query.mesh, PartitionSpec())
    size = -(-min(max(len(queries), 1), _QUERIES) // len(devices)) * len(devices)
    with jax.transfer_guard("allow"):
        parts = []
        for first in range(0, len(queries), size):
            part = np.zeros((size, queries.shape[1]), np.float32)
            part[: len(queries) - first] = queries[first : first + size]
            start = np.full((size, k), -np.inf, np.float32), np.full((size, k), -1, np.int32)
            parts.append(jax.device_put((part, *start), by_query))
        before = 0
        for block in blocks:
            on_devices = jax.device_put(np.asarray(block, np.float32), whole)
            parts = [(part, *_better(part, on_devices, before, *best)) for part, *best in parts]
            before += len(block)
        results = [[np.asarray(array) for array in best] for _, *best in parts] or [
            [np.zeros((0, k)), np.zeros((0, k), int)]
        ]
    cosines, numbers = (np.concatenate(arrays)[: len(queries)] for arrays in zip(*results))
    return Nearest(cosines, numbers)


@partial(jax.jit, donate_argnums=(3, 4))
def _better(
    queries: jax.Array,
    block: jax.Array,
    before: int,
    cosines: jax.Array,
    numbers: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the best among those so far and in a block; ties go to those so far, which stand first."""
    # "highest": in bfloat16 near texts change places, and ties of equal texts are broken by
    # rounding.
    scores = jnp.einsum("QK,CK->QC", normalized(queries), block, precision="highest")
    # after the product: vectors that are divided first are written once more
    scores *= jax.lax.rsqrt(jnp.maximum(jnp.sum(block**2, axis=-1), 1e-24))
    k = cosines.shape[1]
    # top_k prefers the first of equals, so those found before stay, and blocks of another size find
    # the same.
    in_block, indices = jax.lax.top_k(scores, min(k, len(block)))
    both = jnp.concatenate([cosines, in_block], axis=1)
    best, chosen = jax.lax.top_k(both, k)
    ids = jnp.concatenate([numbers, before + indices], axis=1)
    return best, jnp.take_along_axis(ids, chosen, axis=1)
