# SPDX-License-Identifier: Apache-2.0
"""The copies of the word table: one for each device of the rows, and one sum of their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.devices.sharding import make_mesh
from bert_jax.model.word_table import copy_to_rows
from bert_jax.settings.pretraining import MeshConfig

TABLE = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def test_without_a_mesh_there_is_one_copy():
    np.testing.assert_array_equal(copy_to_rows(jnp.asarray(TABLE), 8), TABLE[None])


@pytest.mark.parametrize(("num_rows", "copies"), [(8, 4), (6, 1)])  # 6 rows are not divided among 4 devices
def test_there_is_a_copy_for_each_device_that_rows_are_divided_among(num_rows, copies):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])
    with jax.set_mesh(mesh):
        found = jax.jit(lambda table: copy_to_rows(table, num_rows))(TABLE)
    np.testing.assert_array_equal(found, np.stack([TABLE] * copies))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_is_the_sum_over_the_copies_in_its_dtype(dtype):
    mesh = make_mesh(MeshConfig(data=4), jax.devices()[:4])
    weights = np.random.default_rng(1).normal(size=(4, *TABLE.shape)).astype(np.float32)
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(lambda table: jnp.sum(copy_to_rows(table, 8, dtype) * weights)))(TABLE)
        compiled = jax.jit(jax.grad(lambda table: jnp.sum(copy_to_rows(table, 8, dtype) * weights)))
        text = compiled.lower(TABLE).as_text()
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, weights.sum(0), rtol=0, atol=1e-6 if dtype == "float32" else 0.05)
    assert ("bf16" in text) == (dtype == "bfloat16")
