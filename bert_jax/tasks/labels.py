# SPDX-License-Identifier: Apache-2.0
"""Labels of texts: names, numbers, and probabilities of several names; and the classes that they are."""

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from bert_jax.errors import InputError


class ClassifyExample(NamedTuple):
    """A text or a pair of texts, with its label if it is known."""

    text: str
    second_text: str | None = None  # None where there is no pair
    # The name of the class as the data have it, the number of a regression, or the probabilities of several labels.
    label: Any = None
    id: int | str = 0  # from the data, or else the index among the examples
    where: str = ""


_MOST = float(np.finfo(np.float32).max)  # of a label that is a number
UNAGREED = "-"  # annotators of NLI did not agree
HIDDEN = "-1"  # how data sets mark a label that they withhold
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)", re.ASCII)
_SWITCH = re.compile(rf"{_NUMBER.pattern}|true|false", re.ASCII)
# as pandas writes lists into CSV
_WRITTEN_LIST = re.compile(r"""\[(|.*['"]|[\d.]+[\s,][\d\s.,]*)\]""", re.DOTALL)
_WRITTEN_OBJECT = re.compile(r"""\{.*['"]\s*:.*\}""", re.DOTALL)


def label_name(value: object, where: str) -> str | None:
    """Returns a class as text; None if it is missing. Raises: InputError if it is not a name or a finite number."""
    if value is None or isinstance(value, str):
        name = (value or "").strip()
        if _WRITTEN_OBJECT.fullmatch(name):
            raise InputError(
                f"{where}: label {name!r:.60} is an object as text; give JSON lines or Parquet"
            )
        return name or None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(
            f"{where}: label {value!r:.60} is not a name or a finite number; write one, and not several"
        )
    return str(value)


def class_of(value: object, where: str) -> str | dict[str, float] | None:
    """Returns a class as text, or the probability of each class; None if it is missing. Raises: as `label_name`."""
    if isinstance(value, Mapping):
        return read_labels("", value, where) or None
    return label_name(value, where)


def read_labels(separator: str, value: object, where: str) -> dict[str, float] | None:
    """Returns the probability of each label that a record gives, 1 for those of a list; None if it is not known.

    Raises: InputError if it is not a list of names, an object of probabilities, or text.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        given = {str(name).strip(): share for name, share in value.items() if share is not None}
        for share in given.values():
            if not isinstance(share, (bool, int, float)) or not 0 <= share <= 1:
                raise InputError(
                    f"{where}: labels {value!r:.60} are not probabilities from 0 to 1; give such, or a list"
                )
        return {name: float(share) for name, share in given.items()}
    parts = value.split(separator) if isinstance(value, str) else value
    names = [label_name(part, where) for part in (parts if isinstance(parts, list) else [parts])]
    counts = Counter(name for name in names if name is not None)
    twice = [name for name in counts if counts[name] > 1 and _SWITCH.fullmatch(name)]
    if twice or (isinstance(value, str) and _WRITTEN_LIST.fullmatch(value.strip())):
        raise InputError(
            f"{where}: labels {value!r:.60} are a list as Python writes it, or a 0 or 1 a label; give names with "
            f"{separator!r} between them, or set task.labels to the names in the order of such numbers"
        )
    return dict.fromkeys(counts, 1.0)


def label_number(value: object, where: str) -> float | None:
    """Returns a label as a number; None if it is missing. Raises: InputError if it is not finite in float32."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    number = math.nan
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # type: ignore[arg-type]
    if not abs(number) <= _MOST:
        raise InputError(
            f"{where}: label {value!r:.60} is not a finite number; for names use the task classification"
        )
    return number


def check_labelled(examples: Sequence[Any], what: str = "label") -> None:
    """Raises: InputError if an example has no label, or no tags."""
    for example in examples:
        if getattr(example, what) is None:
            raise InputError(
                f"{example.where} has no {what}; training and dev examples need one: correct or remove it"
            )


def as_number(label: str) -> str | Decimal:
    """Returns a label as a number, or unchanged if it is not one: "1", "1.0" and "01" are the same."""
    # Not float, in which long numbers, such as ids, would be equal.
    return Decimal(label) if _NUMBER.fullmatch(label) else label


def find_labels(examples: Sequence[ClassifyExample]) -> tuple[str, ...]:
    """Returns the classes of training examples, sorted; as numbers if all are. Equal numbers are one, spelled shortest.

    Raises: InputError if there is only one, or almost as many as examples.
    """
    shortest: dict[str | Decimal, str] = {}
    for example in examples:
        names = example.label if isinstance(example.label, Mapping) else [example.label]
        for name in [str(name) for name in names if name is not None]:
            known = shortest.setdefault(as_number(name), name)
            shortest[as_number(name)] = min(known, name, key=lambda each: (len(each), each))
    classes = list(shortest.values())
    if len(classes) < 2:
        where = examples[0].where if examples else "the training data"
        only = ", ".join(map(repr, classes))[:80] or "none"
        raise InputError(f"{where}: all examples have the label {only}; there must be two or more")
    if len(examples) >= 20 and 2 * len(classes) > len(examples):
        many = f"{len(examples)} examples have {len(classes)} different labels, such as {classes[0][:40]!r}"
        raise InputError(
            f"{examples[0].where}: {many}; check task.label_column (numbers are for the task regression)"
        )
    return tuple(sorted(classes, key=int if all(map(_is_integer, classes)) else None))


def _is_integer(label: str) -> bool:
    digits = label.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) < 19


class Classes:
    """The number of each class by its names. A name that is equal as a number is the same class: 1.0 is 1."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self.numbers = numbers
        self.count = len(set(numbers.values()))
        # None if two classes are equal as numbers
        self._equal: dict[str | Decimal, int | None] = {}
        for name, number in numbers.items():
            key = as_number(name)
            self._equal[key] = number if self._equal.get(key, number) == number else None

    def find(self, label: str) -> int | None:
        """Returns the number of the class of a label; None if it is not a class."""
        return self.numbers[label] if label in self.numbers else self._equal.get(as_number(label))

    def of(self, example: ClassifyExample) -> int | None:
        """Returns the number of an example's class; None if it is not known. Raises: InputError if it is not a class.

        For a soft label it is the most probable class.
        """
        if isinstance(example.label, Mapping):
            return int(self.shares(0.0, example).argmax())
        return None if example.label is None else self._number(example.label, example.where)

    def shares(self, smoothing: float, example: ClassifyExample) -> np.ndarray:
        """Returns the probability of each class, [K] float32, with a share of `smoothing` spread equally over all."""
        label = example.label if isinstance(example.label, Mapping) else {example.label: 1.0}
        shares = np.zeros(self.count, np.float64)
        total = sum(label.values())
        for name, share in label.items():
            shares[self._number(name, example.where)] += share
        if not abs(total - 1) < 1e-3:
            raise InputError(
                f"{example.where}: the probabilities of its label add up to {total:.4g}; make it 1"
            )
        return (shares / total * (1 - smoothing) + smoothing / self.count).astype(np.float32)

    def _number(self, label: object, where: str) -> int:
        number = self.find(str(label))
        if number is None:
            names = sorted(self.numbers, key=_is_integer)[:20]  # before numbers
            raise InputError(
                f"{where}: label {label!r:.60} is not one of {', '.join(map(repr, names))}; or set task.labels"
            )
        return number

    def respelled(self, labels: Iterable[object]) -> dict[str, int]:
        """Returns counts of the labels that are spelled differently from their classes, for the log."""
        # reversed, so that of several names the first is the class's own
        names = {number: name for name, number in reversed(list(self.numbers.items()))}
        others = Counter(label for label in labels if isinstance(label, str))
        return {
            f"labels {label!r:.60} read as {names[number]!r:.60}:": count
            for label, count in others.items()
            if label not in self.numbers and (number := self.find(label)) is not None
        }


def classes_of(labels: Sequence[str]) -> Classes:
    """Returns the classes with these labels. A number is the index of one only if they are LABEL_0, LABEL_1, ..."""
    numbers = {label: index for index, label in enumerate(labels)}
    counted = [f"LABEL_{index}" for index in range(len(labels))]
    if {*counted} == {*labels}:
        numbers |= {str(index): numbers[label] for index, label in enumerate(counted)}
    return Classes(numbers)
