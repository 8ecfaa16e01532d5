# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import re

import jax
import pytest
from builders import tiny_model

from bert_jax.devices import sharding
from bert_jax.devices.sharding import RULES, check_divisible, make_mesh, path_name, tree_shardings
from bert_jax.errors import InputError
from bert_jax.model.heads.probe import probed
from bert_jax.model.heads.tokens import TOKENS
from bert_jax.model.objective import init_params
from bert_jax.model.shapes import abstract_params
from bert_jax.settings.finetuning import ProbeConfig
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import MeshConfig
from bert_jax.training.optim import DECAY_RULES, decay_mask


@pytest.fixture(scope="module")
def params():
    return abstract_params(tiny_model(), num_classes=3)


@pytest.fixture(scope="module")
def names(params):
    probe = ProbeConfig(features="weighted_all", hidden_size=8)
    with_probe = jax.eval_shape(lambda key: init_params(tiny_model(), key, probed(TOKENS, probe), 3), jax.random.key(0))
    biased, distances = (abstract_params(tiny_model(score_bias=bias))["encoder"] for bias in ("buckets", "vectors"))
    two_layers = abstract_params(dataclasses.replace(model_size("ultrabert-mini"), vocab_size=131))["mlm"]
    whole = params | {"probe": with_probe["probe"], "encoder": biased | distances, "mlm": params["mlm"] | two_layers}
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(whole)]


def test_resolved_table_is_the_golden_one(params, repository):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    decays = {path_name(path): value for path, value in jax.tree_util.tree_leaves_with_path(decay_mask(params))}
    table = {
        path_name(path): {"axes": [axis or "-" for axis in sharding.spec], "decay": decays[path_name(path)]}
        for path, sharding in jax.tree_util.tree_leaves_with_path(tree_shardings(mesh, params))
    }
    assert table == json.loads((repository / "tests/golden/parameters.json").read_text())


def test_every_rule_is_used(names):
    for rules in (RULES, DECAY_RULES):
        every = [*names, "own/table"]  # of a user's own head
        used = {next((pattern for pattern, _ in rules if re.fullmatch(pattern, name)), None) for name in every}
        assert used >= {pattern for pattern, _ in rules}


def test_a_generators_parameters_lie_as_its_model_would(params):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    both = tree_shardings(mesh, params | {"generator": params})
    assert both["generator"] == {name: both[name] for name in params}


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 3},
        dict.fromkeys(("data", "fsdp", "tensor"), 2**22),  # 2**66, which wraps to 0
        {"data": 0},
        {"data": -2, "tensor": -4},
        {"data": -1, "tensor": -1},
    ],
)
def test_meshes_that_do_not_fit(sizes):
    with pytest.raises(InputError, match="does not fit 8 devices"):
        make_mesh(MeshConfig(**sizes))


def test_indivisible_batches_and_models_name_the_mend():
    mesh = make_mesh(MeshConfig(data=8))
    with pytest.raises(InputError, match="batch_size 100 is not divisible by data x fsdp = 8; use 96 or 104"):
        check_divisible(mesh, tiny_model(), (100, 1))
    with pytest.raises(InputError, match=r"x train.accumulate = 4; use 32 or 64"):
        check_divisible(mesh, tiny_model(), (96, 1), (48, 4))
    with pytest.raises(InputError, match=r"model.num_heads 4 is not divisible by mesh.tensor 8"):
        check_divisible(make_mesh(MeshConfig(tensor=8)), tiny_model(), (8, 1))
    check_divisible(mesh, dataclasses.replace(tiny_model()), (96, 1))


def test_a_shape_that_does_not_fit_its_rule_is_noticed(params):
    broken = {"mlm": {"output_bias": jax.ShapeDtypeStruct((3, 3), "float32")}}
    with pytest.raises(AssertionError, match="output_bias"):
        tree_shardings(make_mesh(MeshConfig()), broken)


def test_slices_as_the_devices_tell(monkeypatch):
    """Stand-ins for chips of two slices, in an order that mixes them."""

    class Chip:
        platform, device_kind, process_index = "tpu", "none", 0

        def __init__(self, number):
            self.id, self.slice_index, self.coords, self.core_on_chip = number, number % 2, (number // 2, 0, 0), 0

    monkeypatch.setattr(sharding, "Mesh", lambda devices, *_, **__: devices)
    devices = make_mesh(MeshConfig(data=4), [Chip(number) for number in range(4)])
    assert [chip.slice_index for chip in devices.flat] == [0, 0, 1, 1]
    with pytest.raises(InputError, match=r"mesh\.dcn 4 is not the 2 slices"):
        make_mesh(MeshConfig(data=4, dcn=4), [Chip(number) for number in range(4)])


def test_fsdp_and_tensor_stay_within_a_slice():
    assert dict(make_mesh(MeshConfig(data=-1, tensor=2, dcn=2)).shape) == {"data": 4, "fsdp": 1, "tensor": 2}
    with pytest.raises(InputError, match=r"mesh\.data 1 is not divisible by the 2 slices"):
        make_mesh(MeshConfig(data=1, fsdp=8, dcn=2))
