# SPDX-License-Identifier: Apache-2.0
"""Embedding tables: one copy of the word table for each device of the rows, and gradients without a scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import computed

from bert_jax.devices.sharding import make_mesh
from bert_jax.model.tables import (
    _sum_by_product,
    _sum_by_scatter,
    _sum_in_order,
    copy_to_rows,
    look_up,
    look_up_words,
    take_rows,
)
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
    both = lambda *given: (_sum_by_product(dtype, "highest", 6, *given), _sum_by_scatter(6, *given))  # noqa: E731
    product, scatter = computed(both, IDS.ravel(), WEIGHTS.reshape(-1, 4))
    assert product.dtype == np.float32
    np.testing.assert_allclose(product, scatter, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("platform", "scatters"), [("cpu", 1), ("tpu", 0), ("cuda", 0)])
def test_no_scatter_away_from_a_cpu(platform, scatters):
    gradient = jax.jit(jax.grad(lambda table: jnp.sum(look_up("bfloat16", "default", table, IDS) * WEIGHTS)))
    text = gradient.trace(jnp.asarray(TABLE)).lower(lowering_platforms=(platform,)).as_text()
    assert text.count('"stablehlo.scatter"') == scatters


def test_words_are_looked_up_and_their_gradients_are_added_up():
    ids = jnp.asarray(IDS.ravel())

    def gradient(function):
        return np.asarray(jax.jit(jax.grad(lambda table: jnp.sum(function(table) * WEIGHTS.reshape(-1, 4))))(TABLE))

    plain = gradient(lambda table: jnp.take(table, ids, axis=0))
    np.testing.assert_array_equal(gradient(lambda table: look_up_words(table, ids)), plain)  # on a CPU the same bits


@pytest.mark.parametrize("ids", [IDS.ravel(), np.zeros(12, np.int32), np.arange(12, dtype=np.int32)[::-1] % 6])
def test_the_sum_in_order_is_the_scatter(ids):
    rows = WEIGHTS.reshape(-1, 4)
    expected = np.zeros((6, 4), np.float64)
    np.add.at(expected, ids, rows)
    found = jax.jit(_sum_in_order, static_argnums=0)(6, ids, rows)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_rows_are_taken_and_their_gradients_are_added_up():
    hidden = np.random.default_rng(4).normal(size=(4, 5, 4)).astype(np.float32)
    positions = jnp.asarray(IDS % 5)  # some of them twice

    def gradient(function):
        return np.asarray(jax.jit(jax.grad(lambda hidden: jnp.sum(function(hidden) * WEIGHTS)))(hidden))

    plain = gradient(lambda hidden: jnp.take_along_axis(hidden, positions[..., None], axis=1))
    np.testing.assert_array_equal(gradient(lambda hidden: take_rows(hidden, positions)), plain)


@pytest.mark.parametrize(
    ("function", "shape"), [(look_up_words, (6, 4)), (lambda rows, ids: take_rows(rows, ids[None]), (1, 6, 4))]
)
def test_on_a_gpu_every_scatter_is_of_places_that_differ(function, shape):
    """XLA sorts the numbers of any other scatter, since results must not change from run to run."""
    ids = jnp.asarray(IDS.ravel())
    gradient = jax.jit(jax.grad(lambda table: jnp.sum(function(table, ids) ** 2)))
    text = gradient.trace(jnp.zeros(shape)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('"stablehlo.scatter"') == text.count("unique_indices = true")
