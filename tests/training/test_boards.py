# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases gets what `metrics.jsonl` has, offline too; the run is the same when it goes on."""

import shutil
import sys
import types

import pytest

from bert_jax import InputError
from bert_jax.settings.pretraining import ReportConfig
from bert_jax.training.boards import open_boards
from bert_jax.training.report import Reporter


class FakeRun:
    def __init__(self, **about):
        self.about, self.logged, self.finished = about, [], False

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def runs(monkeypatch):
    """A stand-in with the three names that are used; tests/reference/test_live_wandb.py has the real one."""
    found = []

    def init(**about):
        found.append(FakeRun(**about))
        return found[-1]

    fake = types.SimpleNamespace(init=init, Settings=dict, Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return found


def report(workdir):
    with Reporter(workdir, 4, tensorboard=False, progress=False) as reporter:
        reporter.boards += open_boards("wandb", workdir, {"train": {"seed": 3}})
        reporter.log(1, "train", {"loss": 2.0})
        reporter.log(2, "eval", {"loss": 1.0, "accuracy": 0.5})


def test_it_gets_every_metric_and_the_settings(runs, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    report(tmp_path / "a")
    report(tmp_path / "a")
    report(tmp_path / "b")
    assert runs[0].logged == [(1, {"train/loss": 2.0}), (2, {"eval/loss": 1.0, "eval/accuracy": 0.5})]
    assert runs[0].finished and runs[0].about["config"] == {"train": {"seed": 3}} and runs[0].about["name"] == "a"
    assert runs[0].about["id"] == runs[1].about["id"] != runs[2].about["id"] and runs[0].about["resume"] == "allow"


def test_another_run_at_the_same_path_is_another_run(runs, tmp_path):
    """As `/content/runs/base` on two Colabs, or a work directory that was deleted and made again."""
    for _ in range(2):
        (tmp_path / "base").mkdir()
        report(tmp_path / "base")
        shutil.rmtree(tmp_path / "base")
    assert runs[0].about["id"] != runs[1].about["id"] and runs[0].about["name"] == runs[1].about["name"] == "base"


def test_a_damaged_id_is_one_line(runs, tmp_path):
    (tmp_path / "wandb.json").write_text("[]")
    with pytest.raises(InputError, match=r"wandb\.json has no id of a run; delete it"):
        open_boards("wandb", tmp_path, {})
    assert runs == []


def test_what_cannot_be_is_one_line(monkeypatch, runs, tmp_path):
    with pytest.raises(InputError, match=r'report\.to "x" is not one of'):
        ReportConfig(to="x").validate()
    assert open_boards("", tmp_path, {}) == []

    def refuse(**about):
        raise RuntimeError("no API key")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(InputError, match=r"no API key\); log in"):
        open_boards("wandb", tmp_path, {})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"pip install 'bert_jax\[wandb\]'"):
        open_boards("wandb", tmp_path, {})
