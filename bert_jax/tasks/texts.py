# SPDX-License-Identifier: Apache-2.0
"""Texts and pairs with a class or a number: examples, rows, predictions and metrics.

A row is [CLS] A [SEP], or [CLS] A [SEP] B [SEP]. Source: paper, sections 3.2 and 4.1; google-research/bert
run_classifier.py.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig, numbers_of
from bert_jax.storage import writing
from bert_jax.storage.places import Place
from bert_jax.tasks import scores
from bert_jax.tasks.base import CUT, Rows, single_row, without_zeros
from bert_jax.tasks.labels import Classes, ClassifyExample, check_labelled
from bert_jax.tasks.scores import Metrics
from bert_jax.text.fitting import join_texts
from bert_jax.text.tokenizer import Tokenizer

CLASS_METRICS = {
    "accuracy": scores.accuracy,
    "f1": scores.f1,
    "macro_f1": scores.macro_f1,
    "mcc": scores.mcc,
}
NUMBER_METRICS = {"pearson": scores.pearson, "spearman": scores.spearman}


class Classified(NamedTuple):
    """A predicted class, and the probability of each class."""

    label: str
    probabilities: Metrics


class Labelled(NamedTuple):
    """The predicted labels of a text, and the probability of each label."""

    labels: tuple[str, ...]
    probabilities: Metrics


class Scored(NamedTuple):
    """A predicted number."""

    value: float


# Rows


def make_rows(
    config: TaskConfig,
    target: Callable[[ClassifyExample], Any],
    examples: Sequence[ClassifyExample],
    tokenizer: Tokenizer,
    training: bool,
) -> Rows:
    """Returns a row of at most `max_seq_length` tokens for each example; a text may have no tokens.

    Raises: InputError if a label is not known, or is missing in training.
    """
    check_length(config)
    if training:
        check_labelled(examples)
    rows = []
    counts = {CUT: 0, "no token": 0}
    for number, example in enumerate(examples):
        first = tokenizer.encode(example.text)
        second = None if example.second_text is None else tokenizer.encode(example.second_text)
        token_ids, type_ids, cut = join_texts(tokenizer, first, second, config.max_seq_length)
        counts[CUT] += cut
        counts["no token"] += not first or second == []
        rows.append(single_row(number, token_ids, target(example), type_ids=type_ids))
    return Rows(rows, without_zeros(counts | getattr(examples, "counts", {})))


def class_weights(config: TaskConfig, counts: np.ndarray) -> np.ndarray:
    """Returns the weight of each class, [K]: as set, or "balanced", N / (K times its count), as in scikit-learn."""
    if config.class_weights == "balanced":
        return counts.sum() / (len(counts) * np.maximum(counts, 1))
    weights = np.array(numbers_of(config.class_weights, "task.class_weights"))
    if len(weights) != len(counts) or not weights.any():
        given = f"{config.class_weights!r} are {len(weights)} numbers"
        raise InputError(
            f"task.class_weights {given}; give one for each of {len(counts)} classes, not all 0"
        )
    return weights


def check_length(config: TaskConfig) -> None:
    """Raises: InputError if a row has no room for a token of each text."""
    if config.max_seq_length < 5:
        raise InputError(
            f"task.max_seq_length {config.max_seq_length} is below 5, [CLS] A [SEP] B [SEP]; use like 128"
        )


# Predictions


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns probabilities along the last axis, float64."""
    powers = np.exp(logits.astype(np.float64) - np.max(logits, axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def score_classes(
    metrics: Iterable[str],
    classes: Classes,
    examples: Sequence[ClassifyExample],
    predictions: Sequence[Classified],
) -> Metrics:
    """Returns the metrics. Raises: InputError if an example has no label."""
    check_labelled(examples)
    truth = [classes.of(example) or 0 for example in examples]
    predicted = [classes.numbers[prediction.label] for prediction in predictions]
    return {metric: CLASS_METRICS[metric](truth, predicted) for metric in metrics}


def score_numbers(examples: Sequence[ClassifyExample], predictions: Sequence[Scored]) -> Metrics:
    """Returns the correlations. Raises: InputError if an example has no label."""
    check_labelled(examples)
    truth = [float(example.label) for example in examples]
    predicted = [prediction.value for prediction in predictions]
    return {metric: function(truth, predicted) for metric, function in NUMBER_METRICS.items()}


def write_predictions(path: Place, pairs: Iterable[tuple[Any, object]]) -> None:
    """Writes a file in GLUE's format: a header, then of each example and its prediction the id and the prediction."""
    lines = ["index\tprediction\n"]
    for example, value in pairs:
        name, said = (" ".join(str(cell).split()) for cell in (example.id, value))  # no tabs
        lines.append(f"{name}\t{said}\n")
    with writing.atomic_path(path) as temporary:
        temporary.write_text("".join(lines), encoding="utf-8")
