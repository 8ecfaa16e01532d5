# SPDX-License-Identifier: Apache-2.0
"""The encoder is a function of JAX: under every kind of mesh axis, in both modes, of any order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import tiny_model
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import bert_jax
from bert_jax.batch import pad_rows
from bert_jax.model.derivatives import plain_derivatives

CONFIG = dataclasses.replace(tiny_model(), hidden_dropout_rate=0.0, attention_dropout_rate=0.0)
BATCH = jax.tree.map(jnp.asarray, pad_rows(list(np.random.default_rng(0).integers(5, 150, (8, 16))), 16))
KINDS = [AxisType.Auto, AxisType.Explicit]


def hidden(params, batch, config=CONFIG, **options):
    return bert_jax.encode(config, params, batch, **options).hidden


def loss(params, batch, **options):
    return jnp.mean(hidden(params, batch, **options).astype(jnp.float32)[..., 0] ** 2)


@pytest.fixture(scope="module")
def params():
    return bert_jax.init_params(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def expected(params):
    return jax.jit(hidden)(params, BATCH), jax.jit(jax.value_and_grad(loss))(params, BATCH)


def check(values, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), values, expected)


@pytest.mark.parametrize("axis", ["data", "batch"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_divided_over_a_mesh_of_ones_own(params, expected, kind, axis):
    """Also as `jax.make_mesh` makes it by default, with shardings as part of types."""
    mesh = jax.make_mesh((8,), (axis,), axis_types=(kind,))
    batch = jax.device_put(BATCH, NamedSharding(mesh, P(axis)))
    given = jax.device_put(params, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        states = jax.jit(hidden)(given, batch)
        check((states, jax.jit(jax.value_and_grad(loss))(given, batch)), expected)
    assert states.sharding.spec[0] == axis or kind is AxisType.Auto


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_divided_by_shard_map(params, expected, kind, checked):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    batch = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
    given = jax.device_put(params, NamedSharding(mesh, P()))

    def mean(params, batch):
        return jax.lax.pmean(loss(params, batch), "data")

    how = {"mesh": mesh, "check_vma": checked}
    states = jax.shard_map(hidden, in_specs=(P(), P("data")), out_specs=P("data"), **how)
    of_all = jax.shard_map(mean, in_specs=(P(), P("data")), out_specs=P(), **how)
    found = jax.jit(states)(given, batch), jax.jit(jax.value_and_grad(of_all))(given, batch)
    check(found, expected)


def test_forward_mode_and_second_order_have_jaxs_own_derivatives(params):
    """Along the parameters themselves: by jvp, by finite differences, and the second derivative both ways."""

    def along(scale):
        return loss(jax.tree.map(lambda leaf: leaf * scale, params), BATCH, own_derivatives=False)

    value, slope = jax.jvp(along, (1.0,), (1.0,))
    assert float(slope) == pytest.approx(float(along(1.001) - along(0.999)) / 0.002, rel=1e-2)
    check((value, slope), jax.jit(jax.value_and_grad(along))(1.0))
    assert float(jax.hessian(along)(1.0)) == pytest.approx(float(jax.grad(jax.grad(along))(1.0)), rel=1e-3)
    with plain_derivatives():  # the same for all functions
        check(jax.jvp(lambda given: loss(given, BATCH), (params,), (params,))[1], slope)
    with pytest.raises(TypeError, match="jvp"):  # which rules of ours do not know
        jax.jvp(lambda given: loss(given, BATCH), (params,), (params,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_of_a_gradient(params, dtype):
    config = dataclasses.replace(CONFIG, compute_dtype=dtype)

    def penalty(params):
        gradient = jax.grad(loss)(params, BATCH, config=config, own_derivatives=False)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.jit(jax.grad(penalty))(params)))
