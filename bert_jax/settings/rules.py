# SPDX-License-Identifier: Apache-2.0
"""Reads and checks settings: dataclasses from and to plain dicts, and the rules that several sections share."""

import dataclasses
import difflib
import math
import re
import typing
from typing import Any, ClassVar, TypeAlias, TypeVar

from bert_jax.errors import InputError, shown


class Section:
    """A configuration, or a section of one: a frozen dataclass, whose fields may be made by `setting`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def validate(self) -> None:
        """Raises: InputError if a setting is not what its field allows, or a rule is broken, here or within."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Section):
                value.validate()
            elif not fits(field, value):
                section = type(self).__name__.removeprefix("Finetune").lower()
                section = f"{section.removesuffix('config')}." if section.endswith("config") else ""
                problem = f"{section}{field.name} {shown(value)} is not {bounds(field)}"
                raise InputError(problem)
        for is_broken, problem in self.rules():
            if is_broken:
                raise InputError(problem)

    def rules(self) -> typing.Iterable[tuple[object, str]]:
        """Yields the rules that bind several settings: whether each is broken, and the message.

        What one setting may be stands in its field. Rules are read after the fields and the sections within, and may
        rely on them. A section that reads a text of its own, such as numbers with commas, does it here, and raises.
        """
        return ()


Rules: TypeAlias = typing.Iterable[tuple[object, str]]
Config = TypeVar("Config", bound=Section)
# settings as plain dicts: by name, numbers, texts, booleans and nested sections
Values: TypeAlias = dict[str, Any]


# What types are called in messages.
_KINDS = {
    int: "a whole number",
    float: "a number with a fraction",
    str: "a text",
    bool: "True or False",
    type(None): "None",
}


# What a setting affects, as given by its field. "results", the default: it may not change within a run. "model": the
# results, and the model, which must be the same when it is trained further. "end": where a run ends, or which of its
# models is the best; it may change. "place": where the data are; it may also differ between hosts. "work": where and in
# what order the same is computed. "nothing": what is shown and kept, and how long to wait.
Affects: TypeAlias = typing.Literal["results", "model", "end", "place", "work", "nothing"]


LARGEST = 2**31 - 1  # devices compute with 32-bit integers
LARGEST_SEED = 2**63 - 1
# devices compute with float32, in which smaller numbers are 0 and larger infinite
ABOVE_0 = 1e-37
MOST_FLOAT = 1e38
MOST_BATCH = 1 << 20  # rows; the largest published batch for BERT, of LAMB, has 65,536
MOST_RATE = 0.999999
# the batches of a few calls are held at once, and a signal waits for the end of these calls
MOST_STEPS_PER_CALL = 1000


def setting(
    default: Any,
    affects: Affects = "results",
    *,
    least: float = 0,
    most: float = math.inf,
    choices: tuple[str, ...] = (),
) -> Any:
    """Returns the field of a setting: what it affects, and what it may be; fields of sections may affect something too.

    A number is from `least` to `most`, and no larger than devices can compute with; a text is one of `choices`, if
    there are some.
    """
    metadata = {"affects": affects, "least": least, "most": most, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def choice(*choices: str, affects: Affects = "results") -> Any:
    """Returns the field of a setting that is one of these texts, the first by default."""
    return setting(choices[0], affects, choices=choices)


def _range(field: dataclasses.Field[Any]) -> tuple[float, float]:
    """Returns the least and the largest number that a field may have."""
    is_whole = isinstance(field.default, int)
    largest = MOST_FLOAT if not is_whole else LARGEST_SEED if field.name == "seed" else LARGEST
    return field.metadata.get("least", 0), min(field.metadata.get("most", largest), largest)


def fits(field: dataclasses.Field[Any], value: object) -> bool:
    """Returns whether a value of the field's type is one that the field allows."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        least, most = _range(field)
        return least <= value <= most  # NaN is not
    choices = field.metadata.get("choices")
    return not choices or value in choices


def bounds(field: dataclasses.Field[Any]) -> str:
    """Returns what a field allows, as a message says it: "from 0 to 1", "one of adamw, lamb", or "" if anything."""
    if choices := field.metadata.get("choices"):
        return f"one of {', '.join(name or repr(name) for name in choices)}"
    if isinstance(field.default, bool) or not isinstance(field.default, (int, float)):
        return ""
    least, most = _range(field)
    return (
        f"from {least} to {most}"
        if isinstance(field.default, int)
        else f"from {least:g} to {most:g}"
    )


def affecting(kind: type, *affects: Affects) -> tuple[str, ...]:
    """Returns the names of the settings of a configuration, such as "train.seed", that affect one of these.

    A section is named instead of its settings if all of them do.
    """
    names: list[str] = []
    for item in dataclasses.fields(kind):
        of_section = typing.get_type_hints(kind)[item.name]
        if "affects" in item.metadata or not dataclasses.is_dataclass(of_section):
            names += [item.name] if item.metadata.get("affects", "results") in affects else []
        else:
            names += [
                f"{item.name}.{name}" for name in affecting(typing.cast(type, of_section), *affects)
            ]
    return tuple(names)


def is_among(name: str, names: typing.Iterable[str]) -> bool:
    """Returns whether a setting is one of `affecting`'s names, or in a section that is."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in names)


def to_dict(config: Section) -> Values:
    """Returns the configuration as nested plain dicts."""
    return dataclasses.asdict(config)


def from_dict(kind: type[Config], values: object, where: str = "config") -> Config:
    """Returns the dataclass `kind` with `values` in place of its defaults.

    Raises: InputError for an unknown key, with a suggestion, or a value of another type.
    """
    if not isinstance(values, typing.Mapping):
        raise InputError(
            f"{where} is {shown(values)}, not a section; set its keys, as in {where}.KEY=VALUE"
        )
    fields = {item.name: item for item in dataclasses.fields(kind)}
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            raise InputError(
                f"{where} has no key {shown(key)}{suggest(key, fields)}; keys: {', '.join(fields)}"
            )
        expected = typing.get_type_hints(kind)[key]
        if dataclasses.is_dataclass(expected):
            arguments[key] = from_dict(
                typing.cast(type[Section], expected), value, f"{where}.{key}"
            )
        elif expected is float and type(value) is int:
            # what a float holds; the bounds say more
            arguments[key] = float(max(min(value, 2**1023), -(2**1023)))
        elif type(value) is not expected:
            given, wanted = (_KINDS.get(cls, cls.__name__) for cls in (type(value), expected))
            raise InputError(f"{where}.{key} is {shown(value)}, {given}; use {wanted}")
        else:
            arguments[key] = value
    return kind(**arguments)


def check_types(config: Section) -> None:
    """Raises: InputError if a setting has another type than its field; Python lets it pass."""
    from_dict(type(config), to_dict(config))


# Settings of earlier versions, with the values that had no effect on results; None is any value.
_REMOVED = {"sweep.together": None, "train.compiled": None, "model.residual": ("plain",)}


def drop_removed(section: str, values: Values) -> list[str]:
    """Deletes settings of earlier versions from a section, and returns those that had an effect, as "NAME=VALUE".

    Values of earlier versions become today's.
    """
    if section == "train" and isinstance(values.get("zero1"), bool):
        values["zero1"] = "on" if values["zero1"] else "off"  # now "auto" is a third
    effective = []
    for name in [name for name in values if f"{section}.{name}" in _REMOVED]:
        value = values.pop(name)
        harmless = _REMOVED[f"{section}.{name}"]
        if harmless is not None and value not in harmless:
            effective.append(f"{section}.{name}={shown(value)}")
    return effective


def value_at(values: object, name: str) -> object:
    """Returns the value of a dotted name in nested dicts; "nothing" if there is none."""
    for key in name.split("."):
        values = values.get(key, "nothing") if isinstance(values, typing.Mapping) else "nothing"
    return values


def changed_keys(
    old: typing.Mapping[str, object], new: typing.Mapping[str, object], prefix: str = ""
) -> list[str]:
    """Returns the dotted names of the settings that differ between two configurations as dicts."""
    names: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        before = old.get(key)
        after = new.get(key)
        if isinstance(before, typing.Mapping) and isinstance(after, typing.Mapping):
            names += changed_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            names.append(prefix + key)
    return names


def nearest_multiples(value: int, divisor: int) -> str:
    """Returns the multiples of `divisor` around `value`, for a message: "96 or 104"."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)


def suggest(name: str, known: typing.Iterable[str]) -> str:
    """Returns " (did you mean ...?)" with the closest known name, or "" if none is close."""
    close = difflib.get_close_matches(name[:80], list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def step_range(text: str) -> tuple[int, int]:
    """Returns the steps of "100:105", or (0, 0) for "". Raises: InputError if the text is not such a range."""
    match = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", text or "0:1")
    if match is None or int(match[1]) >= int(match[2]):
        raise InputError(f"report.profile_steps {shown(text)} is not FIRST:LAST, as in 100:105")
    return (int(match[1]), int(match[2])) if text else (0, 0)


def numbers_of(
    text: str, name: str, example: str = "0.5,1", least: float = 0.0, most: float = 1e15
) -> tuple[float, ...]:
    """Returns the numbers of a list with commas. Raises: InputError if one is not in the range."""
    try:
        numbers = [float(number) for number in text.split(",") if number.strip()]
    except ValueError:
        numbers = [math.nan]
    if not all(least <= number <= most for number in numbers):
        raise InputError(
            f"{name} {shown(text)} is not numbers from {least:g} up to {most:g}, with commas; use like {example}"
        )
    return tuple(numbers)
