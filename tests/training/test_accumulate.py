# SPDX-License-Identifier: Apache-2.0
"""Microbatches: what they add up to, and what devices send for them."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import CLS, MASK, SEP, computed, random_batch, tiny_model
from jax.sharding import PartitionSpec

from bert_jax.devices.sharding import is_data_alone, make_mesh, row_sharding, tree_shardings
from bert_jax.model.keys import bits_of_rows, root_key
from bert_jax.model.objective import PretrainingObjective
from bert_jax.plan import hlo
from bert_jax.settings.pretraining import MaskingConfig, MeshConfig, OptimizerConfig, TrainConfig
from bert_jax.training.accumulate import _own_part, sum_over_microbatches
from bert_jax.training.memory import gathered_bytes
from bert_jax.training.program import Program
from bert_jax.training.step import abstract_state

KERNEL = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
ROWS = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
WEIGHTS = np.arange(16, dtype=np.float32)


def gradient_of_rows(params, rows, factor):
    """Returns a sum over rows, how often it was called, and a gradient that tells which rows were together.

    The sum has a number that each row draws, so it tells whether a row draws what it draws in the whole batch.
    """
    drawn = bits_of_rows(root_key(0, "dropout"), rows["weight"].shape) % 64
    total = factor * jnp.sum(rows["weight"] * drawn)
    together = rows["x"].T @ rows["weight"]
    return (total, jnp.ones((), jnp.int32)), {
        "kernel": params["kernel"] * 0 + jnp.outer(together, jnp.ones(3)),
        "bias": together,
    }


def expected_total():
    drawn = computed(lambda key: bits_of_rows(key, WEIGHTS.shape) % 64, root_key(0, "dropout"))
    return 2 * (WEIGHTS * drawn).sum()


def add_up(count, **options):
    rows = {"x": ROWS, "weight": WEIGHTS}
    function = jax.jit(
        lambda params, rows: sum_over_microbatches(gradient_of_rows, count, params, rows, 2.0, **options)
    )
    return function({"kernel": KERNEL, "bias": np.zeros(8, np.float32)}, rows)


@pytest.mark.parametrize("count", [1, 2, 8, 16])
def test_the_sum_over_microbatches_is_that_of_the_batch(count):
    (total, calls), gradients = add_up(count)
    assert float(total) == expected_total() and int(calls) == count
    np.testing.assert_allclose(gradients["kernel"], np.outer(ROWS.T @ WEIGHTS, np.ones(3)), rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_devices_add_up_what_each_has(count, sizes):
    mesh = make_mesh(MeshConfig(**sizes))
    with jax.set_mesh(mesh):
        (total, calls), gradients = add_up(count)
    assert float(total) == expected_total()
    # Each device counts its own microbatches where it has some of its own.
    assert int(calls) == count * (8 if is_data_alone(mesh.shape) else 1)
    np.testing.assert_allclose(gradients["kernel"], np.outer(ROWS.T @ WEIGHTS, np.ones(3)), rtol=1e-5)


def test_matrices_are_added_up_in_the_dtype_of_gradients_and_divided():
    mesh = make_mesh(MeshConfig(data=8))
    tree = {"pooler": {"kernel": jnp.zeros((8, 8)), "bias": jnp.zeros(8)}}
    shardings = tree_shardings(mesh, {"encoder": tree}, over_data=True)["encoder"]["pooler"]
    with jax.set_mesh(mesh):
        _, gradients = add_up(2, gradient_dtype="bfloat16", shardings=shardings)
        exact = np.outer(ROWS.T @ WEIGHTS, np.ones(3))
    assert gradients["kernel"].dtype == jnp.float32
    assert {shard.data.shape for shard in gradients["kernel"].addressable_shards} == {(1, 3)}
    np.testing.assert_allclose(gradients["kernel"], exact, rtol=0.02, atol=0.5)
    assert abs(gradients["kernel"] - exact).max() > 1e-3 * abs(exact).max()
    np.testing.assert_allclose(gradients["bias"], exact[:, 0], rtol=1e-4)  # and vectors are not rounded


@pytest.mark.slow  # test_step.py has one of these that also takes its steps
@pytest.mark.parametrize(
    ("accumulate", "zero1", "expected"),
    [
        (4, "off", {"all-reduce": 1.0}),
        (1, "on", {"reduce-scatter": 1.0, "all-gather": 1.0}),
        (4, "on", {"reduce-scatter": 1.0, "all-gather": 1.0}),
    ],
)
def test_gradients_are_sent_once_however_many_microbatches_there_are(accumulate, zero1, expected):
    """In bytes of all parameters. The word table is more than half of them, and is divided as the others are."""
    objective = PretrainingObjective(tiny_model(), MaskingConfig(), MASK, (CLS, SEP))
    mesh, optimizer = make_mesh(MeshConfig(data=4), jax.devices()[:4]), OptimizerConfig()
    train = TrainConfig(num_steps=10, accumulate=accumulate, zero1=zero1)
    state = abstract_state(objective, optimizer, train, mesh)
    step = Program(mesh).training(objective, optimizer, train, state)
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=row_sharding(mesh)), random_batch())
    with jax.set_mesh(mesh):
        found = hlo.collectives(step.lower(state, rows).compile().as_text())
    sent = Counter()
    for collective in found:
        sent[collective.kind] += collective.bytes * collective.count / gathered_bytes(state.params)
    assert {kind: share for kind, share in sent.items() if share > 0.02} == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(("shape", "sent"), [((8 * 7, 3), 7), ((2, 8 * 33, 3), 64), ((8 * 128, 3), 128)])
def test_each_device_keeps_its_part_of_a_sum(shape, sent):
    axis = len(shape) - 2
    whole = np.random.default_rng(0).integers(-8, 8, (8, *shape)).astype(np.float32)
    spec = PartitionSpec(*["data" if place == axis else None for place in range(len(shape))])
    function = jax.shard_map(lambda one: _own_part(one[0], axis), in_specs=PartitionSpec("data"), out_specs=spec)
    with jax.set_mesh(make_mesh(MeshConfig(data=8))):
        summed = jax.jit(function)(whole)
    np.testing.assert_array_equal(summed, whole.sum(0))
    part = (*shape[:axis], sent, *shape[axis + 1 :])  # long ones are padded
    text = str(jax.make_jaxpr(function)(whole))
    assert re.search(rf"f32\[{','.join(map(str, part))}\]\S* = reduce_scatter", text), text
    assert summed.addressable_shards[0].data.shape[axis] == shape[axis] // 8
