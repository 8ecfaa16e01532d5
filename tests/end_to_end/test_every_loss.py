# SPDX-License-Identifier: Apache-2.0
"""Each loss of vectors and of candidates: the same on any devices, in microbatches, in processes and after a kill."""

import dataclasses
import json
import random

import jax
import numpy as np
import pytest
from builders import assert_same as assert_same_bits
from builders import topics_run
from every_loss import every_loss
from processes import finish, start

import bert_jax
from bert_jax.devices.sharding import make_mesh
from bert_jax.finetuning import finetune
from bert_jax.settings.finetuning import EmbeddingConfig, FinetuneTrainConfig, RankingConfig, TaskConfig
from bert_jax.settings.pretraining import CheckpointConfig, MeshConfig, TeacherConfig
from bert_jax.settings.rules import to_dict
from bert_jax.training.report import Reporter, read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone():
    return every_loss(make_mesh(MeshConfig(), jax.devices()[:1]), 1)


def assert_same(found, alone):
    assert len(found) == len(alone) > 20
    for name, expected in alone.items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)
        assert np.abs(expected).min() == 0 < np.abs(expected[2:]).max(), name  # words that the batch has not


def test_what_a_step_learns_is_the_mean_that_the_head_says(alone):
    for name, (learnt, mean, *_) in alone.items():
        assert learnt == pytest.approx(mean, rel=1e-5) and mean > 1e-2, name


def test_a_mesh_and_microbatches_change_nothing_but_rounding(alone):
    assert_same(every_loss(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)), 2), alone)


def test_two_processes_change_nothing_but_rounding(repository, alone, tmp_path):
    finish(start(repository, [f"{repository}/tests/every_loss.py", str(tmp_path / "found.npz")], 2))
    assert_same(dict(np.load(tmp_path / "found.npz")), alone)


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A directory with a table of queries with a teacher's scores of two or three passages, and one of graded pairs."""
    rng, rows, graded = random.Random(0), [], []
    for _ in range(40):
        texts = [" ".join(rng.choices(["ban", "bes", "dar", "the"], k=rng.randint(1, 4))) for _ in range(4)]
        negatives = texts[2 : rng.choice((3, 4))]
        scores = [rng.gauss(0, 3) for _ in range(1 + len(negatives))]
        rows.append({"anchor": texts[0], "positive": texts[1], "negative": negatives, "scores": scores})
        graded.append({"sentence1": texts[0], "sentence2": texts[1], "score": rng.random()})
    directory = tmp_path_factory.mktemp("tables")
    for name, table in (("scored", rows), ("graded", graded)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    return directory


SMALL = {"projection_size": 8, "projection_activation": "none"}
TASKS = {
    "dense": TaskConfig(name="embeddings", embedding=EmbeddingConfig(loss="margin_mse")),
    "sparse": TaskConfig(name="embeddings", embedding=EmbeddingConfig(kind="sparse", loss="kl")),
    "of tokens": TaskConfig(
        name="embeddings", embedding=EmbeddingConfig(kind="multi_vector", loss="kl", query_length=8, **SMALL)
    ),
    "reranker": TaskConfig(name="reranking", ranking=RankingConfig(loss="margin_mse")),
    "graded": TaskConfig(name="embeddings", embedding=EmbeddingConfig(loss="cosent")),
    "guided": TaskConfig(name="embeddings", embedding=EmbeddingConfig(loss="gist", guide_margin=0.1)),
}


class Killed(BaseException):
    """In place of a signal, which would end the tests too."""


@pytest.mark.parametrize("kind", TASKS)
def test_a_loss_is_learnt_on_after_a_kill(scored, pretrained, tmp_path, monkeypatch, kind):
    """From step 4 of 6, bit for bit."""
    task = dataclasses.replace(TASKS[kind], max_seq_length=12)
    table = scored / ("graded.jsonl" if kind == "graded" else "scored.jsonl")
    config = topics_run("", pretrained, task=task, train=FinetuneTrainConfig(num_epochs=2.0))
    data = dataclasses.replace(config.data, source="", path=f"{table},{table}")
    config = dataclasses.replace(config, data=data, checkpoint=CheckpointConfig(every_steps=2))
    if kind == "guided":
        bert = bert_jax.load_pretrained(pretrained)
        guide = {"task": "sentence_embedding", "task_settings": to_dict(TaskConfig(name="embeddings"))}
        bert_jax.save_pretrained(dataclasses.replace(bert, **guide), tmp_path / "guide")
        config = dataclasses.replace(config, teacher=TeacherConfig(str(tmp_path / "guide")))
    finetune(config, tmp_path / "whole", jax.devices()[:1])
    log, steps = Reporter.log, []

    def log_and_end(self, step, kind, metrics):
        log(self, step, kind, metrics)
        if kind == "train":
            steps.append(step)
            if len(steps) == 5:
                raise Killed

    monkeypatch.setattr(Reporter, "log", log_and_end)
    with pytest.raises(Killed):
        finetune(config, tmp_path / "run", jax.devices()[:1])
    finetune(config, tmp_path / "run", jax.devices()[:1])
    assert steps == [1, 2, 3, 4, 5, 5, 6]
    losses = [
        {each["step"]: each["loss"] for each in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in each}
        for name in ("whole", "run")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert_same_bits(*(bert_jax.load_pretrained(tmp_path / name).params for name in ("whole", "run")))
