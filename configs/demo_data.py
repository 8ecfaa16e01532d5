# SPDX-License-Identifier: Apache-2.0
"""Data for the demo, from the English documentation inside every Python: a text, and a task without annotators.

    python configs/demo_data.py --output=runs/demo          (in an installation: python -m bert_jax.configs.demo_data)

Writes text.txt, the help topics and documentation strings of the standard library as prose, a document after another,
and areas/ with train.tsv, dev.tsv and test.tsv: which area of the library does a docstring describe? No module is in
two of them. Files are parsed, never imported. What is there already is kept.
"""

import argparse
import ast
import hashlib
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_NOT_DOCUMENTATION = set(
    "site-packages dist-packages test tests idle_test idlelib lib2to3 turtledemo pydoc_data ensurepip".split()
)
_UNDERLINE = re.compile(r"\s*([=\-~^*\"'#+.:_`])\1{2,}\s*")
_TABLE_RULE = re.compile(r"\s*([=-]{3,}\s+)+[=-]{3,}\s*")
_BULLET = re.compile(r"([*\-+•]|\(?[0-9a-z]{1,2}[.)])\s+")
_DIRECTIVE = re.compile(r"\.\. ([a-z]+::)?\s*|\|")
_ROLE = re.compile(r":[a-z:]+:`~?([^`<]*?)(\s*<[^`]*>)?`")
_MARKUP = re.compile(r"(\*\*|``|(?<![\w*`])[*`](?=\S)|(?<=[\w)\].,])[*`](?![\w*`]))")


def read_python_docs() -> Iterator[list[str]]:
    """Yields the help topics, then the documentation strings of each module of the standard library, as prose.

    Files are parsed, never imported. A document is a topic or a module of more than one paragraph.
    """
    from pydoc_data.topics import topics  # half a megabyte of text

    for name in sorted(topics):
        paragraphs = _prose_paragraphs(topics[name])
        if len(paragraphs) > 1:
            yield paragraphs
    for _, docstrings in read_modules():
        paragraphs = [paragraph for docstring in docstrings for paragraph in docstring]
        if len(paragraphs) > 1:
            yield paragraphs


def read_modules() -> Iterator[tuple[str, Iterator[list[str]]]]:
    """Yields each module of the standard library: its dotted name, and the prose paragraphs of each of its docstrings.

    A file is parsed when its docstrings are asked for.
    """
    root = sysconfig.get_paths()["stdlib"]
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _NOT_DOCUMENTATION)
        for name in sorted(name for name in files if name.endswith(".py")):
            path = Path(folder, name)
            parts = path.relative_to(root).with_suffix("").parts
            yield (
                ".".join(parts).removesuffix(".__init__"),
                map(_prose_paragraphs, _docstrings(path)),
            )


def _docstrings(path: Path) -> Iterator[str]:
    """Yields the documentation strings of a Python file in order of appearance."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # a template or a deliberately broken file
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield text
        children = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.ExceptHandler)
        ]
        pending.extend(reversed(children))


def _prose_paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of reStructuredText or plain documentation that are prose, each on one line.

    Left out: doctests, text indented after a colon (examples and other literal text), grammars, tables, headings,
    and paragraphs with fewer than four words or too few letters to be a sentence.
    """
    paragraphs = []
    code_indent = -1  # the indentation of the literal text that is being left out, or -1
    after_colon = -1  # the indentation of the previous paragraph if it ended in a colon, or -1
    for block in re.split(r"\n[ \t]*\n", text.expandtabs()):
        lines = [
            line for line in block.splitlines() if line.strip() and not _UNDERLINE.fullmatch(line)
        ]
        if not lines or any(map(_TABLE_RULE.fullmatch, lines)):
            continue
        indent = min(len(line) - len(line.lstrip()) for line in lines)
        if code_indent >= 0 and indent >= code_indent:
            continue
        code_indent = -1
        if 0 <= after_colon < indent and not _BULLET.match(lines[0].lstrip()):
            code_indent, after_colon = indent, -1
            continue
        after_colon = indent if lines[-1].rstrip().endswith(":") else -1
        paragraphs.extend(_clean(item) for item in _list_items(lines))
    return [paragraph for paragraph in paragraphs if _is_prose(paragraph)]


def _list_items(lines: list[str]) -> Iterator[str]:
    """Yields the items of a list one by one, or all lines as one paragraph."""
    item: list[str] = []
    for line in (line.strip() for line in lines):
        if _BULLET.match(line) and item:
            yield " ".join(item)
            item = []
        item.append(_BULLET.sub("", line, count=1) if _BULLET.match(line) else line)
    yield " ".join(item)


def _clean(paragraph: str) -> str:
    """Returns the words of a paragraph without its markup."""
    paragraph = _DIRECTIVE.sub("", paragraph, count=1) if _DIRECTIVE.match(paragraph) else paragraph
    paragraph = _MARKUP.sub("", _ROLE.sub(r"\1", paragraph))
    return re.sub(r"\s+", " ", paragraph.replace("::", ":")).strip()


def _is_prose(paragraph: str) -> bool:
    """Returns whether a paragraph reads as sentences."""
    if ">>>" in paragraph or ":=" in paragraph.replace('":="', "") or len(paragraph.split()) < 4:
        return False
    num_letters = sum(character.isalpha() or character == " " for character in paragraph)
    return num_letters >= 0.8 * len(paragraph)


# The task

# The modules and packages of each area. Python has more, which belong to no area or to several.
AREAS: dict[str, str] = {
    "concurrency": """asyncio multiprocessing threading concurrent queue subprocess sched signal _threading_local
        contextvars selectors""",
    "files": """tarfile zipfile shutil pathlib gzip bz2 lzma io _pyio tempfile fileinput filecmp glob fnmatch
        genericpath posixpath ntpath os stat linecache zipapp shelve dbm _compression wave sunau aifc chunk compression
        netrc""",
    "graphics": "tkinter turtle curses colorsys",
    "mail": "email mailbox mailcap smtplib smtpd imaplib poplib nntplib quopri",
    "network": """http urllib xmlrpc wsgiref socketserver socket ssl ftplib telnetlib ipaddress webbrowser cgi asyncore
        asynchat nturl2path""",
    "numbers": """_pydecimal decimal fractions statistics random numbers datetime _pydatetime calendar zoneinfo heapq
        bisect _strptime _pylong secrets""",
    "testing": "unittest doctest pdb bdb trace traceback tracemalloc timeit profile cProfile pstats cgitb profiling",
    "text": """xml html json csv configparser plistlib tomllib difflib textwrap re string codecs encodings shlex gettext
        stringprep locale pprint reprlib""",
}
SPLITS = {"dev": 36, "test": 16, "train": 48}  # examples of each area, at most
_MOST_OF_A_MODULE = 15  # examples, so that no long one is an area by itself
_FEWEST_WORDS, _MOST_WORDS = 8, 40


class Described(NamedTuple):
    """A docstring, the area of the library it belongs to, and its module."""

    text: str
    area: str
    module: str


def read_described() -> Iterator[Described]:
    """Yields docstrings of modules with an area, without duplicates and without very short ones."""
    area_of = {module: area for area, modules in AREAS.items() for module in modules.split()}
    seen = set()
    for module, docstrings in read_modules():
        area = area_of.get(module.partition(".")[0])
        for paragraphs in docstrings if area else ():
            words = " ".join(paragraphs).split()[:_MOST_WORDS]
            text = " ".join(words)
            if area and len(words) >= _FEWEST_WORDS and text not in seen:
                seen.add(text)
                yield Described(text, area, module)


def split_by_module(
    examples: Iterable[Described], sizes: dict[str, int]
) -> dict[str, list[Described]]:
    """Returns the examples of each split; every module is in exactly one split, determined by its name.

    Within each area, modules are ordered by a hash of their names. They fill the splits in the order of `sizes`, whole
    modules at a time; leftover modules go to no split.
    """
    modules: dict[str, dict[str, list[Described]]] = {}
    for example in examples:
        modules.setdefault(example.area, {}).setdefault(example.module, []).append(example)
    splits: dict[str, list[Described]] = {name: [] for name in sizes}
    for members in modules.values():
        remaining = iter(sorted(members, key=_order))
        for name, size in sizes.items():
            chosen: list[Described] = []
            while len(chosen) < size and (module := next(remaining, "")):
                chosen += sorted(members[module], key=lambda example: _order(example.text))[
                    :_MOST_OF_A_MODULE
                ]
            splits[name] += chosen[:size]
    return {
        name: sorted(chosen, key=lambda example: _order(example.text))
        for name, chosen in splits.items()
    }


def _order(text: str) -> str:
    """Returns a hash of the text as a sort key, for an order that looks random and is the same everywhere."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_demo_data(directory: Path) -> dict[str, list[Described]]:
    """Writes text.txt and areas/ into a directory, and returns the examples of each split of the task."""
    splits = split_by_module(read_described(), SPLITS)
    if not all(splits.values()):
        raise SystemExit(
            "error: this Python comes without the docstrings of its library; use one that has its .py files"
        )
    (directory / "areas").mkdir(parents=True, exist_ok=True)
    documents = ["\n".join(paragraphs) for paragraphs in read_python_docs()]
    _write(directory / "text.txt", "\n\n".join(documents) + "\n")
    for name, examples in splits.items():
        lines = ["text\tarea", *(f"{example.text}\t{example.area}" for example in examples)]
        _write(directory / "areas" / f"{name}.tsv", "\n".join(lines) + "\n")
    return splits


def _write(path: Path, text: str) -> None:
    """Writes a file, whole or not at all, unless it is there."""
    if not path.exists():
        unfinished = path.with_name(f".{path.name}.unfinished")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)


def main() -> None:
    """Writes the data and prints their sizes."""
    parser = argparse.ArgumentParser(description="Writes the data of the demo.")
    parser.add_argument(
        "--output", required=True, type=Path, help="directory for text.txt and areas/"
    )
    output = parser.parse_args().output
    splits = write_demo_data(output)
    print(f"{output}/text.txt: {(output / 'text.txt').stat().st_size / 1e6:.1f} MB")
    for name, examples in splits.items():
        print(
            f"{output}/areas/{name}.tsv: {len(examples)} examples of {len({each.module for each in examples})} modules"
        )


if __name__ == "__main__":
    main()
