# SPDX-License-Identifier: Apache-2.0
"""The matrix product of every layer: multiplied in the compute dtype, summed in float32, forward and backward."""

import functools

import jax
import jax.numpy as jnp


def product(equation: str, lhs: jax.Array, rhs: jax.Array, rhs_gradient: str = "float32") -> jax.Array:
    """Returns the einsum of two arrays, multiplied in the dtype of the left one and summed in float32.

    Every letter of the equation stands in two of its three terms. On accelerators this is what the hardware does; on
    a CPU it also picks the fast bfloat16 kernel. Gradients are the same kind of product: what comes back is rounded to
    the dtype of the left array before it is multiplied, where JAX would multiply float32 with bfloat16 in all of the
    backward pass. The gradient of a float32 parameter on the right is the float32 sum, not rounded on its way; in
    another `rhs_gradient` it is rounded on each device, before devices add theirs up.
    """
    return _product(equation, rhs_gradient, lhs, rhs)  # type: ignore[return-value]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation: str, rhs_gradient: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return jnp.einsum(equation, lhs, rhs.astype(lhs.dtype), preferred_element_type=jnp.float32)


def _product_forward(
    equation: str, rhs_gradient: str, lhs: jax.Array, rhs: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(equation, lhs, rhs), (lhs, rhs)


def _product_backward(
    equation: str, rhs_gradient: str, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    lhs, rhs = saved
    left, right, result = equation.replace("->", ",").split(",")
    gradient = gradient.astype(lhs.dtype)
    of_rhs = _product_over_rows(f"{left},{result}->{right}", rhs_gradient, lhs, gradient).astype(rhs.dtype)
    return product(f"{result},{right}->{left}", gradient, rhs).astype(lhs.dtype), of_rhs


def _product_over_rows(equation: str, dtype: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Returns the einsum in `dtype`, a sum over rows: of bfloat16, XLA has no kernel for it on CPUs, and may fail."""

    def narrow(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jnp.einsum(equation, lhs, rhs, preferred_element_type=jnp.dtype(dtype))

    def wide(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jnp.einsum(equation, lhs.astype(jnp.float32), rhs.astype(jnp.float32)).astype(dtype)

    if lhs.dtype == jnp.float32:
        return narrow(lhs, rhs)
    return jax.lax.platform_dependent(lhs, rhs, cpu=wide, default=narrow)


_product.defvjp(_product_forward, _product_backward)
