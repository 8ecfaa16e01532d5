# SPDX-License-Identifier: Apache-2.0
"""Fused residual connection: LN(hidden + dropout(product + bias)) in one kernel each way on NVIDIA GPUs.

The forward pass keeps the sum in front of layer norm, in the compute dtype, and nothing else. The backward pass
recomputes mean and deviation from it, and draws the same dropout again.

Dropout is the hash of fused attention, of a number's position in a row and of a key for each row. It is the same on
every mesh and platform. Where no kernel runs, the same function is computed plainly.
"""

import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from bert_jax.devices.sharding import MESH_AXES, num_row_shards, row_axes
from bert_jax.model import fused_residual_gpu
from bert_jax.model.attention_kernels import draws
from bert_jax.model.keys import bits_of_rows

Gradients: TypeAlias = tuple[jax.Array, ...]


class ResidualShape(NamedTuple):
    """The static parameters of a residual connection."""

    epsilon: float  # of layer norm
    kept: int  # numbers that dropout keeps, of 2^16

    @property
    def drops(self) -> bool:
        return self.kept < 2**16

    @property
    def rescale(self) -> float:
        """The factor of what dropout keeps."""
        return 2**16 / self.kept


def fused_residual(
    hidden: jax.Array,
    product: jax.Array,
    bias: jax.Array,
    norm_scale: jax.Array,
    norm_bias: jax.Array,
    *,
    epsilon: float,
    rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns layer norm of hidden + dropout(product + bias), [B, L, H] in the dtype of `hidden`.

    hidden, product [B, L, H]: in the compute dtype. The sum is rounded to it; layer norm is computed in float32.
    bias, norm_scale, norm_bias [H]: parameters, float32.
    rate, dropout_key: the share of numbers that is set to 0, exact to 1 / 131,072, and the random key.
    interpret: runs the kernel anywhere, slowly, for tests.
    """
    shape = ResidualShape(epsilon, round((1 - rate) * 2**16))
    keys = jnp.zeros((hidden.shape[0], 2), jnp.int32)
    if shape.drops:
        assert dropout_key is not None, f"dropout of {rate} needs a key"
        keys = jax.lax.bitcast_convert_type(bits_of_rows(dropout_key, keys.shape), jnp.int32)
    arrays = (hidden, product, bias, norm_scale, norm_bias, keys)
    mesh = jax.sharding.get_abstract_mesh()
    tensor = mesh.shape.get(MESH_AXES["heads"], 1)
    if (interpret or jax.device_count() == 1) if mesh.empty else num_row_shards() * tensor == 1:
        return _residual(shape, interpret, *arrays)
    if mesh.empty or tensor > 1 or hidden.shape[0] % num_row_shards():
        return _plain(shape, *arrays)  # a kernel can only be divided by rows
    by_rows, everywhere = PartitionSpec(row_axes()), PartitionSpec()
    over_mesh = jax.shard_map(
        functools.partial(_residual, shape, interpret),
        in_specs=(by_rows, by_rows, everywhere, everywhere, everywhere, by_rows),
        out_specs=by_rows,
        check_vma=False,  # Pallas does not declare over which axes its result varies
    )
    return over_mesh(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _residual(shape: ResidualShape, interpret: bool, *arrays: jax.Array) -> jax.Array:
    return _forward(shape, interpret, *arrays)[0]


def _forward(shape: ResidualShape, interpret: bool, *arrays: jax.Array) -> tuple[jax.Array, Gradients]:
    """Returns the result, and what the backward pass reads: the sum in front of layer norm, its scale, the keys."""
    kernel = functools.partial(fused_residual_gpu.forward, shape, interpret)
    result, summed = _by_platform(interpret, kernel, functools.partial(_plain_forward, shape), *arrays)
    return result, (summed, arrays[3], arrays[5])


def _backward(
    shape: ResidualShape, interpret: bool, saved: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array | np.ndarray, ...]:
    kernel = functools.partial(fused_residual_gpu.backward, shape, interpret)
    gradients = _by_platform(interpret, kernel, functools.partial(_plain_backward, shape), gradient, *saved)
    return (*gradients, np.zeros(saved[2].shape, jax.dtypes.float0))


_residual.defvjp(_forward, _backward)


def _by_platform(interpret: bool, kernel: Any, plain: Any, *arrays: jax.Array) -> Any:
    """Returns the result of the kernel where it runs, and of the plain form elsewhere; the first array is [B, L, H]."""
    if interpret:
        return kernel(*arrays)
    if not fused_residual_gpu.fits(arrays[0]):
        return plain(*arrays)
    return jax.lax.platform_dependent(*arrays, default=plain, cuda=kernel)


def _plain(shape: ResidualShape, *arrays: jax.Array) -> jax.Array:
    return _plain_forward(shape, *arrays)[0]


def _plain_forward(shape: ResidualShape, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes what the kernel computes: the result and the sum in front of layer norm."""
    hidden, product, bias, norm_scale, norm_bias, keys = arrays
    update = product + bias.astype(product.dtype)
    summed = hidden + _drop(shape, update, keys)
    normal, _ = _normalize(shape, summed)
    return (normal * norm_scale + norm_bias).astype(hidden.dtype), summed


def _plain_backward(
    shape: ResidualShape, gradient: jax.Array, summed: jax.Array, norm_scale: jax.Array, keys: jax.Array
) -> Gradients:
    """Computes the gradients of hidden, product, bias, and layer norm's scale and bias."""
    normal, inverse = _normalize(shape, summed)
    of_result = gradient.astype(jnp.float32)
    of_normal = of_result * norm_scale
    means = [jnp.mean(each, axis=-1, keepdims=True) for each in (of_normal, of_normal * normal)]
    of_sum = (inverse * (of_normal - means[0] - normal * means[1])).astype(gradient.dtype)
    of_product = _drop(shape, of_sum, keys)
    of_bias = jnp.sum(of_product, axis=(0, 1), dtype=jnp.float32)
    return of_sum, of_product, of_bias, jnp.sum(of_result * normal, axis=(0, 1)), jnp.sum(of_result, axis=(0, 1))


def _normalize(shape: ResidualShape, summed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns an array with mean 0 and variance 1 over the last axis, in float32, and 1 / its deviation before."""
    wide = summed.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + shape.epsilon)
    return centred * inverse, inverse


def _drop(shape: ResidualShape, array: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns an array [B, L, H] after dropout; of a gradient, the part that dropout lets back."""
    if not shape.drops:
        return array
    _, size, hidden = array.shape
    halves = draws(hidden, 0, 0, (-(-size // 2), hidden), keys[:, 0, None, None], keys[:, 1, None, None])
    kept = jnp.concatenate(halves, axis=-2)[:, :size] < shape.kept
    scaled = (array.astype(jnp.float32) * shape.rescale).astype(array.dtype)
    return jnp.where(kept, scaled, 0)
