# SPDX-License-Identifier: Apache-2.0
"""The queue of runs: what is finished is left alone, what is stopped goes on, and commands have settings there are."""

import dataclasses
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from builders import make_dataset

from benchmarks import collecting, jobs
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.settings.rules import from_dict, to_dict
from bert_jax.storage.locks import lock_file


def make_job(directory: Path, name: str, code: str = "") -> jobs.Job:
    """Returns a job that appends its name to a file, and then leaves its output."""
    output = directory / name
    program = f"import pathlib, sys, time; p = pathlib.Path; open({str(directory / 'ran')!r}, 'a').write('{name} ');"
    program += f"{code}\np({str(output)!r}).write_text('done')"
    return jobs.Job(name, (sys.executable, "-c", program), output)


def make_unit(directory: Path, *codes: str) -> jobs.Unit:
    made = tuple(make_job(directory, f"job{number}", code) for number, code in enumerate(codes))
    return jobs.Unit("group", 3, directory, made)


def ran(unit: jobs.Unit) -> list[str]:
    return (unit.directory / "ran").read_text().split()


def test_jobs_run_in_order_and_once(tmp_path):
    unit = make_unit(tmp_path / "unit", "", "")
    assert jobs.run_unit(unit, jobs.Stop(0)) == ""
    assert ran(unit) == ["job0", "job1"] and unit.waiting == []
    assert jobs.run_unit(unit, jobs.Stop(0)) == "" and ran(unit) == ["job0", "job1"]
    (unit.directory / "job1").unlink()
    assert jobs.run_unit(unit, jobs.Stop(0)) == "" and ran(unit) == ["job0", "job1", "job1"]
    starts = [json.loads(line) for line in (unit.directory / "starts.jsonl").read_text().splitlines()]
    assert [start["job"] for start in starts] == ["job0", "job1", "job1"]
    assert (
        starts[0]["commit"]
        and re.match(r"1 core of|\d+ cores of", starts[0]["machine"])
        and starts[0]["command"][1] == "-c"
    )
    assert json.loads((unit.directory / "unit.json").read_text()) == {"group": "group", "seed": 3}


def test_a_failure_ends_the_unit_in_a_line(tmp_path):
    unit = make_unit(tmp_path / "unit", "", "sys.exit('error: it is broken')", "")
    problem = jobs.run_unit(unit, jobs.Stop(0))
    assert problem == "job1 failed with exit status 1: error: it is broken"
    assert ran(unit) == ["job0", "job1"] and [job.name for job in unit.waiting] == ["job1", "job2"]


def test_a_command_without_output_has_failed(tmp_path):
    unit = make_unit(tmp_path / "unit", "sys.exit(0)")
    assert jobs.run_unit(unit, jobs.Stop(0)).startswith("job0 failed with exit status 0")


def test_it_stops_in_time_and_the_job_is_told(tmp_path):
    told = (
        f"import signal; signal.signal(15, lambda *_: (p({str(tmp_path / 'told')!r}).write_text('x'), sys.exit(143)))"
    )
    unit = make_unit(tmp_path / "unit", f"{told}; time.sleep(60)", "")
    started = time.monotonic()
    assert jobs.run_unit(unit, jobs.Stop(2)) == "stopped in job0"
    assert time.monotonic() - started < 30 and (tmp_path / "told").exists() and ran(unit) == ["job0"]
    assert jobs.run_unit(unit, jobs.Stop(1e-9)) == "stopped before job0"


def test_a_unit_is_left_to_the_queue_that_has_it(tmp_path):
    unit = make_unit(tmp_path / "unit", f"p({str(tmp_path / 'on')!r}).write_text('x'); time.sleep(3)")
    code = f"from benchmarks import jobs; print(jobs.run_unit(jobs.{unit!r}, jobs.Stop(0)))".replace(
        "PosixPath", "Path"
    )
    code = code.replace("Job(", "jobs.Job(").replace("from bench", "from pathlib import Path; from bench", 1)
    first = threading.Thread(target=jobs.run_unit, args=(unit, jobs.Stop(0)))
    first.start()
    while not (tmp_path / "on").exists():
        time.sleep(0.05)
    other = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, cwd=Path.cwd())
    first.join()
    assert other.stdout.startswith("left to another queue"), other.stderr
    assert ran(unit) == ["job0"]


def test_a_unit_waits_for_what_it_needs(tmp_path):
    needed = tmp_path / "other" / "pretrained"
    unit = make_unit(tmp_path / "unit", "")._replace(needs=needed)
    assert jobs.run_unit(unit, jobs.Stop(0)) == unit.lacks == f"waits for {needed}" and not unit.directory.exists()
    needed.mkdir(parents=True)
    assert jobs.run_unit(unit, jobs.Stop(0)) == "" and ran(unit) == ["job0"]
    needed.rmdir()
    assert unit.lacks == ""  # all is done


# The plan


@pytest.fixture(scope="module")
def plan(repository, toy_data):
    """Returns all commands of all runs, in a tree that is never made."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        flags = [f"--data={toy_data}", f"--data_sop={toy_data}", "--root=nowhere", "--records=", *arguments]
        command = [sys.executable, "-m", "benchmarks.ablations", *flags]
        return subprocess.run(command, cwd=repository, text=True, capture_output=True)

    return run


EVERYTHING = (
    "--runs=main,table5,table6,table8,later", "--size=mini", "--tokens=20e6", "--seeds=2", "--task_data=tasks",
    "--tasks=cola,sst2,mrpc,stsb,rte,squad1,ner", "--pairs=blimp=blimp.jsonl.gz,zorro=zorro=baselines.tsv",
)  # fmt: skip


def test_every_command_has_settings_that_there_are(plan, repository):
    done = plan(*EVERYTHING, "--commands")
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(commands) > 300, done.stderr
    kinds = {"train.py": PretrainConfig, "finetune.py": FinetuneConfig}
    seen = set()
    for command in commands:
        if command[1] not in kinds:
            assert command[1] == "-m" and importlib.util.find_spec(command[2])
            continue
        given = dict(argument.removeprefix("--").split("=", 1) for argument in command[2:])
        file, _, argument = given.pop("config").partition(":")
        spec = importlib.util.spec_from_file_location("config", repository / file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config(argument)
        del given["workdir"]
        for name, value in given.items():
            config.update_from_flattened_dict({name.removeprefix("config."): type_like(config, name, value)})
        from_dict(kinds[command[1]], config.to_dict()).validate()
        seen.add((command[1], argument.partition(",")[0]))
    assert {("train.py", name) for name in ("bert", "no_nsp", "ltr", "mask_0_0_100", "sop", "mini")} <= seen
    assert {("finetune.py", name) for name in ("sst2", "squad1", "ner")} <= seen


def planned_settings(plan, *arguments: str) -> dict[str, PretrainConfig]:
    """Returns the settings of each pre-training of a plan, by the directory of its unit."""
    found = {}
    for line in plan(*arguments, "--commands").stdout.splitlines():
        if "train.py" in (command := shlex.split(line))[1]:
            given = dict(argument.removeprefix("--config.").split("=", 1) for argument in command[3:])
            config = PretrainConfig()
            for name in list(given):
                section, _, key = name.partition(".")
                if key and hasattr(config, section):
                    part = getattr(config, section)
                    value = type_like(to_dict(part), key, given[name])
                    config = dataclasses.replace(config, **{section: dataclasses.replace(part, **{key: value})})
            found[given["--workdir"].removeprefix("nowhere/")] = config
    return found


def test_short_rows_come_first_and_a_step_reads_as_many_tokens_of_them(plan, toy_data, tmp_path):
    short = make_dataset(tmp_path, row_length=16)
    flags = ("--runs=table5,later", "--tokens=1e5", "--seeds=1", "--batch_size=40")
    whole = planned_settings(plan, *flags)["bert-tiny/seed0/pretrain"]
    assert whole.phase2.num_steps == 0 and whole.data.path == str(toy_data) and whole.data.batch_size == 40
    shortened = (*flags, f"--short_data={short}", f"--short_data_sop={short}")
    settings = planned_settings(plan, *shortened)
    assert len(settings) == 6  # sop among them
    for config in settings.values():
        assert (config.data.path, config.phase2.path) == (str(short), str(toy_data))
        assert config.train.num_steps + config.phase2.num_steps == whole.train.num_steps
        assert config.train.num_steps == round(0.3 * whole.train.num_steps) > 0
        assert config.phase2.batch_size == 40 and config.phase2.schedule == "continue"
        # 20 predictions in 128 tokens are 10 in half as many, whatever the length of the rows.
        assert (config.masking.max_predictions, config.phase2.max_predictions) == (3, 5)
        manifests = [json.loads((path / "manifest.json").read_text()) for path in (short, toy_data)]
        per_row = [each["row"]["length"] * each["splits"]["train"]["fill"] for each in manifests]
        assert config.data.batch_size * per_row[0] == pytest.approx(40 * per_row[1], abs=per_row[0] / 2)
    for rate, path in {"0": str(toy_data), "1": str(short)}.items():
        (config, *_) = planned_settings(plan, *shortened, f"--short_rate={rate}").values()
        assert (config.data.path, config.phase2.num_steps) == (path, 0)
        assert config.train.num_steps == whole.train.num_steps
    rows = planned_settings(plan, *shortened, "--runs=rows")
    assert rows["bert-tiny/seed0/pretrain"] == settings["bert-tiny/seed0/pretrain"]
    assert rows["long_rows-tiny/seed0/pretrain"] == whole and len(rows) == 2
    done = plan(*flags, f"--short_data={toy_data}", f"--short_data_sop={short}")
    assert done.returncode == 1 and "have 32 tokens, and those of" in done.stderr and done.stderr.count("\n") == 1
    done = plan(*flags, f"--short_data={short}")
    assert done.returncode == 1 and "--short_data_sop too" in done.stderr and done.stderr.count("\n") == 1


def test_large_tasks_take_one_seed_and_fewer_epochs_and_revisions_fewer_pairs(plan):
    limited = ("--limit=500", "--revision_limit=50", "--task_epochs=4", "--large_task_epochs=2")
    done = plan(*EVERYTHING, *limited, "--commands")
    seeds, epochs, limits = {}, {}, {}
    for line in done.stdout.splitlines():
        if found := re.search(r"main-mini/seed0/tasks/(\w+) .*sweep\.seeds=(\d)", line):
            seeds[found[1]] = int(found[2])
            epochs[found[1]] = re.search(r"num_epochs=([\d.]+)", line)[1]
        if found := re.search(r"--limit=(\d+) .*pairs/blimp(@\d+)?\.json", line):
            limits.setdefault(bool(found[2]), set()).add(int(found[1]))
    assert {task: seeds[task] for task in ("sst2", "squad1", "mrpc", "cola")} == {
        "sst2": 1, "squad1": 1, "mrpc": 5, "cola": 5
    }  # fmt: skip
    wanted = {"sst2": "2.0", "squad1": "2.0", "mrpc": "4.0", "cola": "4.0", "ner": "4.0", "ner_last": "12.0"}
    assert {task: epochs[task] for task in wanted} == wanted
    assert limits == {False: {500}, True: {50}}


def test_a_setting_can_be_of_one_task(plan):
    more = ("--set_task=ner:--config.train.num_epochs=9", "--set_task=--config.train.seed=3")
    lines = plan(*EVERYTHING, "--runs=table8", *more, "--commands").stdout.splitlines()
    tasks = {line: re.search(r"finetune.py:(\w+)", line)[1] for line in lines if "finetune.py" in line}
    assert {"ner", "sst2"} <= set(tasks.values())
    for line, task in tasks.items():
        assert ("--config.train.num_epochs=9" in line) == (task == "ner") and "--config.train.seed=3" in line


def type_like(config, name: str, value: str):
    """Returns a flag's text as the type of the setting; a KeyError if there is not one of this name."""
    for part in name.removeprefix("config.").split("."):
        config = config[part]
    return value == "True" if isinstance(config, bool) else type(config)(value)


def test_the_plan_is_what_the_issue_asks_for(plan):
    done = plan(*EVERYTHING, "--status")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and not done.stderr
    count = {run: sum(line.startswith(f"{run}: ") for line in lines) for run in ("main", "table5", "table6", "table8")}
    assert count == {"main": 2, "table5": 8, "table6": 6, "table8": 12}
    assert sum(line.startswith("later: sop-mini") for line in lines) == 2
    # The BiLSTM of Table 5 starts from the left-to-right model of its seed, and is not pre-trained.
    commands = plan(*EVERYTHING, "--runs=table5", "--commands").stdout.splitlines()
    bilstm = [line for line in commands if "ltr_bilstm" in line]
    assert len(bilstm) == 2 * 7 and all("ltr-mini/seed" in line and "train_encoder=True" in line for line in bilstm)
    waiting = [line for line in lines if "waits for " in line]
    assert len(waiting) == 3 and all("random-mini" in line or "ltr_bilstm-mini" in line for line in waiting)
    assert "waits for nowhere/main-mini/seed0/pretrain/pretrained" in waiting[0]
    # Table 8 concatenates the last four layers, as the paper does, of a model that has four.
    table8 = plan(*EVERYTHING, "--runs=table8", "--commands").stdout
    assert table8.count("probe.features=concat_last4") == 12 and "probe.features=last" not in table8
    table8 = plan(*EVERYTHING, "--runs=table8", "--size=tiny", "--commands").stdout
    assert table8.count("probe.features=last") == 12 and "concat_last4" not in table8
    commands = plan(*EVERYTHING, "--runs=main", "--commands").stdout
    steps = sorted({int(step) for step in re.findall(r"heldout@(\d+)\.json", commands)})
    assert [round(step / steps[0]) for step in steps] == [1, 2, 5, 10, 20, 50, 100]
    assert f"pretrain@{steps[0]} " in commands and f"pretrain@{steps[-1]} " not in commands


def test_what_waits_is_not_called_done_and_what_another_run_finished_is_recorded(repository, toy_data, tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess:
        flags = [f"--data={toy_data}", "--seeds=1", "--tasks=sst2", "--task_data=tasks", *arguments]
        command = [sys.executable, "-m", "benchmarks.ablations", f"--root={tmp_path}", f"--records={tmp_path}", *flags]
        return subprocess.run(command, cwd=repository, text=True, capture_output=True)

    outputs = ("pretrain/pretrained", "evaluations/heldout.json", "tasks/sst2/sweep.json", "tasks/ner_last/sweep.json")
    for group in ("bert-tiny", "no_nsp-tiny"):
        for name in outputs:
            (tmp_path / group / "seed0" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / group / "seed0" / name).write_text('{"runs": []}')
    with lock_file(tmp_path / "ltr-tiny" / "seed0" / ".lock", keep=True):
        done = run("--runs=table5")
    assert "ltr-tiny seed 0: left to another queue" in done.stdout and done.returncode == 1, done.stderr
    assert f"ltr_bilstm-tiny seed 0: waits for {tmp_path}/ltr-tiny/seed0/pretrain/pretrained\n" in done.stdout
    units = collecting.read_record(tmp_path / "table5.json.gz")["units"]
    assert [unit["group"] for unit in units] == ["bert-tiny", "no_nsp-tiny"]
    assert run("--runs=table6", "--sizes=tiny").returncode == 0 and (tmp_path / "table6.json.gz").exists()
    (tmp_path / "bert-tiny" / "seed0" / "evaluations" / "heldout.json").write_text("{")
    done = run("--runs=table6", "--sizes=tiny")
    assert done.returncode == 1 and not done.stderr
    assert "the record of table6 is not written: " in done.stdout and "heldout.json is damaged" in done.stdout


def test_what_a_record_has_is_not_run_on_another_machine(repository, toy_data, tmp_path):
    def run(root: str, *arguments: str) -> subprocess.CompletedProcess:
        flags = [f"--data={toy_data}", "--seeds=1", "--tokens=1e4", "--feature_task=", "--runs=table5,table6"]
        flags += ["--sizes=tiny", f"--root={tmp_path / root}", f"--records={tmp_path / 'records'}", *arguments]
        command = [sys.executable, "-m", "benchmarks.ablations", *flags]
        return subprocess.run(command, cwd=repository, text=True, capture_output=True)

    commands = [shlex.split(line) for line in run("one", "--commands").stdout.splitlines()]
    pretrain, heldout = commands[:2]
    unit = tmp_path / "one" / "bert-tiny" / "seed0"
    (unit / "pretrain" / "pretrained").mkdir(parents=True)
    (unit / "evaluations").mkdir()
    (unit / "evaluations" / "heldout.json").write_text('{"metrics": {"mlm_loss": 1.5}}')
    (unit / "unit.json").write_text('{"group": "bert-tiny", "seed": 0}')
    starts = [{"job": "pretrain", "command": pretrain}, {"job": "heldout", "command": heldout}]
    (unit / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    for name, content in {"config": {"run": {}}, "pretrained/config": {"trained": {"tokens": 10_000}}}.items():
        (unit / "pretrain" / f"{name}.json").write_text(json.dumps(content))
    (unit / "pretrain" / "metrics.jsonl").write_text('{"kind": "eval", "step": 3, "time": 1.0, "mlm_loss": 2.0}\n')
    assert run("one", "--runs=table6").returncode == 0  # records what is finished, and runs nothing
    first = (tmp_path / "records" / "table6.json.gz").read_bytes()

    other = run("two", "--runs=table6")
    assert other.returncode == 0 and other.stdout.endswith("seed 0   0 of 2 done, all recorded before\n")
    assert not (tmp_path / "two").exists() and (tmp_path / "records" / "table6.json.gz").read_bytes() == first
    lines = run("two", "--status").stdout.splitlines()  # another table shares the unit
    assert (
        sum("all recorded before" in line for line in lines) == 2
        and sum("next pretrain" in line for line in lines) == 2
    )
    assert not any("bert-tiny" in line for line in run("two", "--commands").stdout.splitlines())
    with (
        lock_file(tmp_path / "two" / "no_nsp-tiny" / "seed0" / ".lock", keep=True),
        lock_file(tmp_path / "two" / "ltr-tiny" / "seed0" / ".lock", keep=True),
    ):
        assert "left to another queue" in run("two", "--runs=table5").stdout
    assert collecting.read_record(tmp_path / "records" / "table5.json.gz") == collecting.read_record(
        tmp_path / "records" / "table6.json.gz"
    )

    wrong = run("two", "--runs=table6", "--learning_rate=2e-3")
    assert wrong.returncode == 1 and wrong.stderr.count("\n") == 1 and not wrong.stdout
    assert (
        "bert-tiny seed 0 has pretrain from another command, with --config.optimizer.learning_rate=0.00" in wrong.stderr
    )
    assert (tmp_path / "records" / "table6.json.gz").read_bytes() == first
    # A unit that lacks a job in the record is run again, all of it.
    lines = run("two", "--status", "--pairs=blimp=blimp.jsonl.gz").stdout.splitlines()
    assert "next pretrain" in lines[0] and not any("recorded" in line for line in lines)


def test_a_size_may_have_a_learning_rate_of_its_own(plan):
    found = planned_settings(plan, "--runs=table6", "--sizes=tiny,mini", "--learning_rate=2e-3", "--rates=mini=1e-3")
    rates = {name.partition("/")[0]: config.optimizer.learning_rate for name, config in found.items()}
    assert rates == {"bert-tiny": 2e-3, "bert-mini": 1e-3}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--runs=table7"], "there is no run 'table7'"),
        ([], "--runs, --root and --data are needed"),
        (["--runs=rows"], "give --short_data"),
        (["--runs=table5", "--short_rate=0.5"], "have no effect without --short_data"),
        (["--runs=table5", "--short_data_sop=x"], "have no effect without --short_data"),
        (
            ["--runs=table5", "--short_data=x", "--short_data_sop=x", "--set=--config.masking.max_predictions=40"],
            "give --set=--config.phase2.max_predictions too",
        ),
        (["--runs=table5", "--set_task=nre:--config.train.seed=1"], "is neither a flag nor TASK:FLAG"),
        (["--runs=table5", "--rates=mini"], "--rates=mini=: '' is no number; write like mini=1e-3"),
        (["--runs=table5", "--rates=min=1e-3"], "there is no model size 'min'"),
        (["--runs=table5", "--pairs=a=x,a=y"], "--pairs has one name twice"),
        (["--runs=table5", "--tasks=sst3"], "there is no task 'sst3'"),
        (["--runs=table5", "--tasks=sst2"], "--tasks needs --task_data"),
        (["--runs=table5", "--pairs=blimp"], "is not NAME=PATH"),
    ],
)
def test_wrong_flags_are_one_line(plan, arguments, problem):
    done = plan(*arguments)
    assert done.returncode == 1 and problem in done.stderr and done.stderr.count("\n") == 1


def test_a_unit_of_the_queue_can_be_collected(tmp_path):
    unit = make_unit(tmp_path / "unit", "")
    jobs.run_unit(unit, jobs.Stop(0))
    (unit.directory / "pairs").mkdir()
    (unit.directory / "pairs" / "blimp.json").write_text('{"overall": {"accuracy": 0.5}}')
    found = collecting.collect_unit(unit.directory)
    assert (found["group"], found["seed"], found["starts"]) == ("group", 3, [])
