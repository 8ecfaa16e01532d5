# SPDX-License-Identifier: Apache-2.0
"""Sharding: the device mesh, and one table from parameter paths to mesh axes.

The mesh has three axes: "data" (rows divided, parameters replicated), "fsdp" (rows and parameters
divided) and "tensor" (heads, feed-forward and vocabulary divided). One device is a mesh of 1 x 1 x 1,
so the same program runs on any number of devices.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from bert_jax.batch import PyTree
from bert_jax.errors import InputError
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import MeshConfig
from bert_jax.settings.rules import nearest_multiples

Value = TypeVar("Value")
Devices: TypeAlias = Sequence[Any]  # of `jax.Device`, which type checkers take for a variable

ROW_AXES = ("data", "fsdp")  # the axes over which the rows of a batch are divided

# Logical axis -> mesh axis. None means replicated.
MESH_AXES: dict[str | None, str | None] = {
    "vocab": "tensor",
    "heads": "tensor",  # num_heads x head_size
    "mlp": "tensor",
    "embed": "fsdp",
    "layers": None,
    None: None,
}

# Parameter path -> logical axes. The first match of the whole path wins.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(encoder/embeddings/word|mlm/words)/embedding", ("vocab", "embed")),
    (r"encoder/embeddings/((position|type)/embedding|project/kernel)", (None, "embed")),
    (r"encoder/embeddings/(norm/scale|norm/bias|project/bias)", (None,)),
    (r"encoder/score_bias/embedding", (None, None)),
    (r"encoder/distances/embedding", (None, "embed")),
    (r"encoder/distances/norm/(scale|bias)", (None,)),
    (
        r"encoder/layers/attention/(distance_)?(query|key|value)/kernel",
        ("layers", "embed", "heads"),
    ),
    (r"encoder/layers/attention/(distance_)?(query|key|value)/bias", ("layers", "heads")),
    (r"encoder/layers/attention/output/kernel", ("layers", "heads", "embed")),
    (r"encoder/layers/mlp/(intermediate|gate)/kernel", ("layers", "embed", "mlp")),
    (r"encoder/layers/mlp/(intermediate|gate)/bias", ("layers", "mlp")),
    (r"encoder/layers/mlp/output/kernel", ("layers", "mlp", "embed")),
    (r"encoder/layers/(attention|mlp)/(output/bias|norm/scale|norm/bias)", ("layers", None)),
    (r"encoder/pooler/kernel", ("embed", None)),
    (r"encoder/pooler/(bias|norm/scale|norm/bias)", (None,)),
    (r"(mlm|discriminator)/(transform|output)/kernel", ("embed", None)),
    (r"mlm/second/kernel", (None, "embed")),
    (r"(mlm|discriminator)/(transform/bias|norm/scale|norm/bias|output/bias)", (None,)),
    (r"mlm/output_bias", ("vocab",)),
    (r"(next_sentence|classifier|span)/kernel", ("embed", None)),
    (r"(next_sentence|classifier|span)/bias", (None,)),
    (r"probe/.*/kernel", (None, None)),
    (r"probe/(.*/bias|layer_weights)", (None,)),
    (r"(?!encoder/).*", ()),  # of a user's own head: whole on every device
)


def make_mesh(config: MeshConfig, devices: Devices | None = None) -> Mesh:
    """Returns the mesh ("data", "fsdp", "tensor") over all devices.

    Raises: InputError if the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(config, len(devices))
    axes = tuple(sizes)
    types = (AxisType.Auto,) * 3
    told = len({getattr(device, "slice_index", 0) for device in devices})
    slices = config.dcn or told
    if told not in (1, slices):
        raise InputError(
            f"mesh.dcn {slices} is not the {told} slices that the devices form; 0 takes these"
        )
    if sizes["data"] % slices:
        near = nearest_multiples(sizes["data"], slices)
        raise InputError(
            f"mesh.data {sizes['data']} is not divisible by the {slices} slices; use {near}"
        )
    # in the order of the devices, so that each requested slice is a contiguous range of them
    if told == 1:
        return jax.make_mesh(tuple(sizes.values()), axes, axis_types=types, devices=devices)
    of_slice = (sizes["data"] // slices, sizes["fsdp"], sizes["tensor"])
    return Mesh(
        mesh_utils.create_hybrid_device_mesh(of_slice, (slices, 1, 1), devices),
        axes,
        axis_types=types,
    )


@contextlib.contextmanager
def in_no_mesh() -> Iterator[None]:
    """Runs the block, or the decorated function, as if its caller had set no mesh."""
    with jax.set_mesh(Mesh(np.empty((), object), ())):
        yield


def mesh_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """Returns the number of devices along each axis of the mesh; -1 becomes the number of remaining devices.

    Raises: InputError if the sizes do not multiply to the number of devices.
    """
    sizes = {"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor}
    known = math.prod(size for size in sizes.values() if size != -1)
    filled = {
        axis: num_devices // max(known, 1) if size == -1 else size for axis, size in sizes.items()
    }
    if min(filled.values()) < 1 or math.prod(filled.values()) != num_devices:
        product = " x ".join(map(str, sizes.values()))
        raise InputError(
            f"mesh data x fsdp x tensor = {product} does not fit {num_devices} devices"
        )
    return filled


def is_data_alone(sizes: Mapping[str, int]) -> bool:
    """Returns whether a mesh of these sizes has several devices, all along "data"."""
    return math.prod(sizes.values()) == sizes["data"] > 1


def check_divisible(
    mesh: Mesh | AbstractMesh, model: ModelConfig, *batches: tuple[int, int]
) -> None:
    """Raises: InputError if a batch or the model does not divide evenly over the mesh.

    `batches` are pairs (rows of a global batch, number of its microbatches).
    """
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    for batch_size, accumulate in batches:
        if batch_size % (rows * accumulate):
            pieces = f"data x fsdp = {rows}" + (
                f" x train.accumulate = {accumulate}" if accumulate > 1 else ""
            )
            use = nearest_multiples(batch_size, rows * accumulate)
            raise InputError(f"batch_size {batch_size} is not divisible by {pieces}; use {use}")
    for name, size, axis in (
        ("model.num_heads", model.num_heads, "tensor"),
        ("model.num_key_heads", model.key_size // model.head_size, "tensor"),
        ("model.intermediate_size", model.intermediate_size, "tensor"),
        ("model padded vocabulary", model.padded_vocab_size, "tensor"),
        ("model.hidden_size", model.hidden_size, "fsdp"),
        ("model.embedding_size", model.embedding_width, "fsdp"),
    ):
        if size % mesh.shape[axis]:
            raise InputError(
                f"{name} {size} is not divisible by mesh.{axis} {mesh.shape[axis]}; use less of mesh.{axis}"
            )


def path_name(path: KeyPath) -> str:
    """Returns the path of a leaf in nested dicts as "a/b/c", without keys of other containers."""
    return "/".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))


def match_rule(rules: tuple[tuple[str, Value], ...], name: str) -> Value:
    """Returns the value of the first rule that matches the whole name. Raises: InputError if none does."""
    for pattern, value in rules:
        if re.fullmatch(pattern, _in_model(name)):
            return value
    raise InputError(f"parameter {name!r} matches no rule; add one to the table")


def is_stacked(name: str) -> bool:
    """Returns whether the parameter has a leading axis of layers; False if its path matches no rule."""
    own = _in_model(name)
    return any(re.fullmatch(pattern, own) and axes[:1] == ("layers",) for pattern, axes in RULES)


def _in_model(name: str) -> str:
    """Returns the path of a parameter in its model: a generator's is that of another model beside it."""
    return name.removeprefix("generator/")


def tree_shardings(mesh: Mesh | AbstractMesh, tree: PyTree, over_data: bool = False) -> PyTree:
    """Returns the sharding of every leaf of a tree of parameters or of a training state.

    A leaf below a dict is a parameter or one of its moments, and follows the rule of its path. Any other leaf,
    such as a step counter, is replicated. `over_data` also divides each leaf over the axis "data", where possible.
    """

    def place(path: tuple[object, ...], leaf: "jax.Array | jax.ShapeDtypeStruct") -> NamedSharding:
        name = path_name(path)
        axes = match_rule(RULES, name) if name else ()
        assert len(axes) in (0, len(leaf.shape)), f"rule {axes} for {name} of shape {leaf.shape}"
        spec = [MESH_AXES[axis] for axis in axes]
        if over_data and mesh.shape["data"] > 1:
            free = [
                dim
                for dim, (axis, size) in enumerate(zip(spec, leaf.shape))
                if size % mesh.shape["data"] == 0 and (axis is None or mesh.shape[axis] == 1)
            ]
            # The largest that divides, but the last one only if no other does: TPUs pad it to a multiple of 128.
            if free:
                rank = lambda dim: (dim != len(leaf.shape) - 1, leaf.shape[dim])  # noqa: E731
                spec[max(free, key=rank)] = "data"
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(place, tree)


def gathered(mesh: Mesh, params: PyTree) -> PyTree:
    """Returns parameters that are divided over "data" (ZeRO-1) as programs that do not know of it take them.

    All processes must call it. Other parameters are returned as they are.
    """
    specs = (
        getattr(getattr(leaf, "sharding", None), "spec", ()) for leaf in jax.tree.leaves(params)
    )
    if not any("data" in spec for spec in specs):
        return params
    # `_same` has a name at the module, so that JAX compiles it once for each tree, and not at each
    # call.
    return jax.jit(_same, out_shardings=tree_shardings(mesh, params))(params)


def _same(tree: PyTree) -> PyTree:
    return tree


def on_host(tree: PyTree) -> PyTree:
    """Returns a tree of arrays as whole numpy arrays. All processes must call it: arrays may be divided over them."""

    # and fetch, one after the other: all of them would take much memory
    def replicate(leaf: Any) -> Any:
        if getattr(leaf, "is_fully_addressable", True):
            return leaf
        return np.asarray(
            jax.jit(_same, out_shardings=replicated(leaf.sharding.mesh))(leaf).addressable_data(0)
        )

    return jax.device_get(jax.tree.map(replicate, tree))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: the leading axis over data x fsdp."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a value that every device holds."""
    return NamedSharding(mesh, PartitionSpec())


def row_axes() -> tuple[str, ...]:
    """Returns the axes over which rows are divided, of the mesh that is traced under; () without one.

    Inside a `shard_map` over them there are none: rows are those of one device. Nor are there in a user's own mesh: how
    rows are divided there is the user's choice.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_own = {*ROW_AXES, "tensor"} <= set(
        mesh.axis_names
    ) and AxisType.Explicit not in mesh.axis_types
    return tuple(axis for axis in ROW_AXES if axis not in mesh.manual_axes) if is_own else ()


def has_explicit_axes() -> bool:
    """Returns whether a mesh of a user's own is set whose shardings are part of types, as `jax.make_mesh` makes it."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def axis_of_rows(array: Any) -> Any:
    """Returns the axes of such a mesh over which the first axis of an array is divided; None if it is not."""
    spec = getattr(getattr(jax.typeof(array), "sharding", None), "spec", None)
    return spec[0] if spec else None


def num_row_shards() -> int:
    """Returns the number of devices among which the rows of an array are divided, when traced under a mesh."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in row_axes())


def constrain_rows(array: jax.Array) -> jax.Array:
    """Returns `array` with its leading axis divided over data x fsdp, when traced under a mesh."""
    if not row_axes():
        return array
    return jax.lax.with_sharding_constraint(array, PartitionSpec(row_axes()))


def whole(array: jax.Array) -> jax.Array:
    """Returns `array` replicated on all devices, when traced under a mesh."""
    if not row_axes():
        return array
    return jax.lax.with_sharding_constraint(array, PartitionSpec())
