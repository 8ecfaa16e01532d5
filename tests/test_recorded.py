# SPDX-License-Identifier: Apache-2.0
"""What records know of a queue's units: nothing measured is lost or repeated, or mixed with other settings."""

import json
from pathlib import Path

import pytest

from benchmarks import collecting, recorded
from benchmarks.jobs import Job, Unit
from bert_jax.errors import InputError

RATE = "--config.optimizer.learning_rate="


def make_unit(
    root: Path, seed: int = 0, tasks: tuple[str, ...] = ("sst2",), rate: str = "0.001", group: str = "bert"
) -> Unit:
    """Returns a unit of a pre-training, an evaluation and fine-tunings; nothing of it is made."""
    directory = root / group / f"seed{seed}"
    pretrain = (
        "python",
        "train.py",
        f"--workdir={directory}/pretrain",
        f"{RATE}{rate}",
        "--config.report.every_steps=9",
    )
    heldout = ("python", "-m", "bert_jax.tools.evaluate", f"--checkpoint={directory}/pretrain")
    jobs = [
        Job("pretrain", pretrain, directory / "pretrain" / "pretrained"),
        Job("heldout", heldout, directory / "evaluations" / "heldout.json"),
    ]
    for task in tasks:
        command = ("python", "finetune.py", f"--config=configs/finetune.py:{task}")
        jobs.append(Job(f"pairs/{task}", command, directory / "pairs" / f"{task}.json"))
    return Unit(group, seed, directory, tuple(jobs))


def finish(unit: Unit, *names: str) -> Unit:
    """Makes the outputs of the jobs of a unit, or of some; returns the unit."""
    for job in unit.jobs:
        if names and job.name not in names:
            continue
        job.output.parent.mkdir(parents=True, exist_ok=True)
        if job.name == "pretrain":
            job.output.mkdir()
            (job.output / "config.json").write_text('{"trained": {"tokens": 1}}')
            (job.output.parent / "config.json").write_text('{"run": {}}')
            (job.output.parent / "metrics.jsonl").write_text('{"kind": "eval", "step": 3, "time": 1.0, "loss": 2.0}\n')
        else:
            job.output.write_text('{"metrics": {"mlm_loss": 1.5}}')
        with open(unit.directory / "starts.jsonl", "a") as starts:
            starts.write(json.dumps({"job": job.name, "command": job.command}) + "\n")
    (unit.directory / "unit.json").write_text(json.dumps({"group": unit.group, "seed": unit.seed}))
    return unit


def kept(path: Path) -> dict[tuple[str, int], set[str]]:
    """Returns what a record has, by group and seed."""
    units = collecting.read_record(path)["units"]
    return {(unit["group"], unit["seed"]): set(unit["commands"]) for unit in units}


@pytest.fixture
def record(tmp_path):
    """Returns a record of two seeds."""
    units = [finish(make_unit(tmp_path / "one", seed)) for seed in (0, 1)]
    recorded.keep_record(tmp_path / "table.json.gz", units, {})
    return tmp_path / "table.json.gz"


ALL = {"pretrain", "heldout", "pairs/sst2"}


def test_seeds_and_groups_that_are_not_planned_stay(record, tmp_path):
    assert kept(record) == {("bert", 0): ALL, ("bert", 1): ALL}
    units = [make_unit(tmp_path / "two"), finish(make_unit(tmp_path / "two", group="ltr"), "pretrain")]
    found = recorded.read_recorded([record], units)
    assert recorded.is_recorded(units[0], found, units) and not recorded.is_recorded(units[1], found, units)
    recorded.keep_record(record, units, found)
    assert kept(record) == {("bert", 0): ALL, ("bert", 1): ALL, ("ltr", 0): {"pretrain"}}


def test_a_unit_stays_until_all_of_it_is_measured_again(record, tmp_path):
    first = record.read_bytes()
    units = [make_unit(tmp_path / "two", tasks=("sst2", "mrpc"))]
    found = recorded.read_recorded([record], units)
    assert not recorded.is_recorded(units[0], found, units)
    for name in ("pretrain", "heldout"):
        finish(units[0], name)
        recorded.keep_record(record, units, recorded.read_recorded([record], units))
        assert record.read_bytes() == first
    finish(units[0], "pairs/sst2")
    recorded.keep_record(record, units, found)
    assert kept(record) == {("bert", 0): ALL, ("bert", 1): ALL}
    finish(units[0], "pairs/mrpc")
    recorded.keep_record(record, units, found)
    assert kept(record) == {("bert", 0): ALL | {"pairs/mrpc"}, ("bert", 1): ALL}


def test_of_two_records_the_fuller_counts_and_another_table_takes_it(record, tmp_path):
    stale = tmp_path / "later.json.gz"
    recorded.keep_record(stale, [finish(make_unit(tmp_path / "three"), "pretrain")], {})
    units = [make_unit(tmp_path / "two")]
    for paths in ([record, stale], [stale, record]):
        found = recorded.read_recorded([*paths, tmp_path / "missing.json.gz"], units)
        assert recorded.is_recorded(units[0], found, units)
    recorded.keep_record(stale, units, found)
    assert kept(stale) == {("bert", 0): ALL}


def test_two_tables_with_jobs_of_their_own_share_a_unit(tmp_path):
    whole = finish(make_unit(tmp_path / "one", tasks=("sst2", "mrpc")))
    paths = [tmp_path / "table5.json.gz", tmp_path / "table8.json.gz"]
    for path, task in zip(paths, ("sst2", "mrpc"), strict=True):
        planned = tuple(job for job in whole.jobs if job.name != f"pairs/{task}")
        recorded.keep_record(path, [whole._replace(jobs=planned)], {})
        assert kept(path) == {("bert", 0): {job.name for job in planned}}
    for task in ("sst2", "mrpc"):
        unit = make_unit(tmp_path / "two", tasks=(task,))
        assert recorded.is_recorded(unit, recorded.read_recorded(paths, [unit]), [unit])


def test_what_another_unit_starts_from_is_trained_again(record, tmp_path):
    units = [make_unit(tmp_path / "two"), make_unit(tmp_path / "two", group="bilstm")]
    units[1] = units[1]._replace(needs=units[0].jobs[0].output)
    found = recorded.read_recorded([record], units)
    assert not recorded.is_recorded(units[0], found, units)
    assert recorded.is_recorded(units[0], found, units[:1])
    finish(units[0], "pretrain")
    assert recorded.is_recorded(units[0], found, units)  # its tasks need not be


def test_directories_reports_and_saves_may_differ_and_nothing_else(record, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unit = make_unit(Path("relative"))
    free = tuple(each.replace("every_steps=9", "every_steps=7") for each in unit.jobs[0].command)
    unit = unit._replace(jobs=(unit.jobs[0]._replace(command=free), *unit.jobs[1:]))
    assert recorded.is_recorded(unit, recorded.read_recorded([record], [unit]), [unit])
    message = (
        r"table.json.gz: bert seed 0 has pretrain from another command, with --config.optimizer.learning_rate=0.001; "
    )
    with pytest.raises(InputError, match=message + "give the same settings, or another --records"):
        recorded.read_recorded([record], [make_unit(Path("relative"), rate="0.002")])
    unit = finish(make_unit(tmp_path / "one", seed=2), "pretrain", "heldout")
    with pytest.raises(InputError, match=r"one/bert/seed2 has pretrain from another command, .* or another --root"):
        recorded.read_recorded([], [make_unit(tmp_path / "one", seed=2, rate="0.002")])
    unit.jobs[0].output.rename(tmp_path / "away")  # what has not finished, the command itself refuses
    recorded.read_recorded([], [make_unit(tmp_path / "one", seed=2, rate="0.002")])


def test_a_record_without_commands_stays_but_does_not_count(record, tmp_path):
    old = collecting.read_record(record)
    for unit in old["units"]:
        del unit["commands"]
    collecting.write_record(old, record)
    units = [finish(make_unit(tmp_path / "two"), "pretrain")]
    found = recorded.read_recorded([record], units)
    assert not recorded.is_recorded(units[0], found, units)
    recorded.keep_record(record, units, found)
    assert collecting.read_record(record) == old


@pytest.mark.parametrize(
    ("name", "value"),
    [("commands", []), ("commands", {"pretrain": None}), ("commands", {"pretrain": [1]}), ("tasks", []), ("pairs", 3)],
)
def test_a_damaged_record_is_one_line(record, tmp_path, name, value):
    damaged = collecting.read_record(record)
    damaged["units"][0][name] = value
    collecting.write_record(damaged, record)
    with pytest.raises(
        InputError, match=r"record .*bert seed 0; remove it|is damaged: unit 0 has no names in"
    ) as error:
        recorded.read_recorded([record], [make_unit(tmp_path / "two")])
    assert "\n" not in str(error.value)
