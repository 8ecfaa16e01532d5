# SPDX-License-Identifier: Apache-2.0
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from processes import TRAIN, wait_for_lines

from bert_jax.training.goodput import EVERY_SECONDS, KIND, PHASES, Clock, carried, describe, process_started
from bert_jax.training.report import KINDS, METRICS_FILE, Reporter, read_metrics


class Time:
    """A clock that tests set."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def total(record):
    return sum(record[name] for name in PHASES)


def test_every_second_belongs_to_one_phase():
    now = Time()
    clock = Clock(990.0, now)  # the command began ten seconds ago
    now.now += 5
    with clock.phase("steps"):
        now.now += 100
        with clock.phase("evaluation"):
            now.now += 20
        clock.move("data", 30)
        with clock.phase("saving"):
            now.now += 3
    now.now += 1
    record = clock.record()
    expected = {"start": 16, "steps": 70, "evaluation": 20, "data": 30, "saving": 3}
    assert {name: record[name] for name in PHASES} == dict.fromkeys(PHASES, 0) | expected
    assert record["wall"] == total(record) == 139 and record["attempts"] == 1
    assert record["goodput"] == round(70 / 139, 5)
    assert describe(record) == (
        "goodput 50.4% of 139.0 s in 1 attempt: steps 70.0, start 16.0, data 30.0, evaluation 20.0, saving 3.0"
    )


def test_a_phase_ends_with_its_block_also_in_an_error():
    now = Time()
    clock = Clock(0.0, now)
    with pytest.raises(KeyError), clock.phase("saving"):
        now.now += 2
        raise KeyError
    now.now += 3
    assert (clock.record()["saving"], clock.record()["start"]) == (2, 3)


def test_a_clock_that_is_set_back_takes_nothing_away():
    now = Time()
    clock = Clock(0.0, now)
    clock.resume({"time": 5e5, "wall": 100.0, "steps": 60.0, "start": 40.0, "attempts": 2})  # by a host that is ahead
    with clock.phase("steps"):
        now.now += 10
        clock.record()
        now.now -= 3e5
        clock.record()
        now.now += 10
    record = clock.record()
    assert (record["steps"], record["start"], record["between"], record["wall"]) == (80, 40, 0, 120)
    assert record["goodput"] == round(80 / 120, 5) and record["attempts"] == 3


def test_the_clock_of_a_run_is_not_that_of_the_day(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("bert_jax.training.goodput.time.time", lambda: 0.0)
    assert 0 <= clock.record()["wall"] < 60


def test_no_more_is_moved_than_there_is():
    now = Time()
    clock = Clock(0.0, now)
    now.now += 2
    clock.move("data", 5)
    clock.compiled(1.0)  # nothing is left for it
    assert {name: value for name, value in clock.seconds.items() if value} == {"data": 2}


def test_records_are_due_after_a_while():
    now = Time()
    clock = Clock(0.0, now)
    clock.record()
    now.now += EVERY_SECONDS
    assert not clock.is_due()
    now.now += 1
    assert clock.is_due()


def attempt(directory, now, start_step, steps, seconds):
    """Takes steps of `seconds`, with a record each; returns the last record. It then ends without a word."""
    with Reporter(directory, 100, start_step, progress=False, tensorboard=False) as reporter:
        clock = Clock(now.now - 5, now)
        if reporter.carried is not None:
            clock.resume(reporter.carried)
        record = {}
        for step in range(start_step + 1, start_step + steps + 1):
            with clock.phase("steps"):
                now.now += seconds
            record = clock.record()
            reporter.log(step, KIND, record)
    return record


@pytest.fixture
def now(monkeypatch):
    found = Time()
    monkeypatch.setattr("bert_jax.training.report.time.time", found)
    return found


def test_steps_after_the_checkpoint_are_lost_and_time_between_attempts_counts(tmp_path, now):
    began = now.now - 5
    attempt(tmp_path, now, 0, 10, 1.0)  # ends before it has saved anything
    now.now += 100
    attempt(tmp_path, now, 0, 20, 1.0)  # has saved at step 16
    now.now += 50
    last = attempt(tmp_path, now, 16, 4, 1.0)
    assert last["wall"] == now.now - began == total(last)
    assert (last["steps"], last["lost"], last["attempts"]) == (20, 10 + 4, 3)
    assert (last["start"], last["between"]) == (15, 95 + 45)
    # Resumed from an earlier checkpoint, because the last one is damaged: more of it is lost.
    again = attempt(tmp_path, now, 10, 1, 1.0)
    assert (again["steps"], again["lost"]) == (11, 10 + 4 + 10)
    assert again["wall"] == now.now - began == total(again)


def test_attempts_that_end_before_their_first_record_lose_nothing_that_was_known(tmp_path, now):
    attempt(tmp_path, now, 0, 10, 1.0)
    texts = set()
    for _ in range(3):
        Reporter(tmp_path, 100, 8, progress=False, tensorboard=False).close()
        texts.add((tmp_path / METRICS_FILE).read_text())
    assert len(texts) == 1
    (*_, last) = read_metrics(tmp_path / METRICS_FILE, [KIND])
    assert (last["step"], last["steps"], last["lost"]) == (8, 8, 2)
    Reporter(tmp_path, 100, 0, progress=False, tensorboard=False).close()
    (only,) = read_metrics(tmp_path / METRICS_FILE, KINDS)
    assert (only["step"], only["steps"], only["lost"]) == (0, 0, 10)


def test_what_is_carried_may_be_carried_again():
    records = [
        {"step": step, "kind": KIND, "time": step, "wall": step, "steps": step, "lost": 0.0, "attempts": 1}
        for step in (2, 4, 6)
    ]
    assert carried([], 4) is None and carried([{"step": 1, "kind": "train"}], 4) is None
    once = carried(records, 4)
    assert once == records[-1] | {"step": 4, "steps": 4, "lost": 2.0}
    assert carried([*records[:2], once], 4) == once
    for name in ("time", "wall", "steps", "lost", "attempts"):  # damaged, and passed over
        assert carried([records[0], {**records[1], name: math.nan}], 2) == records[0]
        assert carried([{key: value for key, value in records[0].items() if key != name}], 2) is None


def test_runs_of_earlier_versions_have_no_goodput(tmp_path, now):
    (tmp_path / METRICS_FILE).write_text('{"step": 10, "kind": "train", "time": 1.0, "loss": 2.5}\n')
    assert attempt(tmp_path, now, 10, 2, 1.0)["wall"] == 7


def test_the_start_of_a_process():
    code = "from bert_jax.training.goodput import process_started; print(process_started())"
    before = time.time()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert before - 0.05 <= float(done.stdout) <= time.time()
    assert process_started() <= time.time()


@pytest.mark.slow
def test_phases_add_up_to_the_wall_time_of_a_run_that_is_killed_twice(repository, toy_data, tmp_path):
    workdir = tmp_path / "run"
    arguments = [*TRAIN, f"--config.data.path={toy_data}", f"--workdir={workdir}", "--config.train.num_steps=60"]
    arguments += ["--config.checkpoint.every_steps=10", "--config.eval.every_steps=30"]
    started = time.time()
    for lines in (16, 46):  # the first step of these is between checkpoints
        running = subprocess.Popen(
            [sys.executable, *arguments], cwd=repository, stderr=subprocess.PIPE, env=dict(os.environ)
        )
        wait_for_lines(workdir / METRICS_FILE, lines, [running])
        running.send_signal(signal.SIGKILL)
        running.communicate()
    time.sleep(2)
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=repository, stderr=subprocess.PIPE, text=True
    ) as last_attempt:
        said = [(time.time() - started, line.rstrip("\n")) for line in last_attempt.stderr]
    wall, line = said[-1]  # Python's own end after the last line is nobody's
    assert last_attempt.returncode == 0, said
    (*_, last) = read_metrics(workdir / METRICS_FILE, [KIND])
    print(f"measured {wall:.2f} s;", describe(last))
    assert total(last) == pytest.approx(wall, rel=0.01) and last["wall"] == pytest.approx(wall, rel=0.01)
    assert line == describe(last)
    assert last["attempts"] == 3 and last["between"] > 2
    for phase in ("steps", "start", "compilation", "evaluation", "saving", "lost"):
        assert last[phase] > 0, phase
    # What train records say of the steps that count is what the clock says, but for those that compile.
    assert last["goodput"] == pytest.approx(last["steps"] / last["wall"], abs=1e-3)
    kinds = [json.loads(line)["kind"] for line in (workdir / METRICS_FILE).read_text().splitlines()]
    assert kinds.count("train") == 60
