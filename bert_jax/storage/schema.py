# SPDX-License-Identifier: Apache-2.0
"""Schemas for the JSON files that this program writes: manifests, work directories, seals, exported models.

A schema is a function of a value and its place in the file. It raises `Mismatch` if the value does not fit. The
functions below build schemas from smaller ones. Files that people write have their own readers.
"""

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

from bert_jax.errors import InputError, shown
from bert_jax.storage.files import JsonObject, read_json
from bert_jax.storage.places import AnyPath

MOST = 2**53 - 1  # largest integer that every JSON reader represents exactly
Schema = Callable[[object, str], None]  # a value and its place, such as "splits.train.shards[0].rows"


class Mismatch(Exception):
    """A value that does not fit its schema. The message begins with the value's place in the file."""


def read_record(path: AnyPath, schema: Schema, remedy: str) -> JsonObject:
    """Returns the object in a JSON file of the program's own.

    Raises: InputError if there is no such file, it is not JSON, or a value is not what the schema asks for.
    """
    value = read_json(path)
    check(value, schema, path, remedy)
    return value


def check(value: object, schema: Schema, where: AnyPath, remedy: str) -> None:
    """Raises: InputError, with the file and the place in it, unless the value is what the schema asks for."""
    try:
        schema(value, "")
    except Mismatch as mismatch:
        raise InputError(f"{where}: {mismatch}; {remedy}") from None


def _refuse(value: object, place: str, wanted: str) -> typing.NoReturn:
    raise Mismatch(f"{place or 'the whole'} is {shown(value)}, not {wanted}")


def _described(schema: Schema, wanted: str) -> Schema:
    """Returns the schema with `wanted`, its description in messages about missing values."""
    schema.wanted = wanted  # type: ignore[attr-defined]
    return schema


def whole(least: int = 0, most: int = MOST) -> Schema:
    """Returns the schema of a whole number in a range."""
    wanted = f"a whole number from {least} to {most}" if most < MOST else f"a whole number, {least} or more"

    def schema(value: object, place: str) -> None:
        if type(value) is not int or not least <= value <= most:
            _refuse(value, place, wanted)

    return _described(schema, wanted)


def number(finite: bool = True) -> Schema:
    """Returns the schema of a number; of a finite one unless said otherwise."""

    def schema(value: object, place: str) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            _refuse(value, place, "a number")
        if isinstance(value, int) and abs(value) > MOST:
            _refuse(value, place, "a number that a float holds")
        if finite and not math.isfinite(value):
            _refuse(value, place, "a finite number")

    return _described(schema, "a number")


def text(pattern: str = "", wanted: str = "a text") -> Schema:
    """Returns the schema of a text; all of it matches the pattern, if there is one."""

    def schema(value: object, place: str) -> None:
        if not isinstance(value, str) or (pattern and not re.fullmatch(pattern, value)):
            _refuse(value, place, wanted)
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            _refuse(value, place, f"{wanted} of whole characters")

    return _described(schema, wanted)


def one_of(*values: str | float) -> Schema:
    """Returns the schema of one of these texts or numbers."""
    wanted = f"one of {', '.join(map(str, values))}" if len(values) > 1 else shown(next(iter(values)))

    def schema(value: object, place: str) -> None:
        if not any(type(value) is type(each) and value == each for each in values):
            _refuse(value, place, wanted)

    return _described(schema, wanted)


def file_name(value: object, place: str) -> None:
    """The schema of the name of a file below the directory of the file that names it."""
    if not isinstance(value, str) or not value or len(value) > 4000 or not value.isprintable():
        _refuse(value, place, "the name of a file")
    path = PurePosixPath(value)
    if any(len(part.encode("utf-8")) > 255 for part in path.parts):
        _refuse(value, place, "the name of a file")
    if path.is_absolute() or ".." in path.parts:
        _refuse(value, place, "the name of a file in this directory")


_described(file_name, "the name of a file")
SHA256 = text("[0-9a-f]{64}", "a sha256")


def anything(value: object, place: str) -> None:
    """The schema that accepts any value."""


_described(anything, "a value")


def or_null(item: Schema) -> Schema:
    """Returns the schema of a value that may be null."""

    def schema(value: object, place: str) -> None:
        if value is not None:
            item(value, place)

    return _described(schema, item.wanted)  # type: ignore[attr-defined]


def list_of(item: Schema) -> Schema:
    """Returns the schema of a list of values of one kind."""

    def schema(value: object, place: str) -> None:
        if not isinstance(value, list):
            _refuse(value, place, "a list")
        for index, part in enumerate(value):
            item(part, f"{place}[{index}]")

    return _described(schema, "a list")


def tuple_of(*items: Schema) -> Schema:
    """Returns the schema of a list of so many values, each of its own kind."""

    def schema(value: object, place: str) -> None:
        if not isinstance(value, list) or len(value) != len(items):
            _refuse(value, place, f"a list of {len(items)} values")
        for index, (item, part) in enumerate(zip(items, value, strict=True)):
            item(part, f"{place}[{index}]")

    return _described(schema, f"a list of {len(items)} values")


def map_of(item: Schema, key: Schema = anything) -> Schema:
    """Returns the schema of an object with any keys and values of one kind."""

    def schema(value: object, place: str) -> None:
        if not isinstance(value, dict):
            _refuse(value, place, "an object")
        for name, part in value.items():
            key(name, f"a key of {place or 'the whole'}")
            item(part, _inside(place, name))

    return _described(schema, "an object")


def record(
    required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, others: Schema = anything
) -> Schema:
    """Returns the schema of an object with these keys; `others` is the schema of the values of all other keys."""
    known = {**required, **(optional or {})}

    def schema(value: object, place: str) -> None:
        if not isinstance(value, dict):
            _refuse(value, place, "an object")
        for name in required:
            if name not in value:
                wanted = required[name].wanted  # type: ignore[attr-defined]
                raise Mismatch(f"{_inside(place, name)} is missing; it should be {wanted}")
        for name, part in value.items():
            if name not in known and not (name.isprintable() and len(name) <= 200):
                _refuse(name, f"a key of {place or 'the whole'}", "a name")
            known.get(name, others)(part, _inside(place, name))

    return _described(schema, "an object")


def settings(kind: type, required: tuple[str, ...] = ()) -> Schema:
    """Returns the schema of the settings of a dataclass as `settings.to_dict` gives them.

    Missing settings (files of older versions) and unknown ones (of newer versions) are accepted, except that those in
    `required` must be present. Only types are checked here; `validate` checks the values.
    """
    hints = typing.get_type_hints(kind)
    schemas: dict[str, Schema] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            schemas[field.name] = settings(hint)  # type: ignore[arg-type]
        else:
            schemas[field.name] = {
                bool: true_or_false,
                int: whole(-(2**63), 2**63 - 1),
                float: number(False),
                str: text(),
            }[hint]
    return record({name: schemas[name] for name in required}, schemas)


def true_or_false(value: object, place: str) -> None:
    """The schema of a truth value."""
    if not isinstance(value, bool):
        _refuse(value, place, "true or false")


_described(true_or_false, "true or false")


def _inside(place: str, name: object) -> str:
    """Returns the place of a value of an object."""
    name = name if isinstance(name, str) and re.fullmatch(r"[\w./-]{1,60}", name, re.ASCII) else shown(name)
    return f"{place}.{name}" if place else name
