# SPDX-License-Identifier: Apache-2.0
"""Exact search: the nearest of many vectors, block by block, each divided over this host's devices."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.data.vectors import BITS, RANGED, Vectors, quantize, steps_of, unit
from bert_jax.devices.sharding import in_no_mesh
from bert_jax.errors import InputError
from bert_jax.model.heads.embedding import normalized
from bert_jax.model.heads.multi_vector import maxsim

BLOCK = 8192  # vectors that are searched at once, for at most as many queries
TEXTS = 512  # whose tokens' vectors are searched at once
_QUERIES = 1024
_BITS_BLOCK = 4 * BLOCK  # codes of one bit a number that are searched at once
_DIVIDED = PartitionSpec("vectors")
_TILE = 8  # vectors that a device multiplies at once, or a multiple
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
    return scores * jax.lax.rsqrt(jnp.maximum(jnp.sum(block**2, axis=-1), 1e-24))[None]


def nearest_texts(queries: Sequence[np.ndarray], texts: Sequence[np.ndarray], k: int) -> Nearest:
    """Returns the k texts with the largest `maxsim` for queries; both are vectors [tokens, K] of each text."""
    if not queries:
        return Nearest(np.zeros((0, k), np.float32), np.zeros((0, k), np.int32))
    return nearest(padded(queries), in_padded_blocks(texts), k, maxsim)


def products(queries: jax.Array, block: jax.Array) -> jax.Array:
    """Returns the dot products [Q, C] of queries [Q, K] with the vectors of a block [C, K], of any type."""
    return jnp.einsum("QK,CK->QC", queries, block.astype(jnp.float32), precision="highest")


def same_bits(queries: jax.Array, block: jax.Array) -> jax.Array:
    """Returns, less a constant, how many bits of queries [Q, W] are those of each code of a block [C, W]."""
    different = jax.lax.population_count(queries[:, None] ^ block[None])
    return -jnp.sum(different, axis=-1, dtype=jnp.int32).astype(jnp.float32)


@in_no_mesh()
def nearest(
    queries: np.ndarray,
    blocks: Iterable[np.ndarray],
    k: int,
    score: Callable[[jax.Array, jax.Array], jax.Array] = cosines,
) -> Nearest:
    """Returns the k nearest of all vectors of the blocks [n, K] for queries [Q, K]. Ties go to the first vectors.

    Each block is divided over this host's devices, of which two blocks at most are in memory. `score` returns [Q, n] of
    queries and a block, which may also be vectors of tokens [Q, S, K] and [n, T, K].
    """
    mesh = Mesh(np.array(jax.local_devices()), ("vectors",))
    whole, divided = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), _DIVIDED))
    size = min(max(len(queries), 1), _QUERIES)
    with jax.transfer_guard("allow"):
        parts = []
        for first in range(0, len(queries), size):
            part = np.zeros((size, *queries.shape[1:]), queries.dtype)
            part[: len(queries) - first] = queries[first : first + size]
            start = np.full((size, k), -np.inf, np.float32), np.full((size, k), -1, np.int32)
            parts.append(jax.device_put((part, *start), whole))
        before = 0
        rows = 0
        step = _TILE * mesh.size
        for block in blocks:
            # all of one size: a product has other last bits in a program of another, and equals
            # would not tie
            rows = max(rows, -(-len(block) // step) * step)
            filled = block
            if len(block) < rows:
                filled = np.zeros((rows, *block.shape[1:]), block.dtype)
                filled[: len(block)] = block
            on_devices = jax.device_put(filled, divided)
            # the next block is read and sent while this one is searched, and not more of them
            jax.block_until_ready(parts)
            place = np.int32(before), np.int32(len(block))
            parts = [
                (part, *_better(score, mesh, part, on_devices, *place, *best))
                for part, *best in parts
            ]
            before += len(block)
        results = [[np.asarray(array) for array in best] for _, *best in parts] or [
            [np.zeros((0, k)), np.zeros((0, k), int)]
        ]
    return Nearest(*(np.concatenate(arrays)[: len(queries)] for arrays in zip(*results)))


@partial(jax.jit, static_argnums=(0, 1))
def _better(
    score: Callable[[jax.Array, jax.Array], jax.Array],
    mesh: Mesh,
    queries: jax.Array,
    block: jax.Array,
    before: jax.Array,
    count: jax.Array,
    found: jax.Array,
    numbers: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the best among those so far and in a block of `count`; ties go to those so far, which stand first."""
    k = found.shape[1]

    # top_k prefers the first of equals, so those found before stay, and blocks of another size find
    # the same.
    def of_device(queries: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        places = jax.lax.axis_index("vectors") * len(block) + jnp.arange(len(block))
        scores = jnp.where(places < count, score(queries, block), -jnp.inf)
        best, indices = jax.lax.top_k(scores, min(k, len(block)))
        return jax.lax.all_gather((best, places[indices]), "vectors", axis=1, tiled=True)

    specs = PartitionSpec(), _DIVIDED
    search = jax.shard_map(
        of_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )
    in_block, places = search(queries, block)
    best, chosen = jax.lax.top_k(jnp.concatenate([found, in_block], axis=1), k)
    ids = jnp.concatenate([numbers, before + places], axis=1)
    return best, jnp.take_along_axis(ids, chosen, axis=1)


def check_k(k: int) -> int:
    """Returns how many are to be found. Raises: InputError if it is none."""
    if k < 1:
        raise InputError(f"k {k} is below 1; give how many are to be found for a query")
    return k


def nearest_vectors(
    queries: np.ndarray, vectors: Vectors, k: int = 10, candidates: int = 100
) -> Nearest:
    """Returns the k nearest of the vectors in a directory, or all, for queries [Q, K]: their scores and their numbers.

    Queries get length 1, as the vectors have it. What a score is depends on the precision of the directory:

    - float32, float16: the cosine.
    - int8, uint8: the product of the query and the numbers that the codes stand for, about the cosine.
    - binary, ubinary: those are found that have the most bits of the query's code, and the first `candidates` of them
      are ordered by the product of the query with their bits, 0 and 1, which is the score.

    Args:
      queries: vectors of the model that made the others.
      vectors: as `open_vectors` returns them.
      k: the vectors for each query; equal ones by their numbers.
      candidates: of codes of one bit, those that the query's numbers score.
    Raises: InputError if queries are no such vectors, or k is below 1.
    """
    precision = vectors.manifest["precision"]
    size = vectors.manifest["dimensions"]
    queries = np.asarray(queries, np.float32)
    if queries.shape[1:] != (size,) or not np.isfinite(queries).all():
        raise InputError(
            f"queries of the shape {list(queries.shape)} are not finite vectors of {size} numbers, as those of "
            f"{vectors.place}; give [Q, {size}]"
        )
    queries = unit(queries)
    k = min(check_k(k), vectors.manifest["rows"])
    if precision in BITS:
        return _nearest_bits(queries, vectors, k, max(k, candidates))
    if precision not in RANGED:
        return nearest(queries, vectors.blocks(BLOCK), k, products)
    # query x (low + step x level), level = code or code + 128, without making these numbers
    low, step = steps_of(vectors.ranges)
    found = nearest(queries * step, vectors.blocks(BLOCK), k, products)
    rest = queries @ (low + step * (128 if precision == "int8" else 0))
    return found._replace(scores=found.scores + rest[:, None])


def _nearest_bits(queries: np.ndarray, vectors: Vectors, k: int, candidates: int) -> Nearest:
    """Returns the k nearest of codes of one bit, in two stages.

    The first compares bits, 32 at a time, of all codes. The second multiplies, for each query, the bits of the
    `candidates` that it found by the numbers of the query, which say more than its bits.
    """
    precision = vectors.manifest["precision"]
    size = queries.shape[1]
    codes = quantize(queries, precision)
    word = np.uint32 if codes.shape[1] % 4 == 0 else np.uint8  # fewer steps
    blocks = (block.view(word) for block in vectors.blocks(_BITS_BLOCK))
    candidates = min(candidates, vectors.manifest["rows"])
    found = nearest(codes.view(word), blocks, candidates, same_bits).numbers
    numbers = np.sort(found, axis=1)  # so that of equals the first come first
    flipped = np.uint8(128 if precision == "binary" else 0)
    said = np.zeros(numbers.shape, np.float32)
    for scores, query, near in zip(said, queries, numbers):
        bits = np.unpackbits(vectors.take(near).view(np.uint8) ^ flipped, axis=1, count=size)
        # BLAS would round equal codes differently, by where they stand
        scores[:] = np.einsum("CK,K->C", bits.astype(np.float32), query)
    order = np.argsort(-said, axis=1, kind="stable")[:, :k]
    return Nearest(*(np.take_along_axis(array, order, axis=1) for array in (said, numbers)))
