# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of two real processes: what one cannot write ends both, with a reason, and what is there is one's word."""

import os
import socket
import subprocess
import sys
import time

import pytest
from builders import make_dataset

from bert_jax.report import read_metrics
from bert_jax.sealed import checkpoint_steps

pytestmark = pytest.mark.slow

# The disk of the first process is full when its second checkpoint is sealed.
PROGRAM = """
import os, runpy, sys
from bert_jax import sealed
write_json, sealing = sealed.write_json, []
def full(path, value):
    sealing.append(path)
    if os.environ.get("FULL") and len(sealing) == 2:
        raise OSError(28, "No space left on device")
    write_json(path, value)
sealed.write_json = full
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"))


def train(repository, data, workdir, environments):
    """Returns exit status and messages of each of two processes of a run of eight steps."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    settings = {
        "data.path": data,
        "data.batch_size": 16,
        "train.num_steps": 8,
        "model.hidden_size": 32,
        "model.num_heads": 4,
        "model.intermediate_size": 64,
        "masking.max_predictions": 5,
        "optimizer.warmup_steps": 3,
        "eval.every_steps": 4,
        "checkpoint.every_steps": 2,
        "report.every_steps": 1,
        "report.tensorboard": False,
        "report.progress": False,
    }
    command = [sys.executable, "-c", PROGRAM, "--config=configs/pretrain.py:tiny", f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    command += [f"--coordinator=localhost:{port}", "--num_processes=2"]
    base = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "PYTHONPATH": str(repository)}
    processes = [
        subprocess.Popen(
            [*command, f"--process_id={number}"],
            cwd=repository,
            env=base | environment,
            text=True,
            stderr=subprocess.PIPE,
        )
        for number, environment in enumerate(environments)
    ]
    errors = [process.communicate(timeout=400)[1] for process in processes]
    return [process.returncode for process in processes], errors


def test_a_disk_that_is_full_at_sealing_ends_all_with_a_reason_and_the_run_goes_on_later(repository, data, tmp_path):
    workdir = tmp_path / "run"
    began = time.monotonic()
    statuses, told = train(repository, data, workdir, [{"FULL": "1"}, {}])
    assert statuses == [1, 1], "\n\n".join(told)
    assert time.monotonic() - began < 200
    assert "No space left on device" in told[0].splitlines()[-1]
    assert "another process could not write a checkpoint to" in told[1].splitlines()[-1]
    statuses, told = train(repository, data, workdir, [{}, {}])
    assert statuses == [0, 0], "\n\n".join(told)
    assert "resume from step 2" in told[0] and "00000004 is not used" in told[0]
    steps = [record["step"] for record in read_metrics(workdir / "metrics.jsonl") if record["kind"] == "train"]
    assert steps == list(range(1, 9)) and checkpoint_steps(workdir / "checkpoints")[-1] == 8
