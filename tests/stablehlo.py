# SPDX-License-Identifier: Apache-2.0
"""Matrix products of programs that are not compiled yet, with the dtypes that JAX gives them."""

import math
import re
from typing import NamedTuple

from bert_jax.plan.hlo import Array

_PRODUCT = re.compile(
    r"stablehlo\.(?:dot_general|dot|convolution)\b(.*)\((tensor<[^>]*>), (tensor<[^>]*>)\) -> (tensor<[^>]*>)"
)


class Product(NamedTuple):
    """A matrix product."""

    lhs: str  # dtypes
    rhs: str
    result: str
    is_matrix: bool  # False if an operand is a vector


def stablehlo_products(text: str) -> list[Product]:
    """Returns the matrix products of a program in StableHLO, before it is compiled.

    `text` is that of `jax.stages.Lowered.as_text()`. Dtypes are those of the JAX program.
    """
    found = []
    for options, *types in _PRODUCT.findall(text):
        lhs, rhs, result = (_tensor(part) for part in types)
        contracting = re.search(r"contracting_dims = \[([\d, ]*)\]", options)
        batching = re.search(r"batching_dims = \[([\d, ]*)\]", options)
        contracted, batch = (
            math.prod(lhs.shape[int(axis)] for axis in part[1].split(",") if axis.strip()) if part else 1
            for part in (contracting, batching)
        )
        own = [math.prod(array.shape) // max(1, contracted * batch) for array in (lhs, rhs)]
        found.append(Product(lhs.dtype, rhs.dtype, result.dtype, min(*own, contracted) > 1))
    return found


def _tensor(text: str) -> Array:
    *sizes, dtype = re.sub(r"^tensor<|>$", "", text).split("x")
    return Array(dtype, tuple(int(size) for size in sizes))
