# SPDX-License-Identifier: Apache-2.0
"""Code paths of CPUs give what the general ones give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import drawn_params, tiny_model

from bert_jax.model.on_cpu import layer_name, product_over_rows, unstack


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("BLH,HF->BLF", (3, 5, 7), (7, 11)),
        ("BLH,BLF->HF", (3, 5, 7), (3, 5, 11)),  # the gradient of a matrix
        ("HF,BLF->BLH", (7, 11), (3, 5, 11)),  # the result begins with an axis of the second array
        ("BNLD,BNMD->BNLM", (2, 3, 5, 7), (2, 3, 4, 7)),
    ],
)
def test_a_product_is_the_float32_einsum_rounded_once(equation, left, right):
    lhs, rhs = (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed, shape in ((0, left), (1, right)))
    found = product_over_rows(equation, "bfloat16", lhs, rhs)
    exact = np.einsum(equation, np.asarray(lhs, np.float64), np.asarray(rhs, np.float64))
    assert found.dtype == jnp.bfloat16 and found.shape == exact.shape
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8, atol=1e-5)


def test_unstacked_layers_are_slices_with_kernels_in_the_compute_dtype():
    model = tiny_model(compute_dtype="bfloat16", num_layers=3)
    encoder = drawn_params(model)["encoder"]
    separate = unstack(model, encoder)
    assert set(separate) == set(encoder) - {"layers"} | {layer_name(index) for index in range(3)}
    assert separate["embeddings"] is encoder["embeddings"]
    kernel, bias = (encoder["layers"]["mlp"]["output"][name] for name in ("kernel", "bias"))
    for index in range(3):
        part = separate[layer_name(index)]["mlp"]["output"]
        assert part["kernel"].dtype == jnp.bfloat16 and part["bias"].dtype == jnp.float32
        np.testing.assert_array_equal(part["kernel"], kernel[index].astype(jnp.bfloat16))
        np.testing.assert_array_equal(part["bias"], bias[index])
