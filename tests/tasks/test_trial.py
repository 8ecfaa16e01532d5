# SPDX-License-Identifier: Apache-2.0
"""Mistakes in a head or a task of one's own are told before the first step, in one line with the class and the hook."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import make_pretrained, make_topics, message, topics_run
from flax import linen as nn

import bert_jax
from bert_jax.model.heads.embedding import Embeddings
from bert_jax.tasks import trial
from bert_jax.tasks.catalog import Own, make_task
from bert_jax.tasks.hooks import is_own, told
from bert_jax.tasks.prepare import open_task
from bert_jax.tasks.trial import try_own


class Sum(bert_jax.Head):
    """A dense layer on the sum over the tokens of each sequence of a row."""

    name = "sum"
    parts = ("mine",)
    more = 0

    def vectors(self, encoded, batch):
        places = jnp.arange(1, batch.cls_positions.shape[1] + 1)
        inside = (batch.sequence_ids[:, None] == places[:, None])[..., None]
        return (encoded.hidden[:, None].astype(jnp.float32) * inside).sum(axis=2)

    def logits(self, model, encoded, batch, deterministic):
        return nn.Dense(model.num_outputs + self.more, name="mine")(self.vectors(encoded, batch))


class MoreOutputs(Sum):
    more = 1


class OneSequence(Sum):
    def vectors(self, encoded, batch):
        return encoded.hidden[:, :1]


class NotPacked(OneSequence):
    can_be_packed = False


class Misspelt(Sum):
    parts = ("mien",)


class NoTuple(Sum):
    parts = "mine"


class NoPooler(Sum):
    def vectors(self, encoded, batch):
        return encoded.pooled.astype(jnp.float32)


class ADict(Sum):
    def logits(self, *given):
        return {"x": super().logits(*given)}


class NoLoss(Sum):
    def losses(self, logits, batch, weights):
        return {"lost": (jnp.sum(logits), jnp.sum(weights))}


class NoPlace(Sum):
    def write_label(self, labels, label, spot):
        labels[99] = label


class ExportFails(Sum):
    def exported(self, logits):
        return {}["missing"]


class OnlyInTraining(Sum):
    def logits(self, model, encoded, batch, deterministic):
        given = super().logits(model, encoded, batch, deterministic)
        return given if deterministic else nn.Dense(model.num_outputs, name="more")(given)


class NoHash(Sum):
    def __init__(self):
        self.sizes = [1]


HEADS = {
    MoreOutputs: "MoreOutputs.logits gave (2, 1, 4); needed: (2, 1, 3), 3 outputs for each of the labels",
    OneSequence: "OneSequence.logits gave (2, 1, 3); needed: (2, 6, 3)",
    Misspelt: "Misspelt.parts gave ('mien',); needed: the names of the modules that logits makes, ['mine']",
    NoTuple: "NoTuple.parts gave 'mine'; needed: a tuple",
    NoPooler: "NoPooler.logits fails with AttributeError: 'NoneType'",
    ADict: "ADict.logits gave {'x': (2, 1, 3)}; needed: an array of floats [B, ...]",
    NoLoss: """NoLoss.losses gave {'lost': ((), ())}; needed: {"loss": (sum, weight), ...}""",
    NoPlace: "NoPlace.write_label fails with IndexError: index 99 is out of bounds",
    ExportFails: "ExportFails.exported fails with KeyError: 'missing'",
    OnlyInTraining: "OnlyInTraining.logits fails with ScopeParamNotFoundError: ",
    NoHash: "NoHash.attributes gave {'sizes': [1]}; needed: what can be hashed, such as tuples",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("topics")
    return topics_run(make_topics(place / "data", 12, 6), make_pretrained(place))


@pytest.mark.parametrize("kind", HEADS)
def test_a_mistake_in_a_head_is_told_before_the_first_step(run, kind):
    assert message(open_task, run, Own(head=kind())).startswith(HEADS[kind])


@pytest.mark.parametrize("kind", [Sum, NotPacked])
def test_a_head_that_fits_is_taken(run, kind):
    assert isinstance(open_task(run, Own(head=kind())).task.head, kind)


class Vectors(Embeddings):
    name = "own_vectors"

    def as_set(self, config):
        return self


def test_a_head_of_texts_that_are_compared_is_tried_too(run, tmp_path):
    lines = [f'{{"anchor": "bar {word}", "positive": "{word}"}}\n' for word in ("bes", "bit", "bon", "bat")]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    data = dataclasses.replace(run.data, source=str(tmp_path / "train.jsonl"))
    run = dataclasses.replace(run, data=data, task=dataclasses.replace(run.task, name="embeddings"))
    assert isinstance(open_task(run, Own(head=Vectors())).task.head, Vectors)

    class Wrong(Vectors):
        def losses(self, logits, batch, weights):
            return {"loss": logits.sum()}

    assert message(open_task, run, Own(head=Wrong())).startswith("Wrong.losses gave {'loss': ()}; needed")


def test_the_place_of_a_pooled_output_is_told(run):
    assert message(open_task, run, Own(head=NoPooler())).endswith("all_layers = True")
    assert message(open_task, run, Own(head=Sum)).endswith("is no Head of bert_jax; give an instance of a subclass")


class Kinds(bert_jax.Task):
    """The class of a line is its last character."""

    head = bert_jax.HEADS["sequence_classification"]
    metric = "accuracy"
    kinds = ("question", "statement")

    def find_labels(self, examples):
        return self.kinds

    def read(self, source, split):
        return [("b c", 0), ("d e f", 1), ("g", 0)]

    def parse(self, value, where):
        return value, None

    def row_of(self, number, ids, label):
        return bert_jax.Row(number, ids, np.zeros(len(ids), np.uint8), (len(ids),), label)

    def make_rows(self, examples, tokenizer, training):
        rows = []
        for number, (text, label) in enumerate(examples):
            ids = np.array([tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id], np.int32)
            rows.append(self.row_of(number, ids, label))
        return bert_jax.Rows(rows, {})

    def decode(self, examples, rows, outputs):
        return [self.kinds[int(np.argmax(output))] for output in outputs]

    def score(self, examples, predictions):
        return {"accuracy": 1.0}

    def show(self, prediction):
        return {"kind": prediction}

    def write(self, directory, split, examples, predictions):
        directory.mkdir(parents=True)
        (directory / f"{split}.txt").write_text("".join(predictions))


class NoMetric(Kinds):
    metric = None


class ReadsNothing(Kinds):
    def read(self, source, split):
        return None


class ReadFails(Kinds):
    def read(self, source, split):
        return [{}["missing"]]


class NumbersForLabels(Kinds):
    kinds = (0, 1)


class NoSettings(Kinds):
    def settle(self, examples):
        return None


class ListOfRows(Kinds):
    def make_rows(self, *given):
        return super().make_rows(*given).rows


class ListsOfIds(Kinds):
    def row_of(self, number, ids, label):
        return super().row_of(number, ids, label)._replace(token_ids=ids.tolist())


class TooLong(Kinds):
    def row_of(self, number, ids, label):
        return super().row_of(number, np.repeat(ids, 30), label)


class OtherIds(Kinds):
    def row_of(self, number, ids, label):
        return super().row_of(number, ids + 1000, label)


class NoLabel(Kinds):
    def row_of(self, number, ids, label):
        return super().row_of(number, ids, None)


class NamesForLabels(Kinds):
    def row_of(self, number, ids, label):
        return super().row_of(number, ids, self.kinds[label])


class MoreClasses(Kinds):
    def row_of(self, number, ids, label):
        return super().row_of(number, ids, label + 1)


class OtherExamples(Kinds):
    def row_of(self, number, ids, label):
        return super().row_of(number + 1, ids, label)


class OnePrediction(Kinds):
    def decode(self, examples, rows, outputs):
        return ["question"]


class NoJson(Kinds):
    def show(self, prediction):
        return {"kind": np.float32(0.5)}


class NoDirectory(Kinds):
    def write(self, directory, split, examples, predictions):
        (directory / "predictions.txt").write_text("")


class OtherMetric(Kinds):
    def score(self, examples, predictions):
        return {"f1": 1.0}


class NoConfig(Kinds):
    def tune(self, examples, predictions):
        return "0.5"


class OtherArguments(Kinds):
    def __init__(self):
        raise AssertionError


TASKS = {
    NoMetric: "NoMetric.metric gave None; needed: a str",
    ReadsNothing: "ReadsNothing.read gave NoneType (None); needed: a list of examples",
    ReadFails: "ReadFails.read fails with KeyError: 'missing' (test_trial.py, line ",
    NumbersForLabels: "NumbersForLabels.find_labels gave int (0); needed: texts, the names of classes",
    NoSettings: "NoSettings.settle gave NoneType (None); needed: settings, a TaskConfig",
    ListOfRows: "ListOfRows.make_rows gave list (",
    ListsOfIds: "ListsOfIds.make_rows gave token_ids list, type_ids (4,) and lengths (4,); needed: arrays [L] both",
    TooLong: "train of here has a sequence of 150 tokens and the model 64 positions; cut it there",
    OtherIds: "a token id in train of here is 1",
    NoLabel: "NoLabel.make_rows gave no label of example 0; needed: one in training",
    NamesForLabels: "NamesForLabels.make_rows: a label is 'question', and its place takes whole numbers",
    MoreClasses: "MoreClasses.make_rows gave the label 2; needed: one below 2, as many as there are classes",
    OtherExamples: "OtherExamples.make_rows gave example 3; needed: an index below 3",
    OnePrediction: "OnePrediction.decode gave ['question']; needed: a list of 2, one for each example",
    NoJson: "NoJson.show gave {'kind': np.float32(0.5)}; needed: values of JSON (",
    NoDirectory: "NoDirectory.write fails with FileNotFoundError: ",
    OtherMetric: "OtherMetric.score gave ['f1']; needed: also the task's metric, 'accuracy'",
    NoConfig: "NoConfig.tune gave str ('0.5'); needed: settings, a TaskConfig",
    OtherArguments: "OtherArguments(config, labels) makes no task: OtherArguments.__init__() takes 1 positional",
}


def of_kinds(run):
    data = dataclasses.replace(run.data, source="here")
    return dataclasses.replace(run, data=data, task=dataclasses.replace(run.task, name="kinds"))


@pytest.mark.parametrize("kind", TASKS)
def test_a_mistake_in_a_task_is_told_before_the_first_step(run, kind):
    assert message(open_task, of_kinds(run), Own(task=kind)).startswith(TASKS[kind])


def test_a_task_that_fits_is_taken(run):
    assert isinstance(open_task(of_kinds(run), Own(task=Kinds)).task, Kinds)
    assert message(open_task, run, Own(task=Kinds(run.task))).startswith("task is a Kinds; give its class")


def test_a_metric_that_needs_more_than_two_examples_is_no_mistake(run):
    class Divides(Kinds):
        def score(self, examples, predictions):
            return {"accuracy": 1 / (len(examples) - 2)}

    assert open_task(of_kinds(run), Own(task=Divides))


def test_nothing_of_bert_jax_is_tried(run, monkeypatch):
    monkeypatch.setattr(trial, "_try_head", None)
    assert not is_own(make_task(run.task)) and not is_own(make_task(run.task).head)
    inputs = open_task(run)
    assert try_own(inputs.task, inputs.data, inputs.model, inputs.start.tokenizer, run) is None


class Later(Kinds):
    def decode(self, examples, rows, outputs):
        return super().decode(examples, rows, outputs) if len(examples) < 3 else [{}["missing"]]


LATER = r"Later\.decode fails with KeyError: 'missing' \(test_trial\.py, line \d+\)$"


def test_a_mistake_that_only_many_examples_show_is_one_line_too(run):
    task = open_task(of_kinds(run), Own(task=Later)).task
    assert re.match(LATER, message(told()(task.decode), ["b c", "d e f", "g"], [], []))


@pytest.mark.slow
def test_in_a_run_too(run, tmp_path):
    assert re.match(LATER, message(bert_jax.finetune, of_kinds(run), tmp_path / "run", jax.devices()[:1], task=Later))
