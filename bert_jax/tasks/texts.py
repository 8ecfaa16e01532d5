# SPDX-License-Identifier: Apache-2.0
"""Texts and pairs with a class or a number: examples, rows, predictions and metrics.

A row is [CLS] A [SEP], or [CLS] A [SEP] B [SEP]. Source: paper, sections 3.2 and 4.1; google-research/bert
run_classifier.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bert_jax.batch import Row
from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig, numbers_of
from bert_jax.storage import writing
from bert_jax.storage.places import Place
from bert_jax.tasks import scores
from bert_jax.tasks.base import CUT, Rows
from bert_jax.tasks.labels import Classes, ClassifyExample, check_labelled, number_of
from bert_jax.tasks.readers import Record
from bert_jax.text.fitting import join_texts
from bert_jax.text.tokenizer import Tokenizer

Label = TypeVar("Label")

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
    probabilities: dict[str, float]


class Labelled(NamedTuple):
    """The predicted labels of a text, and the probability of each label."""

    labels: tuple[str, ...]
    probabilities: dict[str, float]


class Scored(NamedTuple):
    """A predicted number."""

    value: float


# Values of records


def text_of(record: Record, column: str) -> str:
    """Returns the text of a record. Raises: InputError if it is missing or not a string."""
    text = record.get(column)
    if not isinstance(text, str):
        problem = (
            f"{column!r} is {text!r:.60}, not a text"
            if column in record
            else f"there is no {column!r}"
        )
        raise InputError(f"{record.where}: {problem}; write it as a string")
    return text


def named_class(value: object, classes: Sequence[str] | None) -> object:
    """Returns the name of a class that a data set stores as a number; None if the number is hidden (-1).

    Raises: InputError if no class has the number.
    """
    if classes and isinstance(value, list):
        return [named_class(item, classes) for item in value]
    # as pandas stores integers if some are missing
    if classes and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not classes or not isinstance(value, int):
        return value
    if not -1 <= value < len(classes):
        raise InputError(
            f"label {value} is not the number of one of the classes {', '.join(classes)[:80]}; correct it"
        )
    return classes[value] if value >= 0 else None


def id_of(value: object, place: int) -> int | str:
    """Returns the id that the data give an example, as an integer if it is written like one, or else its position."""
    if isinstance(value, str) and (text := value.strip()):  # strip() knows more blanks than int()
        return int(text) if text.isdecimal() and len(text) < 19 and str(int(text)) == text else text
    return value if isinstance(value, int) and not isinstance(value, bool) else place


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
    rows, truncated, empty = [], 0, 0
    for number, example in enumerate(examples):
        label = target(example)
        first = tokenizer.encode(example.text)
        second = None if example.second_text is None else tokenizer.encode(example.second_text)
        empty += not first or second == []
        token_ids, type_ids, cut = join_texts(tokenizer, first, second, config.max_seq_length)
        truncated += cut
        rows.append(Row(number, token_ids, type_ids, (len(token_ids),), label))
    counts = {CUT: truncated, "no token": empty, **getattr(examples, "counts", {})}
    return Rows(rows, {reason: count for reason, count in counts.items() if count})


def make_class_rows(
    config: TaskConfig,
    classes: Classes,
    examples: Sequence[ClassifyExample],
    tokenizer: Tokenizer,
    training: bool,
) -> Rows:
    """Returns the rows of examples with classes, as `make_rows`; in training, with weights and smoothed labels."""
    soft = any(isinstance(example.label, Mapping) for example in examples)
    smoothing = config.label_smoothing if training else 0.0

    def target(example: ClassifyExample) -> np.ndarray | int | None:
        is_soft = example.label is not None and (soft or smoothing)
        return classes.shares(smoothing, example) if is_soft else classes.of(example)

    made = make_rows(config, target, examples, tokenizer, training)
    if training and config.class_weights:
        shares = np.array([classes.shares(0.0, examples[row.example]) for row in made.rows])
        weights = shares @ _class_weights(config, shares.sum(axis=0))
        weighted = zip(made.rows, weights.tolist(), strict=True)
        made = made._replace(rows=[row._replace(weight=weight) for row, weight in weighted])
    return made._replace(
        counts=made.counts | classes.respelled(example.label for example in examples)
    )


def _class_weights(config: TaskConfig, counts: np.ndarray) -> np.ndarray:
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


def decode_classes(labels: Sequence[str], outputs: Sequence[np.ndarray]) -> list[Classified]:
    """Returns the most likely class of each example, which has one row; ties go to the first."""
    if not len(outputs):
        return []
    probabilities = softmax(np.stack([np.asarray(output) for output in outputs]))
    best = probabilities.argmax(axis=-1).tolist()
    return [
        Classified(str(labels[index]), dict(zip(labels, row)))
        for index, row in zip(best, probabilities.tolist())
    ]


def decode_numbers(activation: str, outputs: Sequence[np.ndarray]) -> list[Scored]:
    """Returns the number of each example, which has one row, through the activation of the settings."""
    return [
        Scored(float(_ACTIVATIONS[activation](np.asarray(output, np.float64).reshape(()))))
        for output in outputs
    ]


_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "": lambda number: number,
    "sigmoid": lambda number: 0.5 * (1 + np.tanh(number / 2)),  # in which nothing overflows
    "tanh": np.tanh,
    "relu": lambda number: np.maximum(number, 0),
}


def score_classes(
    metrics: Iterable[str],
    classes: Classes,
    examples: Sequence[ClassifyExample],
    predictions: Sequence[Classified],
) -> dict[str, float]:
    """Returns the metrics. Raises: InputError if an example has no label."""
    truth = [labelled(classes.of(example), example.where) for example in examples]
    predicted = [classes.numbers[prediction.label] for prediction in predictions]
    return {metric: CLASS_METRICS[metric](truth, predicted) for metric in metrics}


def score_numbers(
    examples: Sequence[ClassifyExample], predictions: Sequence[Scored]
) -> dict[str, float]:
    """Returns the correlations. Raises: InputError if an example has no label."""
    truth = [labelled(number_of(example), example.where) for example in examples]
    predicted = [prediction.value for prediction in predictions]
    return {metric: function(truth, predicted) for metric, function in NUMBER_METRICS.items()}


def labelled(label: Label | None, where: str) -> Label:
    """Returns the label of an example. Raises: InputError if it is not known."""
    if label is None:
        raise InputError(f"{where} has no label; predictions are scored where labels are known")
    return label


def write_predictions(path: Place, ids: Sequence[int | str], values: Sequence[object]) -> None:
    """Writes a file in GLUE's format: a header, then the index and the prediction of each example, without tabs."""
    rows = [[" ".join(str(cell).split()) for cell in row] for row in zip(ids, values)]
    lines = [f"{name}\t{value}\n" for name, value in rows]
    with writing.atomic_path(path) as temporary:
        temporary.write_text("index\tprediction\n" + "".join(lines), encoding="utf-8")
