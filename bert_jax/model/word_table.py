# SPDX-License-Identifier: Apache-2.0
"""The word table on a mesh: each device reads its own copy, so that its gradient is reduced once per step."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bert_jax.devices.sharding import MESH_AXES, ROW_AXES


def copy_to_rows(table: jax.Array, num_rows: int, gradient_dtype: str = "float32") -> jax.Array:
    """Returns the table as [D, V, H]: one copy for each of the D devices that rows are sharded over; 1 without a mesh.

    The table is used twice, by the embeddings and by the output layer. Each device sums both gradients in its own copy,
    and one all-reduce, in `gradient_dtype`, adds up the copies. Without copies there would be an all-reduce per use.
    """
    mesh = jax.sharding.get_abstract_mesh()
    copies = 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in ROW_AXES)
    if copies == 1 or num_rows % copies:
        return table[None]
    spread = PartitionSpec(ROW_AXES, MESH_AXES["vocab"])
    return jax.lax.with_sharding_constraint(_copies(copies, gradient_dtype, table), spread)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _copies(count: int, gradient_dtype: str, table: jax.Array) -> jax.Array:
    return jnp.broadcast_to(table, (count, *table.shape))


def _copies_forward(count: int, gradient_dtype: str, table: jax.Array) -> tuple[jax.Array, None]:
    return _copies(count, gradient_dtype, table), None


def _copies_backward(count: int, gradient_dtype: str, saved: None, gradient: jax.Array) -> tuple[jax.Array]:
    narrow = gradient.astype(gradient_dtype)
    total = jax.lax.reduce(
        narrow, jnp.zeros((), narrow.dtype), jax.lax.add, (0,)
    )  # jnp.sum would accumulate in float32
    return (total.astype(gradient.dtype),)


_copies.defvjp(_copies_forward, _copies_backward)
