# SPDX-License-Identifier: Apache-2.0
"""Random keys: a purpose of their own for each, so that equal seeds share nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import fresh_state, make_pretrained
from jax.sharding import PartitionSpec

import bert_jax
from bert_jax.checkpoints.warm_start import complete
from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import InputError
from bert_jax.model import keys
from bert_jax.model.heads.table import HEADS
from bert_jax.model.keys import PURPOSES, bits_of_rows, root_key, rows_of_microbatch
from bert_jax.model.masking import _token_bits
from bert_jax.model.objective import task_objective
from bert_jax.settings.pretraining import MeshConfig, OptimizerConfig, TrainConfig


def test_purposes_have_numbers_of_their_own():
    assert len(set(PURPOSES.values())) == len(PURPOSES)


@pytest.mark.parametrize("purpose", ["parameters", "dropout"])
def test_a_mask_is_drawn_from_no_key_of_another_purpose(purpose):
    """The masks of epoch 1 once were drawn from the keys of dropout, sequence by step, and those of epoch 0 too."""
    seed, count = 3, 8
    epochs, numbers = (np.ravel(part) for part in np.indices((4, count)))
    place = np.zeros((len(epochs), 1), np.int32)
    drawn = _token_bits(seed, jnp.asarray(epochs), jnp.asarray(numbers)[:, None], place, place, 3)
    drawn = {tuple(row) for row in np.asarray(drawn)[:, 0].tolist()}
    assert len(drawn) == 4 * count
    root = root_key(seed, purpose)
    for number in range(count):  # as a step's dropout, or a layer's parameters
        key = jax.random.fold_in(jax.random.fold_in(root, number), 0)
        assert tuple(jax.random.bits(key, (3,), jnp.uint32).tolist()) not in drawn


def test_a_missing_head_is_that_of_the_seed(tmp_path):
    start = bert_jax.load_pretrained(make_pretrained(tmp_path))
    objective = task_objective(start.config, HEADS["sequence_classification"], 3)
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    fresh = fresh_state(objective, OptimizerConfig(), TrainConfig(seed=5), mesh).params["classifier"]
    jax.tree.map(np.testing.assert_array_equal, complete(start, objective, 5).params["classifier"], fresh)


@pytest.mark.parametrize("shape", [(16, 3, 5), (8, 7), (64, 2, 1000)])
def test_a_device_draws_its_part_of_the_bits_of_all_rows(shape):
    key = root_key(3, "dropout")
    whole = np.asarray(jax.random.bits(key, shape, jnp.uint32))
    np.testing.assert_array_equal(bits_of_rows(key, shape), whole)
    of_device = jax.shard_map(
        lambda key: bits_of_rows(key, (shape[0] // 8, *shape[1:])),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec("data"),
    )
    with jax.set_mesh(make_mesh(MeshConfig(data=8))):
        np.testing.assert_array_equal(jax.jit(of_device)(key), whole)


@pytest.mark.parametrize("size", [3 * 2**30, 2**32 - 1])
def test_places_beyond_32_bits_are_counted(size, monkeypatch):
    """Device 5 begins at 5 x size; the generator is given both words of that number and of the next ones."""
    given = []

    def record(first, second, high, low):
        given.append((np.asarray(high).astype(np.uint64) << np.uint64(32)) + np.asarray(low))
        return low, high

    few = 6  # of the device's numbers; all of them would not fit the memory
    monkeypatch.setattr(keys.threefry2x32_p, "bind", record)
    monkeypatch.setattr(keys.jax.lax, "broadcasted_iota", lambda dtype, shape, axis: jnp.arange(few, dtype=dtype))
    monkeypatch.setattr(keys.jax.lax, "axis_index", lambda axis: jnp.int32(5))
    monkeypatch.setattr(keys, "_in_shard_map", lambda: True)
    bits_of_rows(root_key(0, "dropout"), (size,))
    assert given[0].tolist() == [5 * size + place for place in range(few)]


def test_seeds_that_differ_above_32_bits_differ():
    data = [tuple(jax.random.key_data(root_key(seed, "dropout")).tolist()) for seed in (5, 2**32 + 5, 2**62 + 5)]
    assert len(set(data)) == 3


@pytest.mark.parametrize("devices", [1, 8])
def test_rows_of_a_microbatch_draw_what_they_draw_in_the_whole_batch(devices):
    key, shape, count = root_key(3, "dropout"), (32, 3, 5), 2
    whole = np.asarray(jax.random.bits(key, shape, jnp.uint32))

    def draw(key, index):
        with rows_of_microbatch(index, count):
            return bits_of_rows(key, (shape[0] // count // devices, *shape[1:]))

    if devices > 1:
        draw = jax.shard_map(draw, in_specs=PartitionSpec(), out_specs=PartitionSpec("data"))
    with jax.set_mesh(make_mesh(MeshConfig(data=devices), jax.devices()[:devices])):
        for index in range(count):
            np.testing.assert_array_equal(jax.jit(draw)(key, jnp.int32(index)), whole[index::count])


def test_the_place_of_a_row_is_counted_in_64_bits():
    key, size, count, index = root_key(3, "dropout"), 3 * 70_001, 50_000, 49_999
    with rows_of_microbatch(jnp.int32(index), count):
        bits = np.asarray(bits_of_rows(key, (3, 3, 70_001))).reshape(3, -1)
    for row in range(3):
        places = [(row * count + index) * size + number for number in (0, 1, size - 1)]
        high, low = (
            jnp.array([shift(place) for place in places], jnp.uint32)
            for shift in (lambda n: n >> 32, lambda n: n & 0xFFFFFFFF)
        )
        assert int(high[0]) > 0
        np.testing.assert_array_equal(keys._bits_at(key, high, low), bits[row, [0, 1, -1]])


def test_other_bits_of_the_same_seed_are_refused():
    jax.config.update("jax_threefry_partitionable", False)
    try:
        with pytest.raises(InputError, match="JAX_THREEFRY_PARTITIONABLE is off"):
            root_key(0, "dropout")
    finally:
        jax.config.update("jax_threefry_partitionable", True)
