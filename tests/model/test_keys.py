# SPDX-License-Identifier: Apache-2.0
"""Random keys: a purpose of their own for each, so that equal seeds share nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import computed, fresh_state, make_pretrained
from jax.sharding import AxisType, PartitionSpec

import bert_jax
from bert_jax.checkpoints.warm_start import complete
from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import InputError
from bert_jax.model.heads.table import HEADS
from bert_jax.model.keys import PURPOSES, bits_of_rows, root_key, rows_numbered
from bert_jax.model.masking import _token_bits
from bert_jax.model.objective import TaskObjective
from bert_jax.settings.pretraining import MeshConfig, OptimizerConfig, TrainConfig


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    start = make_pretrained(tmp_path_factory.mktemp("start"), hidden_dropout_rate=0.3, attention_dropout_rate=0.3)
    return bert_jax.load_pretrained(start)


def test_purposes_have_numbers_of_their_own():
    assert len(set(PURPOSES.values())) == len(PURPOSES)


@pytest.mark.parametrize("purpose", ["parameters", "dropout"])
def test_a_mask_is_drawn_from_no_key_of_another_purpose(purpose):
    """The masks of epoch 1 once were drawn from the keys of dropout, sequence by step, and those of epoch 0 too."""
    seed, count = 3, 8
    epochs, numbers = (np.ravel(part) for part in np.indices((4, count)))
    place = np.zeros((len(epochs), 1), np.int32)
    drawn = jax.jit(_token_bits, static_argnums=(0, 5))(seed, epochs, numbers[:, None], place, place, 3)
    drawn = {tuple(row) for row in np.asarray(drawn)[:, 0].tolist()}
    assert len(drawn) == 4 * count

    @jax.jit
    @jax.vmap
    def others(number):  # as a step's dropout, or a layer's parameters
        key = jax.random.fold_in(jax.random.fold_in(root_key(seed, purpose), number), 0)
        return jax.random.bits(key, (3,), jnp.uint32)

    assert not drawn & {tuple(each) for each in np.asarray(others(jnp.arange(count))).tolist()}


def test_a_missing_head_is_that_of_the_seed(tmp_path):
    start = bert_jax.load_pretrained(make_pretrained(tmp_path))
    objective = TaskObjective(start.config, HEADS["sequence_classification"], 3)
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    fresh = fresh_state(objective, OptimizerConfig(), TrainConfig(seed=5), mesh).params["classifier"]
    jax.tree.map(np.testing.assert_array_equal, complete(start, objective, 5).params["classifier"], fresh)


def test_seeds_that_differ_above_32_bits_differ():
    data = [tuple(jax.random.key_data(root_key(seed, "dropout")).tolist()) for seed in (5, 2**32 + 5, 2**62 + 5)]
    assert len(set(data)) == 3


def test_each_row_has_a_key_of_its_own():
    key = root_key(3, "dropout")

    @jax.vmap
    def own(row):
        return jax.random.bits(jax.random.fold_in(key, row), (3, 5), jnp.uint32)

    np.testing.assert_array_equal(*computed(lambda rows: (bits_of_rows(key, (4, 3, 5)), own(rows)), np.arange(4)))


def test_rows_of_rows_are_numbered():
    key = root_key(3, "dropout")

    def bits(key):
        with rows_numbered(1, 2), rows_numbered(1, 3):
            numbered = bits_of_rows(key, (2, 5))
        return bits_of_rows(key, (10, 5)), numbered, bits_of_rows(key, (2, 5))

    whole, numbered, first = computed(bits, key)
    np.testing.assert_array_equal(numbered, whole[[3, 9]])
    np.testing.assert_array_equal(first, whole[:2])


@pytest.mark.parametrize("devices", [1, 8])
def test_rows_of_a_device_and_of_a_microbatch_draw_what_they_draw_in_the_whole_batch(devices):
    key, shape, count = root_key(3, "dropout"), (32, 3, 5), 2
    whole = computed(lambda key: bits_of_rows(key, shape), key)
    each = shape[0] // devices

    def draw(key, index):
        with rows_numbered(jax.lax.axis_index("data") * each), rows_numbered(index, count):
            return bits_of_rows(key, (each // count, *shape[1:]))

    draw = jax.shard_map(draw, in_specs=PartitionSpec(), out_specs=PartitionSpec("data"), check_vma=False)
    with jax.set_mesh(make_mesh(MeshConfig(data=devices), jax.devices()[:devices])):
        for index in range(count):
            np.testing.assert_array_equal(computed(draw, key, np.int32(index)), whole[index::count])


@pytest.mark.parametrize("axis", ["data", "batch"])
def test_the_name_of_a_user_s_axis_changes_no_bit(axis):
    """A program that divides rows itself gives each shard the key that it wants there."""
    key = root_key(3, "dropout")

    def both(key):
        own = jax.random.fold_in(key, jax.lax.axis_index(axis))
        return bits_of_rows(key, (2, 5)), bits_of_rows(own, (2, 5))

    draw = jax.shard_map(both, in_specs=PartitionSpec(), out_specs=PartitionSpec(axis))
    with jax.set_mesh(jax.make_mesh((2,), (axis,), devices=jax.devices()[:2])):
        same, apart = computed(draw, key)
    keys = key, *(jax.random.fold_in(key, number) for number in range(2))
    alone, *expected = computed(lambda *keys: [bits_of_rows(each, (2, 5)) for each in keys], *keys)
    np.testing.assert_array_equal(same, np.tile(alone, (2, 1)))
    np.testing.assert_array_equal(apart, np.concatenate(expected))


MESHES = {
    "data": ((8,), ("data",)),
    "batch": ((8,), ("batch",)),
    "data, model": ((4, 2), ("data", "model")),
    "ours": ((2, 2, 2), ("data", "fsdp", "tensor")),
    "like ours": ((2, 2, 2), ("a", "b", "c")),
}


@pytest.fixture(scope="module")
def dropped(bert):
    """Returns rows of one text, a compiled encoder with dropout, and what it computes on one device."""
    batch, key = bert_jax.make_batch(bert, ["b c d"] * 8), root_key(3, "dropout")
    encode = jax.jit(lambda params, batch, key: bert_jax.encode(bert.config, params, batch, key).hidden)
    expected = np.asarray(encode(bert.params, batch, key))
    assert np.abs(expected[0] - expected[1]).max() > 0.1  # rows differ by their dropout
    return batch, encode, expected


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        ("ours", AxisType.Auto),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("data", AxisType.Explicit),
                ("batch", AxisType.Auto),
                ("data, model", AxisType.Explicit),
                ("like ours", AxisType.Auto),
            )
        ),
    ],
)
def test_dropout_is_the_same_under_a_user_s_axes_of_any_name(bert, dropped, mesh, kind):
    """Rows are divided over the first axis by `jax.jit`, on eight devices; the bits are those of a single one."""
    batch, encode, expected = dropped
    shape, axes = MESHES[mesh]
    with jax.set_mesh(jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))):
        rows = jax.device_put(batch, PartitionSpec(axes[0]))
        params = jax.device_put(bert.params, PartitionSpec())
        np.testing.assert_allclose(encode(params, rows, root_key(3, "dropout")), expected, atol=1e-5)


def test_other_bits_of_the_same_seed_are_refused():
    jax.config.update("jax_threefry_partitionable", False)
    try:
        with pytest.raises(InputError, match="JAX_THREEFRY_PARTITIONABLE is off"):
            root_key(0, "dropout")
    finally:
        jax.config.update("jax_threefry_partitionable", True)
