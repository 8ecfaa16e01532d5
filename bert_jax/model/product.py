# SPDX-License-Identifier: Apache-2.0
"""The matrix product of every layer: operands in the compute dtype, sums in float32, in both passes."""

import contextlib
import functools

import jax
import jax.numpy as jnp

from bert_jax.model.derivatives import with_rule
from bert_jax.model.on_cpu import product_over_rows


def product(
    equation: str,
    lhs: jax.Array,
    rhs: jax.Array,
    rhs_gradient: str = "float32",
    precision: str = "default",
    result: str = "float32",
) -> jax.Array:
    """Returns the einsum of two arrays in the dtype `result`, multiplied in that of the left one and summed in float32.

    Every letter of the equation must occur in two of its three terms. Accelerators compute such products in hardware;
    on a CPU the fast bfloat16 kernel is chosen. Gradients are products of the same kind: the incoming gradient is cast
    to the dtype of the left array first, where JAX would multiply float32 with bfloat16 throughout the backward pass.
    The gradient of a float32 parameter on the right is the float32 sum. With another `rhs_gradient` it is rounded to
    that dtype on each device, before the all-reduce.

    Where parameters are divided over the mesh axis "tensor", each device has a part of a sum. These parts are rounded
    to `result` and then added up between devices, which sends half as much in bfloat16.

    `precision` is `ModelConfig.matmul_precision`, for the gradients too.
    """
    return _product(equation, rhs_gradient, precision, result, lhs, rhs)  # type: ignore[return-value]


def widened(array: jax.Array) -> jax.Array:
    """Returns float32 of narrower floats; float64, which tells derivatives from differences, stays."""
    return array if array.dtype == jnp.float64 else array.astype(jnp.float32)


def matmul_precision(name: str) -> str | None:
    """Returns JAX's name of a `ModelConfig.matmul_precision`; None leaves it to `jax_default_matmul_precision`."""
    return None if name == "default" else name


def in_precision(name: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context that sets the precision of other products, such as those of Flax's cells, both passes."""
    return contextlib.nullcontext() if name == "default" else jax.default_matmul_precision(name)


def _product_forward(
    equation: str, rhs_gradient: str, precision: str, result: str, lhs: jax.Array, rhs: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(equation, lhs, rhs, precision=precision, result=result), (lhs, rhs)


def _product_backward(
    equation: str,
    rhs_gradient: str,
    precision: str,
    result: str,
    saved: tuple[jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    lhs, rhs = saved
    left, right, out = equation.replace("->", ",").split(",")
    gradient = gradient.astype(lhs.dtype)
    grad_rhs = _product_over_rows(
        f"{left},{out}->{right}", rhs_gradient, precision, lhs, gradient
    ).astype(rhs.dtype)
    grad_lhs = product(
        f"{out},{right}->{left}", gradient, rhs, precision=precision, result=lhs.dtype.name
    )
    return grad_lhs, grad_rhs


@with_rule(_product_forward, _product_backward, static=4)
def _product(
    equation: str, rhs_gradient: str, precision: str, result: str, lhs: jax.Array, rhs: jax.Array
) -> jax.Array:
    if lhs.dtype == jnp.float64:
        return jnp.einsum(equation, lhs, rhs.astype(lhs.dtype))

    def summed_in(dtype: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        how = {"preferred_element_type": jnp.dtype(dtype), "precision": matmul_precision(precision)}
        return jnp.einsum(equation, lhs, rhs.astype(lhs.dtype), **how).astype(result)  # type: ignore[return-value]

    wide, narrow = (functools.partial(summed_in, dtype) for dtype in ("float32", result))
    # All sum in float32 within a device. cuBLAS writes the requested dtype; libtpu rounds as it writes (log entry 41).
    fewer = (
        ("cuda",)
        if jax.sharding.get_abstract_mesh().shape.get("tensor", 1) == 1
        else ("cuda", "tpu")
    )
    by_platform = {"default": wide} | dict.fromkeys(fewer, narrow)
    return (
        wide(lhs, rhs)
        if result == "float32"
        else jax.lax.platform_dependent(lhs, rhs, **by_platform)
    )


def _over_rows_forward(
    equation: str, dtype: str, precision: str, lhs: jax.Array, rhs: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product_over_rows(equation, dtype, precision, lhs, rhs), (lhs, rhs)


def _over_rows_backward(
    equation: str,
    dtype: str,
    precision: str,
    saved: tuple[jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    return _product_backward(equation, "float32", precision, dtype, saved, gradient)


@with_rule(_over_rows_forward, _over_rows_backward, static=3)
def _product_over_rows(
    equation: str, dtype: str, precision: str, lhs: jax.Array, rhs: jax.Array
) -> jax.Array:
    """Returns the einsum in `dtype`, a sum over rows."""

    def narrow(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        how = {"preferred_element_type": jnp.dtype(dtype), "precision": matmul_precision(precision)}
        return jnp.einsum(equation, lhs, rhs, **how)  # type: ignore[return-value]

    if lhs.dtype == jnp.float64:
        return jnp.einsum(equation, lhs, rhs)
    if lhs.dtype == jnp.float32:
        return narrow(lhs, rhs)
    on_cpu = functools.partial(product_over_rows, equation, dtype)
    return jax.lax.platform_dependent(lhs, rhs, cpu=on_cpu, default=narrow)


def add_bias(inputs: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Returns inputs [..., O] + bias [O], if there is one, in the dtype of the inputs."""
    return inputs if bias is None else _add_bias(inputs, bias)


def _add_bias_forward(inputs: jax.Array, bias: jax.Array) -> tuple[jax.Array, None]:
    return _add_bias(inputs, bias), None


def _add_bias_backward(saved: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gradient, jnp.sum(widened(gradient), axis=range(gradient.ndim - 1))


@with_rule(_add_bias_forward, _add_bias_backward)
def _add_bias(inputs: jax.Array, bias: jax.Array) -> jax.Array:
    """The gradient of the bias is summed in float32."""
    ones = (1,) * (inputs.ndim - 1)
    return inputs + bias.astype(inputs.dtype).reshape(*ones, -1)
