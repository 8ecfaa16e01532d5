# SPDX-License-Identifier: Apache-2.0
"""Faster ways for CPUs alone. Elsewhere nothing here is used, and what is computed is the same but for rounding."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from bert_jax.settings.model import ModelConfig


def product_over_rows(equation: str, dtype: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Returns the einsum of bfloat16 arrays in `dtype`, summed in float32.

    XLA's bfloat16 kernel for CPUs sums over the last axis of the left array. Another order it takes to float32, half
    as fast, or refuses; so the array that gives the result its first axis is turned in memory, which costs little.
    """
    if math.prod(jax.sharding.get_abstract_mesh().shape.values()) > 1:  # what is divided cannot be told how to lie
        return jnp.einsum(equation, lhs.astype(jnp.float32), rhs.astype(jnp.float32)).astype(dtype)
    left, right, result = equation.replace("->", ",").split(",")
    shared = [letter for letter in result if letter in left and letter in right]
    own = [letter for letter in result if letter not in shared]
    if own[0] in right:
        lhs, rhs, left, right = rhs, lhs, right, left
    turned = "".join(shared + [letter for letter in own if letter in left])
    turned += "".join(letter for letter in left if letter not in turned)
    lhs = jnp.transpose(lhs, [left.index(letter) for letter in turned])
    lhs = with_layout_constraint(lhs, Layout(major_to_minor=tuple(range(lhs.ndim))))
    return jnp.einsum(f"{turned},{right}->{result}", lhs, rhs, preferred_element_type=jnp.float32).astype(dtype)


def unstack(config: ModelConfig, encoder: dict[str, Any]) -> dict[str, Any]:
    """Returns the encoder's parameters with those of each layer by themselves, to infer with many times on a CPU.

    From a stack XLA copies each matrix before it multiplies, and for another dtype it rounds each, in every call. Here
    kernels have the compute dtype. What the encoder computes stays the same, without dropout.
    """

    def of_layer(index: int) -> Any:
        def take(path: tuple[Any, ...], stack: np.ndarray) -> jax.Array:
            is_kernel = path[-1].key == "kernel"
            return jax.device_put(stack[index].astype(config.compute_dtype if is_kernel else stack.dtype))

        return jax.tree_util.tree_map_with_path(take, stacks)

    stacks = jax.device_get(encoder["layers"])
    others = {name: part for name, part in encoder.items() if name != "layers"}
    return others | {layer_name(index): of_layer(index) for index in range(config.num_layers)}


def layer_name(index: int) -> str:
    """Returns what `unstack` calls the parameters of a layer."""
    return f"layer_{index}"


def default_unroll(config: ModelConfig) -> int:
    """Returns how many layers an iteration of the scan holds if `model.unroll` is 0: all on a CPU, where a loop copies.

    Unrolled, XLA may undo rematerialization: what it computes again looks like what it has computed already.
    """
    return config.num_layers if jax.default_backend() == "cpu" and config.remat == "none" else 1
