# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning and warm starts on several real processes: what one process computes, whatever the rows divide into."""

import json
import signal

import pytest
from builders import make_learner, make_topics
from processes import finish, start, told, wait_for_lines
from test_howto import HOWTO, blocks

import bert_jax
from bert_jax.training.report import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return make_learner(tmp_path_factory.mktemp("model"))


def arguments(source, pretrained, workdir, *more):
    return [
        "finetune.py",
        "--config=configs/finetune.py:classification",
        f"--config.data.source={source}",
        f"--config.init_checkpoint={pretrained}",
        f"--workdir={workdir}",
        "--config.task.max_seq_length=16",
        "--config.data.batch_size=8",
        "--config.train.num_epochs=3.0",
        "--config.optimizer.learning_rate=2e-3",
        "--config.report.every_steps=1",
        "--config.report.tensorboard=False",
        "--config.report.progress=False",
        *more,
    ]


def records(workdir, kind):
    found = [record for record in read_metrics(workdir / "metrics.jsonl") if record["kind"] == kind]
    return {record["step"]: (record["loss"], record["accuracy"]) for record in found}


def assert_same_run(ours, theirs):
    for kind in ("train", "eval"):
        assert records(ours, kind).keys() == records(theirs, kind).keys()
        for step, values in records(theirs, kind).items():
            assert records(ours, kind)[step] == pytest.approx(values, abs=2e-3), (kind, step)
    results = [json.loads((workdir / "results.json").read_text()) for workdir in (ours, theirs)]
    assert results[0]["step"] == results[1]["step"]


@pytest.mark.parametrize(
    ("num_train", "num_dev", "count", "devices", "pack"),
    [(41, 1, 4, 2, "on"), (33, 20, 2, 2, "off")],
    ids=["one dev row for four processes of two devices", "rows of their own"],
)
def test_rows_that_no_batch_divides_are_those_of_one_process(
    repository, pretrained, tmp_path, num_train, num_dev, count, devices, pack
):
    """The last batch is empty on some hosts, or nearly: they must run the same program as the others."""
    source = make_topics(tmp_path / "topics", num_train, num_dev)
    how = f"--config.data.pack={pack}"
    finish(start(repository, arguments(source, pretrained, tmp_path / "one", how), 1))
    errors = finish(start(repository, arguments(source, pretrained, tmp_path / "several", how), count, devices))
    assert all("error" not in error for error in errors)
    assert_same_run(tmp_path / "several", tmp_path / "one")
    one, several = (tmp_path / name / "predictions" for name in ("one", "several"))
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in several.iterdir())


def test_an_own_head_is_trained_by_two_processes_with_one_recipe(repository, pretrained, tmp_path, monkeypatch):
    """As users compile: in a hurry the gradient of the largest number of a column differs from program to program."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    source = make_topics(tmp_path / "topics", 36, 20)
    recipe = tmp_path / "mine.py"
    recipe.write_text(blocks(HOWTO / "own_head.md")[0])
    of = [*arguments(source, pretrained, tmp_path / "one"), "--config.data.path="]
    command = ["finetune.py", f"--config={recipe}", *of[2:]]
    finish(start(repository, command, 1))
    command[command.index(f"--workdir={tmp_path / 'one'}")] = f"--workdir={tmp_path / 'several'}"
    finish(start(repository, command, 2, 2))
    assert_same_run(tmp_path / "several", tmp_path / "one")
    assert bert_jax.load_pretrained(tmp_path / "several").task == "mean_and_largest"


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ("data.source=OTHER", "has examples.dev "),
        ("data.pack=off", "has run.data.pack 'off'"),
    ],
)
def test_what_differs_on_one_is_named_on_both(repository, pretrained, tmp_path, other, line):
    """With another number of rows to evaluate on they would wait for ever; how a run packs only one of them asks."""
    source = make_topics(tmp_path / "topics", 36, 20)
    make_topics(tmp_path / "other", 36, 15)
    more = {1: [f"--config.{other.replace('OTHER', str(tmp_path / 'other'))}"]}
    errors = finish(start(repository, arguments(source, pretrained, tmp_path / "run"), 2, more=more), expected=1)
    for lines in told(errors):
        assert len(lines) == 1 and "process 1 (" in lines[0] and line in lines[0], lines
    assert not (tmp_path / "run").exists()


def test_a_stop_of_all_by_one_and_a_resume_by_one_is_the_same_run(repository, pretrained, tmp_path):
    source = make_topics(tmp_path / "topics", 36, 20)
    more = ("--config.checkpoint.every_steps=2", "--config.train.num_epochs=6.0")
    finish(start(repository, arguments(source, pretrained, tmp_path / "one", *more), 1))
    several = arguments(source, pretrained, tmp_path / "several", *more)
    running = start(repository, several, 2)
    wait_for_lines(tmp_path / "several" / "metrics.jsonl", 6, running)
    running[1].send_signal(signal.SIGTERM)
    finish(running, 128 + signal.SIGTERM)
    finish(start(repository, several, 1))
    assert_same_run(tmp_path / "several", tmp_path / "one")


# Does not see the config.json of one work directory, as a host on which a shared file system is late.
LATE = """
import runpy, sys
from pathlib import Path

exists, hidden = Path.exists, Path(sys.argv[1]) / "config.json"
Path.exists = lambda path, **how: path != hidden and exists(path, **how)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_process_that_sees_the_work_directory_late_packs_as_the_first_one_says(repository, pretrained, tmp_path):
    """An earlier version began the run, and did not pack. A new run with these settings packs."""
    source, workdir = make_topics(tmp_path / "topics", 36, 8), tmp_path / "run"
    finish(start(repository, arguments(source, pretrained, tmp_path / "new"), 1))
    assert json.loads((tmp_path / "new" / "config.json").read_text())["packed"] is True
    more = ("--config.data.pack=off", "--config.train.num_epochs=1.0")
    finish(start(repository, arguments(source, pretrained, workdir, *more), 1))
    identity = json.loads((workdir / "config.json").read_text())
    del identity["packed"], identity["run"]["data"]["pack"]
    (workdir / "config.json").write_text(json.dumps(identity))

    late = tmp_path / "late.py"
    late.write_text(LATE)
    command = [str(workdir), *arguments(source, pretrained, workdir)]
    straight = tmp_path / "straight.py"
    straight.write_text("\n".join(line for line in LATE.splitlines() if "exists" not in line))
    errors = finish(start(repository, command, 2, script={0: str(straight), 1: str(late)}))
    assert "rows padded to like lengths" in errors[0] and "resume from step" in errors[0]
    identity = json.loads((workdir / "config.json").read_text())
    assert identity["packed"] is False and identity["run"]["data"]["pack"] == "auto"
