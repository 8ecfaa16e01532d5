# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of two real processes: what one cannot write ends both, with a reason."""

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
    assert "another process could not write a checkpoint to" in told[1].splitlines()[-1]
    told = processes.finish(train(repository, data, workdir))
    assert "resume from step 2" in told[0] and "00000004 is not used" in told[0]
    steps = [record["step"] for record in read_metrics(workdir / "metrics.jsonl") if record["kind"] == "train"]
    assert steps == list(range(1, 9)) and checkpoint_steps(workdir / "checkpoints")[-1] == 8
