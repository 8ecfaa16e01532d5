# SPDX-License-Identifier: Apache-2.0
"""The kernels of fused attention for TPUs: one for the forward pass and one for the backward pass.

A row of BERT is short: all scores of a head, at most 512 x 512, fit the vector memory of a core, so there is no online
softmax. A program of the kernel takes one head of a few short rows, or of one long row, one row after the other. It
writes only the result to HBM.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.attention_kernels import AttentionShape, dot, keeps

# tokens; the scores of one head are 1 MiB an array, and a few such arrays fit the vector memory
LONGEST_ROW = 512
WIDEST_TILE = 256  # columns that the heads of a program may share
# of a program with several rows: beyond that, starting a program is a small part of running it
MOST_TOKENS = 1024
# of the vector memory, which has 16 MiB in a core; the compiler takes some for itself
PROGRAM_BYTES = 12 * 2**20
_BLOCKS = 7  # [L, columns] that the backward pass reads and writes for each row
# [L, L] in float32 that the backward pass may hold for a row at once; libtpu 0.0.42 holds about 3
_SCORES = 8
_SHORT_ROW = 128  # tokens
# columns of a tile; heads lie side by side in it, and a program masks those of the other heads
_LANES = 128


def fits(shape: AttentionShape, array: jax.Array) -> bool:
    """Returns whether the kernel supports these shapes.

    Rows must have a static length that is short and a multiple of 32 (two halves of whole tiles). Few heads may share a
    tile, because each multiplies the columns of all of them.
    """
    rows, size, _ = array.shape
    known = isinstance(rows, int) and isinstance(size, int) and not shape.window
    return (
        known
        and size <= LONGEST_ROW
        and size % 32 == 0
        and _heads_of_a_tile(shape) * shape.head_size <= WIDEST_TILE
    )


def forward(shape: AttentionShape, interpret: bool, *arrays: jax.Array) -> jax.Array:
    """Returns the context [B, L, H]. Arrays: query, key, value, sequence ids, keys of dropout."""
    return _run(_forward_kernel, shape, interpret, 1, *arrays)[0]


def backward(
    shape: AttentionShape, interpret: bool, gradient: jax.Array, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the gradients of query, key and value."""
    return tuple(_run(_backward_kernel, shape, interpret, 3, *arrays, gradient))


def _heads_of_a_tile(shape: AttentionShape) -> int:
    """Returns the heads in the narrowest block of columns that a TPU can address."""
    counts = [count for count in range(1, shape.num_heads + 1) if shape.num_heads % count == 0]
    return next(
        (count for count in counts if count * shape.head_size % _LANES == 0), shape.num_heads
    )


def rows_of_a_program(rows: int, size: int, width: int, itemsize: int) -> int:
    """Returns how many of a device's rows a program takes: a divisor of their number.

    It is the largest for which a program has at most `MOST_TOKENS` tokens, and the scores of one row and the blocks of
    all its rows fit `PROGRAM_BYTES`; 1 if none does. In bfloat16 and with 128 columns that is 8 rows of 128 tokens, 4
    of 256, or one of 512. A block is [size, width] numbers of `itemsize` bytes.
    """
    columns = -(-width // _LANES) * _LANES
    # Sequence ids of a query take a row of lanes. Two of each block are held: one is moved while the other is used.
    of_row = 2 * size * (_BLOCKS * columns * itemsize + 4 * _LANES)
    fitting = (PROGRAM_BYTES - _SCORES * 4 * size**2) // of_row
    most = max(1, min(MOST_TOKENS // size, fitting))
    return max(count for count in range(1, most + 1) if rows % count == 0)


def _run(
    kernel, shape: AttentionShape, interpret: bool, num_results: int, *arrays: jax.Array
) -> list[jax.Array]:
    """Runs a kernel for all rows and heads. Arrays: query, key, value, sequence ids, keys, and the rest like query."""
    query, key, value, sequence_ids, keys, *rest = arrays
    rows, size, _ = query.shape
    of_tile = _heads_of_a_tile(shape)
    width = of_tile * shape.head_size
    count = rows_of_a_program(rows, size, width, query.dtype.itemsize)
    block = pl.BlockSpec((count, size, width), lambda some, tile, head: (some, 0, tile))
    of_rows = functools.partial(pl.BlockSpec, index_map=lambda some, tile, head: (some, 0, 0))
    products = 2 if num_results == 1 else 5
    scores = rows * shape.num_heads * size**2
    moved = sum(
        array.size * array.dtype.itemsize
        for array in (query, key, value, *rest, *[query] * num_results)
    )
    return pl.pallas_call(
        functools.partial(kernel, shape),
        grid=(rows // count, shape.num_heads // of_tile, of_tile),
        in_specs=[
            of_rows((count, 1, 2 * shape.num_heads), memory_space=pltpu.SMEM),
            of_rows((count, size, 1)),
            of_rows((count, 1, size)),
            *[block] * (3 + len(rest)),
        ],
        out_specs=[block] * num_results,
        out_shape=[jax.ShapeDtypeStruct(query.shape, value.dtype)] * num_results,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=products * 2 * scores * shape.head_size,
            transcendentals=scores,
            bytes_accessed=moved,
        ),
        interpret=interpret,
        name=kernel.__name__.strip("_"),
    )(
        keys.reshape(rows, 1, -1),
        jnp.abs(sequence_ids)[:, :, None],
        sequence_ids[:, None, :],
        query,
        key,
        value,
        *rest,
    )


def _forward_kernel(
    shape: AttentionShape, keys, queries_ids, keys_ids, query, key, value, out
) -> None:
    """Writes the context of one head of some rows."""
    head = _Head(shape, query)

    def of_row(row: jax.Array) -> None:
        probabilities, _ = head.probabilities(queries_ids[row], keys_ids[row], query[row], key[row])
        probabilities = head.dropout(keys, row)(probabilities)
        head.write(out, row, dot(shape, probabilities.astype(value.dtype), value[row], 1, 0))

    _for_every_row(query, of_row)


def _backward_kernel(
    shape: AttentionShape,
    keys,
    queries_ids,
    keys_ids,
    query,
    key,
    value,
    gradient,
    of_query,
    of_key,
    of_value,
) -> None:
    """Writes the gradients of query, key and value of one head of some rows."""
    head = _Head(shape, query)

    def of_row(row: jax.Array) -> None:
        probabilities, sees = head.probabilities(
            queries_ids[row], keys_ids[row], query[row], key[row]
        )
        drop = head.dropout(keys, row)
        of_context = head.own(gradient[row])
        head.write(
            of_value, row, dot(shape, drop(probabilities).astype(value.dtype), of_context, 0, 0)
        )
        of_probabilities = drop(dot(shape, of_context, value[row], 1, 1))
        mean = jnp.sum(probabilities * of_probabilities, axis=-1, keepdims=True)
        of_scores = jnp.where(
            sees, probabilities * (of_probabilities - mean) * shape.head_size**-0.5, 0
        )
        of_scores = of_scores.astype(query.dtype)
        head.write(of_query, row, dot(shape, of_scores, key[row], 1, 0))
        head.write(of_key, row, dot(shape, of_scores, query[row], 0, 0))

    _for_every_row(query, of_row)


def _for_every_row(block, of_row: Callable[[jax.Array], None]) -> None:
    """Calls a function with the index of every row of a block, in a loop of the device.

    Of short rows a step of the loop takes two, so that the compiler can multiply for one while it computes the softmax
    and the dropout of the other.
    """
    rows, size, _ = block.shape
    at_once = 2 if rows % 2 == 0 and size <= _SHORT_ROW else 1

    def body(step: jax.Array, nothing: None) -> None:
        for offset in range(at_once):
            of_row(step * at_once + offset)

    jax.lax.fori_loop(0, rows // at_once, body, None)


class _Head:
    """One head of the rows of a block, inside a kernel."""

    def __init__(self, shape: AttentionShape, query):
        self.shape = shape
        self.size = query.shape[1]
        self.in_tile = pl.program_id(2)
        # of its keys of dropout
        self.place = 2 * (pl.program_id(1) * _heads_of_a_tile(shape) + self.in_tile)
        columns = jax.lax.broadcasted_iota(jnp.int32, query.shape[1:], 1)
        self.columns = columns // shape.head_size == self.in_tile

    def own(self, tile: jax.Array) -> jax.Array:
        """Returns a tile [L, columns] with 0 for other heads, which a product then leaves out."""
        return jnp.where(self.columns, tile, jnp.zeros_like(tile))

    def probabilities(
        self, queries_ids: jax.Array, keys_ids: jax.Array, query: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns softmax [L, L] before dropout, and which scores count. Sequence ids are [L, 1] and [1, L]."""
        sees = (queries_ids == keys_ids) & (keys_ids != 0)
        if self.shape.causal:
            places = (self.size, self.size)
            later = jax.lax.broadcasted_iota(jnp.int32, places, 1) > jax.lax.broadcasted_iota(
                jnp.int32, places, 0
            )
            sees = sees & ~later
        scores = dot(self.shape, self.own(query), key, 1, 1) * self.shape.head_size**-0.5
        scores = jnp.where(sees, scores, MASKED_SCORE)
        raised = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        return raised / jnp.sum(raised, axis=-1, keepdims=True), sees

    def dropout(self, keys, row: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """Returns dropout of an array [L, L] of a row; of a gradient it returns what dropout lets back."""
        if not self.shape.drops:
            return lambda array: array
        kept = keeps(self.shape, self.size, keys[row, 0, self.place], keys[row, 0, self.place + 1])
        return lambda array: jnp.where(kept, array * self.shape.rescale, 0)

    def write(self, out, row: jax.Array, tile: jax.Array) -> None:
        """Puts this head's columns of a tile into `out`. Every head of the tile writes its own."""
        before = jnp.where(self.in_tile == 0, jnp.zeros(out.shape[1:], out.dtype), out[row])
        out[row] = jnp.where(self.columns, tile.astype(out.dtype), before)
