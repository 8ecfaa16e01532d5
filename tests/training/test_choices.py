# SPDX-License-Identifier: Apache-2.0
"""What a run chooses where its settings leave it open: by the kind of device, by its memory, once for all restarts."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from builders import tiny_run
from whole_runs import ONE_DEVICE, train

from bert_jax.batch import RowShape
from bert_jax.devices.chips import vmem_bytes
from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import InputError
from bert_jax.model.objective import PretrainingObjective
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.model import left_open, model_of_run
from bert_jax.settings.pretraining import MaskingConfig, MeshConfig, OptimizerConfig, PretrainConfig, TrainConfig
from bert_jax.training import choices
from bert_jax.training.choices import (
    OF_VMEM,
    Batches,
    choose_memory,
    choose_precision,
    choose_update,
    describe_choices,
)
from bert_jax.training.memory import estimate_memory
from bert_jax.training.step import abstract_state

ROW = RowShape(length=128, sequences=1, predictions=20, bytes=1000)


def device(platform, capability=None):
    return SimpleNamespace(platform=platform, compute_capability=capability)


@pytest.mark.parametrize(
    ("where", "dtype", "attention"),
    [
        (device("tpu"), "bfloat16", "fused"),
        (device("gpu", "8.0"), "bfloat16", "fused"),
        (device("cuda", "9.0"), "bfloat16", "fused"),
        (device("gpu", "10.0"), "bfloat16", "fused"),
        (device("gpu", "7.5"), "float32", "plain"),
        (device("gpu", "gfx942"), "float32", "plain"),
        (device("gpu"), "float32", "plain"),
        (device("cpu"), "float32", "plain"),
    ],
)
@pytest.mark.parametrize("kind", [PretrainConfig, FinetuneConfig])
def test_products_are_in_bfloat16_where_units_for_it_are(kind, where, dtype, attention):
    model = choose_precision(kind(), where).model
    assert (model.compute_dtype, model.attention, model.remat) == (dtype, attention, "auto")


def test_what_is_set_stays_and_what_contradicts_the_device_is_not_chosen():
    tpu = device("tpu")
    given = dataclasses.replace(left_open(), compute_dtype="float32", attention="plain")
    assert choose_precision(PretrainConfig(model=given), tpu).model == given
    exact = dataclasses.replace(left_open(), matmul_precision="highest")
    assert choose_precision(PretrainConfig(model=exact), tpu).model.compute_dtype == "float32"
    mixed = PretrainConfig(masking=MaskingConfig(causal_rate=0.25))
    assert choose_precision(mixed, tpu).model.attention == "plain"  # kernels read all rows alike
    halved = dataclasses.replace(left_open(), gradient_dtype="bfloat16")
    halved = PretrainConfig(model=halved)
    assert choose_precision(halved, tpu).model.gradient_dtype == "bfloat16"
    assert choose_precision(halved, device("cpu")).model.gradient_dtype == "float32"


@pytest.mark.parametrize(
    ("platform", "sizes", "size", "asked", "chosen"),
    [
        ("cuda", {"data": 8}, "base", "auto", "on"),
        ("gpu", {"data": 16}, "large", "auto", "on"),
        ("gpu", {"data": 8}, "base", "off", "off"),
        ("gpu", {"data": 1}, "base", "auto", "off"),
        ("gpu", {"data": 4, "fsdp": 2}, "base", "auto", "off"),
        ("tpu", {"data": 16}, "base", "auto", "off"),
        ("tpu", {"data": 16}, "base", "on", "on"),
        ("tpu", {"data": 16}, "large", "auto", "on"),
        ("tpu", {"data": 16}, "large", "off", "off"),
        ("tpu", {"data": 4, "fsdp": 4}, "large", "auto", "off"),
        ("cpu", {"data": 8}, "large", "auto", "off"),
        ("cpu", {"data": 8}, "base", "on", "on"),
    ],
)
def test_accelerators_divide_the_update_where_it_pays(platform, sizes, size, asked, chosen):
    mesh = SimpleNamespace(devices=np.array([device(platform)]), shape={"fsdp": 1, "tensor": 1} | sizes)
    config = PretrainConfig(model=model_of_run(size), train=TrainConfig(zero1=asked))
    config = choose_update(config, mesh)
    assert config.train.zero1 == chosen and config.train.divides_state == (chosen == "on")
    assert describe_choices(config).endswith(" train.zero1=on") == (chosen == "on")


@pytest.fixture(scope="module")
def base():
    """BERT-Base on one device: its settings, and shapes of its state."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = dataclasses.replace(model_of_run("base"), vocab_size=30_522)
    plain = dataclasses.replace(model, compute_dtype="bfloat16", attention="plain", remat="none")
    objective = PretrainingObjective(plain, MaskingConfig(), 103, (101, 102))
    state = abstract_state(objective, OptimizerConfig(), TrainConfig(), mesh)

    def needs(rows, count, remat="none"):
        asked = dataclasses.replace(plain, remat=remat)
        return estimate_memory(asked, rows, count, state, mesh.shape, ROW)["total"] / 0.9 + 1

    def choose(limit, *batches, remat="auto", vmem=0):
        asked = dataclasses.replace(plain, remat=remat)
        return choose_memory(asked, batches, mesh.shape, lambda: state, limit, vmem)

    return needs, choose


def test_as_few_microbatches_as_fit_come_before_computing_again(base):
    needs, choose = base
    open_batch = Batches(256, 0, ROW)
    assert choose(needs(256, 1), open_batch) == ("none", [1])
    assert choose(needs(256, 1) - 2, open_batch) == ("none", [2])
    assert choose(needs(256, 8), open_batch) == ("none", [8])
    assert choose(needs(256, 4), open_batch, Batches(64, 0, ROW)) == ("none", [4, 1])


def test_hidden_states_of_a_microbatch_leave_room_beside_the_units_of_a_tpu(base):
    needs, choose = base
    vmem = vmem_bytes("TPU v6 lite")
    rows = int(vmem * OF_VMEM / (128 * 768 * 2))  # that may be in a microbatch
    assert 32 < rows < 256 and choose(needs(256, 1), Batches(256, 0, ROW)) == ("none", [1])
    for size in (rows, 2 * rows):
        assert choose(needs(size, 1), Batches(size, 0, ROW), vmem=vmem) == ("none", [size // rows])
    assert choose(needs(256, 32), Batches(256, 0, ROW), vmem=vmem) == ("none", [32])  # the fewest that fit
    assert choose(needs(256, 1), Batches(256, 1, ROW), vmem=vmem) == ("none", [1])  # as it is set
    assert choose(needs(256, 2), Batches(256, 0, ROW), vmem=8) == ("none", [256])  # not even one row leaves it
    assert choose(1.0, Batches(6, 0, ROW), vmem=vmem) == ("full", [6])


def test_more_is_computed_again_only_where_a_single_row_does_not_fit(base):
    needs, choose = base
    fixed = Batches(256, 1, ROW)
    assert choose(needs(256, 1, "dots"), fixed) == ("dots", [1])
    assert choose(needs(256, 1, "full"), fixed) == ("full", [1])
    assert choose(needs(256, 1, "full"), fixed, remat="none") == ("none", [1])  # as it is set
    assert choose(1.0, Batches(6, 0, ROW)) == ("full", [6])  # nothing fits; the run says so


def test_rows_that_take_little_are_not_divided(base):
    """Also where the rest does not fit: they would make no room for it."""
    _, choose = base
    assert choose(2**40, Batches(256, 0, ROW), Batches(256, 4, ROW)) == ("none", [1, 4])
    assert choose(2**30, Batches(1, 0, ROW)) == ("none", [1])


def test_a_batch_for_an_accelerator_is_divided_on_a_cpu(base):
    """That of `lamb:large`, which would take more memory than a machine has."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    _, choose = base
    _, (count,) = choose(choices.memory_of(mesh), Batches(65_536, 0, ROW))
    assert count > 1


def test_a_run_keeps_what_it_chose(toy_data, tmp_path, monkeypatch):
    """It began on a CPU; the device that resumes it would have chosen otherwise, and would refuse to go on.

    Both runs end before their first step.
    """

    class Began(Exception):
        pass

    def begin(*_):
        raise Began

    monkeypatch.setattr("bert_jax.training.train.init_state", begin)
    config = tiny_run(toy_data, mesh=ONE_DEVICE, train=TrainConfig(num_steps=2))
    config = dataclasses.replace(config, model=left_open(config.model))
    with pytest.raises(Began):
        train(config, tmp_path)
    run = json.loads((tmp_path / "config.json").read_text())["run"]
    chosen = {name: run["model"][name] for name in ("compute_dtype", "attention", "remat")}
    assert chosen == {"compute_dtype": "float32", "attention": "plain", "remat": "none"}
    assert run["train"]["accumulate"] == 1 and run["train"]["zero1"] == "off"
    monkeypatch.setattr(choices, "multiplies_faster_in_bfloat16", lambda _: True)
    with pytest.raises(Began):
        train(config, tmp_path)
    other = dataclasses.replace(config.model, compute_dtype="bfloat16")
    with pytest.raises(InputError, match=r"another model.compute_dtype; .*--config.model.compute_dtype=float32"):
        train(dataclasses.replace(config, model=other), tmp_path)
