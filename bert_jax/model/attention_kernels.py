# SPDX-License-Identifier: Apache-2.0
"""Common parts of the kernels of fused attention: their static parameters, and dropout as a hash.

Each kernel has the functions `fits`, `forward` and `backward`; `fused_attention` chooses one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bert_jax.model.product import matmul_precision

# multipliers of the hash "lowbias32" (C. Wellons), as int32
_ODD = (0x7FEB352D, 0x846CA68B - 2**32)

# Matrix products of queries and keys in each kernel for GPUs, by its name; XLA's text of a program does not say.
PRODUCTS_OF_KERNELS = {"attention_forward": 2, "attention_queries": 3, "attention_keys": 4}


class AttentionShape(NamedTuple):
    """The static parameters of a kernel."""

    num_heads: int
    head_size: int
    causal: bool
    kept: int  # probabilities that dropout keeps, of 2^16
    precision: str = "default"  # of `product`
    window: int = 0  # tokens to each side that a query sees; 0 is all

    @property
    def drops(self) -> bool:
        return self.kept < 2**16

    @property
    def rescale(self) -> float:
        """The factor of the probabilities that dropout keeps."""
        return 2**16 / self.kept


def keeps(shape: AttentionShape, size: int, first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns which scores [..., size, size] dropout keeps, for keys that broadcast against them."""
    block = (1,) * (jnp.ndim(first) - 2) + (-(-size // 2), size)
    rows, columns = (
        jax.lax.broadcasted_iota(jnp.int32, block, len(block) + axis) for axis in (-2, -1)
    )
    halves = _hashed(rows * size + columns, first, second)
    return jnp.concatenate(halves, axis=-2)[..., :size, :] < shape.kept


def draws(
    size: int,
    row: jax.Array | int,
    column: jax.Array | int,
    block: tuple[int, int],
    first: jax.Array,
    second: jax.Array,
    rows_axis: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Returns 16 random bits for each score of two blocks; dropout keeps those below `AttentionShape.kept`.

    The blocks begin at (row, column) and (row + size / 2, column) of [size, size] scores; their queries lie along
    `rows_axis`. One hash of 32 bits is for both, because hashing is the most expensive part of dropout.
    """
    rows = row + jax.lax.broadcasted_iota(jnp.int32, block, rows_axis)
    columns = column + jax.lax.broadcasted_iota(jnp.int32, block, 1 - rows_axis)
    return _hashed(rows * size + columns, first, second)


def keeps_at(
    shape: AttentionShape,
    size: int,
    rows: jax.Array,
    columns: jax.Array,
    first: jax.Array,
    second: jax.Array,
) -> jax.Array:
    """Like `keeps`, for the scores at any rows and columns that broadcast against each other."""
    half = -(-size // 2)
    low, high = _hashed((rows % half) * size + columns, first, second)
    return jnp.where(rows < half, low, high) < shape.kept


def _hashed(places: jax.Array, first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns twice 16 random bits for each place, of which 32 bits count; with jax_enable_x64 it may have 64."""
    bits = places.astype(jnp.int32) ^ first
    for key, shift, odd in ((0, 16, _ODD[0]), (second, 15, _ODD[1])):
        bits = (bits ^ key ^ _shifted(bits, shift)) * odd
    bits = bits ^ _shifted(bits, 16)
    return bits & 0xFFFF, _shifted(bits, 16)


def _shifted(bits: jax.Array, by: int) -> jax.Array:
    return jax.lax.shift_right_logical(bits, jnp.full_like(bits, by))


def dot(
    shape: AttentionShape, lhs: jax.Array, rhs: jax.Array, of_lhs: int, of_rhs: int
) -> jax.Array:
    """Returns the product over axis `of_lhs` and `of_rhs`, summed in float32."""
    axes = (((of_lhs,), (of_rhs,)), ((), ()))
    precision = matmul_precision(shape.precision)
    return jax.lax.dot_general(
        lhs, rhs, axes, precision=precision, preferred_element_type=jnp.float32
    )
