# SPDX-License-Identifier: Apache-2.0
"""Embedding tables: lookups, and how their gradients are added up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from bert_jax.devices.sharding import MESH_AXES, num_row_shards, row_axes
from bert_jax.model.derivatives import with_rule
from bert_jax.model.product import matmul_precision


def copy_to_rows(table: jax.Array, num_rows: int, gradient_dtype: str = "float32") -> jax.Array:
    """Returns the table as [D, V, H]: one copy for each of the D devices that rows are sharded over; 1 without a mesh.

    The table is used twice, by the embeddings and by the output layer. Each device sums both gradients in its own copy,
    and one all-reduce, in `gradient_dtype`, adds up the copies. Without copies there would be an all-reduce per use.
    """
    copies = num_row_shards()
    if copies == 1 or num_rows % copies:
        return jnp.asarray(table)[None]  # parameters may be NumPy's
    spread = PartitionSpec(row_axes(), MESH_AXES["vocab"])
    return jax.lax.with_sharding_constraint(_copies(copies, gradient_dtype, table), spread)


def _copies_forward(count: int, gradient_dtype: str, table: jax.Array) -> tuple[jax.Array, None]:
    return _copies(count, gradient_dtype, table), None


def _copies_backward(
    count: int, gradient_dtype: str, saved: None, gradient: jax.Array
) -> tuple[jax.Array]:
    narrow = gradient.astype(gradient_dtype)
    total = jax.lax.reduce(
        narrow, jnp.zeros((), narrow.dtype), jax.lax.add, (0,)
    )  # jnp.sum would accumulate in float32
    return (total.astype(gradient.dtype),)


@with_rule(_copies_forward, _copies_backward, static=2)
def _copies(count: int, gradient_dtype: str, table: jax.Array) -> jax.Array:
    return jnp.broadcast_to(table, (count, *table.shape))


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


@with_rule(_look_up_forward, _look_up_backward, static=2)
def look_up(compute_dtype: str, precision: str, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the rows `ids` [...] of a small table [V, H], as [..., H].

    Away from a CPU the table's gradient is a product with one-hot rows, in the compute dtype and summed in float32. A
    scatter would add one row after the other, and on a GPU in an order that changes from run to run. `precision` is
    `ModelConfig.matmul_precision`.
    """
    return jnp.take(table, ids, axis=0)


def look_up_words(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the rows `ids` [R] int of a large table [V, H], as [R, H].

    The table's gradient is a scatter. On a GPU that adds up in an order that changes from run to run; told not to, XLA
    sorts every number of the gradient by its place, which took a quarter of BERT-Base's step (docs/benchmarks.md). So
    there the rows are sorted by id and added up by id, in an order that is always the same.
    """
    return _look_up_words(table, jnp.asarray(ids))


def _look_up_words_forward(
    table: jax.Array, ids: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _look_up_words(table, ids), (table, ids)


def _look_up_words_backward(
    saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    table, ids = saved
    by_scatter = functools.partial(_sum_by_scatter, len(table))
    in_order = functools.partial(_sum_in_order, len(table))
    of_table = jax.lax.platform_dependent(ids, gradient, cuda=in_order, default=by_scatter)
    return of_table, np.zeros(ids.shape, jax.dtypes.float0)


@with_rule(_look_up_words_forward, _look_up_words_backward)
def _look_up_words(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0)


def take_rows(hidden: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the vectors [B, P, H] at `positions` [B, P] int of the rows of `hidden` [B, L, H].

    Several positions may be the same. On a GPU the gradient is a product with one-hot rows, for the reason that
    `look_up_words` gives; elsewhere a scatter.
    """
    return _take_rows(jnp.asarray(hidden), jnp.asarray(positions))


def _take_rows_forward(
    hidden: jax.Array, positions: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _take_rows(hidden, positions), (hidden, positions)


def _take_rows_backward(
    saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    hidden, positions = saved

    def by_scatter(positions: jax.Array, gradient: jax.Array) -> jax.Array:
        zeros = jnp.zeros(hidden.shape, gradient.dtype)
        return jax.vmap(lambda row, places, given: row.at[places].add(given))(
            zeros, positions, gradient
        )

    def by_product(positions: jax.Array, gradient: jax.Array) -> jax.Array:
        one_hot = jax.nn.one_hot(positions, hidden.shape[1], dtype=gradient.dtype)
        # sums, and no more rounding
        precision = jax.lax.Precision.HIGHEST if gradient.dtype == jnp.float32 else None
        return jnp.einsum("bpl,bph->blh", one_hot, gradient, precision=precision)

    of_hidden = jax.lax.platform_dependent(positions, gradient, cuda=by_product, default=by_scatter)
    return of_hidden, np.zeros(positions.shape, jax.dtypes.float0)


@with_rule(_take_rows_forward, _take_rows_backward)
def _take_rows(hidden: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.take_along_axis(hidden, positions[..., None], axis=1)


def _sum_in_order(size: int, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Like `_sum_by_scatter`, in an order that the ids alone decide."""
    if not len(ids):
        return jnp.zeros((size, rows.shape[1]), rows.dtype)
    order = jnp.argsort(ids)
    ids, rows = ids[order], rows[order]
    is_other = ids[1:] != ids[:-1]
    edge = jnp.ones(1, bool)
    begins = jnp.concatenate([edge, is_other])
    ends = jnp.concatenate([is_other, edge])

    def add(
        before: tuple[jax.Array, jax.Array], after: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        (began, summed), (begin, more) = before, after
        return began | begin, jnp.where(begin, more, summed + more)

    _, sums = jax.lax.associative_scan(add, (begins[:, None], rows))
    # The last row of an id holds its sum. The others go to places of their own behind the table, which are dropped:
    # of places that are all different, XLA knows that the order does not matter.
    places = jnp.where(ends, ids, size + jnp.arange(len(ids)))
    return (
        jnp.zeros((size, rows.shape[1]), rows.dtype)
        .at[places]
        .set(sums, mode="drop", unique_indices=True)
    )


def _sum_by_scatter(size: int, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns [size, H]: at each index the sum of the rows [R, H] with that id [R]."""
    return jnp.zeros((size, rows.shape[1]), rows.dtype).at[ids].add(rows)


def _sum_by_product(
    compute_dtype: str, precision: str, size: int, ids: jax.Array, rows: jax.Array
) -> jax.Array:
    """Like `_sum_by_scatter`, with rows rounded to the compute dtype."""
    one_hot = jax.nn.one_hot(ids, size, dtype=compute_dtype)
    how = {"preferred_element_type": rows.dtype, "precision": matmul_precision(precision)}
    return jnp.einsum("rv,rh->vh", one_hot, rows.astype(compute_dtype), **how)  # type: ignore[return-value]
