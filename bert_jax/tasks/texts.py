# SPDX-License-Identifier: Apache-2.0
"""Texts and pairs with a class or a number: examples, rows, predictions and metrics.

A row is [CLS] A [SEP], or [CLS] A [SEP] B [SEP]. Source: paper, sections 3.2 and 4.1; google-research/bert
run_classifier.py.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple, TypeVar

import numpy as np

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.storage import writing
from bert_jax.storage.places import Place
from bert_jax.tasks import scores
from bert_jax.tasks.base import CUT, Row, Rows
from bert_jax.tasks.readers import Record
from bert_jax.text.fitting import join_texts
from bert_jax.text.tokenizer import Tokenizer

Label = TypeVar("Label")

CLASS_METRICS = {"accuracy": scores.accuracy, "f1": scores.f1, "macro_f1": scores.macro_f1, "mcc": scores.mcc}
NUMBER_METRICS = {"pearson": scores.pearson, "spearman": scores.spearman}


class ClassifyExample(NamedTuple):
    """A text or a pair of texts, with its label if it is known."""

    text: str
    second_text: str | None = None  # None where there is no pair
    label: str | float | None = None  # the name of the class as the data have it, or the number of a regression
    id: int | str = 0  # the data's own, or else the place among the examples
    where: str = ""


class Classified(NamedTuple):
    """A predicted class, and the probability of each class."""

    label: str
    probabilities: dict[str, float]


class Scored(NamedTuple):
    """A predicted number."""

    value: float


# Labels

_MOST = float(np.finfo(np.float32).max)  # of a label that is a number
HIDDEN = "-1"  # what data sets write for a label that they keep to themselves
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)", re.ASCII)


def label_name(value: object, where: str) -> str | None:
    """Returns a class as text; None if it is missing. Raises: InputError if it is no text and no finite number."""
    if value is None or isinstance(value, str):
        return (value or "").strip() or None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"{where}: label {value!r:.60} is not a name or a finite number; write one, and not several")
    return str(value)


def label_number(value: object, where: str) -> float | None:
    """Returns a label as a number; None if it is missing. Raises: InputError if it is not finite in float32."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _MOST:
        raise InputError(f"{where}: label {value!r:.60} is not a finite number; for names use the task classification")
    return number


def check_labelled(examples: Sequence[ClassifyExample]) -> None:
    """Raises: InputError if an example has no label."""
    if missing := next((example for example in examples if example.label is None), None):
        raise InputError(f"{missing.where} has no label; training and dev examples need one: correct or remove it")


def as_number(label: str) -> str | Decimal:
    """Returns a label as a number, or itself if it is none: "1", "1.0" and "01" are the same."""
    return Decimal(label) if _NUMBER.fullmatch(label) else label


def find_labels(examples: Sequence[ClassifyExample]) -> tuple[str, ...]:
    """Returns the classes of training examples, sorted; as numbers if all are. Equal numbers are one, spelled shortest.

    Raises: InputError if there is only one, or almost as many as examples.
    """
    spelled: dict[str | Decimal, list[str]] = {}
    for label in dict.fromkeys(str(example.label) for example in examples if example.label is not None):
        spelled.setdefault(as_number(label), []).append(label)
    found = [min(spellings, key=lambda label: (len(label), label)) for spellings in spelled.values()]
    if len(found) < 2:
        where = examples[0].where if examples else "the training data"
        only = ", ".join(map(repr, found))[:80] or "none"
        raise InputError(f"{where}: all examples have the label {only}; there must be two or more")
    if len(examples) >= 20 and 2 * len(found) > len(examples):
        raise InputError(
            f"{examples[0].where}: {len(examples)} examples have {len(found)} different labels, such as "
            f"{found[0][:40]!r}; check task.label_column (numbers are for the task regression)"
        )
    if all(_is_integer(label) for label in found):
        return tuple(sorted(found, key=int))
    return tuple(sorted(found))


def _is_integer(label: str) -> bool:
    digits = label.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) < 19


class Classes:
    """The number of each class by its names. A name that is equal as a number is one of them: 1.0 for 1."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self.numbers = numbers
        self._equal: dict[str | Decimal, int | None] = {}  # None if two classes are equal as numbers
        for name, number in numbers.items():
            key = as_number(name)
            self._equal[key] = number if self._equal.get(key, number) == number else None

    def find(self, label: str) -> int | None:
        """Returns the number of the class of a label; None if there is none."""
        return self.numbers[label] if label in self.numbers else self._equal.get(as_number(label))

    def of(self, example: ClassifyExample) -> int | None:
        """Returns the number of an example's class; None if it is not known. Raises: InputError if there is none."""
        if example.label is None:
            return None
        if (number := self.find(str(example.label))) is None:
            known = sorted(self.numbers, key=lambda label: (_is_integer(label), self.numbers[label]))
            is_number, *are_numbers = (
                isinstance(each, Decimal) for each in (as_number(str(example.label)), *self._equal)
            )
            rule = " (a number is not taken for the place of a class)" if is_number and not any(are_numbers) else ""
            raise InputError(
                f"{example.where}: label {example.label!r:.60} is not one of {', '.join(map(repr, known[:20]))}; "
                f"write one of these{rule}, or set task.labels to the names that all of the data have"
            )
        return number

    def respelled(self, labels: Iterable[object]) -> dict[str, int]:
        """Returns counts of the labels that are spelled in another way than their classes, for the log."""
        others = Counter(str(label) for label in labels if label is not None and label not in self.numbers)
        names = {number: name for name, number in reversed(list(self.numbers.items()))}
        found = {label: number for label in others if (number := self.find(label)) is not None}
        return {
            f"labels {label!r:.60} read as {names[number]!r:.60}:": others[label] for label, number in found.items()
        }


def classes_of(labels: Sequence[str]) -> Classes:
    """Returns the classes with these labels. A number is the place of one only if they are LABEL_0, LABEL_1, ..."""
    numbers = {label: index for index, label in enumerate(labels)}
    places = {str(index): numbers.get(f"LABEL_{index}") for index in range(len(labels))}
    return Classes(
        numbers | {place: number for place, number in places.items() if number is not None}
        if None not in places.values()
        else numbers
    )


def number_of(example: ClassifyExample) -> float | None:
    """Returns the target of a regression; None if it is not known."""
    return None if example.label is None else float(example.label)


# Values of records


def text_of(record: Record, column: str) -> str:
    """Returns the text of a record. Raises: InputError if it is missing or not a string."""
    text = record.get(column)
    if not isinstance(text, str):
        problem = f"{column!r} is {text!r:.60}, not a text" if column in record else f"there is no {column!r}"
        raise InputError(f"{record.where}: {problem}; write it as a string")
    return text


def named_class(value: object, classes: Sequence[str] | None) -> object:
    """Returns the name of a class that TFDS stores as a number; None if the number is hidden (-1)."""
    if not classes or not isinstance(value, int):
        return value
    return classes[value] if 0 <= value < len(classes) else None


def id_of(value: object, place: int) -> int | str:
    """Returns the id that the data give an example, as an integer if it is written like one, or else its position."""
    if isinstance(value, str) and (text := value.strip()):  # blanks to it are more than to int()
        return int(text) if text.isdecimal() and len(text) < 19 and str(int(text)) == text else text
    return value if isinstance(value, int) and not isinstance(value, bool) else place


# Rows


def make_rows(
    config: TaskConfig,
    target: Callable[[ClassifyExample], int | float | None],
    examples: Sequence[ClassifyExample],
    tokenizer: Tokenizer,
    training: bool,
) -> Rows:
    """Returns a row of at most `max_seq_length` tokens for each example; a text may have no tokens.

    Raises: InputError if a label is not known, or is missing in training.
    """
    check_length(config)
    rows, truncated, empty = [], 0, 0
    for number, example in enumerate(examples):
        label = target(example)
        if label is None and training:
            raise InputError(f"{example.where} has no label; training examples need one: correct or remove it")
        first = tokenizer.encode(example.text)
        second = None if example.second_text is None else tokenizer.encode(example.second_text)
        empty += not first or second == []
        token_ids, type_ids, cut = join_texts(tokenizer, first, second, config.max_seq_length)
        truncated += cut
        rows.append(Row(number, token_ids, type_ids, (len(token_ids),), label))
    counts = {CUT: truncated, "no token": empty, **getattr(examples, "counts", {})}
    return Rows(rows, {reason: count for reason, count in counts.items() if count})


def make_class_rows(
    config: TaskConfig, classes: Classes, examples: Sequence[ClassifyExample], tokenizer: Tokenizer, training: bool
) -> Rows:
    """Returns the rows of examples with classes, as `make_rows`."""
    made = make_rows(config, classes.of, examples, tokenizer, training)
    return made._replace(counts=made.counts | classes.respelled(example.label for example in examples))


def check_length(config: TaskConfig) -> None:
    """Raises: InputError if a row has no room for a token of each text."""
    if config.max_seq_length < 5:
        raise InputError(f"task.max_seq_length {config.max_seq_length} is below 5, [CLS] A [SEP] B [SEP]; use like 128")


# Predictions


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns probabilities along the last axis, float64."""
    powers = np.exp(logits.astype(np.float64) - np.max(logits, axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def decode_classes(
    labels: Sequence[str], examples: Sequence[ClassifyExample], rows: Sequence[Row], outputs: Sequence[np.ndarray]
) -> list[Classified]:
    """Returns the most likely class of each example; ties go to the first."""
    del examples, rows  # a row for each example, in their order
    if not len(outputs):
        return []
    probabilities = softmax(np.stack([np.asarray(each) for each in outputs]))
    best = probabilities.argmax(axis=-1).tolist()
    return [Classified(str(labels[index]), dict(zip(labels, row))) for index, row in zip(best, probabilities.tolist())]


def decode_numbers(
    examples: Sequence[ClassifyExample], rows: Sequence[Row], outputs: Sequence[np.ndarray]
) -> list[Scored]:
    """Returns the number of each example."""
    del examples, rows
    return [Scored(float(np.asarray(each).reshape(()))) for each in outputs]


def score_classes(
    metrics: Sequence[str],
    classes: Classes,
    examples: Sequence[ClassifyExample],
    predictions: Sequence[Classified],
) -> dict[str, float]:
    """Returns the metrics. Raises: InputError if an example has no label."""
    truth = [labelled(classes.of(example), example.where) for example in examples]
    said = [classes.numbers[prediction.label] for prediction in predictions]
    return {metric: CLASS_METRICS[metric](truth, said) for metric in metrics}


def score_numbers(examples: Sequence[ClassifyExample], predictions: Sequence[Scored]) -> dict[str, float]:
    """Returns the correlations. Raises: InputError if an example has no label."""
    truth = [labelled(number_of(example), example.where) for example in examples]
    said = [prediction.value for prediction in predictions]
    return {metric: function(truth, said) for metric, function in NUMBER_METRICS.items()}


def labelled(label: Label | None, where: str) -> Label:
    """Returns the label of an example at a place. Raises: InputError if it is not known."""
    if label is None:
        raise InputError(f"{where} has no label; predictions are scored where labels are known")
    return label


def show(prediction: Classified | Scored) -> dict[str, object]:
    """Returns a prediction as JSON values."""
    if isinstance(prediction, Scored):
        return {"value": prediction.value}
    return {"label": prediction.label, "probabilities": prediction.probabilities}


def write_split(
    directory: Place, split: str, examples: Sequence[ClassifyExample], predictions: Sequence[Classified | Scored]
) -> None:
    """Writes SPLIT.tsv: the index and the prediction of each example."""
    values = [prediction.value if isinstance(prediction, Scored) else prediction.label for prediction in predictions]
    write_predictions(directory / f"{split}.tsv", [example.id for example in examples], values)


def write_predictions(path: Place, ids: Sequence[int | str], values: Sequence[object]) -> None:
    """Writes a file in GLUE's format: a header, then the index and the prediction of each example, without tabs."""
    rows = [[" ".join(str(each).split()) for each in row] for row in zip(ids, values)]
    lines = [f"{name}\t{value}\n" for name, value in rows]
    with writing.atomic_path(path) as temporary:
        temporary.write_text("index\tprediction\n" + "".join(lines), encoding="utf-8")
