# SPDX-License-Identifier: Apache-2.0
"""Schemas for the JSON files that this program writes: manifests, work directories, seals, exported models.

A schema describes a value, and has the schemas of its parts. The functions below build schemas from smaller
ones. Files that people write have their own readers.
"""

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeAlias

from bert_jax.errors import InputError, shown
from bert_jax.storage.files import JsonObject, read_json
from bert_jax.storage.places import AnyPath

MOST = 2**53 - 1  # largest integer that every JSON reader represents exactly


class Mismatch(Exception):
    """A value that does not fit its schema. The message begins with the value's place in the file."""


# its key in an object or index in a list, its schema, the value
Part: TypeAlias = tuple[str | int, "Schema", object]
_MISSING = object()  # the value of a key that is required and not there


@dataclass(frozen=True)
class Schema:
    """The definition of valid values. `parts` yields the parts of a value that fits; `keys` is the schema of keys."""

    wanted: str
    fits: Callable[[Any], bool]
    parts: Callable[[Any], Iterable[Part]] = lambda value: ()
    keys: "Schema | None" = None

    def __call__(self, value: object, place: str = "") -> None:
        """Raises: Mismatch if the value does not fit; `place` is where it is, as "splits.train.shards[0].rows"."""
        if value is _MISSING:
            raise Mismatch(f"{place} is missing; it should be {self.wanted}")
        if not self.fits(value):
            raise Mismatch(f"{place or 'the whole'} is {shown(value)}, not {self.wanted}")
        for key, schema, part in self.parts(value):
            if self.keys is not None:
                self.keys(key, f"a key of {place or 'the whole'}")
            schema(part, _inside(place, key))


def read_record(path: AnyPath, schema: Schema, remedy: str) -> JsonObject:
    """Returns the object in a JSON file of the program's own.

    Raises: InputError if the file is missing or not JSON, or if a value does not fit the schema.
    """
    value = read_json(path)
    check(value, schema, path, remedy)
    return value


def check(value: object, schema: Schema, where: AnyPath, remedy: str) -> None:
    """Raises: InputError, with the file and the place in it, unless the value fits the schema."""
    try:
        schema(value)
    except Mismatch as mismatch:
        raise InputError(f"{where}: {mismatch}; {remedy}") from None


def integer(least: int = 0, most: int = MOST) -> Schema:
    """Returns the schema of a whole number in a range."""
    wanted = (
        f"a whole number from {least} to {most}"
        if most < MOST
        else f"a whole number, {least} or more"
    )
    return Schema(wanted, lambda value: type(value) is int and least <= value <= most)


def number(finite: bool = True, *texts: str) -> Schema:
    """Returns the schema of a number that a float holds, finite unless said otherwise, or of one of some texts."""

    def fits(value: object) -> bool:
        if type(value) is int:
            return abs(value) <= MOST
        return value in texts or (type(value) is float and (not finite or math.isfinite(value)))

    return Schema("a number that is finite" if finite else "a number", fits)


def text(pattern: str = "", wanted: str = "a text") -> Schema:
    """Returns the schema of a text of whole characters; all of it matches the pattern, if there is one."""

    def fits(value: object) -> bool:
        if not isinstance(value, str) or (pattern and not re.fullmatch(pattern, value)):
            return False
        return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)

    return Schema(wanted, fits)


def one_of(*values: str | float) -> Schema:
    """Returns the schema of one of these texts or numbers."""
    wanted = (
        f"one of {', '.join(map(str, values))}" if len(values) > 1 else shown(next(iter(values)))
    )
    return Schema(
        wanted,
        lambda value: any(type(value) is type(option) and value == option for option in values),
    )


def _is_file_name(value: object) -> bool:
    if not isinstance(value, str) or not value or len(value) > 4000 or not value.isprintable():
        return False
    path = PurePosixPath(value)
    too_long = any(len(part.encode("utf-8")) > 255 for part in path.parts)
    return not (too_long or path.is_absolute() or ".." in path.parts)


# or below it; of the file that names it
file_name = Schema("the name of a file in this directory", _is_file_name)
true_or_false = Schema("true or false", lambda value: isinstance(value, bool))
anything = Schema("a value", lambda value: True)
SHA256 = text("[0-9a-f]{64}", "a sha256")


def or_null(item: Schema) -> Schema:
    """Returns the schema of a value that may be null."""
    parts = lambda value: () if value is None else item.parts(value)  # noqa: E731
    return Schema(item.wanted, lambda value: value is None or item.fits(value), parts, item.keys)


def list_of(item: Schema) -> Schema:
    """Returns the schema of a list of values of one kind."""

    def parts(value: list[object]) -> Iterable[Part]:
        return ((index, item, part) for index, part in enumerate(value))

    return Schema("a list", lambda value: isinstance(value, list), parts)


def tuple_of(*items: Schema) -> Schema:
    """Returns the schema of a list of fixed length, whose values have these schemas."""

    def parts(value: list[object]) -> Iterable[Part]:
        return ((index, item, part) for index, (item, part) in enumerate(zip(items, value)))

    wanted = f"a list of {len(items)} values"
    return Schema(wanted, lambda value: isinstance(value, list) and len(value) == len(items), parts)


def map_of(item: Schema, key: Schema = anything) -> Schema:
    """Returns the schema of an object with any keys and values of one kind."""

    def parts(value: JsonObject) -> Iterable[Part]:
        return ((name, item, part) for name, part in value.items())

    return Schema("an object", lambda value: isinstance(value, dict), parts, key)


_NAME = Schema("a name", lambda name: name.isprintable() and len(name) <= 200)


def record(
    required: Mapping[str, Schema],
    optional: Mapping[str, Schema] | None = None,
    others: Schema = anything,
) -> Schema:
    """Returns the schema of an object with these keys; `others` is the schema of the values of all other keys."""
    known = {**required, **(optional or {})}

    def parts(value: JsonObject) -> Iterable[Part]:
        yield from (
            (name, schema, _MISSING) for name, schema in required.items() if name not in value
        )
        yield from ((name, known.get(name, others), part) for name, part in value.items())

    return Schema("an object", lambda value: isinstance(value, dict), parts, _NAME)


_OF_SETTINGS = {
    bool: true_or_false,
    int: integer(-(2**63), 2**63 - 1),
    float: number(False),
    str: text(),
}


def settings(kind: type) -> Schema:
    """Returns the schema of the settings of a dataclass as `settings.to_dict` gives them.

    Missing settings (files of older versions) and unknown ones (of newer versions) are accepted. Only types are checked
    here; `validate` checks the values.
    """
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return record(
        {}, {name: _OF_SETTINGS.get(hints[name]) or settings(hints[name]) for name in names}
    )


def _inside(place: str, key: str | int) -> str:
    """Returns the place of a part, given the place of the value that has it."""
    if isinstance(key, int):
        return f"{place}[{key}]"
    name = key if re.fullmatch(r"[\w./-]{1,60}", key, re.ASCII) else shown(key)
    return f"{place}.{name}" if place else name
