# SPDX-License-Identifier: Apache-2.0
"""Real processes that train as one: the losses of one process, one agreed step to stop at, any number to resume."""

import os
import signal

import numpy as np
import processes
import pytest
from builders import make_dataset
from processes import TRAIN, finish, wait_for_lines

import bert_jax
from bert_jax.devices.cluster import is_job
from bert_jax.storage.locks import LOCK
from bert_jax.training.report import read_metrics
from bert_jax.training.workdir import locked

pytestmark = pytest.mark.slow
STEPS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"))


def start(repository, data, workdir, num_processes, more=()):
    """Returns the processes of a run, a device each. A part of its rows is read from left to right."""
    arguments = [
        *TRAIN,
        f"--workdir={workdir}",
        f"--config.data.path={data}",
        "--config.masking.causal_rate=0.4",
        "--config.checkpoint.keep_every=12",
        *more,
    ]
    return processes.start(repository, arguments, num_processes)


def losses(workdir, kind="train"):
    found = [r for r in read_metrics(workdir / "metrics.jsonl") if r["kind"] == kind]
    return {(r["step"], name): r[name] for r in found for name in ("mlm_loss", "clm_loss") if name in r}


@pytest.fixture(scope="module")
def alone(repository, data, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone") / "run"
    finish(start(repository, data, workdir, 1))
    return workdir


def test_two_processes_have_the_losses_of_one(repository, data, alone, tmp_path):
    told = finish(start(repository, data, tmp_path / "run", 2))
    assert "trained to step 24" in told[0] and "trained" not in told[1]
    for kind in ("train", "eval"):
        ours, theirs = losses(tmp_path / "run", kind), losses(alone, kind)
        assert sorted(ours) == sorted(theirs)
        assert ours == pytest.approx(theirs, rel=2e-4)
    for step in (0, 12, 24):
        ours, theirs = (bert_jax.load_pretrained(f"{workdir}@{step}") for workdir in (tmp_path / "run", alone))
        assert ours.trained == theirs.trained and ours.trained["step"] == step
        tables = [bert.params["encoder"]["embeddings"]["word"]["embedding"] for bert in (ours, theirs)]
        np.testing.assert_allclose(*tables, atol=1e-5)


def test_a_signal_at_one_stops_all_and_any_number_goes_on(repository, data, alone, tmp_path):
    workdir = tmp_path / "run"
    running = start(repository, data, workdir, 2)
    wait_for_lines(workdir / "metrics.jsonl", 4, running)
    running[1].send_signal(signal.SIGINT)
    errors = finish(running, 128 + signal.SIGTERM)
    assert "stopped by signal 15 after step" in errors[0]
    reached, _ = max(losses(workdir))
    finish(start(repository, data, workdir, 1))
    ours, theirs = losses(workdir), losses(alone)
    assert reached < STEPS and sorted(ours) == sorted(theirs)
    assert ours == pytest.approx(theirs, rel=2e-4)


def test_all_processes_are_refused_together_where_another_run_is_at_work(repository, data, tmp_path):
    with locked(tmp_path / "run"):
        told = finish(start(repository, data, tmp_path / "run", 2), expected=1)
    assert all(f"is in use by another run (process {os.getpid()} on " in each for each in told)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]


def test_two_processes_go_through_two_phases_like_one(repository, data, tmp_path):
    longer = make_dataset(tmp_path, row_length=48)
    more = [
        "--config.train.num_steps=5",
        "--config.phase2.num_steps=4",
        f"--config.phase2.path={longer}",
        "--config.phase2.batch_size=8",
        "--config.phase2.max_predictions=7",
        "--config.phase2.warmup_steps=1",
        "--config.phase2.keep_moments=False",
    ]
    for count in (1, 2):
        told = finish(start(repository, data, tmp_path / str(count), count, more))
    assert "phase 2 of 2: steps 6 to 9, rate 0.001; Adam's means at zero" in told[0] and "phase" not in told[1]
    ours, theirs = losses(tmp_path / "2"), losses(tmp_path / "1")
    assert (
        sorted(ours) == sorted(theirs) == [(step, name) for step in range(1, 10) for name in ("clm_loss", "mlm_loss")]
    )
    assert ours == pytest.approx(theirs, rel=2e-4)


def test_schedulers_are_recognised():
    for alone in ({}, {"SLURM_NTASKS": "1"}, {"TPU_WORKER_HOSTNAMES": "localhost"}):
        assert not is_job(alone)
    for several in ({"SLURM_NTASKS": "8"}, {"TPU_WORKER_HOSTNAMES": "a,b"}, {"MEGASCALE_NUM_SLICES": "2"}):
        assert is_job(several)
