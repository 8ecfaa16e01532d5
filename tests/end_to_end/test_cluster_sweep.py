# SPDX-License-Identifier: Apache-2.0
"""Grids of runs under two real processes: what one process comes to, written once, and finished runs left alone."""

import json

import processes
import pytest
from builders import make_learner, make_topics

import bert_jax

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    return make_topics(tmp_path_factory.mktemp("topics"), 44, 21)  # neither fills its last batch


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return make_learner(tmp_path_factory.mktemp("start"))


def sweep(repository, topics, start, workdir, num_processes, devices=1):
    """Returns what each process of a grid of two runs said."""
    command = [
        "finetune.py",
        "--config=configs/finetune.py:classification",
        f"--workdir={workdir}",
        f"--config.data.source={topics}",
        f"--config.init_checkpoint={start}",
        "--config.task.max_seq_length=16",
        "--config.data.batch_size=16",
        "--config.train.num_epochs=2",
        "--config.sweep.seeds=2",
        "--config.optimizer.learning_rate=3e-3",
        "--config.report.every_steps=1",
        "--config.report.tensorboard=False",
        "--config.report.progress=False",
    ]
    return processes.finish(processes.start(repository, command, num_processes, devices), timeout=900)


def scores(workdir):
    told = json.loads((workdir / "sweep.json").read_text())
    return {run["name"]: (run["score"], run["step"]) for run in told["runs"]}


@pytest.fixture(scope="module")
def alone(repository, topics, start, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone") / "grid"
    sweep(repository, topics, start, workdir, 1)
    return workdir


def test_a_grid_of_several_processes_is_that_of_one(repository, topics, start, alone, tmp_path):
    workdir = tmp_path / "grid"
    told = sweep(repository, topics, start, workdir, 2, devices=2)
    assert scores(workdir) == scores(alone) and len(scores(workdir)) == 2
    assert told[0].count("the best is") == 3 and all("the best" not in each for each in told[1:])
    assert bert_jax.load_predictor(workdir)(["ban ber bis"])[0].label in ("b", "d", "f")
    assert not list(workdir.rglob("checkpoints")) and not list(workdir.rglob("*.tmp"))
    again = sweep(repository, topics, start, workdir, 2, devices=2)  # nothing is trained again
    assert "run 2 of 2" in again[0] and "train " not in again[0] and scores(workdir) == scores(alone)
