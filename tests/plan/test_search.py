# SPDX-License-Identifier: Apache-2.0
"""The search for the settings of the lowest bound, with a stand-in for the compiler."""

import dataclasses
from types import SimpleNamespace

import pytest
from builders import tiny_run
from jax.sharding import AbstractMesh

from bert_jax.devices.sharding import mesh_sizes
from bert_jax.errors import InputError
from bert_jax.plan import search as searching
from bert_jax.plan.planner import Plan, row_of
from bert_jax.plan.search import meshes, search
from bert_jax.plan.tables import search_table
from bert_jax.settings.model import model_size

GPU = SimpleNamespace(platform="cuda", compute_capability="9.0", device_kind="NVIDIA H100")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Returns the settings that a search compiles: the first does not fit, and each bound is lower than the last."""
    asked = []

    def plan(config, topology, row):
        asked.append(config)
        return Plan(
            topology=topology,
            device_kind="a GPU",
            num_chips=8,
            mesh=mesh_sizes(config.mesh, int(topology.partition(":")[2])),
            batch_size=config.data.batch_size,
            row_length=512,
            predictions=77,
            problem="" if len(asked) > 1 else "too much",
            hbm_bytes=1e11,
            bytes={"total": 10**9},
            estimate={},
            model_flops=1e12,
            compiled_flops=1e12,
            moved_bytes=1e9,
            collectives=(),
            bound={"products": 1 / len(asked)},
            bound_mfu=0.5,
            compile_seconds=1.0,
            source="a compiler",
        )

    def make_mesh(config, devices):
        sizes = mesh_sizes(config, len(devices))
        return AbstractMesh(tuple(sizes.values()), tuple(sizes))

    def estimated_bytes(config, mesh, row):
        """Returns so many bytes that 64 rows of a chip fit, or 128 where less is kept."""
        rows = config.data.batch_size // (mesh.shape["data"] * mesh.shape["fsdp"]) // config.train.accumulate
        return rows * 1e9 / (1 if config.model.remat == "none" else 2)

    def planned_devices(name, slices):
        family, _, count = name.partition(":")
        return [TPU if family == "v6e" else GPU] * int(count), ""

    monkeypatch.setattr(searching, "plan", plan)
    monkeypatch.setattr(searching, "planned_devices", planned_devices)
    monkeypatch.setattr(searching, "make_mesh", make_mesh)
    monkeypatch.setattr(searching, "estimated_bytes", estimated_bytes)
    return asked


def configuration(path, batch_size):
    config = tiny_run(path)
    model = dataclasses.replace(model_size("large"), vocab_size=30522, compute_dtype="bfloat16")
    return dataclasses.replace(config, model=model, data=dataclasses.replace(config.data, batch_size=batch_size))


ROW = row_of(configuration("data", 1), 512)


def test_meshes_are_data_parallel_fsdp_and_a_mixture():
    assert [(mesh.data, mesh.fsdp) for mesh in meshes(16, 0)] == [(-1, 1), (1, -1), (-1, 8)]
    assert [(mesh.data, mesh.fsdp, mesh.dcn) for mesh in meshes(16, 2)] == [(-1, 1, 2), (2, -1, 2)]
    assert len(meshes(1, 0)) == 1 and len(meshes(2, 0)) == 2


def test_the_winner_has_the_lowest_bound_and_the_flags_that_make_its_settings(tmp_path, compiled):
    config, told = configuration(tmp_path, 512), []
    found = search(config, "h200:8", ROW, told.append)
    assert len(compiled) == len(told) == 4  # until three fit
    assert [plan.fits for plan in found] == [True, True, True, False]
    assert [plan.bound_seconds for plan in found] == [1 / 4, 1 / 3, 1 / 2, 1]
    assert {settings.model.remat for settings in compiled} == {"none"}  # 64 rows of a chip fit as they are
    assert {settings.train.accumulate for settings in compiled} == {1}
    flags = dict(flag.removeprefix("--config.").split("=") for flag in found[0].flags)
    winner = compiled[3]
    assert flags["model.attention"] == winner.model.attention == "fused"
    assert flags["train.zero1"] == winner.train.zero1
    table = "\n".join(search_table(found))
    assert "--config.model.attention=fused" in table and "by a compiler" in table and "lowest bound" in table


def test_what_does_not_fit_at_once_is_accumulated_and_what_computes_nothing_again_is_first(tmp_path, compiled):
    found = search(configuration(tmp_path, 8 * 1024), "a100:8", ROW)
    assert {(each.model.remat, each.train.accumulate) for each in compiled} == {("none", 16)}
    assert "--config.train.accumulate=16" in found[0].flags


def test_tpus_take_microbatches_of_which_they_keep_more_beside_their_units(tmp_path, compiled):
    search(configuration(tmp_path, 8 * 16), "v6e:8", ROW)  # 16 rows of 512 x 1024 numbers in bfloat16 are 16 MiB
    assert {each.train.accumulate for each in compiled} == {2}


def test_a_mesh_that_does_not_divide_is_left_out_with_the_reason(tmp_path):
    told = []
    found = search(configuration(tmp_path, 48), "h100:12", ROW, on_refusal=told.append)
    assert {plan.mesh["fsdp"] for plan in found} <= {1, 4}
    assert told == ["left out: model.hidden_size 1024 is not divisible by mesh.fsdp 12; use less of mesh.fsdp"]


def test_a_batch_that_divides_over_no_mesh_is_refused(tmp_path):
    told = []
    with pytest.raises(InputError, match=r"data\.batch_size 7 divides over no mesh of h100:8"):
        search(configuration(tmp_path, 7), "h100:8", ROW, on_refusal=told.append)
    assert "batch_size 7 is not divisible by data x fsdp = 8" in told[0]
