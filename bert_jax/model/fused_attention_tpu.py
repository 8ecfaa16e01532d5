# SPDX-License-Identifier: Apache-2.0
"""The kernels of fused attention for TPUs: one for the forward pass and one for the backward pass.

A row of BERT is short: all scores of a head, at most 512 x 512, fit the vector memory of a core, so there is no online
softmax. A program of the kernel takes one row and one head and writes only the result to HBM.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.attention_kernels import AttentionShape, dot, keeps

LONGEST_ROW = 512  # tokens; the scores of one head are 1 MiB an array, and a few such arrays fit the vector memory
WIDEST_TILE = 256  # columns that the heads of a program may share
_LANES = 128  # columns of a tile; heads lie side by side in it, and a program masks those of the other heads


def fits(shape: AttentionShape, array: jax.Array) -> bool:
    """Returns whether the kernel supports these shapes.

    Rows must have a static length that is short and a multiple of 32 (two halves of whole tiles). Few heads may share a
    tile, because each multiplies the columns of all of them.
    """
    rows, size, _ = array.shape
    known = isinstance(rows, int) and isinstance(size, int)
    return known and size <= LONGEST_ROW and size % 32 == 0 and _heads_of_a_tile(shape) * shape.head_size <= WIDEST_TILE


def forward(shape: AttentionShape, interpret: bool, *arrays: jax.Array) -> jax.Array:
    """Returns the context [B, L, H]. Arrays: query, key, value, sequence ids, keys of dropout."""
    return _run(_forward_kernel, shape, interpret, 1, *arrays)[0]


def backward(shape: AttentionShape, interpret: bool, gradient: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the gradients of query, key and value."""
    return tuple(_run(_backward_kernel, shape, interpret, 3, *arrays, gradient))


def _heads_of_a_tile(shape: AttentionShape) -> int:
    """Returns the heads in the narrowest block of columns that a TPU can address."""
    counts = [count for count in range(1, shape.num_heads + 1) if shape.num_heads % count == 0]
    return next((count for count in counts if count * shape.head_size % _LANES == 0), shape.num_heads)


def _run(kernel, shape: AttentionShape, interpret: bool, num_results: int, *arrays: jax.Array) -> list[jax.Array]:
    """Runs a kernel for every row and head. Arrays: query, key, value, sequence ids, keys, and the rest like query."""
    query, key, value, sequence_ids, keys, *rest = arrays
    rows, size, _ = query.shape
    of_tile = _heads_of_a_tile(shape)
    block = pl.BlockSpec((1, size, of_tile * shape.head_size), lambda row, tile, head: (row, 0, tile))
    of_row = functools.partial(pl.BlockSpec, index_map=lambda row, tile, head: (row, 0, 0))
    products = 2 if num_results == 1 else 5
    scores = rows * shape.num_heads * size**2
    moved = sum(array.size * array.dtype.itemsize for array in (query, key, value, *rest, *[query] * num_results))
    return pl.pallas_call(
        functools.partial(kernel, shape),
        grid=(rows, shape.num_heads // of_tile, of_tile),
        in_specs=[
            of_row((1, 1, 2 * shape.num_heads), memory_space=pltpu.SMEM),
            of_row((1, size, 1)),
            of_row((1, 1, size)),
            *[block] * (3 + len(rest)),
        ],
        out_specs=[block] * num_results,
        out_shape=[jax.ShapeDtypeStruct(query.shape, value.dtype)] * num_results,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=products * 2 * scores * shape.head_size, transcendentals=scores, bytes_accessed=moved
        ),
        interpret=interpret,
        name=kernel.__name__.strip("_"),
    )(keys.reshape(rows, 1, -1), sequence_ids[:, :, None], sequence_ids[:, None, :], query, key, value, *rest)


def _forward_kernel(shape: AttentionShape, keys, queries_ids, keys_ids, query, key, value, out) -> None:
    """Writes the context of one head of one row."""
    head = _Head(shape, keys, query)
    probabilities, _ = head.probabilities(queries_ids, keys_ids, query, key)
    probabilities = head.drop(probabilities)
    head.write(out, dot(shape, probabilities.astype(value.dtype), value[0], 1, 0))


def _backward_kernel(
    shape: AttentionShape, keys, queries_ids, keys_ids, query, key, value, gradient, of_query, of_key, of_value
) -> None:
    """Writes the gradients of query, key and value of one head of one row."""
    head = _Head(shape, keys, query)
    probabilities, sees = head.probabilities(queries_ids, keys_ids, query, key)
    of_context = head.own(gradient[0])
    head.write(of_value, dot(shape, head.drop(probabilities).astype(value.dtype), of_context, 0, 0))
    of_probabilities = head.drop(dot(shape, of_context, value[0], 1, 1))
    mean = jnp.sum(probabilities * of_probabilities, axis=-1, keepdims=True)
    of_scores = jnp.where(sees, probabilities * (of_probabilities - mean) * shape.head_size**-0.5, 0)
    of_scores = of_scores.astype(query.dtype)
    head.write(of_query, dot(shape, of_scores, key[0], 1, 0))
    head.write(of_key, dot(shape, of_scores, query[0], 0, 0))


class _Head:
    """One head of one row, inside a kernel."""

    def __init__(self, shape: AttentionShape, keys, query):
        self.shape, self.size = shape, query.shape[1]
        self.in_tile = pl.program_id(2)
        columns = jax.lax.broadcasted_iota(jnp.int32, query.shape[1:], 1)
        self.columns = columns // shape.head_size == self.in_tile
        self.keeps = None
        if shape.kept < 2**16:
            place = 2 * (pl.program_id(1) * _heads_of_a_tile(shape) + self.in_tile)
            self.keeps = keeps(shape, self.size, keys[0, 0, place], keys[0, 0, place + 1])

    def own(self, tile: jax.Array) -> jax.Array:
        """Returns a tile [L, columns] with 0 for other heads, which a product then leaves out."""
        return jnp.where(self.columns, tile, jnp.zeros_like(tile))

    def probabilities(self, queries_ids, keys_ids, query, key) -> tuple[jax.Array, jax.Array]:
        """Returns softmax [L, L] before dropout, and which scores count."""
        ids = keys_ids[0]  # [1, L]
        sees = (queries_ids[0] == ids) & (ids != 0)
        if self.shape.causal:
            places = (self.size, self.size)
            later = jax.lax.broadcasted_iota(jnp.int32, places, 1) > jax.lax.broadcasted_iota(jnp.int32, places, 0)
            sees = sees & ~later
        scores = dot(self.shape, self.own(query[0]), key[0], 1, 1) * self.shape.head_size**-0.5
        scores = jnp.where(sees, scores, MASKED_SCORE)
        raised = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        return raised / jnp.sum(raised, axis=-1, keepdims=True), sees

    def drop(self, array: jax.Array) -> jax.Array:
        """Returns an array [L, L] after dropout; of a gradient, what dropout lets back."""
        return array if self.keeps is None else jnp.where(self.keeps, array * (2**16 / self.shape.kept), 0)

    def write(self, out, tile: jax.Array) -> None:
        """Puts this head's columns of a tile into `out`, of which every head of the tile writes its own."""
        before = jnp.where(self.in_tile == 0, jnp.zeros_like(out[0]), out[0])
        out[0] = jnp.where(self.columns, tile.astype(out.dtype), before)
