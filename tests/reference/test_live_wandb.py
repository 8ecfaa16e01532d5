# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases itself, offline: a run is written into its work directory, and goes on as the same run."""

import pytest

from bert_jax.training.boards import open_boards
from bert_jax.training.report import Reporter

pytest.importorskip("wandb")
pytestmark = pytest.mark.reference


def test_metrics_are_written_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step in (1, 2):
        with Reporter(tmp_path, 4, tensorboard=False, progress=False) as reporter:
            reporter.boards += open_boards("wandb", tmp_path, {"train": {"seed": 3}})
            reporter.log(step, "train", {"loss": 2.0})
    written = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert written and len({path.name for path in written}) == 1  # of one id
    assert b"train/loss" in b"".join(path.read_bytes() for path in written)
