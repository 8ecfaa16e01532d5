# SPDX-License-Identifier: Apache-2.0
"""The kernels of the fused residual connection for NVIDIA GPUs, in Pallas for Triton: one forward, one backward.

A program has some tokens from the first half of a row and as many from the second, because one hash of dropout decides
about a number in each. All units of a token lie in its registers. A block of Triton has a power of 2 columns, so a
token is cut into the widest such blocks that divide it.

The backward kernel adds up the gradients of the parameters over its own tokens. The sums of the programs are added up
outside, in a fixed order.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from bert_jax.model.attention_kernels import draws

# Tokens of each half of a row that are computed at once. One in the backward pass, which needs three times as many
# registers for each.
FORWARD, BACKWARD = 2, 1
STEPS = 16  # of the backward kernel: its programs compute as many such blocks, one after the other
MOST_BLOCKS = 8  # of columns of a token
WIDEST = 2048  # units; beyond that they do not fit the registers
MOST_PROGRAMS = 65535  # along the second axis of a grid of CUDA


def fits(array: jax.Array) -> bool:
    """Returns whether the kernels support the shape [B, L, H]: even L, and H of few blocks of at least 128 columns."""
    rows, size, hidden = array.shape
    known = isinstance(rows, int) and isinstance(size, int)
    width = _width(hidden)
    return (
        known
        and size % 2 == 0
        and rows <= MOST_PROGRAMS
        and width >= 128
        and hidden // width <= MOST_BLOCKS
        and hidden <= WIDEST
        and array.dtype in (jnp.bfloat16, jnp.float32)
    )


def forward(shape: Any, interpret: bool, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the result and the sum in front of layer norm. Arrays: those of `fused_residual._residual`."""
    hidden = arrays[0]
    tokens = math.gcd(hidden.shape[1] // 2, FORWARD)
    like = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype)
    programs = hidden.shape[1] // 2 // tokens
    kernel = functools.partial(residual_forward, shape, tokens)
    result, summed = _call(kernel, interpret, programs, arrays, [like, like])
    return result, summed


def backward(shape: Any, interpret: bool, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the gradients of hidden, product, bias, and layer norm's scale and bias.

    Arrays: the gradient of the result, the sum in front of layer norm, the scale of layer norm, the keys of dropout.
    """
    gradient = arrays[0]
    rows, size, hidden = gradient.shape
    tokens = math.gcd(size // 2, BACKWARD)
    steps = math.gcd(size // 2 // tokens, STEPS)
    programs = size // 2 // tokens // steps
    like = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
    sums = jax.ShapeDtypeStruct((rows, programs, 3, hidden), jnp.float32)
    kernel = functools.partial(residual_backward, shape, tokens, steps)
    of_hidden, of_product, sums = _call(kernel, interpret, programs, arrays, [like, like, sums])
    return of_hidden, of_product, *jnp.sum(sums, axis=(0, 1))


def _width(hidden: int) -> int:
    """Returns the widest power of 2 that divides a number."""
    return hidden & -hidden


def _call(
    kernel: Any, interpret: bool, programs: int, arrays: tuple[jax.Array, ...], results: list[jax.ShapeDtypeStruct]
) -> list[jax.Array]:
    """Runs a kernel for every row, of which each of its programs sees all."""
    rows, size, hidden = arrays[0].shape

    def block(array: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        if array.ndim == 1:  # parameters
            return pl.BlockSpec((hidden,), lambda part, row: (0,))
        if array.ndim == 2:  # keys
            return pl.BlockSpec((None, 2), lambda part, row: (row, 0))
        if array.ndim == 3:
            return pl.BlockSpec((None, size, hidden), lambda part, row: (row, 0, 0))
        return pl.BlockSpec((None, None, 3, hidden), lambda part, row: (row, part, 0, 0))

    return pl.pallas_call(
        kernel,
        grid=(programs, rows),
        in_specs=[block(array) for array in arrays],
        out_specs=[block(result) for result in results],
        out_shape=results,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=kernel.func.__name__,
    )(*arrays)


def residual_forward(
    shape: Any, tokens: int, hidden, product, bias, norm_scale, norm_bias, keys, result, summed
) -> None:
    """Writes the result and the sum of some tokens of both halves of a row."""
    size, units = hidden.shape
    columns = _columns(units)
    start = pl.program_id(0) * tokens
    keeps = _keeps(shape, units, tokens, start, keys)
    for half in (0, 1):
        rows = pl.ds(start + half * (size // 2), tokens)
        sums = []
        for number, block in enumerate(columns):
            update = product[rows, block] + bias[block].astype(product.dtype)[None, :]
            added = hidden[rows, block] + _drop(shape, update, keeps[number][half])
            summed[rows, block] = added
            sums.append(added)
        normal, _ = _normalize(shape, sums)
        for block, values in zip(columns, normal):
            result[rows, block] = (values * norm_scale[block][None, :] + norm_bias[block][None, :]).astype(result.dtype)


def residual_backward(
    shape: Any, tokens: int, steps: int, gradient, summed, norm_scale, keys, of_hidden, of_product, sums
) -> None:
    """Writes the gradients of some tokens of both halves of a row, and the sums of those of the parameters."""
    size, units = gradient.shape
    columns = _columns(units)
    first = pl.program_id(0) * steps

    def step(number, totals):
        start = (first + number) * tokens
        keeps = _keeps(shape, units, tokens, start, keys)
        for half in (0, 1):
            rows = pl.ds(start + half * (size // 2), tokens)
            normal, inverse = _normalize(shape, [summed[rows, block] for block in columns])
            of_result = [gradient[rows, block].astype(jnp.float32) for block in columns]
            of_normal = [of * norm_scale[block][None, :] for of, block in zip(of_result, columns)]
            mean = _mean(of_normal)
            slope = _mean([of * values for of, values in zip(of_normal, normal)])
            added = []
            for place, block in enumerate(columns):
                of_sum = inverse * (of_normal[place] - mean - normal[place] * slope)
                of_sum = of_sum.astype(gradient.dtype)
                of_update = _drop(shape, of_sum, keeps[place][half])
                of_hidden[rows, block] = of_sum
                of_product[rows, block] = of_update
                own = (of_update.astype(jnp.float32), of_result[place] * normal[place], of_result[place])
                added.append(tuple(total + more for total, more in zip(totals[place], own)))
            totals = tuple(added)
        return totals

    start = tuple((jnp.zeros((tokens, block.size), jnp.float32),) * 3 for block in columns)
    totals = jax.lax.fori_loop(0, steps, step, start)
    for block, of_block in zip(columns, totals):
        for place, total in enumerate(of_block):
            sums[place, block] = jnp.sum(total, axis=0)


def _columns(units: int) -> list[Any]:
    return [pl.ds(start, _width(units)) for start in range(0, units, _width(units))]


def _keeps(shape: Any, units: int, tokens: int, start: jax.Array, keys) -> list[tuple[Any, ...]]:
    """Returns which numbers of tokens from `start` and from half a row later dropout keeps, by block of columns."""
    blocks = _columns(units)
    if not shape.drops:
        return [(None, None)] * len(blocks)
    width = _width(units)
    drawn = [draws(units, start, block.start, (tokens, width), keys[0], keys[1]) for block in blocks]
    return [tuple(bits < shape.kept for bits in halves) for halves in drawn]


def _drop(shape: Any, values: jax.Array, keeps: Any) -> jax.Array:
    if not shape.drops:
        return values
    scaled = (values.astype(jnp.float32) * shape.rescale).astype(values.dtype)
    return jnp.where(keeps, scaled, jnp.zeros_like(scaled))


def _mean(blocks: list[jax.Array]) -> jax.Array:
    """Returns the mean of each token, whose units lie in blocks of columns."""
    count = sum(block.shape[1] for block in blocks)
    return sum(jnp.sum(block, axis=1, keepdims=True) for block in blocks) * (1 / count)  # type: ignore[return-value]


def _normalize(shape: Any, blocks: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Returns tokens with mean 0 and variance 1, in float32, and 1 / their deviations before."""
    wide = [block.astype(jnp.float32) for block in blocks]
    mean = _mean(wide)
    centred = [block - mean for block in wide]
    inverse = jax.lax.rsqrt(_mean([block * block for block in centred]) + shape.epsilon)
    return [block * inverse for block in centred], inverse
