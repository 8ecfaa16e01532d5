# SPDX-License-Identifier: Apache-2.0
"""Files to documents. A document is the list of its lines, each a sentence or a paragraph.

Text files, plain or gzip, hold a line per sentence or paragraph and blank lines between documents; the end of
a file ends a document too. The input "python-docs" is the English documentation inside every Python: it needs
no file, so it is what tests and the first steps are made of.
"""

import ast
import gzip
import hashlib
import os
import re
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bert_jax import storage
from bert_jax.errors import InputError

PYTHON_DOCS = "python-docs"
PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Piece:
    """Whole documents that one process reads: a stretch of a plain text file, or all of another input."""

    path: str
    start: int = 0  # bytes
    end: int = 0  # bytes; 0 is the end of the input


def iterate_documents(inputs: str) -> Iterator[list[str]]:
    """Yields the documents of comma-separated globs, or of "python-docs", in order.

    Raises: InputError if an input is missing, unreadable or not UTF-8, or if there is no document at all.
    """
    found = False
    for piece in plan_pieces(inputs):
        for document in read_piece(piece):
            found = True
            yield document
    if not found:
        raise _no_document(inputs)


def _no_document(inputs: str) -> InputError:
    return InputError(f"input {inputs!r} holds no document: all its lines are blank; give files with text")


def plan_pieces(inputs: str, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Returns the pieces of the inputs, whose documents one after the other are those of `iterate_documents`.

    A plain text file is cut into pieces of about `piece_bytes`, after blank lines; a compressed one cannot be.
    Raises: InputError if an input is missing or all are empty.
    """
    if inputs == PYTHON_DOCS:
        return [Piece(PYTHON_DOCS)]
    pieces = []
    for path in storage.expand_globs(inputs):
        if storage.is_compressed(path):
            pieces.append(Piece(path))
        else:
            cuts = _cuts(path, piece_bytes)
            pieces.extend(Piece(path, start, end) for start, end in zip(cuts, cuts[1:]))
    if not pieces:
        raise _no_document(inputs)
    return pieces


def read_piece(piece: Piece) -> Iterator[list[str]]:
    """Yields the documents of a piece.

    Raises: InputError if the file cannot be read or is not UTF-8, naming the file and the line.
    """
    if piece.path == PYTHON_DOCS:
        return _python_documents()
    return _text_documents(_lines(piece))


def fingerprint(inputs: str) -> str:
    """Returns the sha256 of the contents of the inputs, whatever their paths."""
    if inputs == PYTHON_DOCS:
        return hashlib.sha256(f"{PYTHON_DOCS} {sys.version}".encode()).hexdigest()
    contents = [storage.sha256_file(path) for path in storage.expand_globs(inputs)]
    return hashlib.sha256(" ".join(contents).encode()).hexdigest()


# Text files


def _cuts(path: str, piece_bytes: int) -> list[int]:
    """Returns the places [number of pieces + 1] to cut a plain file at: its start, ends of blank lines, its end."""
    cuts = [0]
    with storage.open_binary(path) as stream:
        size = stream.seek(0, 2)
        while cuts[-1] + piece_bytes < size:
            stream.seek(cuts[-1] + piece_bytes)
            stream.readline()  # the rest of a line, whose beginning is unknown
            while (line := stream.readline()) and line.strip():
                pass
            cuts.append(stream.tell())
        if cuts[-1] < size:
            cuts.append(size)
    return cuts


def _lines(piece: Piece) -> Iterator[str]:
    """Yields the stripped lines of a piece."""
    position, number = piece.start, 0
    try:
        with storage.open_binary(piece.path) as stream:
            if piece.start:
                stream.seek(piece.start)
            while (not piece.end or position < piece.end) and (line := stream.readline()):
                position += len(line)
                number += 1
                yield line.decode("utf-8").removeprefix("\ufeff").strip()  # U+FEFF: the byte order mark of some editors
    except UnicodeDecodeError as error:
        number += _count_lines(piece.path, piece.start)
        raise InputError(
            f"{piece.path}, line {number} is not UTF-8 (byte 0x{error.object[error.start]:02x}); convert the file, "
            "for example with iconv -t utf-8"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{piece.path} is truncated or damaged ({error}); copy it again") from None
    except OSError as error:
        raise InputError(
            f"cannot read {piece.path}: {error.strerror or error}; check the file and its permissions"
        ) from None


def _count_lines(path: str, end: int) -> int:
    """Returns the number of lines in the first `end` bytes of a file."""
    with storage.open_binary(path) as stream:
        return stream.read(end).count(b"\n")


def _text_documents(lines: Iterator[str]) -> Iterator[list[str]]:
    """Yields runs of lines that are not blank."""
    document: list[str] = []
    for line in lines:
        if line:
            document.append(line)
        elif document:
            yield document
            document = []
    if document:
        yield document


# The documentation of Python

_NOT_DOCUMENTATION = set(
    "site-packages dist-packages test tests idle_test idlelib lib2to3 turtledemo pydoc_data ensurepip".split()
)
_UNDERLINE = re.compile(r"\s*([=\-~^*\"'#+.:_`])\1{2,}\s*")
_TABLE_RULE = re.compile(r"\s*([=-]{3,}\s+)+[=-]{3,}\s*")
_BULLET = re.compile(r"([*\-+•]|\(?[0-9a-z]{1,2}[.)])\s+")
_DIRECTIVE = re.compile(r"\.\. ([a-z]+::)?\s*|\|")
_ROLE = re.compile(r":[a-z:]+:`~?([^`<]*?)(\s*<[^`]*>)?`")
_MARKUP = re.compile(r"(\*\*|``|(?<![\w*`])[*`](?=\S)|(?<=[\w)\].,])[*`](?![\w*`]))")


def _python_documents() -> Iterator[list[str]]:
    """Yields the help topics, then the documentation strings of each module of the standard library, as prose.

    Files are parsed, never imported. A document is a topic or a module of more than one paragraph.
    """
    from pydoc_data.topics import topics  # half a megabyte of text

    for name in sorted(topics):
        paragraphs = _prose_paragraphs(topics[name])
        if len(paragraphs) > 1:
            yield paragraphs
    for folder, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(set(folders) - _NOT_DOCUMENTATION)
        for name in sorted(name for name in files if name.endswith(".py")):
            texts = _docstrings(Path(folder, name))
            paragraphs = [paragraph for text in texts for paragraph in _prose_paragraphs(text)]
            if len(paragraphs) > 1:
                yield paragraphs


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

    Left out: doctests, what is indented after a colon (examples and other literal text), grammars, tables,
    headings, and what has fewer than four words or too few letters to be a sentence.
    """
    paragraphs = []
    code_indent = -1  # how deep the literal text is indented that is being left out, or -1
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
