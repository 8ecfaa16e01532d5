# SPDX-License-Identifier: Apache-2.0
"""Fused attention for TPUs: one kernel for the forward pass and one for the backward pass.

A row of BERT is short: all scores of a head, at most 512 x 512, fit the vector memory of a core, so there is no online
softmax. A program of the kernel takes one row and one head and writes only the result to HBM. The backward pass
recomputes scores and probabilities from query and key, and draws the same dropout again. So the memory and traffic of
a layer grow with the length of a row, not with its square.

Dropout is a hash of a score's position and of a key for each row and head. It is the same in both passes, on every
mesh, and without a TPU, where `attention.attend` computes the same numbers. The kernel is tested against that.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from bert_jax.devices.sharding import MESH_AXES, ROW_AXES
from bert_jax.model.attention import MASKED_SCORE, attend, attention_mask
from bert_jax.model.product import matmul_precision

LONGEST_ROW = 512  # tokens; the scores of one head are 1 MiB an array, and a few such arrays fit the vector memory
WIDEST_TILE = 256  # columns that the heads of a program may share
_LANES = 128  # columns of a tile; heads lie side by side in it, and a program masks those of the other heads
_ODD = (0x7FEB352D, 0x846CA68B - 2**32)  # multipliers of the hash "lowbias32" (C. Wellons), as int32


class _Shape(NamedTuple):
    """The static parameters of a kernel."""

    num_heads: int
    head_size: int
    causal: bool
    kept: int  # probabilities that dropout keeps, of 2^16
    precision: str = "default"  # of `product`

    @property
    def heads_of_a_tile(self) -> int:
        """Heads in the narrowest block of columns that a TPU can address."""
        counts = [count for count in range(1, self.num_heads + 1) if self.num_heads % count == 0]
        return next((count for count in counts if count * self.head_size % _LANES == 0), self.num_heads)


def fused_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sequence_ids: jax.Array,
    *,
    num_heads: int,
    causal: bool = False,
    rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    precision: str = "default",
    interpret: bool = False,
) -> jax.Array:
    """Returns the context of all heads, [B, L, H] in the dtype of `value`; query, key and value have that shape.

    sequence_ids [B, L]: as `attention_mask` takes them, and `causal` too.
    rate, dropout_key: the share of probabilities that is set to 0, exact to 1 / 131,072, and the random key.
    precision: that of `product`.
    interpret: runs the kernel where there is no TPU, slowly, for tests.
    """
    rows, _, hidden = query.shape
    shape = _Shape(num_heads, hidden // num_heads, causal, round((1 - rate) * 2**16), precision)
    keys = jnp.zeros((rows, num_heads, 2), jnp.int32)
    if shape.kept < 2**16:
        assert dropout_key is not None, f"dropout of {rate} needs a key"
        keys = jax.lax.bitcast_convert_type(jax.random.bits(dropout_key, keys.shape, jnp.uint32), jnp.int32)
    arrays = (query, key, value, sequence_ids.astype(jnp.int32), keys)
    mesh, tensor = jax.sharding.get_abstract_mesh(), MESH_AXES["heads"]
    if (interpret or jax.device_count() == 1) if mesh.empty else mesh.size == 1:
        return _attention(shape, interpret, *arrays)
    if mesh.empty or rows % math.prod(mesh.shape[axis] for axis in ROW_AXES):
        return _plain(shape, *arrays)  # a kernel can only be sharded by rows and heads
    of_device = shape._replace(num_heads=num_heads // mesh.shape[tensor])
    columns, ids, heads = (PartitionSpec(ROW_AXES, *rest) for rest in ((None, tensor), (None,), (tensor, None)))
    over_mesh = jax.shard_map(
        functools.partial(_attention, of_device, interpret),
        in_specs=(columns, columns, columns, ids, heads),
        out_specs=columns,
        check_vma=False,  # Pallas does not declare over which axes its result varies
    )
    return over_mesh(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(shape: _Shape, interpret: bool, *arrays: jax.Array) -> jax.Array:
    if interpret:
        return _run(_forward_kernel, shape, True, 1, *arrays)[0]
    plain = functools.partial(_plain, shape)
    if not _fits(shape, arrays[0]):
        return plain(*arrays)
    kernel = functools.partial(_run, _forward_kernel, shape, False, 1)
    return jax.lax.platform_dependent(*arrays, tpu=lambda *arrays: kernel(*arrays)[0], default=plain)


def _attention_forward(shape: _Shape, interpret: bool, *arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _attention(shape, interpret, *arrays), arrays


def _attention_backward(
    shape: _Shape, interpret: bool, arrays: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array | np.ndarray, ...]:
    def plain(gradient: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        _, pull_back = jax.vjp(lambda *floats: _plain(shape, *floats, *arrays[3:]), *arrays[:3])
        return pull_back(gradient)

    def kernel(gradient: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(_run(_backward_kernel, shape, interpret, 3, *arrays, gradient))

    if interpret:
        gradients = kernel(gradient, *arrays)
    elif _fits(shape, gradient):
        gradients = jax.lax.platform_dependent(gradient, *arrays, tpu=kernel, default=plain)
    else:
        gradients = plain(gradient, *arrays)
    return (*gradients, *(np.zeros(array.shape, jax.dtypes.float0) for array in arrays[3:]))


_attention.defvjp(_attention_forward, _attention_backward)


def _fits(shape: _Shape, array: jax.Array) -> bool:
    """Returns whether the kernel supports these shapes.

    Rows must have a static length that is short and a multiple of 32 (two halves of whole tiles). Few heads may share a
    tile, because each multiplies the columns of all of them.
    """
    rows, size, _ = array.shape
    known = isinstance(rows, int) and isinstance(size, int)
    return known and size <= LONGEST_ROW and size % 32 == 0 and shape.heads_of_a_tile * shape.head_size <= WIDEST_TILE


def _plain(shape: _Shape, *arrays: jax.Array) -> jax.Array:
    """Computes the result of the kernel with `attend`."""
    query, key, value, sequence_ids, keys = arrays
    size = query.shape[1]

    def drop(probabilities: jax.Array) -> jax.Array:
        kept = _keeps(shape, size, keys[:, :, 0, None, None], keys[:, :, 1, None, None])
        return jnp.where(kept, probabilities * (2**16 / shape.kept), 0)

    query, key, value = (array.reshape(*array.shape[:2], shape.num_heads, -1) for array in (query, key, value))
    attends = attention_mask(sequence_ids, shape.causal)
    keep_all = shape.kept == 2**16
    dropped = (lambda probabilities: probabilities) if keep_all else drop
    return attend(query, key, value, attends, dropped, shape.precision).reshape(arrays[2].shape)


def _keeps(shape: _Shape, size: int, first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns which scores [..., size, size] dropout keeps, for keys that broadcast against them; 16 bits for each."""
    place = (-(-size // 2), size)
    bits = jax.lax.broadcasted_iota(jnp.int32, place, 0) * size + jax.lax.broadcasted_iota(jnp.int32, place, 1)
    bits = bits ^ first
    for key, shift, odd in ((0, 16, _ODD[0]), (second, 15, _ODD[1])):
        bits = (bits ^ key ^ jax.lax.shift_right_logical(bits, jnp.full_like(bits, shift))) * odd
    bits = bits ^ jax.lax.shift_right_logical(bits, jnp.full_like(bits, 16))
    low, high = bits & 0xFFFF, jax.lax.shift_right_logical(bits, jnp.full_like(bits, 16))
    return jnp.concatenate([low, high], axis=-2)[..., :size, :] < shape.kept


def _run(kernel, shape: _Shape, interpret: bool, num_results: int, *arrays: jax.Array) -> list[jax.Array]:
    """Runs a kernel for every row and head. Arrays: query, key, value, sequence ids, keys, and the rest like query."""
    query, key, value, sequence_ids, keys, *rest = arrays
    rows, size, _ = query.shape
    of_tile = shape.heads_of_a_tile
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


def _forward_kernel(shape: _Shape, keys, queries_ids, keys_ids, query, key, value, out) -> None:
    """Writes the context of one head of one row."""
    head = _Head(shape, keys, query)
    probabilities, _ = head.probabilities(queries_ids, keys_ids, query, key)
    probabilities = head.drop(probabilities)
    head.write(out, _dot(shape, probabilities.astype(value.dtype), value[0], 1, 0))


def _backward_kernel(
    shape: _Shape, keys, queries_ids, keys_ids, query, key, value, gradient, of_query, of_key, of_value
) -> None:
    """Writes the gradients of query, key and value of one head of one row."""
    head = _Head(shape, keys, query)
    probabilities, sees = head.probabilities(queries_ids, keys_ids, query, key)
    of_context = head.own(gradient[0])
    head.write(of_value, _dot(shape, head.drop(probabilities).astype(value.dtype), of_context, 0, 0))
    of_probabilities = head.drop(_dot(shape, of_context, value[0], 1, 1))
    mean = jnp.sum(probabilities * of_probabilities, axis=-1, keepdims=True)
    of_scores = jnp.where(sees, probabilities * (of_probabilities - mean) * shape.head_size**-0.5, 0)
    of_scores = of_scores.astype(query.dtype)
    head.write(of_query, _dot(shape, of_scores, key[0], 1, 0))
    head.write(of_key, _dot(shape, of_scores, query[0], 0, 0))


class _Head:
    """One head of one row, inside a kernel."""

    def __init__(self, shape: _Shape, keys, query):
        self.shape, self.size = shape, query.shape[1]
        self.in_tile = pl.program_id(2)
        columns = jax.lax.broadcasted_iota(jnp.int32, query.shape[1:], 1)
        self.columns = columns // shape.head_size == self.in_tile
        self.keeps = None
        if shape.kept < 2**16:
            place = 2 * (pl.program_id(1) * shape.heads_of_a_tile + self.in_tile)
            self.keeps = _keeps(shape, self.size, keys[0, 0, place], keys[0, 0, place + 1])

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
        scores = _dot(self.shape, self.own(query[0]), key[0], 1, 1) * self.shape.head_size**-0.5
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


def _dot(shape: _Shape, lhs: jax.Array, rhs: jax.Array, of_lhs: int, of_rhs: int) -> jax.Array:
    """Returns the product over axis `of_lhs` and `of_rhs`, summed in float32."""
    axes = (((of_lhs,), (of_rhs,)), ((), ()))
    precision = matmul_precision(shape.precision)
    return jax.lax.dot_general(lhs, rhs, axes, precision=precision, preferred_element_type=jnp.float32)
