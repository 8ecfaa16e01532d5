# SPDX-License-Identifier: Apache-2.0
"""Random keys: each follows from a seed and a purpose, so that no two purposes share a key.

The order of the data is drawn by NumPy (`data.pipeline`, `tasks.batches`), independently of these keys.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from bert_jax.errors import InputError

# The number that is folded into the seed's key. Never change one: every seed would then give other results.
PURPOSES = {
    "parameters": 0,  # initial parameters, and heads that a loaded model lacks
    "dropout": 1,  # further folded with the step and the microbatch
    "masking": 2,  # further folded with the epoch, the sequence and the token
    "causal_rows": 3,  # further folded as for masking
}


def root_key(seed: int, purpose: str) -> jax.Array:
    """Returns the root key of a purpose, one of `PURPOSES`.

    Always threefry, whatever JAX's default generator: its bits do not depend on vmap, shape or sharding.

    Raises: InputError if JAX is told to draw other bits of threefry keys, as it did before version 0.5.
    """
    if not getattr(jax.config, "jax_threefry_partitionable", True):
        raise InputError(
            "JAX_THREEFRY_PARTITIONABLE is off, with which every seed draws other numbers, on each mesh others; "
            "leave it on"
        )
    key = jax.random.key(seed, impl="threefry2x32")  # of the lower 32 bits
    if seed >= 2**32:
        key = jax.random.fold_in(key, seed >> 32)
    return jax.random.fold_in(key, PURPOSES[purpose])


def bits_of_rows(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns random bits, uint32 of `shape`, whose first axis is the rows of a batch.

    These are `jax.random.bits`. Inside a `shard_map` over "data" they are this shard's part of the bits of all
    rows, so the bits of a row do not depend on how the rows are divided. Inside `rows_of_microbatch` they are the bits
    of its rows in the whole batch.
    """
    if (microbatch := _MICROBATCH.get()) is not None:
        return _bits_of_some_rows(key, shape, *microbatch)
    if not _in_shard_map():
        return jax.random.bits(key, shape, jnp.uint32)
    # The generator is a function of the key and of the position in the array, a number of 64 bits.
    size = math.prod(shape)
    assert size < 2**32, f"{shape} are more than 2^32 numbers"
    shard = jax.lax.axis_index("data").astype(jnp.uint32)
    low = (shard * (size >> 16)) << 16
    high = (shard * (size >> 16)) >> 16
    start = low + shard * (size & 0xFFFF)
    high += start < low
    # Counted in the shape of the result: an array of another shape would be copied, on TPUs.
    strides = [jnp.uint32(math.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    count = sum((jax.lax.broadcasted_iota(jnp.uint32, shape, k) * s for k, s in enumerate(strides)), start)
    return _bits_at(key, high + (count < start).astype(jnp.uint32), count)


# Of a microbatch: its number, and how many there are.
_MICROBATCH = contextvars.ContextVar[tuple[jax.Array, int] | None]("microbatch", default=None)


@contextlib.contextmanager
def rows_of_microbatch(index: jax.Array, count: int) -> Iterator[None]:
    """Within it a batch is the rows index, index + count, ... of a larger one, and they draw the same bits as there."""
    token = _MICROBATCH.set((index, count))
    try:
        yield
    finally:
        _MICROBATCH.reset(token)


def _bits_of_some_rows(key: jax.Array, shape: tuple[int, ...], index: jax.Array, count: int) -> jax.Array:
    size = math.prod(shape[1:])  # of a row, whose first number is at row x size in the whole array, in 64 bits
    row = jnp.arange(shape[0], dtype=jnp.uint32)
    row += jax.lax.axis_index("data").astype(jnp.uint32) * shape[0] if _in_shard_map() else 0
    row = row * count + index.astype(jnp.uint32)
    (row_high, row_low), (size_high, size_low) = (row >> 16, row & 0xFFFF), (size >> 16, size & 0xFFFF)
    middle = [row_high * size_low, row_low * size_high]
    carry = (row_low * size_low >> 16) + sum(term & 0xFFFF for term in middle)
    high = row_high * size_high + sum(term >> 16 for term in middle) + (carry >> 16)
    start = (row * jnp.uint32(size))[:, None]
    low = start + jnp.arange(size, dtype=jnp.uint32)
    return _bits_at(key, high[:, None] + (low < start).astype(jnp.uint32), low).reshape(shape)


def _bits_at(key: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """Returns the bits at 64-bit positions of the array that the generator fills."""
    first, second = jax.random.key_data(key)
    bits = threefry2x32_p.bind(first, second, high, low)
    return bits[0] ^ bits[1]


def _in_shard_map() -> bool:
    return "data" in jax.sharding.get_abstract_mesh().manual_axes
