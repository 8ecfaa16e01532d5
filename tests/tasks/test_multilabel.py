# SPDX-License-Identifier: Apache-2.0
"""Any number of labels for a text, soft labels, weights and smoothing: read, learnt, scored, kept with the model."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from builders import computed, make_learner, make_topics, message, tiny_model, topics_run, write
from hf_models import make_tokenizer, random_params
from read_models import load_hf

from bert_jax import load_predictor, load_pretrained
from bert_jax.batch import pad_rows
from bert_jax.checkpoints.hf import save_hf
from bert_jax.finetuning import finetune
from bert_jax.model.heads.multilabel import MULTILABEL
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.settings.finetuning import FinetuneTrainConfig, TaskConfig
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.labels import ClassifyExample
from bert_jax.training.report import read_metrics

LABELS = ("b", "d", "f")


def task(labels=LABELS, name="multilabel", named="", **settings):
    return make_task(TaskConfig(name=name, max_seq_length=16, labels=named, **settings), labels)


def classes(labels=LABELS, **settings):
    return task(labels, "classification", **settings)


@pytest.fixture
def read(tmp_path):
    """Returns the examples of a file in which each row has one of these labels, as JSON."""

    def read(made, *labels):
        lines = [f'{{"text": "ban", "labels": {label}}}\n' for label in labels]
        return made.read(write(tmp_path / "train.jsonl", "".join(lines)), "train")

    return read


def rows_of(made, examples, training=True):
    return made.make_rows(examples, make_tokenizer(80), training).rows


def labelled(*labels):
    return [ClassifyExample("ban", label=label, where="x:1") for label in labels]


@pytest.mark.parametrize(
    ("value", "wanted", "shares"),
    [
        ('["b", "f"]', {"b": 1, "f": 1}, [1, 0, 1]),
        ("[]", {}, [0, 0, 0]),
        ('"f, b"', {"b": 1, "f": 1}, [1, 0, 1]),
        ('{"b": 0.25, "d": true, "f": null}', {"b": 0.25, "d": 1}, [0.25, 1, 0]),
    ],
)
def test_labels_are_lists_texts_or_probabilities(read, value, wanted, shares):
    examples = read(task(), value)
    assert examples[0].label == wanted and rows_of(task(), examples)[0].label.tolist() == shares


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ('["b", "x"]', "label 'x' is not one of 'b', 'd', 'f'"),
        ('{"b": 2}', "are not probabilities from 0 to 1"),
        ('[["b"]]', "label ['b'] is not a name"),
        ("null", "has no label; training and dev examples need one"),
        ("\"{'b': 0.3}\"", "is an object as text; give"),
        ("[0, 1, 0]", "are a list as Python writes it, or a 0 or 1"),
        ('"1,0,0"', "are a list as Python writes it"),
        ("\"['b', 'd']\"", "are a list as Python writes it"),
        ('"[0. 1. 0.]"', "are a list as Python writes it"),
    ],
)
def test_what_is_no_label_is_named(read, value, problem):
    found = message(lambda: rows_of(task(), read(task(), value)))
    assert problem in found and "train.jsonl:1" in found


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ("[1, 0];[0, 1]", [["x"], ["y"]]),
        ("[1.0, 1.0];[0.0, 0.0]", [["x", "y"], []]),
        ('[true, false];["y"]', [["x"], ["y"]]),
    ],
)
def test_lists_of_a_0_or_1_for_each_label_are_in_the_order_of_the_settings(read, rows, wanted):
    found = read(task((), named="x,y"), *rows.split(";"))
    assert [[name for name, share in each.label.items() if share] for each in found] == wanted


@pytest.mark.parametrize("rows", ["[1, 0];[0, 1]", "[true, false];[false, true]", '"1,0";"0,1"'])
def test_lists_of_a_0_or_1_are_no_labels(read, rows):
    found = read(task(()), *rows.split(";"))
    assert "train.jsonl:1: all examples have the labels" in message(task(()).find_labels, found)


def test_columns_of_a_0_or_1_for_each_label(tmp_path):
    named = task((), named="loud,rude")

    def read(*lines, made=named, split="train"):
        path = write(tmp_path / f"{split}.csv", "\n".join(["id,comment_text,rude,loud", *lines]))
        return made.read(path, split)

    assert "to those with a 0 or 1" in message(read, "7,ban,0,1", made=task(()))
    found = read("7,ban,0,1", "8,dan,True,1.0", "9,fan,0.25,false")
    assert [[*each.label.values()] for each in found] == [[1, 0], [1, 1], [0, 0.25]]
    assert found.columns == ("comment_text", "loud", "rude") and found[0].id == 7
    for line, problem in (("7,ban,,1", "nothing in column 'rude'"), ("7,ban,2,1", "not probabilities from 0 to 1")):
        assert problem in message(read, line)
    assert read("7,ban,-1,-1", split="test")[0].label is None
    made = classes((), named="loud,rude")  # of classes one holds
    assert [row.label.tolist() for row in rows_of(made, read("7,ban,0,1", "8,ban,1,0", made=made))] == [[1, 0], [0, 1]]


@pytest.mark.parametrize(("label", "sign"), [("b;d", ";"), ("b | d", "|"), ("d;x", ""), ("b, d", "")])
def test_labels_with_another_sign_between_them_are_named(read, label, sign):
    examples = read(task(()), *['"b"', '"d"', f'"{label}"'] * 20)
    if sign:
        problem = f"label {label!r} is several; set task.label_separator to {sign!r}"
        assert problem in message(task(()).find_labels, examples)
    else:
        assert {"b", "d"} <= set(task(()).find_labels(examples))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"metric": "f1"}, "task.metric 'f1' is not one of micro_f1"),
        ({"thresholds": "0.5,0.5"}, "task.thresholds has 2 numbers"),
        ({"label_separator": ""}, "task.label_separator is empty"),
        ({"class_weights": "1,-2"}, "is not numbers from 0 up"),
        ({"class_weights": "1,1e39"}, '"1,1e39" is not numbers from 0 up to 1e'),  # infinite in float32
    ],
)
def test_settings_that_cannot_be_are_named(settings, problem):
    assert problem in message(lambda: task(**settings).config.validate())


def test_the_loss_is_the_mean_of_the_labels_cross_entropies():
    logits, labels = np.array([[[2.0, -1.0, 0.0]], [[0.0] * 3]]), np.array([[[1.0, 0.0, 0.5]], [[1.0] * 3]])
    batch, weights = pad_rows([[1, 2], [3]], 4)._replace(labels=labels), np.array([[1.0], [0.0]])
    loss, total = computed(lambda logits: MULTILABEL.losses(logits, batch, weights)["loss"], logits)
    wanted = np.mean([np.log1p(np.exp(-2)), np.log1p(np.exp(-1)), np.log(2)])
    assert (loss, total) == (pytest.approx(wanted, rel=1e-6), 1.0)


def log_odds(*shares):
    return np.log(np.array(shares) / (1 - np.array(shares)))


def test_metrics_are_scikit_learns():
    """Worked out by hand and by its definitions: micro over all, macro over labels, ties of AP taken together."""
    examples = labelled(*(dict.fromkeys(given, 1.0) for given in ("b", "bd", "", "d")))
    shares = [(0.9, 0.2, 0.1), (0.4, 0.8, 0.2), (0.4, 0.1, 0.7), (0.1, 0.6, 0.1)]
    made = task().decode(examples, [], [log_odds(*each) for each in shares])
    assert [each.labels for each in made] == [("b",), ("d",), ("f",), ("d",)]
    assert task().score(examples, made) == pytest.approx({
        "micro_f1": 6 / 8, "subset_accuracy": 0.5, "macro_f1": 5 / 9,
        "mean_average_precision": (0.5 * 1 + 0.5 * 2 / 3 + 1 + 0) / 3,
        "f1_b": 2 / 3, "f1_d": 1, "f1_f": 0,
    })  # fmt: skip
    tuned = task().tune(examples, made).thresholds
    assert [float(each) for each in tuned.split(",")] == pytest.approx([0.25, 0.4, 0.5])
    assert task(thresholds="0.3,0.9,0.9").decode(examples, [], [np.zeros(3)])[0].labels == ("b",)
    assert task(thresholds="1,1,1").tune(examples, made).thresholds == "1,1,1"


def test_a_threshold_between_probabilities_near_1_parts_them():
    """In six digits it was 1, and nothing had the label."""
    examples, logits = labelled({"b": 1.0}, {"d": 1.0}), np.array([[17.0, -3.0, -3.0], [15.5, 3.0, -3.0]])
    tuned = task().tune(examples, task().decode(examples, [], logits)).thresholds
    found = task(thresholds=tuned).decode(examples, [], logits)
    assert [each.labels for each in found] == [("b",), ("d",)]


@pytest.mark.slow
def test_a_run_learns_tunes_keeps_and_predicts(tmp_path):
    source = make_topics(tmp_path / "data", 200)
    config = topics_run(source, make_learner(tmp_path), train=FinetuneTrainConfig(num_epochs=6.0))
    config = dataclasses.replace(config, task=TaskConfig(name="multilabel", max_seq_length=24))
    result = finetune(config, tmp_path / "run", jax.devices()[:1])
    assert result.metrics["micro_f1"] > 0.9 > result.constant["micro_f1"]
    found = [each["micro_f1"] for each in read_metrics(tmp_path / "run" / "metrics.jsonl") if each["kind"] == "eval"]
    assert max(found) == pytest.approx(result.metrics["micro_f1"])  # chosen by what is reported
    model = load_pretrained(tmp_path / "run")
    thresholds = model.task_settings["thresholds"]
    assert len(thresholds.split(",")) == 3
    (said,) = load_predictor(tmp_path / "run")(["ban bar dar dat"])
    saved = model.config, model.params, model.tokenizer, model.task, model.labels
    for kept, labels in ((thresholds, said.labels), ("1,1,1", ())):
        save_hf(tmp_path / kept, *saved, thresholds=kept)
        (again,) = load_predictor(tmp_path / kept)(["ban bar dar dat"])
        assert again.labels == labels and again.probabilities == pytest.approx(said.probabilities, abs=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "m"
    params = random_params(num_classes=3, parts=MULTILABEL.parts)
    save_hf(folder, tiny_model(), params, make_tokenizer(203), MULTILABEL.name, LABELS, thresholds="0.5,0.25,1")
    return folder


def test_thresholds_and_the_kind_of_problem_are_kept(saved):
    found = load_hf(saved)
    assert found.task_settings["thresholds"] == "0.5,0.25,1.0"
    assert (found.task, found.labels, found.problem) == (MULTILABEL.name, LABELS, "")
    assert json.loads((saved / "config.json").read_text())["problem_type"] == "multi_label_classification"


@pytest.mark.parametrize("wrong", [[0.5], "0.5,0.5,0.5", [0.5, True, 0.5], [0.5, -0.5, 0.5]])
def test_thresholds_in_a_config_are_a_number_for_each_label(saved, tmp_path, wrong):
    folder = shutil.copytree(saved, tmp_path / "m")
    about = json.loads((folder / "config.json").read_text())
    about["task_specific_params"]["multilabel"]["thresholds"] = wrong
    write(folder / "config.json", json.dumps(about))
    assert "config.json: thresholds: Expected" in message(load_hf, folder)


@pytest.mark.parametrize("others", [{"text-generation": {"max_length": 9}}, []])
def test_older_configurations_have_other_settings(saved, tmp_path, others):
    folder = shutil.copytree(saved, tmp_path / "m")
    about = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", json.dumps(about | {"task_specific_params": others}))
    assert not load_hf(folder).task_settings


# Classes: soft labels, weights, smoothing


def test_soft_labels_of_classes(read):
    examples = read(classes(), '{"b": 0.75, "f": 0.25}', '"d"')
    rows = rows_of(classes(), examples, training=False)
    assert [row.label.tolist() for row in rows] == [[0.75, 0, 0.25], [0, 1, 0]]
    assert classes(()).find_labels(examples) == LABELS
    batch, logits = pad_rows([[1]], 2)._replace(labels=rows[0].label[None, None]), np.log([[[0.2, 0.7, 0.1]]])
    found = computed(lambda logits: SEQUENCES.losses(logits, batch, np.ones((1, 1))), logits)
    wanted = -0.75 * np.log(0.2) - 0.25 * np.log(0.1)
    assert found["loss"][0] == pytest.approx(wanted, rel=1e-6) and found["accuracy"][0] == 0
    predictions = classes().decode(examples, rows, np.array([[3.0, 0, 0], [0, 2.0, 0]]))
    assert classes().score(examples, predictions)["accuracy"] == 1
    problem = "the probabilities of its label add up to 0.5; make it 1"
    assert problem in message(rows_of, classes(), labelled({"b": 0.5}))


def test_smoothed_labels_are_of_training_alone():
    made = classes(label_smoothing=0.3)
    assert rows_of(made, labelled("d"))[0].label.tolist() == pytest.approx([0.1, 0.8, 0.1])
    assert rows_of(made, labelled("d"), training=False)[0].label == 1


@pytest.mark.parametrize(
    ("weights", "training", "expected"),
    [
        ("2,0.5,1", True, [2, 2, 2, 0.5]),
        ("balanced", True, [4 / 9, 4 / 9, 4 / 9, 4 / 3]),
        ("balanced", False, [1, 1, 1, 1]),
    ],
)
def test_class_weights_are_of_training_alone(weights, training, expected):
    rows = rows_of(classes(class_weights=weights), labelled("b", "b", "b", "d"), training)
    assert [row.weight for row in rows] == pytest.approx(expected)
    assert "are 2 numbers" in message(rows_of, classes(class_weights="1,2"), labelled("b"))
