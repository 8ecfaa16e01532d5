# SPDX-License-Identifier: Apache-2.0
"""Gradients of a batch in microbatches: each device adds up its own, and devices are added up once, at the end."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from bert_jax.batch import Batch, PyTree
from bert_jax.devices.sharding import is_data_alone, path_name
from bert_jax.model.keys import rows_numbered

_Rest = TypeVar("_Rest")
_NARROW = ("kernel", "embedding")  # the parameters whose gradients `model.gradient_dtype` is about


def sum_over_microbatches(
    function: Callable[..., tuple[_Rest, PyTree]],
    count: int,
    params: PyTree,
    batch: Batch,
    *shared: PyTree,
    gradient_dtype: str = "float32",
    shardings: PyTree = None,
) -> tuple[_Rest, PyTree]:
    """Returns the sum of function(params, microbatch, *shared) over `count` microbatches.

    The function returns (anything that can be added up, gradients of the parameters). Microbatch i takes rows i,
    i + count, ..., so that each device keeps its own rows and no data move. Each row draws the dropout that it draws in
    the whole batch.

    On a mesh of "data" alone each device runs its own microbatches and sums their results. Then devices are added
    up: gradients of matrices in `gradient_dtype`, and where `shardings` divide a gradient over "data", each device
    keeps its part alone. So communication does not grow with `count`. On other meshes the compiler adds up devices in
    each microbatch: it fails to divide the vocabulary over "tensor" inside a `shard_map` over "data" (jaxlib 0.10.2).
    """

    def local(params: PyTree, batch: Batch, *shared: PyTree) -> tuple[_Rest, PyTree]:
        if count == 1:
            return function(params, batch, *shared)

        def add(total: PyTree, piece: tuple[Batch, jax.Array]) -> tuple[PyTree, None]:
            rows, index = piece
            with rows_numbered(index, count):
                return jax.tree.map(jnp.add, total, function(params, rows, *shared)), None

        pieces = microbatches_of(batch, count)
        first = jax.tree.map(lambda leaf: leaf[0], pieces)
        shapes = jax.eval_shape(lambda rows: function(params, rows, *shared), first)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.scan(add, zeros, (pieces, jnp.arange(count)))[0]

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not is_data_alone(mesh.shape):
        return local(params, batch, *shared)
    replicated = PartitionSpec()
    divided = jax.tree.map(lambda leaf: replicated, params)
    if shardings is not None:
        divided = jax.tree.map(lambda sharding: sharding.spec, shardings)

    def of_device(params: PyTree, batch: Batch, *shared: PyTree) -> tuple[_Rest, PyTree]:
        with rows_numbered(jax.lax.axis_index("data") * jax.tree.leaves(batch)[0].shape[0]):
            rest, gradients = local(params, batch, *shared)

        def add_up(path: KeyPath, gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
            is_narrow = path_name(path).rpartition("/")[2] in _NARROW
            # rounded here, just before it is sent: microbatches were added up in float32
            narrow = gradient.astype(gradient_dtype) if is_narrow else gradient
            if "data" in spec:
                narrow = _own_part(narrow, spec.index("data"))
            else:
                narrow = jax.lax.psum(narrow, "data")
            return narrow.astype(gradient.dtype)

        return jax.lax.psum(rest, "data"), jax.tree_util.tree_map_with_path(
            add_up, gradients, divided
        )

    return jax.shard_map(
        of_device,
        in_specs=(replicated, PartitionSpec("data"), *(replicated for _ in shared)),
        out_specs=(replicated, divided),
        check_vma=False,  # Pallas does not declare over which axes its results vary
    )(params, batch, *shared)


def _own_part(array: jax.Array, axis: int) -> jax.Array:
    """Returns the sum of an array over "data". Each device keeps its part along `axis`.

    Long parts are padded to a multiple of 32 rows, four tiles of a TPU's memory. For others libtpu makes an all-reduce,
    which sends twice as much.
    """
    devices = jax.lax.axis_size("data")
    size = array.shape[axis] // devices
    missing = -size % 32 if size > 32 else 0
    parts = array.reshape(*array.shape[:axis], devices, size, *array.shape[axis + 1 :])
    parts = jnp.pad(parts, [(0, missing if dim == axis + 1 else 0) for dim in range(parts.ndim)])
    summed = jax.lax.psum_scatter(parts, "data", scatter_dimension=axis)
    return jax.lax.slice_in_dim(summed, 0, size, axis=axis)


def microbatches_of(batch: Batch, count: int) -> Batch:
    """Returns the microbatches of a batch, [count, rows of one, ...]."""
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1), batch)
