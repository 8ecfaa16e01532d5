# SPDX-License-Identifier: Apache-2.0
"""Packed fine-tuning is unpacked fine-tuning on the same examples: each step, on any devices, resumed, by choice."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from builders import make_learner, make_topics, topics_run

from bert_jax.errors import InputError
from bert_jax.finetuning import finetune
from bert_jax.settings.finetuning import (
    FinetuneConfig,
    FinetuneDataConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
    ProbeConfig,
    TaskConfig,
)
from bert_jax.settings.pretraining import MeshConfig, ReportConfig
from bert_jax.training.report import read_metrics
from bert_jax.training.workdir import settings_of, was_packed

NO_DROPOUT = FinetuneModelConfig(hidden_dropout_rate=0.0, attention_dropout_rate=0.0)


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    return make_topics(tmp_path_factory.mktemp("topics"), 100, 30)  # the last batch of an epoch has 4 of 16


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return make_learner(tmp_path_factory.mktemp("start"))


def run(topics, start, workdir, pack, devices=1, **sections):
    data = FinetuneDataConfig(source=str(topics), batch_size=16, pack=pack, bucket=False)
    sections = {"model": NO_DROPOUT, "train": FinetuneTrainConfig(num_epochs=4.0)} | sections
    config = topics_run(topics, start, data=data, mesh=MeshConfig(data=devices), **sections)
    return finetune(config, workdir, jax.devices()[:devices])


def losses(workdir, kind="train"):
    found = [record for record in read_metrics(workdir / "metrics.jsonl") if record["kind"] == kind]
    return np.array([[record["step"], record["loss"], record["accuracy"]] for record in found])


@pytest.fixture(scope="module")
def packed(topics, start, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("packed") / "run"
    return workdir, run(topics, start, workdir, "on")


@pytest.mark.slow
def test_every_step_has_the_loss_of_the_same_examples_in_rows_of_their_own(packed, topics, start, tmp_path):
    result = run(topics, start, tmp_path / "run", "off")
    ours, theirs = losses(packed[0]), losses(tmp_path / "run")
    assert len(theirs) == 28 and theirs[-1, 1] < 0.5 * theirs[0, 1]
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(losses(packed[0], "eval"), losses(tmp_path / "run", "eval"), rtol=1e-3)
    assert packed[1].metrics == pytest.approx(result.metrics, rel=1e-3)
    names = sorted(path.name for path in (tmp_path / "run" / "predictions").iterdir())
    for name in names:  # those of the best model: the same labels for the same examples, in their order
        one, other = ((workdir / "predictions" / name).read_text() for workdir in (packed[0], tmp_path / "run"))
        assert one == other


@pytest.mark.slow
def test_devices_and_microbatches_change_nothing_but_rounding(packed, topics, start, tmp_path):
    """Batches of the run take 4 to 6 rows of 32 tokens: of eight devices some have no text at all."""
    halves = FinetuneTrainConfig(num_epochs=4.0, accumulate=2)
    run(topics, start, tmp_path / "eight", "on", devices=8, train=halves)
    np.testing.assert_allclose(losses(tmp_path / "eight"), losses(packed[0]), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_several_steps_a_call_and_devices_change_nothing_but_rounding(topics, start, tmp_path):
    """Of batches of several shapes, some calls take several steps and some take one; dropout draws the same bits."""
    report = ReportConfig(every_steps=4, tensorboard=False, progress=False)
    more = {"model": FinetuneModelConfig(), "report": report}
    for devices, count in ((1, 1), (4, 2)):
        train = FinetuneTrainConfig(num_epochs=4.0, steps_per_call=count)
        run(topics, start, tmp_path / str(count), "on", devices, train=train, **more)
    ours, theirs = losses(tmp_path / "2"), losses(tmp_path / "1")
    assert theirs[:, 0].tolist() == [4, 8, 12, 16, 20, 24, 28]
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_what_was_chosen_is_read_from_the_work_directory(tmp_path):
    assert was_packed(tmp_path) is None
    run = {"train": {"num_epochs": 1.0}, "data": {"batch_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps({"run": run}))
    assert was_packed(tmp_path) is False
    assert settings_of(tmp_path, FinetuneConfig)["data"]["pack"] == "auto"
    for packed in (True, False):
        (tmp_path / "config.json").write_text(json.dumps({"run": run, "packed": packed}))
        assert was_packed(tmp_path) is packed


def test_what_cannot_be_packed_is_said():
    bilstm = TaskConfig(name="classification", probe=ProbeConfig(features="last"))
    config = FinetuneConfig(task=bilstm, data=FinetuneDataConfig(source="a", pack="on"), init_checkpoint="b")
    with pytest.raises(InputError, match="would run from one example of a row into the next"):
        config.validate()
    dataclasses.replace(config, data=FinetuneDataConfig(source="a")).validate()
    with pytest.raises(InputError, match=r"data\.pack .yes. is not one of auto, on, off"):
        dataclasses.replace(config, data=FinetuneDataConfig(source="a", pack="yes")).validate()
