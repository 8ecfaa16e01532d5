# SPDX-License-Identifier: Apache-2.0
"""Grids of runs under two real processes: what one process comes to, written once, and finished runs left alone."""

import json
import os
import socket
import subprocess
import sys

import pytest
from builders import make_pretrained, make_topics

import bert_jax

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    return make_topics(tmp_path_factory.mktemp("topics"), 48, 32)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return make_pretrained(tmp_path_factory.mktemp("start"))


def sweep(repository, topics, start, workdir, num_processes, *more):
    """Returns what each process of a grid of four runs said; a device each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "finetune.py",
        "--config=configs/finetune.py:classification",
        f"--workdir={workdir}",
        f"--config.data.source={topics}",
        f"--config.init_checkpoint={start}",
        "--config.task.max_seq_length=16",
        "--config.data.batch_size=16",
        "--config.train.num_epochs=3",
        "--config.sweep.seeds=2",
        "--config.sweep.learning_rates=3e-3,1e-3",
        "--config.report.every_steps=1",
        "--config.report.tensorboard=False",
        "--config.report.progress=False",
        *more,
    ]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "PYTHONPATH": str(repository)}
    processes = []
    for number in range(num_processes):
        joining = [f"--coordinator=localhost:{port}", f"--num_processes={num_processes}", f"--process_id={number}"]
        arguments = command + (joining if num_processes > 1 else ["--distributed=off"])
        processes.append(
            subprocess.Popen(arguments, cwd=repository, env=environment, text=True, stderr=subprocess.PIPE)
        )
    errors = [process.communicate(timeout=500)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * num_processes, "\n\n".join(errors)
    return errors


def scores(workdir):
    told = json.loads((workdir / "sweep.json").read_text())
    return {run["name"]: (run["score"], run["step"]) for run in told["runs"]}


@pytest.fixture(scope="module")
def alone(repository, topics, start, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone") / "grid"
    sweep(repository, topics, start, workdir, 1)
    return workdir


@pytest.mark.parametrize("together", [False, True])
def test_a_grid_of_two_processes_is_that_of_one(repository, topics, start, alone, tmp_path, together):
    workdir = tmp_path / "grid"
    more = [f"--config.sweep.together={together}"]
    told = sweep(repository, topics, start, workdir, 2, *more)
    assert scores(workdir) == scores(alone) and len(scores(workdir)) == 4
    assert told[0].count("the best is") == 1 + 4 * (not together) and "the best" not in told[1]
    assert bert_jax.load_predictor(workdir)(["ban ber bis"])[0].label in ("b", "d", "f")
    assert not list(workdir.rglob("checkpoints")) and not list(workdir.rglob("*.tmp"))
    if not together:  # given again, nothing is trained again
        again = sweep(repository, topics, start, workdir, 2, *more)
        assert "run 4 of 4" in again[0] and "train " not in again[0] and scores(workdir) == scores(alone)
