# SPDX-License-Identifier: Apache-2.0
"""Embedding tables: lookups, and how their gradients are added up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from bert_jax.devices.sharding import MESH_AXES, num_row_shards, row_axes
from bert_jax.model.product import matmul_precision


def copy_to_rows(table: jax.Array, num_rows: int, gradient_dtype: str = "float32") -> jax.Array:
    """Returns the table as [D, V, H]: one copy for each of the D devices that rows are sharded over; 1 without a mesh.

    The table is used twice, by the embeddings and by the output layer. Each device sums both gradients in its own copy,
    and one all-reduce, in `gradient_dtype`, adds up the copies. Without copies there would be an all-reduce per use.
    """
    copies = num_row_shards()
    if copies == 1 or num_rows % copies:
        return table[None]
    spread = PartitionSpec(row_axes(), MESH_AXES["vocab"])
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def look_up(compute_dtype: str, precision: str, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the rows `ids` [...] of a small table [V, H], as [..., H].

    Away from a CPU the table's gradient is a product with one-hot rows, in the compute dtype and summed in float32. A
    scatter would add one row after the other, and on a GPU in an order that changes from run to run. `precision` is
    `ModelConfig.matmul_precision`.
    """
    return jnp.take(table, ids, axis=0)


def _look_up_forward(
    compute_dtype: str, precision: str, table: jax.Array, ids: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return look_up(compute_dtype, precision, table, ids), (table, ids)


def _look_up_backward(
    compute_dtype: str, precision: str, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    table, ids = saved
    by_product = functools.partial(_sum_by_product, compute_dtype, precision, len(table))
    by_scatter = functools.partial(_sum_by_scatter, len(table))
    rows = (ids.reshape(-1), gradient.reshape(-1, table.shape[1]))
    of_table = jax.lax.platform_dependent(*rows, cpu=by_scatter, default=by_product)
    return of_table, np.zeros(ids.shape, jax.dtypes.float0)


look_up.defvjp(_look_up_forward, _look_up_backward)


def _sum_by_scatter(size: int, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns [size, H]: at each index the sum of the rows [R, H] with that id [R]."""
    return jnp.zeros((size, rows.shape[1]), rows.dtype).at[ids].add(rows)


def _sum_by_product(compute_dtype: str, precision: str, size: int, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Like `_sum_by_scatter`, with rows rounded to the compute dtype."""
    one_hot = jax.nn.one_hot(ids, size, dtype=compute_dtype)
    how = {"preferred_element_type": rows.dtype, "precision": matmul_precision(precision)}
    return jnp.einsum("rv,rh->vh", one_hot, rows.astype(compute_dtype), **how)  # type: ignore[return-value]
