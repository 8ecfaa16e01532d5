# SPDX-License-Identifier: Apache-2.0
"""The queue of plans and the table of docs/pods.md."""

import dataclasses
import json
import shlex

import pytest
from builders import tiny_run

from benchmarks import plans
from benchmarks.pages import Sources, draw_page
from benchmarks.queues import make_record
from bert_jax.errors import InputError
from bert_jax.plan.planner import plan_by_arithmetic, row_of
from bert_jax.settings.model import model_size
from bert_jax.storage.writing import write_json

(SETTING,) = [setting for setting in plans.SETTINGS if setting.name == "large_phase2_h200-8_64"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns a directory in which one setting has its plan."""
    root = tmp_path_factory.mktemp("plans")
    model = dataclasses.replace(model_size("large"), vocab_size=30522, compute_dtype="bfloat16")
    config = tiny_run(root)
    config = dataclasses.replace(config, model=model, data=dataclasses.replace(config.data, batch_size=512))
    plan = dataclasses.replace(
        plan_by_arithmetic(config, "h200:8", 8, row_of(config, 512)),
        compiled_flops=3.3e13,
        moved_bytes=1.5e11,
        compile_seconds=600.0,
    )
    (job,) = plans.unit_of(SETTING, root).jobs
    job.output.parent.mkdir()
    write_json(job.output, {"plans": [dataclasses.asdict(plan)]})
    return root


def test_names_differ_and_commands_say_what_is_planned():
    assert len({setting.name for setting in plans.SETTINGS}) == len(plans.SETTINGS)
    assert SETTING.command[-1] == "--config.model.residual=fused"
    unrolled = plans.Setting("large", 2, "v5e:4x4", 16, ("model.unroll=24",))
    assert unrolled.name == "large_phase2_v5e-4x4_16_model.unroll-24"
    assert unrolled.command[-1] == "--config.model.unroll=24"
    tpu = plans.Setting("base", 1, "v5e:4x4", 128).command
    assert "--topology=v5e:4x4" in tpu and "--config=configs/pretrain.py:base,phase=1" in tpu
    assert not any("residual" in flag for flag in tpu)


def test_a_record_keeps_what_is_not_made_anew(finished):
    before = {"other": {"topology": "v5e:2x2"}, SETTING.name: {"topology": "old"}}
    units = [plans.unit_of(setting, finished) for setting in plans.SETTINGS]
    record = make_record(units, plans.read_plan, before)
    assert list(record) == [SETTING.name, "other"] and record["other"] == before["other"]
    assert record[SETTING.name]["topology"] == "h200:8"
    assert shlex.split(record[SETTING.name]["command"])[:3] == ["python", "-m", "bert_jax.tools.plan"]


def test_a_page_draws_the_table_from_the_record(finished, tmp_path, repository):
    write_json(
        tmp_path / "plans.json",
        {SETTING.name: plans.read_plan(SETTING.name, plans.unit_of(SETTING, finished).jobs[0].output)},
    )
    page = tmp_path / "page.md"
    page.write_text(f'<!-- draw plans\nrecord = "plans"\nrows = [["{SETTING.name}", "Large"]]\n-->\n<!-- end -->\n')
    sources = Sources(tmp_path, repository / "benchmarks" / "paper.toml")
    drawn = draw_page(page, sources)
    plan = json.loads((tmp_path / "plans.json").read_text())[SETTING.name]
    (row,) = [line for line in drawn.splitlines() if line.startswith("| Large")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == ["8", "64 x 512"] and cells[6] == "150.0" and cells[-1] == "10 min"
    assert cells[8:10] == [f"{1e3 * plan['seconds']['step']:.1f}", f"{plan['mfu']:.1%}"]
    page.write_text(page.read_text().replace(SETTING.name, "nothing"))
    with pytest.raises(InputError, match=r"page\.md:1: the record has no plan 'nothing'; it has large_phase2"):
        draw_page(page, sources)
