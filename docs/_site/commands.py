# SPDX-License-Identifier: Apache-2.0
"""The reference pages of the commands, made from their docstrings and from the flags that they define."""

import ast
import configparser
import importlib
import importlib.util
import re
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags, logging  # app and logging define flags of their own, here and not in a command
from paths import PACKAGE, ROOT, SCRIPTS, TOOLS, in_markdown, sentence

OVERVIEW = """# Commands

Generated from the code: docstrings and flags. Options are written `--name=value`, and an unknown one is refused with a
suggestion. A mistake ends in one line that names the value, the rule and the fix, with exit status 1.
"""


class Flag(NamedTuple):
    """A flag, as the reference shows it."""

    name: str
    facts: tuple[str, ...]  # type, default, rules
    help: str


class Command(NamedTuple):
    """A command, as the reference shows it."""

    name: str  # "prepare_corpus"
    calls: tuple[str, ...]  # "python -m bert_jax.tools.prepare_corpus"
    docstring: str
    flags: tuple[Flag, ...]

    @property
    def summary(self) -> str:
        """The first sentence of the docstring, without an example."""
        first = " ".join(self.docstring.partition("\n\n")[0].split())
        return sentence(re.split(r": (?:python|bert_jax) ", first)[0])


@cache
def commands() -> tuple[Command, ...]:
    """Returns all commands, training first, the others by name."""
    entry = _entry_point()
    found = {}
    for path in sorted((ROOT / TOOLS).glob("*.py")):
        if _can_be_run(path):
            module = f"{TOOLS.replace('/', '.')}.{path.stem}"
            calls = (f"python -m {module}",)
            found[path.stem] = Command(path.stem, calls, _docstring(path), _flags_of(path, module))
    scripts = {}
    for script in SCRIPTS:
        name = Path(script).stem
        tool = found.pop(name, None)
        if tool is None:
            path = ROOT / script
            tool = Command(name, (), _docstring(path), _flags_of(path, name))
        scripts[name] = tool._replace(calls=(f"python {script}", *tool.calls))
    every = [*scripts.values(), *found.values()]
    return tuple(each._replace(calls=(f"{entry} {each.name}", *each.calls)) if entry else each for each in every)


def _entry_point() -> str:
    """Returns the command that an installed package brings; "" if there is none."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    scripts = parser.get("options.entry_points", "console_scripts", fallback="")
    return next((line.partition("=")[0].strip() for line in scripts.splitlines() if "=" in line), "")


def _can_be_run(path: Path) -> bool:
    return '__name__ == "__main__"' in path.read_text("utf-8")


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""


def _flags_of(path: Path, module: str) -> tuple[Flag, ...]:
    """Returns the flags that a file defines when it is imported, and takes them out of the registry again."""
    for name in [name for name in sys.modules if name.startswith(f"{TOOLS.replace('/', '.')}.")]:
        del sys.modules[name]  # so that the flags are defined anew
    app.define_help_flags()
    logging.use_absl_handler()
    before = set(flags.FLAGS)
    hook = sys.excepthook
    try:
        if module.startswith(PACKAGE):
            importlib.import_module(module)
        else:
            spec = importlib.util.spec_from_file_location(f"_command_{module}", path)
            assert spec is not None and spec.loader is not None, path
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        added = [flags.FLAGS[name] for name in flags.FLAGS if name not in before]
        return tuple(_flag(flag) for flag in sorted(added, key=lambda flag: not _required(flag)))
    finally:
        sys.excepthook = hook
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)


def _required(flag: Any) -> bool:
    return any("other than None" in validator.message for validator in flag.validators)


def _flag(flag: Any) -> Flag:
    parser = flag.parser
    kind = {"string": "text", "int": "whole number", "float": "number", "bool": "True or False"}
    facts = [kind.get(flag.flag_type(), flag.flag_type())]
    if choices := getattr(parser, "enum_values", None):
        facts = ["one of " + ", ".join(f"`{choice}`" if choice else '`""`' for choice in choices)]
    elif isinstance(flag.default, list):
        facts = ["list, with commas"]
    elif "config" in flag.flag_type():
        facts = ["`FILE.py` or `FILE.py:ARGUMENT`"]
    if _required(flag):
        facts.append("**required**")
    elif flag.default not in (None, "", []):
        facts.append(f"default `{flag.default}`")
    low, high = getattr(parser, "lower_bound", None), getattr(parser, "upper_bound", None)
    if low is not None or high is not None:
        facts.append(f"{low:g} or more" if high is None else f"from {low:g} to {high:g}")
    described = re.sub(r"^<[^>]*>: ", "", flag.help or "")  # where absl repeats the choices
    return Flag(flag.name, tuple(facts), sentence(described))


def as_markdown(docstring: str) -> str:
    """Returns a docstring as Markdown: paragraphs that are commands become blocks of code."""
    parts = []
    for paragraph in docstring.split("\n\n") if docstring else []:
        lines = paragraph.splitlines()
        if all(re.match(r"    |(python|bert_jax|echo) ", line) for line in lines):
            parts.append(f"```sh\n{textwrap.dedent(paragraph)}\n```")
        else:
            parts.append(in_markdown(paragraph))
    return "\n\n".join(parts)


def page(command: Command) -> str:
    """Returns the reference page of a command as Markdown."""
    _, _, rest = command.docstring.partition("\n\n")
    example = re.search(r": ((?:python|bert_jax) .*)", " ".join(command.docstring.partition("\n\n")[0].split()))
    usage = "\n".join(f"{call} --help" for call in command.calls)
    lines = [f"# `{command.name}`", "", in_markdown(command.summary), "", f"```sh\n{usage}\n```", ""]
    if example:
        lines += [f"```sh\n{example[1]}\n```", ""]
    lines += [as_markdown(rest), "", "## Flags", "", "Written `--name=value`; `--help` prints the same list.", ""]
    for flag in command.flags:
        extra = ""
        if flag.name == "config":
            which = "finetuning" if "finetune" in command.name else "pretraining"
            extra = f" Each setting of it is a flag too: [`--config.section.key=value`](../{which}.md)."
        lines += [f"### `--{flag.name}` {{ #{flag.name} }}", "", " · ".join(flag.facts), "{ .facts }", ""]
        lines += [in_markdown(flag.help) + extra, ""]
    return "\n".join(lines)


def overview() -> str:
    """Returns the page that lists all commands."""
    lines = [OVERVIEW, "| Command | |", "|---|---|"]
    lines += [f"| [`{each.name}`]({each.name}.md) | {in_markdown(each.summary)} |" for each in commands()]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Returns the pages by their paths on the site."""
    made = {f"reference/commands/{each.name}.md": page(each) for each in commands()}
    return {"reference/commands/index.md": overview(), **made}
