# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of two real processes: what one cannot write ends both, and a signal in a save stops both."""

import re
import signal
import time

import processes
import pytest
from builders import make_dataset

from bert_jax.checkpoints.sealed import checkpoint_steps
from bert_jax.training.report import read_metrics

pytestmark = pytest.mark.slow

# The disk of the first process is full when its second checkpoint is sealed.
PROGRAM = """
import runpy, sys
from bert_jax.checkpoints import sealed
FULL = sys.argv[-1] == "full"
if FULL:
    sys.argv.pop()
write_json, sealing = sealed.write_json, []
def full(path, value):
    sealing.append(path)
    if FULL and len(sealing) == 2:
        raise OSError(28, "No space left on device")
    write_json(path, value)
sealed.write_json = full
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"))


def train(repository, data, workdir, full=False):
    """Returns the processes of a run of eight steps; the first one's disk may be full."""
    command = ["-c", PROGRAM, *processes.TRAIN[1:], f"--workdir={workdir}", f"--config.data.path={data}"]
    command += [
        f"--config.{change}" for change in ("train.num_steps=8", "eval.every_steps=4", "checkpoint.every_steps=2")
    ]
    return processes.start(repository, command, 2, more={0: ["--config.report.every_steps=1"] + ["full"] * full})


def test_a_disk_that_is_full_at_sealing_ends_all_with_a_reason_and_the_run_goes_on_later(repository, data, tmp_path):
    workdir = tmp_path / "run"
    began = time.monotonic()
    told = processes.finish(train(repository, data, workdir, full=True), expected=1)
    assert time.monotonic() - began < 200
    assert "No space left on device" in told[0].splitlines()[-1]
    # The other one hears it when both agree on the seal, or from the first when that ends; whichever comes first.
    heard = r"another process could not write a checkpoint to|process 0 \(.*\) ended: cannot write a checkpoint to"
    assert re.search(heard, told[1].splitlines()[-1])
    told = processes.finish(train(repository, data, workdir))
    assert "resume from step 2" in told[0] and "00000004 is not used" in told[0]
    steps = [record["step"] for record in read_metrics(workdir / "metrics.jsonl") if record["kind"] == "train"]
    assert steps == list(range(1, 9)) and checkpoint_steps(workdir / "checkpoints")[-1] == 8


# Orbax takes some seconds more for the checkpoint of step 10, and says so with a file.
SLOW = """
import pathlib, runpy, sys, time
import orbax.checkpoint as ocp
said, save = pathlib.Path(sys.argv.pop()), ocp.CheckpointManager.save
def slow(self, step, *args, **options):
    started = save(self, step, *args, **options)
    if step == 10:
        said.touch()
        time.sleep(5)
    return started
ocp.CheckpointManager.save = slow
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_signal_in_a_save_stops_a_resumed_run_on_all(repository, data, tmp_path):
    """Orbax numbers its saves by the step, which a resumed run's own count of calls has not reached."""
    workdir, saving = tmp_path / "run", tmp_path / "saving"
    changes = ["eval.every_steps=0", "checkpoint.every_steps=2", "report.every_steps=1"]
    command = [*processes.TRAIN, f"--workdir={workdir}", f"--config.data.path={data}"]
    command += [f"--config.{change}" for change in changes]
    processes.finish(processes.start(repository, [*command, "--config.train.num_steps=8"], 1))
    slow = ["-c", SLOW, *command[1:], "--config.train.num_steps=16"]
    running = processes.start(repository, slow, 2, more={number: [str(saving)] for number in (0, 1)})
    deadline = time.monotonic() + 200
    while not saving.exists():
        assert time.monotonic() < deadline and all(process.poll() is None for process in running)
        time.sleep(0.02)
    running[1].send_signal(signal.SIGTERM)
    told = processes.finish(running, 128 + signal.SIGTERM)
    assert "stopped by signal 15 after step 10" in told[0] and checkpoint_steps(workdir / "checkpoints")[-1] == 10
