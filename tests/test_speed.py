# SPDX-License-Identifier: Apache-2.0
"""The queue of measurements and the table of docs/benchmarks.md."""

from pathlib import Path

import pytest

from benchmarks import speed
from benchmarks.pages import Sources, draw_page
from benchmarks.timing import Contender, Round, figures
from bert_jax.errors import InputError
from bert_jax.storage.writing import write_json


def unit(name):
    (measurement,) = [each for each in speed.MEASUREMENTS if each.name == name]
    return speed.unit_of(measurement, Path("/big/speed"), "/big/data", "peers/python")


def measured(name, seconds, **facts):
    """Returns the figures of rounds of 2 steps and 1,000 tokens each."""
    rounds = [Round(each, each, {"steps": 2, "tokens": 1000}) for each in seconds]
    return figures(Contender(name, lambda: rounds[0], facts), rounds)


def record_of(*contenders):
    return {
        "figures": list(contenders), "versions": {"jax": "1.2.3"}, "modified": False, "cores": 2, "processor": "Abacus",
        "commit": "0123456789", "time": "2020-01-02T03:04:05Z",
    }  # fmt: skip


def test_names_differ_and_commands_name_data_and_peers():
    names = [each.name for each in speed.MEASUREMENTS]
    assert len(set(names)) == len(names) and {"infer_base_qqp", "finetune_base_mrpc", "train_tiny", "loader"} <= set(
        names
    )
    (job,) = unit("infer_base_qqp").jobs
    assert {"--task=qqp", "--data=/big/data/glue/QQP", "--peer_python=peers/python"} <= set(job.command)
    assert "onnx" in job.command[-3] and job.command[-2] == f"--output={job.output}"
    prepare, bench = unit("loader").jobs
    assert prepare.output == Path("/big/speed/rows/manifest.json") and "--data=/big/speed/rows" in bench.command


def test_a_record_names_no_directory_of_the_machine(tmp_path):
    output = tmp_path / "bench.json"
    write_json(output, {"command": f"bench --data=/big/data/glue/SST-2 --output={tmp_path}/x"})
    record = speed.read_measurement(output, "/big/data", tmp_path)
    assert record == {"command": "bench --data=glue/SST-2 --output=x"}


def test_a_page_draws_medians_and_ratios_of_rounds(tmp_path, repository):
    ours = measured("ours float32", [2.0, 4.0, 3.0]), measured("ours bfloat16", [1.0, 2.0, 2.0])
    theirs = measured("torch eager:float32", [4.0, 4.0, 12.0], versions={"python": "3", "torch": "9"})
    write_json(tmp_path / "speed.json", {"one": record_of(*ours, theirs), "two": record_of(*ours)})
    page = tmp_path / "page.md"
    page.write_text(
        """<!-- draw speed
record = "speed"
rows = [["one", "first"], ["two", "second"]]
contenders = [["ours float32", "ours"], ["torch eager:float32", "torch"]]
against = [["ours", "torch", "best"], ["ours float32", "torch", "float32"]]
metric = "tokens_per_second"
-->
<!-- end -->
"""
    )
    drawn = draw_page(page, sources := Sources(tmp_path, repository / "benchmarks" / "paper.toml")).splitlines()
    assert "| first | 333 | 250 | **4.00** (2.00 to 6.00) | **2.00** (1.00 to 4.00) |" in drawn
    assert "| second | 333 |  |  |  |" in drawn
    told = "2 cores of Abacus; jax 1.2.3, torch 9; commit 0123456; 2020-01-02."
    assert told in drawn and told.replace(", torch 9", "") in drawn
    page.write_text(page.read_text().replace("tokens_per_second", "step_seconds"))
    assert "| first | 1,500.0 | 2,000.0 |" in draw_page(page, sources)
    page.write_text(page.read_text().replace('"two"', '"three"'))
    with pytest.raises(InputError, match=r"page\.md:1: 'three' was not measured; there are one, two"):
        draw_page(page, sources)
