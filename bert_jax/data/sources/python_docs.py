# SPDX-License-Identifier: Apache-2.0
"""The English documentation inside every Python, as documents of prose: text that needs no file."""

import ast
import hashlib
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

PYTHON_DOCS = "python-docs"

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
            yield ".".join(parts).removesuffix(".__init__"), map(_prose_paragraphs, _docstrings(path))


def python_fingerprint() -> str:
    """Returns a sha256 that changes with the version of Python."""
    return hashlib.sha256(f"{PYTHON_DOCS} {sys.version}".encode()).hexdigest()


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
        children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)]
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
        lines = [line for line in block.splitlines() if line.strip() and not _UNDERLINE.fullmatch(line)]
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
