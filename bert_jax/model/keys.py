# SPDX-License-Identifier: Apache-2.0
"""Random keys: each follows from a seed and a purpose, so that no two purposes share a key.

The order of the data is drawn by NumPy (`data.pipeline`, `tasks.batches`), independently of these keys.
"""

import math

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

# The number that is folded into the seed's key. Never change one: every seed would then give other results.
PURPOSES = {
    "parameters": 0,  # initial parameters, and those of heads that a loaded model lacks
    "dropout": 1,  # further folded with the step and the microbatch
    "masking": 2,  # further folded with the epoch, the sequence and the token
}


def root_key(seed: int, purpose: str) -> jax.Array:
    """Returns the root key of a purpose, one of `PURPOSES`.

    Always threefry, whatever JAX's default generator: its bits do not depend on vmap, shape or sharding.
    """
    key = jax.random.key(seed, impl="threefry2x32")  # of the lower 32 bits
    if seed >= 2**32:
        key = jax.random.fold_in(key, seed >> 32)
    return jax.random.fold_in(key, PURPOSES[purpose])


def bits_of_rows(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns random bits, uint32 of `shape`, whose first axis is the rows of a batch.

    These are `jax.random.bits`. Inside a `shard_map` over "data" they are the part of this place along the axis, of the
    bits of all rows: what is drawn for a row does not depend on how the rows are divided.
    """
    if not _in_shard_map():
        return jax.random.bits(key, shape, jnp.uint32)
    # The generator is a function of the key and of the place in the array, a number of 64 bits.
    size = math.prod(shape)
    assert size < 2**32, f"{shape} are more than 2^32 numbers"
    place = jax.lax.axis_index("data").astype(jnp.uint32)
    low = (place * (size >> 16)) << 16
    high = (place * (size >> 16)) >> 16
    start = low + place * (size & 0xFFFF)
    high += start < low
    # Counted in the shape of the result: an array of another shape would be copied, on TPUs.
    strides = [jnp.uint32(math.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    count = sum((jax.lax.broadcasted_iota(jnp.uint32, shape, k) * s for k, s in enumerate(strides)), start)
    first, second = jax.random.key_data(key)
    bits = threefry2x32_p.bind(first, second, high + (count < start).astype(jnp.uint32), count)
    return bits[0] ^ bits[1]


def _in_shard_map() -> bool:
    return "data" in jax.sharding.get_abstract_mesh().manual_axes
