# SPDX-License-Identifier: Apache-2.0
"""The modern recipe, small, on two processes: it learns, is killed, goes on with the same bits, and is exported."""

import signal
import time

import jax
import numpy as np
import processes
import pytest
from builders import make_dataset
from processes import finish

from bert_jax import load_pretrained
from bert_jax.checkpoints.sealed import checkpoint_steps
from bert_jax.training.report import read_metrics

pytestmark = pytest.mark.slow
SETTINGS = (
    *("model.hidden_size=32", "model.num_heads=2", "model.intermediate_size=48", "model.max_positions=256"),
    *("model.window=4", "data.batch_size=8", "train.num_steps=16", "phase2.num_steps=8", "phase2.batch_size=2"),
    *("eval.every_steps=12", "checkpoint.every_steps=2", "report.every_steps=1", "report.tensorboard=False"),
    "model.unroll=1",
)


def start(repository, data, workdir, num_processes=2):
    """Returns the processes of `pretrain:modern,mini,phases`: a smaller model, few steps, rows of 64 and 256 tokens."""
    settings = (*SETTINGS, "report.progress=False", f"data.path={data[0]}", f"phase2.path={data[1]}")
    command = ["train.py", "--config=configs/pretrain.py:modern,mini,phases", f"--workdir={workdir}"]
    return processes.start(repository, [*command, *(f"--config.{each}" for each in settings)], num_processes)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    made = [tmp_path_factory.mktemp(name) for name in ("short", "long")]
    return [make_dataset(each, length, next_sentence="none") for each, length in zip(made, (64, 256), strict=True)]


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    """Each run after the first takes its programs from a cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        yield


@pytest.fixture(scope="module")
def undisturbed(repository, data, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole") / "run"
    finish(start(repository, data, workdir), timeout=1200)
    return workdir


def test_it_learns_in_both_stages_and_the_rate_falls_at_the_end(undisturbed):
    found = [record for record in read_metrics(undisturbed / "metrics.jsonl") if record["kind"] == "train"]
    losses = [record["mlm_loss"] for record in found]
    assert len(losses) == 24 and np.mean(losses[-4:]) < np.mean(losses[:4])
    rates = [record["learning_rate"] for record in found]
    assert rates[4] == rates[15] == pytest.approx(1e-3) and rates[17] == pytest.approx(4e-4) and rates[-1] < 4e-4


def test_a_killed_run_goes_on_with_the_same_bits(repository, data, undisturbed, tmp_path):
    workdir = tmp_path / "run"
    for last in (6, 18):  # both processes are killed in each stage
        running, saved = start(repository, data, workdir), workdir / "checkpoints"
        while not (saved.exists() and max(checkpoint_steps(saved), default=0) >= last):
            ended = [process for process in running if process.poll() is not None]
            assert not ended, [process.communicate()[1] for process in ended]
            time.sleep(0.02)
        for process in running:
            process.send_signal(signal.SIGKILL)
        finish(running, -signal.SIGKILL)
    told = finish(start(repository, data, workdir), timeout=1200)
    assert "in 3 attempts" in told[0]
    ours, theirs = (load_pretrained(each).params for each in (workdir, undisturbed))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
