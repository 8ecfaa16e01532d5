# SPDX-License-Identifier: Apache-2.0
"""The search for the fastest settings, by arithmetic."""

import dataclasses

import pytest
from builders import tiny_run

from bert_jax.errors import InputError
from bert_jax.plan import search as searching
from bert_jax.plan.planner import plan_by_arithmetic, row_of
from bert_jax.plan.search import meshes, search
from bert_jax.plan.tables import search_table
from bert_jax.settings.model import model_size


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch):
    monkeypatch.setattr(searching, "compiler_version", lambda: "")


def configuration(path, batch_size):
    config = tiny_run(path)
    model = dataclasses.replace(model_size("large"), vocab_size=30522, compute_dtype="bfloat16")
    return dataclasses.replace(config, model=model, data=dataclasses.replace(config.data, batch_size=batch_size))


ROW = row_of(configuration("data", 1), 512)


def test_meshes_are_data_parallel_fsdp_and_a_mixture():
    assert [(mesh.data, mesh.fsdp) for mesh in meshes(16, 0)] == [(-1, 1), (1, -1), (-1, 8)]
    assert [(mesh.data, mesh.fsdp, mesh.dcn) for mesh in meshes(16, 2)] == [(-1, 1, 2), (2, -1, 2)]
    assert len(meshes(1, 0)) == 1 and len(meshes(2, 0)) == 2


def test_the_winner_has_the_batch_and_flags_that_make_its_settings(tmp_path):
    config = configuration(tmp_path, 512)
    found = search(config, "h200:8", ROW)
    assert {plan.batch_size for plan in found} == {512}
    times = [plan.seconds["step"] for plan in found if plan.fits]
    assert times == sorted(times) and len(times) > 20
    winner = found[0]
    flags = dict(flag.removeprefix("--config.").split("=") for flag in winner.flags)
    assert flags["model.attention"] == "fused"
    assert "model.remat" not in flags  # 64 rows of a chip fit as they are
    changed = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, unroll=int(flags["model.unroll"]), attention="fused", gradient_dtype="bfloat16"
        ),
        train=dataclasses.replace(config.train, zero1=flags.get("train.zero1") == "True"),
    )
    assert plan_by_arithmetic(changed, "h200:8", 8, ROW).seconds == winner.seconds
    table = "\n".join(search_table(found))
    assert "--config.model.attention=fused" in table and "by arithmetic" in table and "more; --json=FILE" in table


def test_what_does_not_fit_at_once_is_accumulated(tmp_path):
    found = search(configuration(tmp_path, 8 * 1024), "a100:8", ROW)
    winner = found[0]
    assert winner.fits and any("train.accumulate=" in flag for flag in winner.flags)


def test_a_mesh_that_does_not_divide_is_left_out_with_the_reason(tmp_path):
    told = []
    found = search(configuration(tmp_path, 48), "h100:12", ROW, on_refusal=told.append)
    assert {plan.mesh["fsdp"] for plan in found} == {1, 4}
    assert told == ["left out: model.hidden_size 1024 is not divisible by mesh.fsdp 12; use a smaller mesh.fsdp"]


def test_a_batch_that_divides_over_no_mesh_is_refused(tmp_path):
    told = []
    with pytest.raises(InputError, match=r"data\.batch_size 7 divides over no mesh of h100:8"):
        search(configuration(tmp_path, 7), "h100:8", ROW, on_refusal=told.append)
    assert "batch_size 7 is not divisible by data x fsdp = 8" in told[0]


def test_candidates_are_compiled_in_turn_until_enough_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "compiler_version", lambda: "a compiler")
    asked = []

    def compiled(config, topology, row):
        made = plan_by_arithmetic(config, topology, 8, row)
        asked.append(made)
        slow = made.seconds | {"step": made.seconds["step"] + (1 if len(asked) == 2 else 0)}
        return dataclasses.replace(made, fits=len(asked) != 1, source="a compiler", seconds=slow)

    monkeypatch.setattr(searching, "plan", compiled)
    told = []
    found = search(configuration(tmp_path, 512), "h200:8", ROW, told.append)
    assert len(asked) == len(told) == 4  # the first does not fit
    assert [plan.fits for plan in found] == [True, True, True, False]
    assert found[2].seconds["step"] > 1  # ranked by what the compiler says
