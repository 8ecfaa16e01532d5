# SPDX-License-Identifier: Apache-2.0
"""Classification and regression of texts and pairs, from your own tables, CSV and JSON lines, and from TFDS."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.errors import InputError
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks import texts
from bert_jax.tasks.base import Prediction, Rows, Task, choose_metric
from bert_jax.tasks.classify_read import is_pair, labels_of, named_columns, parse_texts, read_texts
from bert_jax.tasks.labels import (
    HIDDEN,
    Classes,
    ClassifyExample,
    class_of,
    classes_of,
    find_labels,
    label_number,
)
from bert_jax.tasks.scores import RANKING_METRICS, Metrics, ranking_scores

# Usual column names in lower case; the first one present is used.
CLASS_COLUMNS = (
    "label",
    "gold_label",
    "labels",
    "class",
    "category",
    "target",
    "entailment_judgment",
    "sentiment",
)
_NUMBERS = (
    "score",
    "label",
    "similarity_score",
    "relatedness_score",
    "similarity",
    "rating",
    "value",
    "target",
)


_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "": lambda number: number,
    "sigmoid": lambda number: 0.5 * (1 + np.tanh(number / 2)),  # in which nothing overflows
    "tanh": np.tanh,
    "relu": lambda number: np.maximum(number, 0),
}


class TextTask(Task[ClassifyExample, Any]):
    """A task of texts or pairs; the settings name the columns or keys of the data."""

    head = SEQUENCES

    def parse(self, value, where):
        return parse_texts(named_columns(self.config), is_pair(self.config), value, where)

    def settle(self, examples):
        """Returns the settings with `num_texts` set."""
        return dataclasses.replace(
            self.config, num_texts=1 if examples[0].second_text is None else 2
        )

    def write(self, directory, split, examples, predictions):
        """Writes SPLIT.tsv: the index and the value of the prediction of each example."""
        pairs = zip(examples, map(self.value_of, predictions))
        texts.write_predictions(directory / f"{split}.tsv", pairs)

    @abc.abstractmethod
    def value_of(self, prediction: Prediction) -> object:
        """Returns what is written of a prediction."""


class ClassesTask(Task[ClassifyExample, texts.Classified]):
    """A task with one of several classes for each text; its maker sets `classes`."""

    classes: Classes

    def make_rows(self, examples, tokenizer, training):
        """Returns a row for each example; in training, with weights and smoothed labels."""
        config = self.config
        classes = self.classes
        smoothing = config.label_smoothing if training else 0.0
        # One soft label makes all of them soft, since the labels of a batch are one array.
        is_soft = smoothing or any(isinstance(example.label, Mapping) for example in examples)

        def target(example: ClassifyExample) -> np.ndarray | int | None:
            if is_soft and example.label is not None:
                return classes.shares(smoothing, example)
            return classes.of(example)

        rows, counts = texts.make_rows(config, target, examples, tokenizer, training)
        if training and config.class_weights:
            shares = np.array([classes.shares(0.0, example) for example in examples])
            weights = shares @ texts.class_weights(config, shares.sum(axis=0))
            rows = [row._replace(weight=weight) for row, weight in zip(rows, weights.tolist())]
        return Rows(rows, counts | classes.respelled(example.label for example in examples))

    def decode(self, examples, rows, outputs):
        """Returns the most likely class of each example, which has one row; ties go to the first."""
        predictions = []
        for output in outputs:
            shares = texts.softmax(np.asarray(output))
            best = str(self.labels[int(shares.argmax())])
            predictions.append(texts.Classified(best, dict(zip(self.labels, shares.tolist()))))
        return predictions


class NumbersTask(Task[ClassifyExample, texts.Scored]):
    """A task with a number for each text."""

    activation: str = ""  # which outputs pass through

    def make_rows(self, examples, tokenizer, training):
        def target(example: ClassifyExample) -> float | None:
            return None if example.label is None else float(example.label)

        return texts.make_rows(self.config, target, examples, tokenizer, training)

    def decode(self, examples, rows, outputs):
        activate = _ACTIVATIONS[self.activation]
        numbers = [np.asarray(output, np.float64).reshape(()) for output in outputs]
        return [texts.Scored(float(activate(number))) for number in numbers]

    def score(self, examples, predictions):
        return texts.score_numbers(examples, predictions)


class ClassificationTask(ClassesTask, TextTask):
    """One of several classes for each text."""

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()) -> None:
        """Makes the task with the classes of a trained model, or else of the settings, or else of the training data.

        Raises: InputError if a setting cannot be used.
        """
        super().__init__(config, tuple(labels) or labels_of(config))
        self.metric = choose_metric(config, (*texts.CLASS_METRICS, *RANKING_METRICS))
        if self.metric == "f1" and len(self.labels) > 2:
            raise InputError("task.metric f1 is of the second of two classes; use macro_f1")
        self.classes = classes_of(self.labels)

    def read(self, source, split):
        hidden = "" if self.classes.find(HIDDEN) is not None else HIDDEN
        return read_texts(self.config, CLASS_COLUMNS, class_of, hidden, source, split)

    def find_labels(self, examples):
        return self.labels or find_labels(examples)

    def score(self, examples, predictions):
        if self.metric not in RANKING_METRICS:
            return texts.score_classes(
                dict.fromkeys(("accuracy", self.metric)), self.classes, examples, predictions
            )
        # By the probability of the last class, which is the relevant one.
        relevant = len(self.labels) - 1
        grades = [float(self.classes.of(example) == relevant) for example in examples]
        values = [prediction.probabilities[self.labels[relevant]] for prediction in predictions]
        accuracy = texts.score_classes(("accuracy",), self.classes, examples, predictions)
        return accuracy | _ranking(examples, grades, values)

    def value_of(self, prediction: texts.Classified) -> str:
        return prediction.label


class RegressionTask(NumbersTask, TextTask):
    """A number for each text."""

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()) -> None:
        """Makes the task, which has no labels. Raises: InputError if a setting cannot be used."""
        super().__init__(config)
        self.activation = config.activation
        self.metric = choose_metric(config, (*texts.NUMBER_METRICS, *RANKING_METRICS))

    def read(self, source, split):
        return read_texts(self.config, _NUMBERS, label_number, "", source, split)

    def score(self, examples, predictions):
        metrics = super().score(examples, predictions)
        if self.metric not in RANKING_METRICS:
            return metrics
        grades = [float(example.label or 0) for example in examples]
        return metrics | _ranking(
            examples, grades, [prediction.value for prediction in predictions]
        )

    def value_of(self, prediction: texts.Scored) -> float:
        return prediction.value


def _ranking(
    examples: Sequence[ClassifyExample], grades: Sequence[float], values: Sequence[float]
) -> Metrics:
    """Returns ranking metrics: the second texts of each first text are ranked by value.

    Of equal values, the less relevant come first.
    """
    candidates: dict[str, list[tuple[float, float]]] = {}
    for example, grade, value in zip(examples, grades, values):
        candidates.setdefault(example.text, []).append((-value, grade))
    rankings = [[grade for _, grade in sorted(scored)] for scored in candidates.values()]
    return ranking_scores(
        rankings, [[grade for grade in ranking if grade > 0] for ranking in rankings]
    )
