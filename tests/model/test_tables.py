# SPDX-License-Identifier: Apache-2.0
"""Embedding tables: one copy of the word table for each device of the rows, and gradients without a scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.devices.sharding import make_mesh
from bert_jax.model.tables import _sum_by_product, _sum_by_scatter, copy_to_rows, look_up
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


IDS = np.random.default_rng(2).integers(0, len(TABLE), (4, 3)).astype(np.int32)
WEIGHTS = np.random.default_rng(3).normal(size=(4, 3, 4)).astype(np.float32)


def test_a_row_is_looked_up_and_its_gradients_are_added_up():
    def loss(function):
        return lambda table: jnp.sum(function(table) * WEIGHTS)

    def plain(table):
        return jnp.take(table, IDS, axis=0)

    def ours(table):
        return look_up("float32", "default", table, IDS)

    np.testing.assert_array_equal(ours(jnp.asarray(TABLE)), TABLE[IDS])
    gradients = [np.asarray(jax.jit(jax.grad(loss(function)))(TABLE)) for function in (ours, plain)]
    np.testing.assert_array_equal(*gradients)  # on a CPU the same bits
    expected = np.zeros_like(TABLE)
    np.add.at(expected, IDS, WEIGHTS)
    np.testing.assert_allclose(gradients[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.03)])
def test_the_product_is_the_scatter(dtype, tolerance):
    ids, rows = jnp.asarray(IDS.ravel()), jnp.asarray(WEIGHTS.reshape(-1, 4))
    product = _sum_by_product(dtype, "highest", 6, ids, rows)
    assert product.dtype == jnp.float32
    np.testing.assert_allclose(product, _sum_by_scatter(6, ids, rows), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("platform", "scatters"), [("cpu", 1), ("tpu", 0), ("cuda", 0)])
def test_no_scatter_away_from_a_cpu(platform, scatters):
    gradient = jax.jit(jax.grad(lambda table: jnp.sum(look_up("bfloat16", "default", table, IDS) * WEIGHTS)))
    text = gradient.trace(jnp.asarray(TABLE)).lower(lowering_platforms=(platform,)).as_text()
    assert text.count('"stablehlo.scatter"') == scatters
