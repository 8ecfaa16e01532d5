# SPDX-License-Identifier: Apache-2.0
"""The modern recipe, small: it learns, is killed, goes on with the same bits, and is written for transformers."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from builders import make_dataset
from ml_collections import ConfigDict

from bert_jax import load_pretrained
from bert_jax.checkpoints.hf import load_hf, save_hf
from bert_jax.checkpoints.sealed import checkpoint_steps
from bert_jax.pretraining import pretrain
from bert_jax.settings.pretraining import MeshConfig, PretrainConfig
from bert_jax.settings.rules import from_dict
from bert_jax.tools.recipes import directory
from bert_jax.training.report import read_metrics

SETTINGS = {
    "model": {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "num_layers": 4, "max_positions": 256,
              "window": 4},
    "data": {"batch_size": 8},
    "train": {"num_steps": 16},
    "phase2": {"num_steps": 8, "batch_size": 2},
    "eval": {"every_steps": 12},
    "checkpoint": {"every_steps": 2},
    "report": {"every_steps": 1, "tensorboard": False, "progress": False},
}  # fmt: skip


def modern_run(short, long) -> PretrainConfig:
    """Returns `pretrain:modern,mini,phases` with a smaller model, few steps, and rows of 64 and then 256 tokens."""
    scope: dict = {"__name__": "recipe"}
    exec((directory() / "pretrain.py").read_text("utf-8"), scope)
    values: ConfigDict = scope["get_config"]("modern,mini,phases")
    values.update(SETTINGS)
    values.data.path, values.phase2.path = str(short), str(long)
    return dataclasses.replace(from_dict(PretrainConfig, values.to_dict()), mesh=MeshConfig(data=1))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    made = [tmp_path_factory.mktemp(name) for name in ("short", "long")]
    return [make_dataset(each, length, next_sentence="none") for each, length in zip(made, (64, 256), strict=True)]


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole") / "run"
    pretrain(modern_run(*data), workdir, jax.devices()[:1])
    return workdir


@pytest.mark.slow
def test_it_learns_in_both_stages_and_the_rate_falls_at_the_end(undisturbed):
    found = [record for record in read_metrics(undisturbed / "metrics.jsonl") if record["kind"] == "train"]
    losses = [record["mlm_loss"] for record in found]
    assert len(losses) == 24 and np.mean(losses[-4:]) < np.mean(losses[:4])
    rates = [record["learning_rate"] for record in found]
    assert rates[4] == rates[15] == pytest.approx(1e-3) and rates[17] == pytest.approx(4e-4) and rates[-1] < 4e-4


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bits(repository, data, undisturbed, tmp_path):
    workdir = tmp_path / "run"
    code = (
        "import sys, jax; from pathlib import Path; from test_modern import modern_run, pretrain; "
        "pretrain(modern_run(*sys.argv[1:3]), Path(sys.argv[3]), jax.devices()[:1])"
    )
    places = [repository, repository / "tests", repository / "tests/end_to_end"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, "-c", code, *map(str, data), str(workdir)]
    for last in (6, 18):  # one kill in each stage
        running = subprocess.Popen(command, env=environment, cwd=repository)
        saved = workdir / "checkpoints"
        while not (saved.exists() and max(checkpoint_steps(saved), default=0) >= last) and running.poll() is None:
            time.sleep(0.02)
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL, "it was done before it was killed"
    pretrain(modern_run(*data), workdir, jax.devices()[:1])
    ours, theirs = (load_pretrained(each).params for each in (workdir, undisturbed))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.slow
def test_it_is_written_for_transformers(undisturbed, tmp_path):
    bert = load_pretrained(undisturbed)
    save_hf(tmp_path / "out", bert.config, bert.params, bert.tokenizer, bert.task, bert.labels)
    loaded = load_hf(tmp_path / "out")
    assert (loaded.config.family, loaded.config.window, loaded.task) == ("modernbert", 4, "masked_lm")
    jax.tree.map(np.testing.assert_array_equal, loaded.params["mlm"], jax.device_get(bert.params["mlm"]))
