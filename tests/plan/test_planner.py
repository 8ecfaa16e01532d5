# SPDX-License-Identifier: Apache-2.0
"""The planner, as far as it needs no compiler of another machine: arithmetic, errors, search and tables."""

import dataclasses
import sys

import pytest
from builders import tiny_model, tiny_run

from bert_jax.devices.chips import GIB
from bert_jax.errors import InputError
from bert_jax.plan import planner as planner
from bert_jax.plan.tables import plan_table
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import DataConfig, MaskingConfig, MeshConfig, TrainConfig
from bert_jax.training.flops import num_parameters
from bert_jax.training.memory import activation_bytes, memory_problem


def tiny_config(path, **sections):
    config = tiny_run(path, model=tiny_model(hidden_dropout_rate=0.1, attention_dropout_rate=0.1), **sections)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=64))


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch):
    monkeypatch.setattr(planner, "compiler_version", lambda: "")


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """By arithmetic, also where XLA's GPU compiler is installed."""
    config = tiny_config(tmp_path_factory.mktemp("plan"))
    mixed = dataclasses.replace(config, mesh=MeshConfig(2, 2, 2))
    return [planner.plan_by_arithmetic(each, "h100:8", 8, planner.row_of(each, 32)) for each in (config, mixed)]


def test_gpus_are_planned_by_arithmetic_and_it_says_so(plans):
    data, mixed = plans
    params = 4 * num_parameters(tiny_model(vocab_size=256))  # padded from 203
    assert data.source == "arithmetic" and data.fits and data.compiled_flops == 0
    assert data.bytes["params"] == params and data.bytes["optimizer"] == pytest.approx(2 * params, abs=64)
    assert [(t.kind, t.bytes, t.group_size) for t in data.collectives] == [("all-reduce", params, 8)]
    assert params / 4 < mixed.bytes["params"] < params / 3  # norms and biases are not divided
    assert [t.kind for t in mixed.collectives] == ["all-reduce", "all-gather", "reduce-scatter", "all-reduce"]
    assert data.model_flops == mixed.model_flops and 0 < data.mfu < 1


def test_what_is_kept_for_the_backward_pass_shrinks_with_remat():
    large = dataclasses.replace(model_size("large"), vocab_size=30522, compute_dtype="bfloat16")
    kept = {remat: activation_bytes(dataclasses.replace(large, remat=remat), 512) for remat in ("none", "dots", "full")}
    assert kept["none"] > 3 * kept["dots"] > 3 * kept["full"]
    assert activation_bytes(large, 512, tensor=4) == pytest.approx(kept["none"] / 4, rel=1e-6)


@pytest.mark.parametrize(
    ("predictions", "length"), [(20, 128), (40, 256), (76, 512), (80, 512), (5, 128), (0, 128), (400, 512)]
)  # at most max_positions
def test_rows_are_as_long_as_the_predictions_say(tmp_path, predictions, length):
    config = dataclasses.replace(
        tiny_run(tmp_path), model=model_size("base"), masking=MaskingConfig(max_predictions=predictions)
    )
    assert planner.default_row_length(config) == length


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (18.98G) "
        "exceeds available HBM (15.75G).",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.98G of 15.75G hbm. Exceeded by 3.23G.",
    ],
)
def test_out_of_memory_becomes_one_line_that_says_what_to_change(tmp_path, message):
    needed, available = planner.out_of_memory(message)
    assert (needed / GIB, available / GIB) == (pytest.approx(18.98), pytest.approx(15.75))
    config = dataclasses.replace(tiny_run(tmp_path), data=DataConfig(path="x", batch_size=128), train=TrainConfig(10))
    line = memory_problem(config, {"data": 16, "fsdp": 1, "tensor": 1}, needed, available)
    assert line == (
        "out of memory: 8 rows at once on a chip need 18.98 GiB of 15.75, so it does not fit; use model.remat=dots, or "
        "train.accumulate=2, or data.batch_size=64, or mesh.fsdp=-1 with mesh.data=1"
    )


def test_another_error_of_the_compiler_is_told():
    with pytest.raises(InputError, match="the compiler has refused the program: INTERNAL: no"):
        planner.out_of_memory("INTERNAL: no\nmore")


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ("v5f:4x4", "topology 'v5f:4x4' is unknown .did you mean 'v5e:4x4'.*TPUs: v5e:2x2"),
        ("v5e", "is unknown"),
        ("h100:0", "is unknown"),
        ("b17:8", "GPUs: a100:N"),
    ],
)
def test_an_unknown_topology_is_refused_with_those_there_are(tmp_path, topology, expected):
    with pytest.raises(InputError, match=expected):
        planner.plan(tiny_config(tmp_path), topology)


def test_without_libtpu_one_line_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(InputError, match=r"libtpu is not installed.*pip install 'bert_jax\[tpu\]'"):
        planner.plan(tiny_config(tmp_path), "v5e:4x4")


def test_rows_longer_than_the_positions_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"rows of 128 are longer than model.max_positions 64"):
        planner.plan(tiny_config(tmp_path), "h100:8", planner.row_of(tiny_config(tmp_path), 128))


@pytest.mark.parametrize(
    ("rows", "accumulate", "mend"),
    [(201, 1, "train.accumulate=3, or data.batch_size=1600"), (12, 3, "train.accumulate=4, or data.batch_size=96")],
)
def test_what_is_advised_divides(tmp_path, rows, accumulate, mend):
    data, train = DataConfig(path="x", batch_size=16 * rows), TrainConfig(10, accumulate=accumulate)
    config = dataclasses.replace(tiny_run(tmp_path), data=data, train=train)
    assert mend in memory_problem(config, {"data": 16, "fsdp": 1, "tensor": 1}, 20.0, 10.0)


def test_the_model_of_time_knows_what_is_divided_and_what_is_computed_again(tmp_path):
    def plan(model=None, **train):
        config = dataclasses.replace(tiny_run(tmp_path), train=TrainConfig(10, **train))
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(model_size("large"), vocab_size=30522, **(model or {})),
            data=dataclasses.replace(config.data, batch_size=256),
        )
        return planner.plan(config, "h100:8", planner.row_of(config, 128))

    plain, zero1, full, four = plan(), plan(zero1=True), plan({"remat": "full"}), plan(accumulate=4)
    assert zero1.seconds["memory"] < plain.seconds["memory"] and zero1.seconds["products"] == plain.seconds["products"]
    assert full.seconds["products"] == pytest.approx(4 / 3 * plain.seconds["products"])
    assert four.collectives == plain.collectives  # devices are added up once
    narrow = plan({"gradient_dtype": "bfloat16", "compute_dtype": "bfloat16"})
    assert narrow.collectives[0].bytes == plain.collectives[0].bytes // 2


def test_the_table_has_every_part(plans):
    text = "\n".join(plan_table(plans[1]))
    for part in ("data 2 x fsdp 2 x tensor 2; by arithmetic", "fits: yes", "optimizer", "of the chip", "all-gather",
                 "model's FLOPs", "MFU", "assumes products at 80%"):  # fmt: skip
        assert part in text, part
    failed = dataclasses.replace(plans[0], fits=False, problem="out of memory: so much")
    assert "fits: NO. out of memory: so much" in "\n".join(plan_table(failed))
