# SPDX-License-Identifier: Apache-2.0
"""Evaluation: the constant prediction by hand, names of further splits, and every example once in any batch size."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from builders import make_topics, message, task_params, tiny_model

from bert_jax.batch import Row
from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import TextError
from bert_jax.model.heads.table import HEADS
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.settings.pretraining import MeshConfig
from bert_jax.tasks import evaluation
from bert_jax.tasks.base import Rows
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.classify import ClassificationTask
from bert_jax.tasks.evaluation import (
    Inference,
    Split,
    constant_scores,
    evaluate,
    make_inference,
    make_split,
    predict_split,
)
from bert_jax.tasks.labels import ClassifyExample


def row_of(label, length=1):
    return Row(0, np.zeros(length, np.int32), np.zeros(length, np.uint8), (length,), label)


@pytest.mark.parametrize(
    ("head", "classes", "labels", "lengths", "expected"),
    [
        # the most frequent class, the mean of a regression
        ("sequence_classification", ("a", "b", "c"), [1, 2, 2, 0], [1], [[0, 0, 1]]),
        ("sequence_classification", (), [1.0, 2.0, 6.0], [1], [[3.0]]),
        # the most frequent label of tokens, of which -1 is no word's first piece, for each token
        (
            "token_classification",
            ("O", "B"),
            [np.array([-1, 0, 1, -1]), np.array([-1, 1, -1])],
            [2, 3],
            [[[0, 1]] * 2, [[0, 1]] * 3],
        ),
        # spans begin and end nowhere
        ("question_answering", (), [np.array([3, 4])], [3], [[[0, 0]] * 3]),
    ],
)
def test_the_constant_prediction(head, classes, labels, lengths, expected):
    seen = []

    class Counting(ClassificationTask):
        """Scores are counts of predictions."""

        def decode(self, examples, rows, outputs):
            seen.append([output.tolist() for output in outputs])
            return outputs

        def score(self, examples, predictions):
            return {"metric": float(len(predictions))}

    task = Counting(TaskConfig(), classes)
    task.head, task.metric = HEADS[head], "metric"
    trained = Split("train", [], [row_of(label) for label in labels], {})
    dev = Split("dev", lengths, [row_of(None, length) for length in lengths], {})
    scores = constant_scores(task, trained, [dev, dev._replace(name="dev_other")])
    assert scores == {"metric": len(lengths), "metric_other": len(lengths)}
    assert seen == [expected, expected]


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_every_example_has_a_prediction_whatever_the_batches(tmp_path, bert, devices):
    source = make_topics(tmp_path / "topics")
    task = ClassificationTask(TaskConfig(name="classification", max_seq_length=16), ("b", "d", "f"))
    examples = task.read(str(source), "dev")[:13]
    split = make_split(task, bert.tokenizer, "dev", examples)
    params = task_params("sequence_classification", len(task.labels)) | {"encoder": bert.params["encoder"]}
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    ends, kept = [], []
    with jax.set_mesh(mesh):
        infer, alone = (make_inference(bert.config, task, mesh, params, pack) for pack in ("on", "off"))
        one_by_one = predict_split(
            task, split, alone, alone.ready(params), batch_size=devices, mesh=mesh, finished=lambda: ends.append(1)
        )
        scores, _ = evaluate(task, [split], infer, 8, mesh, params, lambda split, found: kept.extend(found))
        others, _ = evaluate(task, [split], alone, devices, mesh, params)
    assert len(ends) == -(-13 // devices) and len(kept) == 13
    for ours, theirs in zip(kept, one_by_one):
        assert ours.label == theirs.label and ours.probabilities == pytest.approx(theirs.probabilities, abs=1e-5)
    right = np.mean([example.label == found.label for example, found in zip(examples, kept)])
    assert scores["accuracy"] == pytest.approx(right) and scores["loss"] == pytest.approx(others["loss"], rel=1e-5)


def test_every_evaluation_is_scored_with_the_thresholds_that_it_tunes(monkeypatch):
    """All probabilities are below 0.5, and in the right order: the F1 at 0.5 is 0, at thresholds of their own 1."""
    task = make_task(TaskConfig(name="multilabel"), ("a", "b"))
    examples = [ClassifyExample("", label={name: 1.0}) for name in "aab"]
    dev = Split("dev", examples, [row_of(label) for label in np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])], {})
    outputs = np.array([[-1.0, -4.0], [-2.0, -5.0], [-3.0, -3.0]])
    monkeypatch.setattr(evaluation, "_compute_split", lambda *_: (outputs, {"loss": 1.0}))
    infer = Inference(tiny_model(), "off", False, lambda params: params, lambda params, batch: None)
    metrics, tuned = evaluate(task, [dev, dev._replace(name="dev_other")], infer, 8, None, {})
    assert metrics["micro_f1"] == metrics["micro_f1_other"] == metrics["subset_accuracy"] == 1
    assert task.score(examples, task.decode(examples, [], outputs))["micro_f1"] == 0
    assert tuned.decode(examples, [], outputs)[1].labels == ("a",)
    diverged = task.decode(examples, [], outputs * np.nan)
    assert task.tune(examples, diverged).thresholds == "0.5,0.5"
    # The constant prediction is tuned as well: both labels, 3 of 6 of them right, and none of the 3 missed.
    assert constant_scores(task, dev._replace(name="train"), [dev])["micro_f1"] == 2 / 3


def test_an_example_with_which_a_tokenizer_fails_is_named_by_its_place():
    def fail(texts):
        raise TextError("the library fails", "two")

    tokenizer = SimpleNamespace(encode_batch=fail, encode=fail)
    task = make_task(TaskConfig(name="classification"), ("no", "yes"))
    examples = [ClassifyExample(text, label="no", where=f"x.tsv:{line}") for line, text in ((2, "one"), (3, "one two"))]
    assert message(make_split, task, tokenizer, "dev", examples) == "x.tsv:3: the library fails"


def test_what_was_cut_is_counted():
    assert Rows([], {"truncated": 2, "words truncated": 1, "no token": 4}).num_cut() == 3
