# SPDX-License-Identifier: Apache-2.0
"""Reads and checks settings: dataclasses from and to plain dicts, and the rules that several sections share."""

import dataclasses
import difflib
import math
import re
import typing
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from bert_jax.errors import InputError, shown


class Section(Protocol):
    """A dataclass: a configuration, or a section of one."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


Config = TypeVar("Config", bound=Section)
Values: TypeAlias = dict[str, Any]  # settings as plain dicts: by name, numbers, texts, booleans and nested sections


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


def setting(default: Any, affects: Affects) -> Any:
    """Returns the field of a setting, with what it affects in its metadata; fields of sections may have it too."""
    return dataclasses.field(default=default, metadata={"affects": affects})


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
            names += [f"{item.name}.{name}" for name in affecting(typing.cast(type, of_section), *affects)]
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
        raise InputError(f"{where} is {shown(values)}, not a section; set its keys, as in {where}.KEY=VALUE")
    fields = {item.name: item for item in dataclasses.fields(kind)}
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            raise InputError(f"{where} has no key {shown(key)}{suggest(key, fields)}; keys: {', '.join(fields)}")
        expected = typing.get_type_hints(kind)[key]
        if dataclasses.is_dataclass(expected):
            arguments[key] = from_dict(typing.cast(type[Section], expected), value, f"{where}.{key}")
        elif expected is float and type(value) is int:
            if abs(value) > 2**1023:
                raise InputError(f"{where}.{key} is {shown(value)}, beyond what a float holds; use a smaller one")
            arguments[key] = float(value)
        elif type(value) is not expected:
            given, wanted = (_KINDS.get(cls, cls.__name__) for cls in (type(value), expected))
            raise InputError(f"{where}.{key} is {shown(value)}, {given}; use {wanted}")
        else:
            arguments[key] = value
    return kind(**arguments)


def check_sections(config: Section) -> None:
    """Raises: InputError if a setting has another type than its field, or breaks a rule of its section."""
    from_dict(type(config), to_dict(config))  # Python lets other types pass
    for item in dataclasses.fields(config):
        if dataclasses.is_dataclass(section := getattr(config, item.name)):
            section.validate()  # type: ignore[attr-defined]


# Settings of earlier versions, with the values that had no effect on results; None is any value.
_REMOVED = {"sweep.together": None, "train.compiled": None, "model.residual": ("plain",)}


def drop_removed(section: str, values: Values) -> list[str]:
    """Deletes settings of earlier versions from a section, and returns those that had an effect, as "NAME=VALUE"."""
    effective = []
    for name in [name for name in values if f"{section}.{name}" in _REMOVED]:
        value, harmless = values.pop(name), _REMOVED[f"{section}.{name}"]
        if harmless is not None and value not in harmless:
            effective.append(f"{section}.{name}={shown(value)}")
    return effective


def value_at(values: object, name: str) -> object:
    """Returns the value of a dotted name in nested dicts; "nothing" if there is none."""
    for key in name.split("."):
        values = values.get(key, "nothing") if isinstance(values, typing.Mapping) else "nothing"
    return values


def changed_keys(old: typing.Mapping[str, object], new: typing.Mapping[str, object], prefix: str = "") -> list[str]:
    """Returns the dotted names of the settings that differ between two configurations as dicts."""
    names: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
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


def _section(config: Section) -> str:
    """Returns the name of a section, such as "model" for a ModelConfig."""
    return type(config).__name__.removesuffix("Config").removeprefix("Finetune").lower()


LARGEST = 2**31 - 1  # devices compute with 32-bit integers
_LEAST_FLOAT, _MOST_FLOAT = 1e-37, 1e38  # and with float32, in which smaller numbers are 0 and larger ones infinite
_LARGEST_SEED = 2**63 - 1
MOST_BATCH = 1 << 20  # rows; the largest published batch for BERT, of LAMB, has 65,536
MOST_STEPS_PER_CALL = 1000  # the batches of a few calls are held at once, and a signal waits for the end of these calls


def check_numbers(config: Section) -> None:
    """Raises: InputError if a number of a section is infinite, NaN, or does not fit in 32 bits."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{_section(config)}.{field.name}"
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{name} {value} is not finite; use a number")
        if isinstance(value, float) and value and not _LEAST_FLOAT <= abs(value) <= _MOST_FLOAT:
            raise InputError(f"{name} {value} does not fit in float32; use 0, or a number from 1e-37 to 1e38")
        most = _LARGEST_SEED if field.name == "seed" else LARGEST
        if isinstance(value, int) and not -most <= value <= most:
            raise InputError(f"{name} {shown(value)} is not in -{most}..{most}; use a smaller number")


def check_positive(config: Section, names: str, most: float = math.inf) -> None:
    """Raises: InputError if one of the named settings is below 1 or above `most`."""
    _check_range(config, names, 1, most)


def check_not_negative(config: Section, names: str, most: float = math.inf) -> None:
    """Raises: InputError if one of the named settings is below 0 or above `most`."""
    _check_range(config, names, 0, most)


def _check_range(config: Section, names: str, least: int, most: float) -> None:
    for name in names.split():
        value, full_name = getattr(config, name), f"{_section(config)}.{name}"
        if value < least:
            raise InputError(f"{full_name} {shown(value)} is below {least}; use {least} or more")
        if value > most:
            raise InputError(f"{full_name} {shown(value)} is above {most}; use {most} at most")


def check_rates(config: Section, names: str, most: float = 0.999999) -> None:
    """Raises: InputError if one of the named settings is not from 0 to `most`."""
    for name in names.split():
        if not 0 <= getattr(config, name) <= most:
            raise InputError(
                f"{_section(config)}.{name} {getattr(config, name)} is not a rate; use 0 or more and {most:g} at most"
            )


def check_choice(config: Section, name: str, choices: tuple[str, ...]) -> None:
    """Raises: InputError if the named setting is not one of the choices."""
    value = getattr(config, name)
    if value not in choices:
        raise InputError(f"{_section(config)}.{name} {value!r} is unknown; use one of {', '.join(choices)}")


def step_range(text: str) -> tuple[int, int]:
    """Returns the steps of "100:105", or (0, 0) for "". Raises: InputError if the text is not such a range."""
    if not text:
        return 0, 0
    match = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise InputError(f"report.profile_steps {shown(text)} is not FIRST:LAST, as in 100:105")
    return int(match[1]), int(match[2])


def numbers_above_0(text: str, name: str, example: str) -> tuple[float, ...]:
    """Returns the numbers of a list with commas. Raises: InputError if one is not above 0, as float32 has it."""
    try:
        numbers = [float(number) for number in text.split(",") if number.strip()]
    except ValueError:
        numbers = [0.0]
    if not all(_LEAST_FLOAT <= number <= _MOST_FLOAT for number in numbers):
        raise InputError(f"{name} {shown(text)} is not a list of numbers above 0, up to 1e38; use like {example}")
    return tuple(numbers)
