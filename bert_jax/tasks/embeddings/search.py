# SPDX-License-Identifier: Apache-2.0
"""Exact search: the nearest of many vectors, block by block, the queries divided over this host's devices."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.devices.sharding import in_no_mesh
from bert_jax.model.heads.embedding import normalized
from bert_jax.model.heads.multi_vector import maxsim

BLOCK = 8192  # vectors that are searched at once, for at most as many queries
TEXTS = 512  # whose tokens' vectors are searched at once
_QUERIES = 1024
_STEP = 16  # between the numbers of tokens that texts are padded to: each is a program


class Nearest(NamedTuple):
    """The nearest vectors of each query, best first."""

    # [Q, k] float32: cosines, or other scores; -inf where there are fewer than k vectors
    scores: np.ndarray
    numbers: np.ndarray  # [Q, k] int32: their indices among all vectors, or -1


def in_blocks(vectors: np.ndarray) -> Iterable[np.ndarray]:
    """Yields the vectors [n, K] block by block."""
    return (vectors[first : first + BLOCK] for first in range(0, len(vectors), BLOCK))


def padded(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the vectors of the tokens of texts, each [tokens, K], as an array [n, T, K] with zeros at the end."""
    longest = -(-max(map(len, texts)) // _STEP) * _STEP
    array = np.zeros((len(texts), longest, texts[0].shape[1]), np.float32)
    for text, vectors in zip(array, texts):
        text[: len(vectors)] = vectors
    return array


def in_padded_blocks(texts: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the vectors of the tokens of texts, block by block, as `padded`."""
    return (padded(texts[first : first + TEXTS]) for first in range(0, len(texts), TEXTS))


def cosines(queries: jax.Array, block: jax.Array) -> jax.Array:
    """Returns the cosines [Q, C] of queries [Q, K] with the vectors of a block [C, K]."""
    # "highest": in bfloat16 near texts change places, and ties of equal texts are broken by
    # rounding.
    scores = jnp.einsum("QK,CK->QC", normalized(queries), block, precision="highest")
    # after the product: vectors that are divided first are written once more
    return scores * jax.lax.rsqrt(jnp.maximum(jnp.sum(block**2, axis=-1), 1e-24))


def nearest_texts(queries: Sequence[np.ndarray], texts: Sequence[np.ndarray], k: int) -> Nearest:
    """Returns the k texts with the largest `maxsim` for queries; both are vectors [tokens, K] of each text."""
    if not queries:
        return Nearest(np.zeros((0, k), np.float32), np.zeros((0, k), np.int32))
    return nearest(padded(queries), in_padded_blocks(texts), k, maxsim)


@in_no_mesh()
def nearest(
    queries: np.ndarray,
    blocks: Iterable[np.ndarray],
    k: int,
    score: Callable[[jax.Array, jax.Array], jax.Array] = cosines,
) -> Nearest:
    """Returns the k nearest of all vectors of the blocks [n, K] for queries [Q, K]. Ties go to the first vectors.

    `score` returns [Q, n] of queries and a block, which may also be vectors of tokens [Q, S, K] and [n, T, K].
    """
    devices = jax.local_devices()
    by_query = NamedSharding(Mesh(np.array(devices), ("queries",)), PartitionSpec("queries"))
    whole = NamedSharding(by_query.mesh, PartitionSpec())
    size = -(-min(max(len(queries), 1), _QUERIES) // len(devices)) * len(devices)
    with jax.transfer_guard("allow"):
        parts = []
        for first in range(0, len(queries), size):
            part = np.zeros((size, *queries.shape[1:]), np.float32)
            part[: len(queries) - first] = queries[first : first + size]
            start = np.full((size, k), -np.inf, np.float32), np.full((size, k), -1, np.int32)
            parts.append(jax.device_put((part, *start), by_query))
        before = 0
        for block in blocks:
            on_devices = jax.device_put(np.asarray(block, np.float32), whole)
            parts = [
                (part, *_better(score, part, on_devices, before, *best)) for part, *best in parts
            ]
            before += len(block)
        results = [[np.asarray(array) for array in best] for _, *best in parts] or [
            [np.zeros((0, k)), np.zeros((0, k), int)]
        ]
    return Nearest(*(np.concatenate(arrays)[: len(queries)] for arrays in zip(*results)))


@partial(jax.jit, static_argnums=0, donate_argnums=(4, 5))
def _better(
    score: Callable[[jax.Array, jax.Array], jax.Array],
    queries: jax.Array,
    block: jax.Array,
    before: int,
    found: jax.Array,
    numbers: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the best among those so far and in a block; ties go to those so far, which stand first."""
    scores, k = score(queries, block), found.shape[1]
    # top_k prefers the first of equals, so those found before stay, and blocks of another size find
    # the same.
    in_block, indices = jax.lax.top_k(scores, min(k, len(block)))
    both = jnp.concatenate([found, in_block], axis=1)
    best, chosen = jax.lax.top_k(both, k)
    ids = jnp.concatenate([numbers, before + indices], axis=1)
    return best, jnp.take_along_axis(ids, chosen, axis=1)
