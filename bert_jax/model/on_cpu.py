# SPDX-License-Identifier: Apache-2.0
"""Code paths that are faster on CPUs and used only there. Results are the same but for rounding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.tree_util import KeyPath

from bert_jax.batch import PyTree
from bert_jax.settings.model import ModelConfig


def product_over_rows(equation: str, dtype: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Returns the einsum of bfloat16 arrays in `dtype`, summed in float32.

    XLA's bfloat16 kernel for CPUs sums over the last axis of the left array. For other orders XLA converts to float32,
    which is half as fast, or fails. So the array that gives the result its first axis is transposed in memory first,
    which is cheap.
    """
    # layouts cannot be set for sharded arrays
    if math.prod(jax.sharding.get_abstract_mesh().shape.values()) > 1:
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
    return jnp.einsum(
        f"{turned},{right}->{result}", lhs, rhs, preferred_element_type=jnp.float32
    ).astype(dtype)


def unstack(config: ModelConfig, encoder: PyTree) -> PyTree:
    """Returns the encoder's parameters with separate arrays for each layer, for repeated inference on a CPU.

    From stacked parameters XLA copies and casts every matrix in every call. Here kernels are separate and already have
    the compute dtype. Where that is their dtype they share the memory of the stack. The outputs of the encoder, without
    dropout, stay the same.
    """

    def of_layer(index: int) -> PyTree:
        def take(path: KeyPath, stack: np.ndarray) -> jax.Array:
            is_kernel = path[-1].key == "kernel"
            dtype = config.compute_dtype if is_kernel else stack.dtype
            return jax.device_put(stack[index].astype(dtype, copy=False))

        return jax.tree_util.tree_map_with_path(take, stacks)

    stacks = jax.device_get(encoder["layers"])
    others = {name: part for name, part in encoder.items() if name != "layers"}
    separate = [of_layer(index) for index in range(config.num_stacked)]
    length = config.num_layers // config.num_stacked  # of a group that shares its parameters
    return others | {
        layer_name(index): separate[index // length] for index in range(config.num_layers)
    }


def layer_name(index: int) -> str:
    """Returns the name that `unstack` gives to the parameters of a layer."""
    return f"layer_{index}"
