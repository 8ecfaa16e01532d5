# SPDX-License-Identifier: Apache-2.0
"""Any number of labels for a text, soft labels, weights and smoothing: read, learnt, scored, kept with the model."""

import dataclasses
import json
import random
import re

import jax
import numpy as np
import pytest
from builders import computed, make_learner, tiny_model, topics_run
from hf_models import make_tokenizer, random_params
from read_models import load_hf

from bert_jax import InputError, load_predictor, load_pretrained
from bert_jax.batch import pad_rows
from bert_jax.checkpoints.hf import save_hf
from bert_jax.finetuning import finetune
from bert_jax.model.heads.multilabel import MULTILABEL
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.settings.finetuning import FinetuneTrainConfig, TaskConfig
from bert_jax.tasks import scores
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.labels import ClassifyExample
from bert_jax.tasks.texts import Labelled

LABELS = ("b", "d", "f")


def task(labels=LABELS, name="multilabel", **settings):
    return make_task(TaskConfig(name=name, max_seq_length=16, **settings), labels)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (["b", "f"], {"b": 1, "f": 1}),
        ([], {}),
        ("", {}),
        ("f, b", {"b": 1, "f": 1}),
        ("b", {"b": 1}),
        ({"b": 0.25, "d": True, "f": None}, {"b": 0.25, "d": 1}),
    ],
)
def test_labels_are_lists_texts_or_probabilities(tmp_path, value, wanted):
    (example,) = task().read(write_lines(tmp_path / "train.jsonl", [{"text": "ban", "labels": value}]), "train")
    assert example.label == wanted
    (row,) = task().make_rows([example], make_tokenizer(80), True).rows
    assert row.label.tolist() == [np.float32(wanted.get(name, 0)) for name in LABELS]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (["b", "x"], "label 'x' is not one of 'b', 'd', 'f'"),
        ({"b": 2}, "are not probabilities from 0 to 1"),
        ([["b"]], "label ['b'] is not a name"),
        (None, "has no label; training and dev examples need one"),
        ("{'b': 0.3}", "is an object as text; give"),
        *(
            (wrong, "are a list as Python writes it, or a 0 or 1")
            for wrong in ([0, 1, 0], [0.0, 0.0], [True, True], "1,0,0", "['b', 'd']", '["b"]', "[]", "[0. 1. 0.]")
        ),
    ],
)
def test_what_is_no_label_is_named(tmp_path, value, problem):
    with pytest.raises(InputError) as caught:
        found = task().read(write_lines(tmp_path / "train.jsonl", [{"text": "ban", "labels": value}]), "train")
        task().make_rows(found, make_tokenizer(80), True)
    assert problem in str(caught.value) and "train.jsonl:1" in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([[1, 0], [0, 1]], [["x"], ["y"]]),
        ([[1.0, 1.0], [0.0, 0.0]], [["x", "y"], []]),
        ([[True, False], ["y"]], [["x"], ["y"]]),
    ],
)
def test_lists_of_a_0_or_1_for_each_label_are_in_the_order_of_the_settings(tmp_path, rows, wanted):
    place = write_lines(tmp_path / "train.jsonl", [{"text": "ban", "labels": row} for row in rows])
    found = make_task(TaskConfig(name="multilabel", labels="x,y")).read(place, "train")
    assert [[name for name, share in each.label.items() if share] for each in found] == wanted


@pytest.mark.parametrize("rows", [[[1, 0], [0, 1]], [[True, False], [False, True]], ["1,0", "0,1"], [[0.0, 1.0]]])
def test_lists_of_a_0_or_1_are_no_labels(tmp_path, rows):
    place = write_lines(tmp_path / "train.jsonl", [{"text": "ban", "labels": row} for row in rows])
    with pytest.raises(InputError, match=r"train\.jsonl:1: all examples have the labels"):
        task(()).find_labels(task(()).read(place, "train"))
    numbers = write_lines(tmp_path / "dev.jsonl", [{"text": "ban", "labels": row} for row in ([0], [1, 0], [])])
    assert [sorted(each.label) for each in task(()).read(numbers, "dev")] == [["0"], ["0", "1"], []]


def test_columns_of_a_0_or_1_for_each_label(tmp_path):
    def read(*lines, split="train", **settings):
        (tmp_path / "a.csv").write_text("id,comment_text,rude,loud\n" + "".join(f"{line}\n" for line in lines))
        return make_task(TaskConfig(name="multilabel", **settings)).read(str(tmp_path / "a.csv"), split)

    with pytest.raises(InputError, match="to those with a 0 or 1"):
        read("7,ban,0,1", "8,dan,1,0")
    found = read("7,ban,0,1", "8,dan,True,1.0", "9,fan,0.25,false", labels="loud,rude")
    assert [each.label for each in found] == [
        {"loud": 1, "rude": 0}, {"loud": 1, "rude": 1}, {"loud": 0, "rude": 0.25}
    ]  # fmt: skip
    assert found.columns == ("comment_text", "loud", "rude") and found[0].id == 7
    for line, problem in (("7,ban,,1", "nothing in column 'rude'"), ("7,ban,2,1", "not probabilities from 0 to 1")):
        with pytest.raises(InputError, match=f"a.csv:2.* {problem}"):
            read(line, labels="loud,rude")
    (tmp_path / "test.csv").write_text("comment_text,rude,loud\nban,-1,-1\n")
    named = TaskConfig(name="multilabel", labels="loud,rude")
    assert make_task(named).read(str(tmp_path / "test.csv"), "test")[0].label is None
    made = make_task(dataclasses.replace(named, name="classification", max_seq_length=16))  # of classes one holds
    (tmp_path / "a.csv").write_text("text,rude,loud\nban,0,1\ndan,1,0\n")
    rows = made.make_rows(made.read(str(tmp_path / "a.csv"), "train"), make_tokenizer(80), True).rows
    assert [row.label.tolist() for row in rows] == [[1, 0], [0, 1]]


@pytest.mark.parametrize(("label", "sign"), [("b;d", ";"), ("b | d", "|"), ("d;x", ""), ("b, d", "")])
def test_labels_with_another_sign_between_them_are_named(tmp_path, label, sign):
    rows = [{"text": "ban", "labels": each} for each in ("b", "d", label) * 20]
    own = task(labels=())
    examples = own.read(write_lines(tmp_path / "train.jsonl", rows), "train")
    if not sign:
        assert {"b", "d"} <= set(own.find_labels(examples))
        return
    with pytest.raises(
        InputError, match=re.escape(f"label {label!r} is several; set task.label_separator to {sign!r}")
    ):
        own.find_labels(examples)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"metric": "f1"}, "task.metric 'f1' is not one of micro_f1"),
        ({"thresholds": "0.5,0.5"}, "task.thresholds has 2 numbers"),
        ({"thresholds": "a"}, "is not numbers from 0 up"),
        ({"label_separator": ""}, "task.label_separator is empty"),
        ({"label_smoothing": 1.0}, "task.label_smoothing 1.0 is not"),
        ({"class_weights": "1,-2"}, "is not numbers from 0 up"),
        ({"class_weights": "1,1e39"}, '"1,1e39" is not numbers from 0 up to 1e'),  # infinite in float32
    ],
)
def test_settings_that_cannot_be_are_named(settings, problem):
    with pytest.raises(InputError) as caught:
        task(**settings).config.validate()
    assert problem in str(caught.value)


def test_the_loss_is_the_mean_of_the_labels_cross_entropies():
    logits = np.array([[[2.0, -1.0, 0.0]], [[0.0, 0.0, 0.0]]], np.float32)
    labels = np.array([[[1.0, 0.0, 0.5]], [[1.0, 1.0, 1.0]]], np.float32)
    batch = pad_rows([[1, 2], [3]], 4)._replace(labels=labels)
    weights = np.array([[1.0], [0.0]], np.float32)
    loss, total = computed(lambda logits: MULTILABEL.losses(logits, batch, weights)["loss"], logits)
    shares = 1 / (1 + np.exp(-np.asarray(logits[0, 0], np.float64)))
    wanted = -np.mean(labels[0, 0] * np.log(shares) + (1 - labels[0, 0]) * np.log(1 - shares))
    assert (float(loss), float(total)) == (pytest.approx(wanted, rel=1e-6), 1.0)


def test_metrics_are_scikit_learns():
    """Worked out by hand and by its definitions: micro over all, macro over labels, ties of AP taken together."""
    examples = [ClassifyExample("", label=dict.fromkeys(given, 1.0)) for given in ("b", "bd", "", "d")]
    shares = [(0.9, 0.2, 0.1), (0.4, 0.8, 0.2), (0.4, 0.1, 0.7), (0.1, 0.6, 0.1)]
    made = task().decode(examples, [], [np.log(np.array(each) / (1 - np.array(each))) for each in shares])
    assert [each.labels for each in made] == [("b",), ("d",), ("f",), ("d",)]
    found = task().score(examples, made)
    assert found["micro_f1"] == pytest.approx(6 / 8) and found["subset_accuracy"] == 0.5
    assert [found[f"f1_{name}"] for name in LABELS] == [pytest.approx(2 / 3), 1, 0]
    assert found["macro_f1"] == pytest.approx(5 / 9)
    assert found["mean_average_precision"] == pytest.approx((0.5 * 1 + 0.5 * 2 / 3 + 1 + 0) / 3)
    assert scores.average_precision(np.zeros(0, bool), np.zeros(0)) == 0
    tuned = task().tune(examples, made)
    assert [float(each) for each in tuned.thresholds.split(",")] == pytest.approx([0.25, 0.4, 0.5])
    assert task(thresholds="0.3,0.9,0.9").decode(examples, [], [np.zeros(3)])[0].labels == ("b",)
    assert task(thresholds=tuned.thresholds).tune(examples, made).thresholds == tuned.thresholds


def test_a_threshold_between_probabilities_near_1_parts_them():
    """In six digits it was 1, and nothing had the label."""
    examples = [ClassifyExample("", label={"b": 1.0}), ClassifyExample("", label={"d": 1.0})]
    logits = [np.array([17.0, -3.0, -3.0]), np.array([15.5, 3.0, -3.0])]
    tuned = task().tune(examples, task().decode(examples, [], logits))
    found = task(thresholds=tuned.thresholds).decode(examples, [], logits)
    assert [each.labels for each in found] == [("b",), ("d",)]


def topics(path, num_rows, seed, soft=False):
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        given = [topic for topic in LABELS if rng.random() < 0.5]
        words = [f"{topic}{rng.choice('aeiou')}{rng.choice('nrst')}" for topic in given for _ in range(3)]
        words += [f"{rng.choice('glmp')}{rng.choice('aeiou')}{rng.choice('nrst')}" for _ in range(2)]
        rows.append({"text": " ".join(rng.sample(words, len(words))), "labels": given})
    write_lines(path, rows)


@pytest.mark.slow
def test_a_run_learns_tunes_keeps_and_predicts(tmp_path):
    topics(tmp_path / "train.jsonl", 200, 0)
    topics(tmp_path / "dev.jsonl", 60, 1)
    config = topics_run(tmp_path, make_learner(tmp_path), train=FinetuneTrainConfig(num_epochs=6.0))
    config = dataclasses.replace(config, task=TaskConfig(name="multilabel", max_seq_length=24))
    result = finetune(config, tmp_path / "run", jax.devices()[:1])
    assert result.metrics["micro_f1"] > 0.9 > result.constant["micro_f1"]
    assert {"f1_b", "mean_average_precision", "subset_accuracy"} <= result.metrics.keys()
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    evaluations = [record["micro_f1"] for record in records if record["kind"] == "eval"]
    assert max(evaluations) == pytest.approx(result.metrics["micro_f1"])  # chosen by what is reported
    model = load_pretrained(tmp_path / "run")
    assert len(model.task_settings["thresholds"].split(",")) == 3
    (found,) = load_predictor(tmp_path / "run")(["ban bar dar dat"])
    assert isinstance(found, Labelled) and set(found.probabilities) == set(LABELS)
    thresholds = model.task_settings["thresholds"]
    saved = model.config, model.params, model.tokenizer, model.task, model.labels
    save_hf(tmp_path / "hf", *saved, thresholds=thresholds)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["problem_type"] == "multi_label_classification"
    assert load_pretrained(tmp_path / "hf").task_settings["thresholds"] == thresholds
    (again,) = load_predictor(tmp_path / "hf")(["ban bar dar dat"])
    assert again.labels == found.labels
    assert again.probabilities == pytest.approx(found.probabilities, abs=1e-5)
    save_hf(tmp_path / "high", *saved, thresholds="1,1,1")
    (none,) = load_predictor(tmp_path / "high")(["ban bar dar dat"])
    assert none.labels == () and none.probabilities == again.probabilities


@pytest.mark.parametrize(
    "wrong", [[0.5], "0.5,0.5,0.5", [0.5, True, 0.5], [0.5, -0.5, 0.5], [0.5, float("nan"), 0.5], None]
)
def test_thresholds_in_a_config_are_a_number_for_each_label(tmp_path, wrong):
    params = random_params(num_classes=3, parts=MULTILABEL.parts)
    save_hf(tmp_path / "m", tiny_model(), params, make_tokenizer(203), MULTILABEL.name, LABELS, thresholds="0.5,0.25,1")
    assert load_hf(tmp_path / "m").task_settings["thresholds"] == "0.5,0.25,1.0"
    where = tmp_path / "m" / "config.json"
    about = json.loads(where.read_text())
    about["task_specific_params"]["multilabel"]["thresholds"] = wrong
    where.write_text(json.dumps(about))
    with pytest.raises(InputError, match=r"config\.json: thresholds: Expected"):
        load_hf(tmp_path / "m")
    for others in ({"text-generation": {"max_length": 9}}, None, []):  # as older configurations have them
        where.write_text(json.dumps(about | {"task_specific_params": others}))
        assert not load_hf(tmp_path / "m").task_settings


def test_problem_type_says_which_head_it_is(tmp_path):
    params = random_params(num_classes=3, parts=MULTILABEL.parts)
    for head, problem in ((MULTILABEL, "multi_label_classification"), (SEQUENCES, "single_label_classification")):
        where = tmp_path / head.name
        save_hf(where, tiny_model(), params, make_tokenizer(203), head.name, LABELS)
        assert json.loads((where / "config.json").read_text())["problem_type"] == problem
        found = load_hf(where)
        assert (found.task, found.labels, found.problem) == (head.name, LABELS, "")


# Classes: soft labels, weights, smoothing


def classes(**settings):
    return task(name="classification", **settings)


def rows_of(made, labels, training=True):
    examples = [ClassifyExample("ban", label=label, where="x:1") for label in labels]
    return made.make_rows(examples, make_tokenizer(80), training).rows


def test_soft_labels_of_classes(tmp_path):
    lines = [{"text": "ban", "label": {"b": 0.75, "f": 0.25}}, {"text": "dan", "label": "d"}]
    examples = classes().read(write_lines(tmp_path / "train.jsonl", lines), "train")
    rows = classes().make_rows(examples, make_tokenizer(80), False).rows
    assert [row.label.tolist() for row in rows] == [[0.75, 0, 0.25], [0, 1, 0]]
    assert task((), "classification").find_labels(examples) == LABELS
    batch = pad_rows([[1]], 2)._replace(labels=rows[0].label[None, None])
    logits = np.array([[[1.0, 2.0, 0.5]]], np.float32)
    found = computed(lambda logits: SEQUENCES.losses(logits, batch, np.ones((1, 1), np.float32)), logits)
    wanted = -(rows[0].label * (logits - np.log(np.exp(logits).sum()))).sum()
    assert float(found["loss"][0]) == pytest.approx(float(wanted), rel=1e-6) and float(found["accuracy"][0]) == 0
    predictions = classes().decode(examples, rows, [np.array([3.0, 0, 0]), np.array([0, 2.0, 0])])
    assert classes().score(examples, predictions)["accuracy"] == 1
    with pytest.raises(InputError, match=r"the probabilities of its label add up to 0\.5; make it 1"):
        rows_of(classes(), [{"b": 0.5}])


def test_smoothed_labels_are_of_training_alone():
    made = classes(label_smoothing=0.3)
    (row,) = rows_of(made, ["d"])
    assert row.label.tolist() == pytest.approx([0.1, 0.8, 0.1])
    assert rows_of(made, ["d"], training=False)[0].label == 1


def test_class_weights_are_of_training_alone():
    labels = ["b", "b", "b", "d"]
    assert [row.weight for row in rows_of(classes(class_weights="2,0.5,1"), labels)] == [2, 2, 2, 0.5]
    balanced = rows_of(task(("b", "d"), "classification", class_weights="balanced"), labels)
    assert [row.weight for row in balanced] == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2])
    assert {row.weight for row in rows_of(classes(class_weights="balanced"), labels, training=False)} == {1.0}
    with pytest.raises(InputError, match="are 2 numbers"):
        rows_of(classes(class_weights="1,2"), labels)
