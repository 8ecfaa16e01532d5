# SPDX-License-Identifier: Apache-2.0
"""Matrix products of programs that are not compiled yet, with the dtypes that JAX gives them."""

import math
import re

from bert_jax.plan.hlo import Array, Product

_PRODUCT = re.compile(
    r"stablehlo\.(?:dot_general|dot|convolution)\b(.*)\((tensor<[^>]*>), (tensor<[^>]*>)\) -> (tensor<[^>]*>)"
)


def stablehlo_products(text: str) -> list[Product]:
    """Returns the matrix products of a program in StableHLO, before it is compiled; each counts once.

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
        work = 2 * math.prod(result.shape) * contracted
        found.append(Product(lhs.dtype, rhs.dtype, result.dtype, work, 1, min(*own, contracted) > 1))
    return found


def _tensor(text: str) -> Array:
    *sizes, dtype = re.sub(r"^tensor<|>$", "", text).split("x")
    return Array(dtype, tuple(int(size) for size in sizes))
