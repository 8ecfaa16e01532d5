# SPDX-License-Identifier: Apache-2.0
"""Evaluation: the constant prediction by hand, names of further splits, and every example once in any batch size."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from builders import make_pretrained, make_topics, task_params, tiny_model

from bert_jax.batch import Row
from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import TextError
from bert_jax.inference.pretrained import load_pretrained
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


def constant_of(head, labels, train, lengths=(1,)):
    """Returns what `constant_scores` predicts for a row of each of some lengths, trained on rows with some labels."""
    seen = []

    class Counting(ClassificationTask):
        """Scores are counts of predictions."""

        def decode(self, examples, rows, outputs):
            seen.extend(outputs)
            return outputs

        def score(self, examples, predictions):
            return {"metric": float(len(predictions))}

    task = Counting(TaskConfig(), labels)
    task.head, task.metric = HEADS[head], "metric"
    row = lambda label, length=1: Row(0, np.zeros(length, np.int32), np.zeros(length, np.uint8), (length,), label)  # noqa: E731
    trained = Split("train", [], [row(label) for label in train], {})
    dev = Split("dev", list(lengths), [row(None, length) for length in lengths], {})
    other = Split("dev_other", list(lengths), [row(None, length) for length in lengths], {})
    scores = constant_scores(task, trained, [dev, other])
    assert scores == {"metric": float(len(lengths)), "metric_other": float(len(lengths))}
    return seen[: len(lengths)]


def test_the_most_frequent_class_is_predicted():
    (output,) = constant_of("sequence_classification", ("a", "b", "c"), [1, 2, 2, 0])
    assert output.tolist() == [0, 0, 1]


def test_the_mean_of_a_regression_is_predicted():
    (output,) = constant_of("sequence_classification", (), [1.0, 2.0, 6.0])
    assert output.tolist() == [3.0]


def test_the_most_frequent_label_of_tokens_is_predicted_for_each_token():
    labels = [np.array([-1, 0, 1, -1]), np.array([-1, 1, -1, -1])]  # -1 is no word's first piece
    short, long = constant_of("token_classification", ("O", "B"), labels, lengths=(2, 4))
    assert short.tolist() == [[0, 1]] * 2 and long.tolist() == [[0, 1]] * 4


def test_spans_begin_and_end_nowhere():
    (output,) = constant_of("question_answering", (), [np.array([3, 4])], lengths=(3,))
    assert not output.any() and output.shape == (3, 2)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_every_example_has_a_prediction_whatever_the_batches(tmp_path, devices):
    source = make_topics(tmp_path / "topics")
    bert = load_pretrained(make_pretrained(tmp_path))
    task = ClassificationTask(TaskConfig(name="classification", max_seq_length=16), ())
    examples = task.read(str(source), "dev")[:13]
    task = ClassificationTask(task.config, task.find_labels(examples))
    split = make_split(task, bert.tokenizer, "dev", examples)
    assert isinstance(task.make_rows(examples, bert.tokenizer, False), Rows)
    model = tiny_model(vocab_size=bert.tokenizer.vocab_size)
    params = task_params("sequence_classification", len(task.labels)) | {"encoder": bert.params["encoder"]}
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    ends, kept = [], []
    with jax.set_mesh(mesh):
        infer, alone = (make_inference(model, task, mesh, params, pack) for pack in ("on", "off"))
        one_by_one = predict_split(
            task, split, alone, alone.ready(params), batch_size=devices, mesh=mesh, finished=lambda: ends.append(1)
        )
        scores, _ = evaluate(task, [split], infer, 8, mesh, params, lambda split, found: kept.extend(found))
        others, _ = evaluate(task, [split], alone, devices, mesh, params)
    assert len(ends) == -(-13 // devices)
    assert len(kept) == 13 and [each.label for each in kept] == [each.label for each in one_by_one]
    for ours, theirs in zip(kept, one_by_one):
        assert ours.probabilities == pytest.approx(theirs.probabilities, abs=1e-5)
    right = np.mean([example.label == found.label for example, found in zip(examples, kept)])
    assert scores["accuracy"] == pytest.approx(right) and scores["loss"] == pytest.approx(others["loss"], rel=1e-5)


def test_every_evaluation_is_scored_with_the_thresholds_that_it_tunes(monkeypatch):
    """All probabilities are below 0.5, and in the right order: the F1 at 0.5 is 0, at thresholds of their own 1."""
    task = make_task(TaskConfig(name="multilabel"), ("a", "b"))
    examples = [ClassifyExample("", label={name: 1.0}) for name in "aab"]
    dev = Split("dev", examples, [], {})
    outputs = [np.array(logits) for logits in ([-1.0, -4.0], [-2.0, -5.0], [-3.0, -3.0])]
    monkeypatch.setattr(evaluation, "_compute_split", lambda *_: (outputs, {"loss": 1.0}))
    infer = Inference(tiny_model(), "off", False, lambda params: params, lambda params, batch: None)
    metrics, tuned = evaluate(task, [dev, dev._replace(name="dev_other")], infer, 8, None, {})
    assert metrics["micro_f1"] == metrics["micro_f1_other"] == metrics["subset_accuracy"] == 1
    assert task.score(examples, task.decode(examples, [], outputs))["micro_f1"] == 0
    assert tuned.decode(examples, [], outputs)[1].labels == ("a",)
    diverged = task.decode(examples, [], [np.full(2, np.nan)] * 3)
    assert task.tune(examples, diverged).thresholds == "0.5,0.5"
    # The constant prediction is tuned as well: both labels, 3 of 6 of them right, and none of the 3 missed.
    labels = [np.array([1.0, 0.0]), np.array([1.0, 0.0]), np.array([0.0, 1.0])]
    rows = [Row(n, np.zeros(1, np.int32), np.zeros(1, np.uint8), (1,), label) for n, label in enumerate(labels)]
    assert constant_scores(task, Split("train", [], rows, {}), [dev._replace(rows=rows)])["micro_f1"] == 2 / 3


def test_an_example_with_which_a_tokenizer_fails_is_named_by_its_place():
    def fail(texts):
        raise TextError("the library fails", "two")

    tokenizer = SimpleNamespace(encode_batch=fail, encode=fail)
    task = make_task(TaskConfig(name="classification"), ("no", "yes"))
    examples = [ClassifyExample(text, label="no", where=f"x.tsv:{line}") for line, text in ((2, "one"), (3, "one two"))]
    with pytest.raises(TextError, match=r"^x\.tsv:3: the library fails$"):
        make_split(task, tokenizer, "dev", examples)
