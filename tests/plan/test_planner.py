# SPDX-License-Identifier: Apache-2.0
"""The planner, with the CPU's compiler in place of another machine's: figures, bound, errors and tables."""

import dataclasses
import sys
import types

import jax
import pytest
from builders import message, tiny_model, tiny_run
from hf_models import random_params

from bert_jax.devices.chips import GIB, GPUS, TPUS
from bert_jax.errors import InputError
from bert_jax.model.objective import count_parameters
from bert_jax.plan import planner
from bert_jax.plan.tables import plan_table
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import DataConfig, MaskingConfig, MeshConfig, TrainConfig
from bert_jax.training.memory import activation_bytes, memory_problem


def tiny_config(path, **sections):
    config = tiny_run(path, model=tiny_model(), **sections)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=64))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a plan of a tiny model on a mesh of all axes, as if eight CPU devices were those of a pod."""
    config = tiny_config(tmp_path_factory.mktemp("plan"), mesh=MeshConfig(2, 2, 2))
    return planner._plan_by_compiler(config, "v5e:2x4", planner.row_of(config, 32), jax.devices()[:8], "a compiler 1")


def test_a_plan_has_the_compilers_figures_and_a_bound_of_them(made):
    params = 4 * count_parameters(random_params(tiny_model(vocab_size=256, vocab_multiple=1)))  # padded from 203
    assert made.fits and made.rows_per_chip == 16 and made.source == "a compiler 1"
    assert params / 4 < made.bytes["params"] < params / 3  # norms and biases are not divided
    assert made.bytes["optimizer"] == pytest.approx(2 * made.bytes["params"], abs=64)
    assert {traffic.kind for traffic in made.collectives} >= {"all-reduce", "all-gather"}
    assert 1.0 < made.compiled_flops / made.model_flops < 1.2 and made.moved_bytes > made.bytes["params"]
    chip = TPUS["v5e"]
    assert made.bound["products"] == pytest.approx(made.compiled_flops / chip.float32)
    assert made.bound["memory"] == pytest.approx(made.moved_bytes / chip.hbm_bandwidth)
    assert made.bound["links"] == planner.link_seconds(chip, 8, made.collectives) > 0
    assert made.bound_mfu == pytest.approx(made.model_flops / chip.float32 / made.bound_seconds)


def test_an_all_reduce_sends_its_bytes_twice_and_gpus_of_several_hosts_send_over_the_network():
    tpu, gpu = TPUS["v5e"], GPUS["h100"]
    sums, parts = (planner.Traffic(kind, "f32", 1, 10**9, 8) for kind in ("all-reduce", "all-gather"))
    assert planner.link_seconds(tpu, 8, [sums]) == pytest.approx(2e9 / tpu.link_bandwidth)
    assert planner.link_seconds(tpu, 8, [sums, parts]) == pytest.approx(3e9 / tpu.link_bandwidth)
    between = planner.link_seconds(gpu, 16, [parts]) - planner.link_seconds(gpu, 8, [parts])
    assert between == pytest.approx(1e9 / 8 / gpu.network_bandwidth)


def test_a_program_that_the_compiler_refuses_has_no_bound(tmp_path, monkeypatch):
    def refuse(**_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 18.98G of 15.75G hbm. Exceeded by 3.23G.")

    config = tiny_config(tmp_path)
    monkeypatch.setattr(planner, "lower_train_step", lambda *_: types.SimpleNamespace(compile=refuse))
    plan = planner._plan_by_compiler(config, "v5e:2x4", planner.row_of(config, 32), jax.devices()[:8], "a compiler 1")
    assert not plan.fits and "need 18.98 GiB of 15.75" in plan.problem and plan.bound_seconds == 0
    text = "\n".join(plan_table(plan))
    assert "fits: NO. out of memory" in text and "bound" not in text


def test_the_table_has_every_part(made):
    text = "\n".join(plan_table(made))
    for part in ("data 2 x fsdp 2 x tensor 2; by a compiler 1", "fits: yes", "optimizer", "of the chip", "all-gather",
                 "model's FLOPs", "bound on a step", "at the data sheet's peaks"):  # fmt: skip
        assert part in text, part


def test_what_is_kept_for_the_backward_pass_shrinks_with_remat():
    large = dataclasses.replace(model_size("large"), vocab_size=30522, compute_dtype="bfloat16")
    kept = {remat: activation_bytes(dataclasses.replace(large, remat=remat), 512) for remat in ("none", "dots", "full")}
    assert kept["none"] > 3 * kept["dots"] > 3 * kept["full"]
    assert activation_bytes(large, 512, tensor=4) == pytest.approx(kept["none"] / 4, rel=1e-6)


@pytest.mark.parametrize(
    ("predictions", "length"), [(20, 128), (40, 256), (76, 512), (0, 128), (400, 512)]
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


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ("v5f:4x4", "topology 'v5f:4x4' is unknown .did you mean 'v5e:4x4'.*TPUs: v5e:2x2"),
        ("v5e", "is unknown"),
        ("b17:8", "GPUs: a100:N"),
    ],
)
def test_an_unknown_topology_is_refused_with_those_there_are(tmp_path, topology, expected):
    with pytest.raises(InputError, match=expected):
        planner.plan(tiny_config(tmp_path), topology)


def test_what_cannot_be_planned_is_one_line(tmp_path, monkeypatch):
    config = tiny_config(tmp_path)
    told = message(planner.plan, config, "h100:8", planner.row_of(config, 128))
    assert "rows of 128 are longer than model.max_positions 64" in told
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert "pip install 'bert_jax[tpu]'" in message(planner.plan, config, "v5e:4x4")
    monkeypatch.setattr(planner, "compiler_version", lambda: "")
    assert "pip install 'bert_jax[gpu-plan]'" in message(planner.plan, config, "h100:8")
    told = message(planner.out_of_memory, "INTERNAL: no\nmore")
    assert "the compiler has refused the program: INTERNAL: no" in told


@pytest.mark.parametrize(
    ("rows", "accumulate", "mend"),
    [(201, 1, "train.accumulate=3, or data.batch_size=1600"), (12, 3, "train.accumulate=4, or data.batch_size=96")],
)
def test_what_is_advised_divides(tmp_path, rows, accumulate, mend):
    data, train = DataConfig(path="x", batch_size=16 * rows), TrainConfig(10, accumulate=accumulate)
    config = dataclasses.replace(tiny_run(tmp_path), data=data, train=train)
    assert mend in memory_problem(config, {"data": 16, "fsdp": 1, "tensor": 1}, 20.0, 10.0)
