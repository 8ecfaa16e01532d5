# SPDX-License-Identifier: Apache-2.0
"""Four real processes of two devices each, with models and optimizers divided over them: the losses of one process."""

import signal

import processes
import pytest
from builders import make_dataset
from processes import TRAIN, finish, wait_for_lines

from bert_jax.training.report import read_metrics

pytestmark = pytest.mark.slow
STEPS = 16
RTOL = 2e-4  # of losses after up to 16 steps: sums of other orders

WAYS = {
    "fsdp": ["--config.mesh.data=1", "--config.mesh.fsdp=8"],
    "tensor": ["--config.mesh.data=2", "--config.mesh.tensor=4"],  # a group of four devices is two processes
    "zero1": ["--config.train.zero1=on"],
    "all three": ["--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.mesh.tensor=2"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("packed"), row_length=60, pack=4)


def start(repository, data, workdir, num_processes, more=()):
    """Returns the processes of a run, two devices each, or one device for a single process."""
    arguments = [
        *TRAIN,
        f"--workdir={workdir}",
        f"--config.data.path={data}",
        f"--config.train.num_steps={STEPS}",
        *more,
    ]
    return processes.start(repository, arguments, num_processes, devices=2 if num_processes > 1 else 1)


def losses(workdir):
    return {(r["kind"], r["step"]): r["mlm_loss"] for r in read_metrics(workdir / "metrics.jsonl")}


def assert_same_losses(workdir, other, number=STEPS + 3):
    ours, theirs = losses(workdir), losses(other)
    assert sorted(ours) == sorted(theirs) and len(ours) >= number
    differences = [abs(ours[place] / theirs[place] - 1) for place in theirs]
    print(f"{workdir.name}: losses differ by at most {max(differences):.2g}")
    assert max(differences) < RTOL


@pytest.fixture(scope="module")
def alone(repository, data, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone") / "run"
    finish(start(repository, data, workdir, 1), timeout=900)
    return workdir


@pytest.mark.parametrize("way", ["tensor", "all three"])
def test_four_processes_have_the_losses_of_one(repository, data, alone, tmp_path, way):
    told = finish(start(repository, data, tmp_path / "run", 4, WAYS[way]), timeout=900)
    assert "devices: 8 (cpu)" in told[0] and f"trained to step {STEPS}" in told[0]
    assert "goodput " in told[0] and told[0].splitlines()[-1].endswith("; by the first process's clock")
    assert all("goodput" not in other for other in told[1:])
    assert_same_losses(tmp_path / "run", alone)


def test_packed_rows_in_microbatches_and_several_steps_a_call_on_four_processes(repository, packed, tmp_path):
    alone = ["--config.train.accumulate=2", "--config.report.every_steps=4"]
    several = [*alone, *WAYS["fsdp"], "--config.train.steps_per_call=4"]
    for count, more in ((1, alone), (4, several)):
        finish(start(repository, packed, tmp_path / str(count), count, more), timeout=900)
    assert_same_losses(tmp_path / "4", tmp_path / "1", 4 + 3)


@pytest.mark.parametrize(("number", "statuses", "way"), [(signal.SIGTERM, 143, "fsdp"), (signal.SIGKILL, 75, "zero1")])
def test_four_that_lose_one_go_on_as_two(repository, data, alone, tmp_path, number, statuses, way):
    """With parameters divided over four processes, and then over two. A warning saves all steps, a kill none."""
    workdir = tmp_path / "run"
    running = start(
        repository, data, workdir, 4, [*WAYS[way], "--config.checkpoint.every_steps=3", "--lost_seconds=30"]
    )
    wait_for_lines(workdir / "metrics.jsonl", 5, running, timeout=900)
    running[2].send_signal(number)
    told = finish(
        running, [-9 if number == signal.SIGKILL and index == 2 else statuses for index in range(4)], timeout=900
    )
    if number == signal.SIGKILL:
        assert all("process 2 (" in told[index] for index in (0, 1, 3)), told
    told = finish(start(repository, data, workdir, 2, ["--config.mesh.data=1", "--config.mesh.fsdp=4"]), timeout=900)
    assert "resume from step" in told[0] and "in 2 attempts" in told[0]
    assert_same_losses(workdir, alone)
