# SPDX-License-Identifier: Apache-2.0
"""Tables of records: what is collected, means and differences over seeds, and records that are damaged."""

import gzip
import json
import subprocess
import sys

import pytest

from benchmarks import tables
from bert_jax.errors import InputError


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture
def runs(tmp_path):
    """Two groups: `a` of three seeds with a task, `b` of two, without the task in the second."""
    for group, losses in (("a", (4.0, 4.2, 4.4)), ("b", (3.0, 3.4))):
        for seed, loss in enumerate(losses):
            unit = tmp_path / group / f"seed{seed}"
            write(unit / "evaluations" / "heldout.json", {"metrics": {"mlm_loss": loss}})
            write(unit / "pairs" / "blimp.json", {"overall": {"accuracy": loss / 10}})
            if (group, seed) != ("b", 1):
                for number, score in enumerate((0.5, 0.7)):
                    result = {"metric": "f1", "metrics": {"f1": score + seed / 10, "accuracy": 1.0}}
                    write(unit / "tasks" / "mrpc" / "runs" / f"rate0.001_seed{number}" / "results.json", result)
    write(tmp_path / "c" / "config.json", {"run": {"data": {"path": f"{tmp_path}/data128"}, "train": {"seed": 0}}})
    lines = [{"kind": "eval", "step": step, "time": 0.0, "loss": 9.0 - step} for step in (1, 2)]
    (tmp_path / "c" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def collected(runs):
    units = [path for pattern in ("?/seed*", "c") for path in sorted(runs.glob(pattern))]
    return tables.collect(units, {"format": 1, "units": []})


def test_a_cell_is_the_mean_over_seeds(runs):
    record = collected(runs)
    columns = ["evaluation:heldout.mlm_loss", "pairs:blimp", "task:mrpc", "task:mrpc.accuracy", "heldout:loss"]
    assert tables.table(record, columns)[2:] == [
        "| a | 4.2 ± 0.2 (3) | 0.42 ± 0.02 (3) | 0.7 ± 0.1 (3) | 1 ± 0 (3) |  |",
        "| b | 3.2 ± 0.28 (2) | 0.32 ± 0.028 (2) | 0.6 | 1 |  |",
        "| c |  |  |  |  | 7 |",
    ]
    assert len(tables.table(record, columns, ["b"])) == 3
    assert next(unit for unit in record["units"] if unit["group"] == "c")["settings"]["data"] == {"path": "data128"}


def test_differences_are_over_the_seeds_that_both_have(runs):
    lines = tables.table(collected(runs), ["evaluation:heldout.mlm_loss", "task:mrpc"], ["a", "b"], "a")
    assert lines[2:] == ["| b | -0.9 [-2.171, +0.3706] (2) | +0 (one seed) |"]  # 12.706 x 0.1414 / sqrt(2)


def test_a_unit_is_replaced_and_others_stay(runs):
    record = collected(runs)
    write(runs / "a" / "seed0" / "evaluations" / "heldout.json", {"metrics": {"mlm_loss": 1.0}})
    again = tables.collect([runs / "a" / "seed0"], record)
    assert len(again["units"]) == len(record["units"]) == 6
    assert tables.values_of(again, "a", "evaluation:heldout.mlm_loss") == {0: 1.0, 1: 4.2, 2: 4.4}


@pytest.mark.parametrize(
    ("columns", "rows", "told"),
    [
        (["task:mrpc.f2"], [], "mrpc has no metric 'f2'"),
        (["tasks:mrpc"], [], "is not evaluation:NAME.METRIC"),
        (["task:mrpc"], ["aa"], "the record has no group 'aa' .did you mean 'a'"),
    ],
)
def test_what_is_misspelled_is_named(runs, columns, rows, told):
    with pytest.raises(InputError, match=told):
        tables.table(collected(runs), columns, rows)


@pytest.mark.parametrize("content", [b"", b"{}", gzip.compress(b"[]", mtime=0), gzip.compress(b"{}", mtime=0)])
def test_a_damaged_record_is_one_line(tmp_path, content):
    (tmp_path / "record.json.gz").write_bytes(content)
    with pytest.raises(InputError, match="is not a record"):
        tables.read_record(tmp_path / "record.json.gz")


def test_the_records_of_the_repository_can_be_read(repository):
    record = tables.read_record(repository / "benchmarks" / "records" / "table5.json.gz")
    (line,) = tables.table(record, ["task:sst2", "pairs:blimp"], ["bert-tiny"])[2:]
    assert line == "| bert-tiny | 0.8341 ± 0.013 (3) | 0.5432 ± 0.0055 (3) |"


def test_the_command_collects_and_prints(runs, repository):
    command = [sys.executable, "-m", "benchmarks.tables", f"--record={runs}/record.json.gz"]
    arguments = [f"--collect={runs}/?/seed*", "--columns=pairs:blimp"]
    done = subprocess.run([*command, *arguments], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0 and "| a | 0.42" in done.stdout and "5 units in" in done.stderr
    done = subprocess.run([*command, f"--collect={runs}/none/*"], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: --collect=") and done.stderr.count("\n") == 1


def test_what_the_interval_of_a_difference_says():
    baseline = {0: 1.0, 1: 2.0, 2: 3.0}
    for values, said in (((1.5, 2.6, 3.5), "higher"), ((0.5, 1.6, 2.5), "lower"), ((1.5, 1.6, 3.1), "not told apart")):
        assert tables.told_apart(dict(enumerate(values)), baseline)[1] == said
    assert tables.told_apart({0: 9.0}, baseline) == ("+8 (one seed)", "")
    assert tables.told_apart({}, baseline) == ("", "")
