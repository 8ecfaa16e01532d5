# SPDX-License-Identifier: Apache-2.0
"""Fused attention: kernels for TPUs and GPUs, which write no scores to the memory of the device.

The backward pass recomputes scores and probabilities from query and key, and draws the same dropout again. So the
memory and traffic of a layer grow with the length of a row, not with its square.

Dropout is a hash of a score's position and of a key for each row and head. It is the same in both passes, on every
mesh and on every platform. Elsewhere, and for rows that no kernel takes, `attention.attend` computes the same numbers.
The kernels are tested against that.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from bert_jax.devices.sharding import MESH_AXES, num_row_shards, row_axes
from bert_jax.model.attention import LONGEST_WHOLE, SAVED, attend, attention_mask
from bert_jax.model.attention_kernels import AttentionShape, keeps
from bert_jax.model.derivatives import with_rule
from bert_jax.model.keys import bits_of_rows
from bert_jax.model.long_rows import in_blocks, in_windows, pays_in_windows
from bert_jax.model.score_bias import Biases, bias_of_scores
from bert_jax.settings.model import ModelConfig

Gradients: TypeAlias = tuple[jax.Array, ...]

# by their names; JAX's name of the platform is "tpu" for the first two
_MODULES = {
    "tpu": "fused_attention_tpu",
    "splash": "splash_attention_tpu",
    "cuda": "fused_attention_gpu",
}
# Their backward passes read the context, and what the forward pass knows of the softmax of each query.
_WITH_STATISTICS = ("splash", "cuda")


@functools.cache
def kernels() -> dict[str, ModuleType]:
    """Returns the kernels by name. Without the part of Pallas that one needs, its platform computes by `attend`."""
    there = {}
    for name, module in _MODULES.items():
        try:
            there[name] = importlib.import_module(f"bert_jax.model.{module}")
        except ImportError as error:
            warnings.warn(
                f"attention=fused has no kernel {name!r} with this JAX ({error}); use plain",
                stacklevel=2,
            )
    return there


def _fitting(shape: AttentionShape, array: jax.Array, interpret: str = "") -> list[str]:
    """Returns the names of the kernels that support `array`, at most one of a platform; of tests, the one they run."""
    if interpret:
        return [interpret]
    return [name for name, kernel in kernels().items() if kernel.fits(shape, array)]


def attend_by_ids(
    config: ModelConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ids: jax.Array,
    is_global: bool,
    dropout_key: jax.Array | None,
    biases: Biases | None = None,
) -> jax.Array:
    """Returns the context [B, L, H] of a layer without storing the scores of a row: by a kernel, in blocks or windows.

    query, key and value are [B, L, H], and ids [B, L] the sequence ids. `is_global` says whether the layer sees whole
    sequences and not windows. Without `dropout_key` there is no dropout. `biases` are those of scores.
    """
    return fused_attention(
        query,
        key,
        value,
        ids,
        num_heads=config.num_heads,
        causal=config.causal,
        rate=0.0 if dropout_key is None else config.attention_dropout_rate,
        dropout_key=dropout_key,
        precision=config.matmul_precision,
        window=0 if is_global else config.window,
        use_kernels=config.has_kernels,
        biases=biases,
    )


def fused_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sequence_ids: jax.Array,
    *,
    num_heads: int,
    causal: bool = False,
    rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    precision: str = "default",
    interpret: str = "",
    window: int = 0,
    use_kernels: bool = True,
    biases: Biases | None = None,
) -> jax.Array:
    """Returns the context of all heads, [B, L, H] in the dtype of `value`; query, key and value have that shape.

    sequence_ids [B, L]: as `attention_mask` takes them, and `causal` too. What padding sees is not the same on all
        platforms, so a loss must not read it.
    rate, dropout_key: the share of probabilities that is set to 0, exact to 1 / 131,072, and the random key.
    precision: as in `product`.
    interpret: the name of one of `kernels` runs it anywhere, slowly, for tests.
    window: the tokens to each side that a query sees; 0 is all. Kernels take it without dropout.
    use_kernels: False computes without a kernel too, as biases need it.
    biases: of scores.
    """
    rows, _, hidden = query.shape
    shape = AttentionShape(
        num_heads, hidden // num_heads, causal, round((1 - rate) * 2**16), precision, window
    )
    keys = jnp.zeros((rows, num_heads, 2), jnp.int32)
    if shape.drops:
        assert dropout_key is not None, f"dropout of {rate} needs a key"
        keys = jax.lax.bitcast_convert_type(bits_of_rows(dropout_key, keys.shape), jnp.int32)
    arrays = (query, key, value, sequence_ids.astype(jnp.int32), keys)
    if not use_kernels or (window and not _fitting(shape, query, interpret)):
        plain = jax.checkpoint(functools.partial(_plain, shape))
        return checkpoint_name(plain(*arrays, biases=biases), SAVED)
    mesh = jax.sharding.get_abstract_mesh()
    tensor = MESH_AXES["heads"]
    divided = num_row_shards() * mesh.shape.get(tensor, 1)
    if mesh.empty:
        alone = interpret or jax.device_count() == 1
    else:
        # a user's mesh may have no such axis
        alone = (divided if tensor in mesh.shape else mesh.size) == 1
    if alone:
        return _attention(shape, interpret, *arrays)
    if tensor not in mesh.shape or rows % num_row_shards():
        return _plain(shape, *arrays)  # a kernel can only be sharded by rows and heads
    of_device = shape._replace(num_heads=num_heads // mesh.shape[tensor])
    columns, ids, heads = (
        PartitionSpec(row_axes(), *rest) for rest in ((None, tensor), (None,), (tensor, None))
    )
    over_mesh = jax.shard_map(
        functools.partial(_attention, of_device, interpret),
        in_specs=(columns, columns, columns, ids, heads),
        out_specs=columns,
        check_vma=False,  # Pallas does not declare over which axes its result varies
    )
    return over_mesh(*arrays)


def _attention_forward(
    shape: AttentionShape, interpret: str, *arrays: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the context, and what the backward pass reads: the context, the statistics of softmax, the arrays.

    The statistics [B, N, L] are those of `_WITH_STATISTICS`; other platforms have none, and XLA removes the zeros in
    their place.
    """
    with_statistics = set(_WITH_STATISTICS) & set(_fitting(shape, arrays[0], interpret))
    missing = (*arrays[4].shape[:2], arrays[0].shape[1] if with_statistics else 0)

    def without(compute: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, jax.Array]]:
        return lambda *arrays: (compute(*arrays), jnp.zeros(missing, jnp.float32))

    context, statistics = _by_platform(
        shape,
        interpret,
        arrays[0],
        arrays,
        tpu=without(lambda *arrays: kernels()["tpu"].forward(shape, bool(interpret), *arrays)),
        splash=lambda *arrays: kernels()["splash"].forward(shape, bool(interpret), *arrays),
        cuda=lambda *arrays: kernels()["cuda"].forward(shape, bool(interpret), *arrays),
        default=without(functools.partial(_plain, shape)),
    )
    # Rematerialization "dots" keeps both, or the backward pass would run the forward kernel again.
    context, statistics = checkpoint_name(context, SAVED), checkpoint_name(statistics, SAVED)
    return context, (context, statistics, *arrays)


def _attention_backward(
    shape: AttentionShape, interpret: str, saved: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array | np.ndarray, ...]:
    def plain(
        gradient: jax.Array, context: jax.Array, statistics: jax.Array, *arrays: jax.Array
    ) -> Gradients:
        _, pull_back = jax.vjp(lambda *floats: _plain(shape, *floats, *arrays[3:]), *arrays[:3])
        return pull_back(gradient)

    def on_tpu(
        gradient: jax.Array, context: jax.Array, statistics: jax.Array, *arrays: jax.Array
    ) -> Gradients:
        return kernels()["tpu"].backward(shape, bool(interpret), gradient, *arrays)

    gradients = _by_platform(
        shape,
        interpret,
        gradient,
        (gradient, *saved),
        tpu=on_tpu,
        splash=lambda *arrays: kernels()["splash"].backward(shape, bool(interpret), *arrays),
        cuda=lambda *arrays: kernels()["cuda"].backward(shape, bool(interpret), *arrays),
        default=plain,
    )
    return (*gradients, *(np.zeros(array.shape, jax.dtypes.float0) for array in saved[5:]))


@with_rule(_attention_forward, _attention_backward, static=2)
def _attention(shape: AttentionShape, interpret: str, *arrays: jax.Array) -> jax.Array:
    return _attention_forward(shape, interpret, *arrays)[0]


def _by_platform(
    shape: AttentionShape,
    interpret: str,
    like: jax.Array,
    arrays: tuple[jax.Array, ...],
    **functions: Callable,
) -> Any:
    """Returns the result of the function for the platform that is lowered for, if its kernel supports `like`."""
    if interpret:
        return functions[interpret](*arrays)
    fitting = {
        "tpu" if name == "splash" else name: functions[name] for name in _fitting(shape, like)
    }
    if not fitting:
        return functions["default"](*arrays)
    return jax.lax.platform_dependent(*arrays, default=functions["default"], **fitting)


def _plain(shape: AttentionShape, *arrays: jax.Array, biases: Biases | None = None) -> jax.Array:
    """Computes the result of the kernels with `attend`, where rows are long in blocks."""
    query, key, value, sequence_ids, keys = arrays
    size = query.shape[1]
    if pays_in_windows(shape, size):
        return in_windows(shape, *arrays, biases=biases)
    if isinstance(size, int) and size > LONGEST_WHOLE and not shape.window:
        return in_blocks(shape, *arrays, biases=biases)

    def drop(probabilities: jax.Array) -> jax.Array:
        kept = keeps(shape, size, keys[:, :, 0, None, None], keys[:, :, 1, None, None])
        return jnp.where(kept, probabilities * shape.rescale, 0)

    heads = (*query.shape[:2], shape.num_heads, shape.head_size)
    query, key, value = (array.reshape(heads) for array in (query, key, value))
    attends = attention_mask(sequence_ids, shape.causal, shape.window)
    dropped = drop if shape.drops else (lambda probabilities: probabilities)
    bias = None if biases is None else bias_of_scores(biases, query, key, precision=shape.precision)
    context, _ = attend(query, key, value, attends, dropped, shape.precision, bias)
    return context.reshape(arrays[2].shape)
