# SPDX-License-Identifier: Apache-2.0
"""Whole runs for tests: trained, stopped, compared."""

import os
import signal

import jax
import numpy as np

from bert_jax.pretraining import pretrain
from bert_jax.settings.pretraining import MeshConfig
from bert_jax.training.report import Reporter, read_metrics

ONE_DEVICE = MeshConfig(data=1)


def train(config, workdir):
    """Returns the result of a run on as many devices as its mesh has."""
    devices = jax.devices()[: config.mesh.data * config.mesh.fsdp * config.mesh.tensor]
    return pretrain(config, workdir, devices)


def losses(workdir, kind="train"):
    return {
        r["step"]: (r["mlm_loss"], r["nsp_loss"]) for r in read_metrics(workdir / "metrics.jsonl") if r["kind"] == kind
    }


def assert_same_state(ours, theirs):
    for before, after in zip(*(jax.tree.leaves(jax.device_get(state)) for state in (ours, theirs)), strict=True):
        np.testing.assert_array_equal(before, after)


def stop_at(monkeypatch, step):
    """Makes this process receive SIGTERM while it reports a training step."""
    log = Reporter.log

    def log_and_signal(self, reported, kind, metrics):
        log(self, reported, kind, metrics)
        if kind == "train" and reported == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Reporter, "log", log_and_signal)
