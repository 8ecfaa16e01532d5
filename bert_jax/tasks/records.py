# SPDX-License-Identifier: Apache-2.0
"""Records: the values of a row or of an object by name, which know where they stand and say what is wrong with them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from bert_jax.errors import InputError, shown

Kind = TypeVar("Kind", str, list, int, bool)
_KINDS = {str: "a text", list: "a list", int: "a whole number", bool: "true or false"}


class Record(dict[str, Any]):
    """The values of a row or an object by name, and its location."""

    __slots__ = ("where",)

    def __init__(self, values: Mapping[str, object] | Iterable[tuple[str, object]], where: str):
        super().__init__(values)
        self.where = where

    def get_as(self, name: str, kind: type[Kind]) -> Kind:
        """Returns the value of a name. Raises: InputError if it is missing or of another kind."""
        value = self.get(name)
        if isinstance(value, kind) and (kind is not int or not isinstance(value, bool)):
            return value
        raise self.wrong(name, _KINDS[kind])

    def texts(self, name: str) -> list[str]:
        """Returns a list of texts. Raises: InputError if it is something else."""
        values = self.get(name)
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            return values
        raise self.wrong(name, "a list of texts")

    def objects(self, name: str) -> "list[Record]":
        """Returns a list of objects, which know where they stand. Raises: InputError if it is something else."""
        return [
            to_record(item, f"{self.where}, {name}[{number}]")
            for number, item in enumerate(self.get_as(name, list))
        ]

    def wrong(self, name: str, kind: str) -> InputError:
        """Returns the error for a value that is missing or not of a kind."""
        if name in self:
            return InputError(
                f"{self.where}: {name!r} is {shown(self[name])}, not {kind}; correct it"
            )
        return InputError(
            f"{self.where} has no {name!r}, {kind}; it has {listed_columns(list(self))}: add it, or name its column"
        )


def to_record(value: object, where: str) -> Record:
    """Returns an object of JSON as a record. Raises: InputError if it is something else."""
    if isinstance(value, Mapping):
        return Record(value, where)
    raise InputError(
        f'{where} is {shown(value)}, not an object; write one, such as {{"text": "...", "label": "..."}}'
    )


def find_columns(
    alternatives: Iterable[Sequence[str]], columns: Iterable[object]
) -> tuple[str, ...]:
    """Returns the columns of the first alternative of which all are there, in any case; () if none is."""
    by_lower: dict[str, str] = {}
    for column in map(str, columns):
        # An exact name goes before one in another case.
        by_lower.setdefault(column.lower(), column)
        by_lower[column] = column
    for names in alternatives:
        found = [by_lower.get(name) or by_lower.get(name.lower(), "") for name in names]
        if all(found) and len({*found}) == len(names):
            return tuple(found)
    return ()


def find_column(usual: Iterable[str], columns: Iterable[object]) -> str:
    """Returns the column with the first of these names that is there, in any case; "" if none is."""
    return "".join(find_columns([[name] for name in usual], columns))


def listed_columns(columns: Sequence[str]) -> str:
    """Returns the columns as listed in messages."""
    return ", ".join(repr(str(name)[:40]) for name in columns[:20]) or "nothing"


def no_column(
    place: str,
    name: str,
    columns: Sequence[str],
    fix: str = "set the column of the task, such as task.text_column",
) -> InputError:
    """Returns the error for a column that a file does not have."""
    return InputError(f"{place} has no column {name}; it has {listed_columns(columns)}: {fix}")


# Values


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
    if value < -1:
        raise InputError(f"label {value} is not the number of a class; correct it")
    return classes[value] if value >= 0 else None


def id_of(value: object, place: int) -> int | str:
    """Returns the id that the data give an example, as an integer if it is written like one, or else its position."""
    if isinstance(value, str) and (text := value.strip()):  # strip() knows more blanks than int()
        return int(text) if text.isdecimal() and len(text) < 19 and str(int(text)) == text else text
    return value if isinstance(value, int) and not isinstance(value, bool) else place
