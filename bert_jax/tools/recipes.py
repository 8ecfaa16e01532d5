# SPDX-License-Identifier: Apache-2.0
"""Finds the recipes of `configs/` by name, as in --config=pretrain:base, in every installation of bert_jax."""

import difflib
import hashlib
import importlib.machinery
import importlib.util
import itertools
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ml_collections import ConfigDict

from bert_jax.errors import InputError, one_line
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.settings.rules import from_dict
from bert_jax.storage.files import JsonObject

if TYPE_CHECKING:
    from bert_jax.tasks.catalog import Own

Config = TypeVar("Config", PretrainConfig, FinetuneConfig)

# The help of --config.
HELP = (
    "a recipe of bert_jax, such as pretrain:base or finetune:mnli, or a Python file with get_config, such as "
    "my/recipe.py; the text after a colon is its argument"
)


def directory() -> Path:
    """Returns the directory of the recipes: in the package if it is installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def names() -> list[str]:
    """Returns the names of the recipes, sorted. Other files beside them, such as the demo's data, have no settings."""
    return sorted(
        path.stem
        for path in directory().glob("*.py")
        if "def get_config(" in path.read_text("utf-8")
    )


def find(value: str) -> str:
    """Returns the value of --config with a recipe's name replaced by its file; the path of a file stays as it is.

    Raises: InputError if it names no recipe, or a file of configs/ that is not there.
    """
    path, colon, argument = value.partition(":")
    if not path or Path(path).is_file():
        return value
    if re.fullmatch(r"\w+", path):
        if path in names():
            return f"{directory() / path}.py{colon}{argument}"
        close = difflib.get_close_matches(path, names(), n=1)
        hint = f" (did you mean --config={close[0]}{colon}{argument}?)" if close else ""
        raise InputError(
            f"--config={value} names no recipe{hint}; there are {', '.join(names())}, and a file of your own is "
            "written with its path, such as my/recipe.py"
        )
    if (stem := re.fullmatch(r"(?:\./)?configs/(\w+)\.py", path)) and stem[1] in names():
        fix = f"the recipe that comes with bert_jax is --config={stem[1]}{colon}{argument}"
        raise InputError(f"--config={value}: there is no such file here; {fix}")
    return value


def resolve_recipe(arguments: Sequence[str]) -> list[str]:
    """Returns a command line in which --config names a file, as returned by `find`.

    Raises: InputError as `find`, and if there is no such file, or --config is empty or given twice.
    """
    resolved = list(arguments)
    given = _given(arguments)
    values = [value for _, _, value in given]
    if "" in values:
        raise InputError(
            f"--config is empty; name a recipe: {', '.join(names())}, or a file of your own"
        )
    if len(values) > 1:
        raise InputError(
            f"--config is given {len(values)} times, as {' and as '.join(values)}; give one recipe"
        )
    for index, prefix, value in given:
        found = find(value)
        if not Path(found.partition(":")[0]).is_file():
            raise InputError(
                f"--config={value}: there is no such file; give one, or the name of a recipe: {', '.join(names())}"
            )
        resolved[index] = prefix + found
    return resolved


def _given(arguments: Sequence[str]) -> list[tuple[int, str, str]]:
    """Returns the index of each value of --config on a command line, the text before it in the argument, and it."""
    given: list[tuple[int, str, str]] = []
    for index, argument in enumerate(itertools.takewhile("--".__ne__, arguments)):
        name, equals, value = argument.partition("=")
        if name in ("--config", "-config") and equals:
            given.append((index, f"{name}=", value))
        elif name in ("--config", "-config") and index + 1 < len(arguments):
            given.append((index + 1, "", arguments[index + 1]))
    return given


class Given(NamedTuple):
    """A setting on the command line: --config.NAME=VALUE."""

    flag: str  # as it was written, without a value: "--config.data.path"
    name: str  # "data.path"; with another prefix than "config", all of it
    # None of --config.NAME alone, which is True of a setting that is True or False
    value: str | None


_SETTING = re.compile(r"--?(no)?(\w+\.[\w.]*)(?:=(.*))?", re.DOTALL)
_WORDS = {
    "true": True,
    "t": True,
    "1": True,
    "yes": True,
    "false": False,
    "f": False,
    "0": False,
    "no": False,
}
_WANTED = {bool: "True or False", int: "a whole number", float: "a number"}


def take_settings(arguments: Sequence[str]) -> tuple[list[str], list[Given]]:
    """Returns a command line without its settings, which absl would parse each as a flag, and the settings."""
    rest: list[str] = []
    given: list[Given] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if argument == "--":
            return [*rest, argument, *remaining], given
        match = _SETTING.fullmatch(argument)
        if match is None:
            rest.append(argument)
            continue
        is_false, name, value = match.groups()
        is_text_next = bool(remaining) and not remaining[0].startswith("-")
        if is_false:
            value = "false"
        elif value is None and is_text_next:
            value = remaining.pop(0)
        given.append(Given(f"--{name}", name.removeprefix("config."), value))
    return rest, given


def change_settings(config: ConfigDict, given: Sequence[Given]) -> None:
    """Sets the settings in the configuration of a recipe.

    Raises: InputError, with what may be meant, if there is no such setting, or if its value is of another type.
    """
    known = dict(_flat(config.to_dict()))
    for flag, name, value in given:
        if name not in known or flag == f"--{name}":
            raise InputError(_unknown_setting(flag, name, known))
        kind: Any = type(known[name])
        try:
            if kind is bool:
                setting = value is None or _WORDS[value.lower()]
            elif value is None:
                raise ValueError
            else:
                setting = kind(value)
            config.update_from_flattened_dict({name: setting})
        except (KeyError, ValueError):
            wanted = _WANTED.get(kind, "a text")
            raise InputError(
                f"{flag}={value} is of another type; use {wanted}; --help lists the options"
            ) from None


def _flat(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields the settings with their full names, such as model.hidden_size."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def find_setting(config: object, last_name: str) -> str:
    """Returns the first setting with this last name, data.batch_size for batch_size; "" without a configuration."""
    if isinstance(config, ConfigDict):
        for name, _ in _flat(config.to_dict()):
            if name.rpartition(".")[2] == last_name:
                return name
    return ""


def _unknown_setting(flag: str, name: str, known: dict[str, object]) -> str:
    """Returns the message for a flag that names no setting."""
    sections = list(dict.fromkeys(full.partition(".")[0] for full in known))
    by_last_name = {full.rpartition(".")[2]: full for full in reversed(known)}
    section = name.partition(".")[0]
    last = name.rpartition(".")[2]
    close = [] if name == last else difflib.get_close_matches(name, known, n=1)
    close += [by_last_name[match] for match in difflib.get_close_matches(last, by_last_name, n=1)]
    close += [f"{match}." for match in difflib.get_close_matches(section, sections, n=1)]
    hint = f" (did you mean --config.{close[0]}?)" if close else ""
    inside = [full for full in known if full.startswith(f"{section}.")] or sections
    return f"{flag} is not a setting{hint}; there are {', '.join(inside)}"


def find_mistake(arguments: Sequence[str], error: BaseException) -> str:
    """Returns where an error was raised in the recipe that a command line names; "" if it was not raised there."""
    for path in (value.partition(":")[0] for _, _, value in _given(arguments)):
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == path
        ]
        # None: it is not text
        if isinstance(error, SyntaxError) and error.filename in (path, None):
            lines.append(error.lineno or 1)
        if lines:
            return f"recipe {path}, line {lines[-1]}: {type(error).__name__}: {one_line(error)}; correct it"
        if wrong := re.search(r"get_config\(\) (?:takes|missing) [^\n\\]*", str(error)):
            return f"recipe {path}: {wrong[0]}; what follows the colon of --config is the argument: give or omit it"
    return ""


def check_config(config: object) -> ConfigDict:
    """Returns the value of a recipe's get_config. Raises: InputError if it is no ConfigDict."""
    if isinstance(config, ConfigDict):
        return config
    # ml_collections' stand-in for a file that cannot be read
    error = getattr(config, "_error", None)
    if isinstance(error, OSError):
        raise InputError(
            f"--config: {one_line(error)}; give the name of a recipe, or a file that is there"
        )
    raise InputError(
        f"--config: get_config of the recipe returned {type(config).__name__} {config!r:.40}, not a ConfigDict; return "
        "ml_collections.ConfigDict(...), as the recipes of bert_jax do"
    )


def read_own(path: str | None) -> "Own":
    """Returns a recipe's own task and head, by its get_task and get_head, if it has them; "" stands for no recipe.

    Raises: InputError if there is no such file, or it fails.
    """
    from bert_jax.devices.job import this_job  # JAX starts here
    from bert_jax.tasks.catalog import Own

    path = find(path or "").partition(":")[0]
    if not path:
        return Own()
    if not Path(path).is_file():
        raise InputError(f"the recipe {path} does not exist; give the path of a Python file")
    try:
        recipe = _run(path)
        get_task, get_head = (getattr(recipe, name, None) for name in ("get_task", "get_head"))
        if get_task or get_head:  # processes with other programs would wait for each other for ever
            this_job().check_same(
                {"code of the recipe": hashlib.sha256(Path(path).read_bytes()).hexdigest()}
            )
        head = get_head() if get_head else None
        if get_head and head is None:
            raise InputError(f"recipe {path}: get_head gives nothing; let it return the head")
        return Own(get_task, head)
    except InputError:
        raise
    except Exception as error:
        mistake = find_mistake([f"--config={path}"], error)
        raise InputError(
            mistake or f"recipe {path}: {type(error).__name__}: {one_line(error)}; correct it"
        ) from error


def _run(path: str) -> ModuleType:
    """Returns the module of a recipe, whatever the file's name, as for --config."""
    loader = importlib.machinery.SourceFileLoader("bert_jax_recipe", path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def recipe(
    name: str, settings: Mapping[str, object] | None = None
) -> PretrainConfig | FinetuneConfig:
    """Returns the settings of a recipe, for `pretrain` or `finetune`.

    Args:
      name: as --config has it: "pretrain:base", "finetune:sst2", or the path of a file with get_config. What stands
        behind the colon is the recipe's argument.
      settings: what is changed, by full names: {"data.path": "data128", "train.num_steps": 1000}.
    Raises: InputError if there is no such recipe or setting, or a value is of another type. Rules are checked where
      the settings are used.

    Examples:
      >>> config = bert_jax.recipe("pretrain:base", {"train.num_steps": 100})
      >>> config.train.num_steps, config.model.num_layers
      (100, 12)
    """
    path, _, argument = find(name).partition(":")
    if not Path(path).is_file():
        raise InputError(f"the recipe {name} does not exist; there are {', '.join(names())}")
    config = check_config(_run(path).get_config(*[argument] if argument else []))
    known = dict(_flat(config.to_dict()))
    for setting, value in (settings or {}).items():
        if setting not in known:
            raise InputError(_unknown_setting(setting, setting, known))
        try:
            config.update_from_flattened_dict({setting: value})
        except TypeError:
            wanted = _WANTED.get(type(known[setting]), "a text")
            raise InputError(f"{setting} {value!r} is of another type; use {wanted}") from None
    values = config.to_dict()
    return from_dict(FinetuneConfig if "task" in values else PretrainConfig, values)


def read_config(kind: type[Config], values: JsonObject) -> Config:
    """Returns the settings of a recipe. Raises: InputError if it is of the other command, or breaks a rule."""
    if kind is PretrainConfig and "task" in values:
        raise InputError(
            "--config is a recipe of fine-tuning; give it to finetune, or take one such as pretrain:base"
        )
    if kind is FinetuneConfig and "masking" in values:
        raise InputError(
            "--config is a recipe of pre-training; give it to train, or take one such as finetune:sst2"
        )
    config = from_dict(kind, values)
    config.validate()
    return config
