# SPDX-License-Identifier: Apache-2.0
"""Random keys: each follows from a seed and a purpose, so that no two purposes share a key.

The order of the data is drawn by NumPy (`batches.order`), independently of these keys.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.errors import InputError

# The number that is folded into the seed's key. Never change one: every seed would then give other results.
PURPOSES = {
    "parameters": 0,  # initial parameters, and heads that a loaded model lacks
    "dropout": 1,  # further folded with the step, the layer and the row
    "masking": 2,  # further folded with the epoch, the sequence and the token
    "causal_rows": 3,  # further folded as for masking
    "replacing": 4,  # further folded as for masking
}


def root_key(seed: int, purpose: str) -> jax.Array:
    """Returns the root key of a purpose, one of `PURPOSES`.

    Always threefry, whatever JAX's default generator: its bits do not depend on vmap, shape or sharding.

    Raises: InputError if JAX is told to draw other bits of threefry keys, as it did before version 0.5.
    """
    if not getattr(jax.config, "jax_threefry_partitionable", True):
        raise InputError(
            "JAX_THREEFRY_PARTITIONABLE is off, with which seeds draw other numbers; leave it on"
        )
    key = jax.random.key(seed, impl="threefry2x32")  # of the lower 32 bits
    if seed >= 2**32:
        key = jax.random.fold_in(key, seed >> 32)
    return jax.random.fold_in(key, PURPOSES[purpose])


def bits_of_rows(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns random bits, uint32 of `shape`, whose first axis is the rows of a batch.

    Each row has a key of its own, made of `key` and the row's number. So the bits of a row do not depend on how rows
    are divided over devices or microbatches, as long as `rows_numbered` says which rows they are.
    """
    first, step = _ROWS.get()
    numbers = first + step * jnp.arange(shape[0], dtype=jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    return jax.vmap(lambda key: jax.random.bits(key, shape[1:], jnp.uint32))(keys)


# The number of the first row of a batch, and the distance between its rows.
_ROWS: contextvars.ContextVar[tuple[Any, Any]] = contextvars.ContextVar("rows", default=(0, 1))


@contextlib.contextmanager
def rows_numbered(first: jax.Array | int, step: int = 1) -> Iterator[None]:
    """Within it a batch is the rows first, first + step, ... of a larger one, and they draw the bits of those rows.

    The larger one may itself be numbered so, as a microbatch of the rows of one device is.
    """
    before, distance = _ROWS.get()
    token = _ROWS.set((before + distance * jnp.asarray(first, jnp.uint32), distance * step))
    try:
        yield
    finally:
        _ROWS.reset(token)
