# SPDX-License-Identifier: Apache-2.0
"""Reads documents from text files in three formats. The first line that is not blank decides the format:

- JSON lines: it begins an object with a key, as in {"text": (or the file name ends in .jsonl). Each line is a
  document; the lines of its string "text", or of another key, are the document's lines.
- WikiExtractor's output: it begins with <doc id=. Each <doc ...> ... </doc> is a document.
- Anything else is plain text: one sentence or paragraph per line, with blank lines between documents. A document does
  not continue in the next file.

In the first two formats, a first line that repeats the document's title is dropped, since it is not a sentence.

JSON that is not in lines, bzip2, xz, zip and tar files, UTF-16 and other binary files, and lines that end in CR alone
are refused.
"""

import html
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

from bert_jax.errors import InputError, not_utf8, reading, shown
from bert_jax.storage import files

TEXT = "text"
JSON_LINES = "JSON lines"
WIKI_EXTRACTOR = "WikiExtractor"
TEXT_COLUMN = "text"

_JSON_NAME = re.compile(r"\.(jsonl|ndjson)(\.\w+)?$")
_JSON_START = re.compile(rb'\{\s*"([^"\\]|\\.)*"\s*:')
# JSON over several lines: it begins so, or with the bracket alone where the file name ends in .json.
_OTHER_JSON = re.compile(rb'(\[\s*)?\{\s*"([^"\\]|\\.)*"\s*:')
_OTHER_JSON_NAME = re.compile(r"\.json(\.gz|\.zst)?$")
# their first bytes
_UNREADABLE = {"bzip2": rb"BZh[1-9]1AY&SY", "xz": rb"\xfd7zXZ\x00", "zip": rb"PK\x03\x04"}
_ARROW = b"ARROW1", b"\xff\xff\xff\xff"  # of a file and of a stream
_HEAD_BYTES = 1 << 16
_BINARY_BYTES = 1 << 13  # of the beginning; a NUL byte among them means that a file is not text
# The first bytes of a file, or where each four bytes have zeros, if most letters are Latin.
_WIDE_MARKS = {"UTF-32": (b"\xff\xfe\0\0", b"\0\0\xfe\xff"), "UTF-16": (b"\xff\xfe", b"\xfe\xff")}
_WIDE_ZEROS = {
    "UTF-16LE": [False, True, False, True], "UTF-16BE": [True, False, True, False],
    "UTF-32LE": [False, True, True, True], "UTF-32BE": [True, True, True, False],
}  # fmt: skip
_DOC_START = "<doc id="
_DOC_END = "</doc>"
_DOC_TITLE = re.compile(r'title="(.*)"')
_BYTE_ORDER_MARK = "\ufeff"  # some editors begin a file with it

# Limits on the memory of a process: a small compressed file may decompress to any number of bytes.
LONGEST_LINE = 64 << 20  # bytes
LONGEST_DOCUMENT = 256 << 20  # bytes
LINE_COST = 64  # bytes of memory per line, in addition to its text

# Where a file can be cut: after a line that ends a document.
_ENDS_DOCUMENT = {
    TEXT: lambda line: not line.strip(),
    JSON_LINES: lambda line: True,
    WIKI_EXTRACTOR: lambda line: line.rstrip().endswith(_DOC_END.encode()),
}


@dataclass(frozen=True)
class Piece:
    """Whole documents that one process reads: a stretch of an input, or all of it."""

    source: str  # the input, as the user and messages call it
    kind: str  # one of the formats above, or an input that is not a file
    path: str = ""  # of the file on this machine
    start: int = 0  # bytes, examples of a TFDS data set, or row groups of a Parquet file
    end: int = 0  # 0 is the end of the input
    column: str = TEXT_COLUMN  # of a Parquet file, or key of JSON lines


def detect_format(path: str, source: str) -> str:
    """Returns the format of a file. Raises: InputError if it cannot be read, or is in none of the formats."""
    with files.reading(source), files.open_binary(path) as stream:
        head = stream.read(_HEAD_BYTES)
    if name := next((name for name, magic in _UNREADABLE.items() if re.match(magic, head)), ""):
        raise InputError(
            f"{source} is compressed by {name}; decompress it, or compress it by gzip or zstd"
        )
    check_encoding(head, source)
    if b"\0" in head[:_BINARY_BYTES]:
        raise InputError(
            f"{source} has NUL bytes: it is a binary file or an archive; give the text files in it"
        )
    check_line_ends(head, source)
    line = b""
    with files.reading(source), files.open_binary(path) as stream:
        while not line and (read := stream.readline(1 << 16)):
            line = read.removeprefix(_BYTE_ORDER_MARK.encode()).strip()
        start = line + b"\n" + stream.read(1 << 12)
    if is_json_lines(source) or _JSON_START.match(line):
        return JSON_LINES
    if _OTHER_JSON.match(start) or (
        _OTHER_JSON_NAME.search(source) and line.startswith((b"[", b"{"))
    ):
        write = "'.[]'" if line.startswith(b"[") else "."
        raise InputError(
            f"{source} is JSON that is not in lines; write one object a line, as jq -c {write} does"
        )
    return WIKI_EXTRACTOR if line.startswith(_DOC_START.encode()) else TEXT


def is_json_lines(source: str) -> bool:
    """Returns whether the name of a file says that it is JSON lines."""
    return bool(_JSON_NAME.search(source))


def check_encoding(head: bytes, source: str) -> None:
    """Raises: InputError if a file that begins with `head` is a pointer of Git LFS, Arrow, or UTF-16 or UTF-32."""
    if head.startswith(files.LFS_POINTER):
        raise InputError(
            f"{source} is a pointer of Git LFS in place of the file; fetch it with git lfs pull"
        )
    if head.startswith(_ARROW):
        raise InputError(
            f"{source} is Arrow, as save_to_disk of datasets writes it; write it by to_parquet or to_json"
        )
    wide = next((name for name, mark in _WIDE_MARKS.items() if head.startswith(mark)), "")
    start = head[:_BINARY_BYTES]
    if not wide and b"\0" in start:
        # half of the bytes at an offset
        nuls = [start[offset::4].count(0) > len(start) // 8 for offset in range(4)]
        wide = next((name for name, zeros in _WIDE_ZEROS.items() if nuls == zeros), "")
        # numbers, and no text
        if wide and "\0" in start[: len(start) // 4 * 4].decode(wide, "replace"):
            wide = ""
    if wide:
        raise InputError(
            f"{source} is {wide}, not UTF-8; convert it with iconv -f {wide.lower()} -t utf-8"
        )


def check_line_ends(head: bytes, source: str) -> None:
    """Raises: InputError if most lines of a file that begins with `head` end in CR alone."""
    if len(re.findall(rb"\r(?!\n|\Z)", head)) > head.count(b"\n"):
        raise InputError(
            f"{source} has lines that end in CR alone, as on old Macs; convert it with tr '\\r' '\\n'"
        )


def plan_file(path: str, source: str, piece_bytes: int, column: str = TEXT_COLUMN) -> list[Piece]:
    """Returns the pieces of a file, of about `piece_bytes`; a compressed file cannot be cut, an empty one has none.

    Raises: InputError if it cannot be read.
    """
    kind = detect_format(path, source)
    if files.is_compressed(path):
        return [Piece(source, kind, path, column=column)]
    cuts = [0]
    with files.reading(source), open(path, "rb") as stream:
        size = stream.seek(0, 2)
        while cuts[-1] + piece_bytes < size:
            stream.seek(cuts[-1] + piece_bytes)
            # From any byte, forward to the end of a document: where the cuts are follows from the
            # file alone, not from its reader.
            read_line(stream, lambda: source)  # skip the rest of the line at the cut
            while (line := read_line(stream, lambda: source)) and not _ENDS_DOCUMENT[kind](line):
                pass
            cuts.append(stream.tell())
        if cuts[-1] < size:
            cuts.append(size)
    return [Piece(source, kind, path, start, end, column) for start, end in zip(cuts, cuts[1:])]


def read_line(stream: IO[bytes], place: Callable[[], str]) -> bytes:
    """Returns the next line, b"" at the end. Raises: InputError if it is too long to be one."""
    line = stream.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise InputError(
            f"{place()}: a line has more than {LONGEST_LINE >> 20} MiB; part it, or leave the file out"
        )
    return line


def decoded_lines(stream: IO[bytes], path: str, before: str) -> Iterator[tuple[str, str]]:
    """Yields where each line of a stream stands, `before` and its number from 1, and its text with its line end.

    Raises: InputError if it cannot be read, or a line is not UTF-8 or too long to be one; `path` names it.
    """
    with reading(path):
        for number, line in enumerate(iter(lambda: read_line(stream, lambda: path), b""), 1):
            if number == 1:
                check_encoding(line, path)
                if not line.endswith(b"\n"):
                    check_line_ends(line, path)
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise not_utf8(error, f"{before}{number}") from None
            yield f"{before}{number}", text


def read_file(piece: Piece) -> Iterator[list[str]]:
    """Yields the documents of a piece of a file.

    Raises: InputError if it cannot be read, is not UTF-8 or breaks the rules of its format, naming the line.
    """
    lines = _Lines(piece)
    if piece.kind == JSON_LINES:
        return _json_documents(lines)
    return _wiki_documents(lines) if piece.kind == WIKI_EXTRACTOR else _text_documents(lines)


def text_lines(text: str, title: object = None) -> list[str]:
    """Returns the stripped lines of a text that are not blank, without a first one that is the title."""
    lines = [line for line in (line.strip() for line in text.split("\n")) if line]
    return lines[1:] if lines and isinstance(title, str) and lines[0] == title.strip() else lines


class _Lines:
    """The stripped lines of a piece, which know their numbers."""

    def __init__(self, piece: Piece):
        self.piece = piece
        self.number = 0  # of the last line, within the piece
        self._held = 0  # bytes of the document that is being read

    def __iter__(self) -> Iterator[str]:
        piece = self.piece
        position = self.piece.start
        with files.reading(piece.source), files.open_binary(piece.path) as stream:
            if piece.start:
                stream.seek(piece.start)
            while (not piece.end or position < piece.end) and (
                line := read_line(stream, lambda: self.place(self.number + 1))
            ):
                position += len(line)
                self.number += 1
                try:
                    text = line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise not_utf8(error, self.place()) from None
                yield text.removeprefix(_BYTE_ORDER_MARK).strip()

    def hold(self, text: str, num_lines: int = 1) -> None:
        """Counts lines of the document that is being read. Raises: InputError if it is too long to be one."""
        self._held += len(text) + LINE_COST * num_lines
        if self._held > LONGEST_DOCUMENT:
            most = f"{LONGEST_DOCUMENT >> 20} MiB"
            raise InputError(
                f"{self.place()}: the document has more than {most}; part it, or leave the file out"
            )

    def release(self) -> None:
        """Begins another document."""
        self._held = 0

    def place(self, number: int = 0) -> str:
        """Returns where the last line, or line `number` of the piece, is in its file."""
        number = number or self.number
        # A piece does not know how many lines come before it. They are counted when somebody asks,
        # for a message.
        if self.piece.start:
            with open(self.piece.path, "rb") as stream:
                for start in range(0, self.piece.start, _HEAD_BYTES):
                    number += stream.read(min(_HEAD_BYTES, self.piece.start - start)).count(b"\n")
        return f"{self.piece.source}, line {number}"


def _text_documents(lines: _Lines) -> Iterator[list[str]]:
    """Yields runs of lines that are not blank."""
    document: list[str] = []
    for line in lines:
        if line:
            lines.hold(line)
            document.append(line)
        elif document:
            yield document
            document = []
            lines.release()
    if document:
        yield document


# JSON lines


def _json_documents(lines: _Lines) -> Iterator[list[str]]:
    """Yields the text of each line's object, unless it is blank."""
    column = lines.piece.column
    for line in filter(None, lines):
        try:
            value = json.loads(line)
            text = value[column]
            text.encode()  # half of a pair of surrogates is no text
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            example = f'{{"{column}": "..."}}'
            problem = f"{shown(line)} is not an object such as {example}"
            raise InputError(
                f"{lines.place()}: {problem}; correct the line, or choose a --text_column"
            ) from None
        lines.release()
        lines.hold(text, text.count("\n") + 1)
        # WikiExtractor --json escapes as in HTML
        if isinstance(value.get("url"), str) and "?curid=" in value["url"]:
            text = html.unescape(text)
        if document := text_lines(text, value.get("title")):
            yield document


# WikiExtractor


def _wiki_documents(lines: _Lines) -> Iterator[list[str]]:
    """Yields the lines between <doc ...> and </doc>, unless there is only a title."""
    # Of the current document: the number of its first line (0 outside of documents), its title and its lines.
    start = 0
    title = ""
    inside = []
    for line in lines:
        if line.startswith(_DOC_START):
            if start:
                raise _unclosed(lines, start, lines.place())
            match = _DOC_TITLE.search(line)
            start = lines.number
            title = html.unescape(match[1]) if match else ""
            inside = []
            lines.release()
        elif start:
            lines.hold(line)
            inside.append(line.removesuffix(_DOC_END))
            if line.endswith(_DOC_END):
                if document := text_lines(html.unescape("\n".join(inside)), title):
                    yield document
                start = 0
        elif line:
            raise InputError(
                f"{lines.place()} stands outside <doc> and </doc> ({shown(line)}); remove it"
            )
    if start:
        raise _unclosed(lines, start, "the end of the file")


def _unclosed(lines: _Lines, start: int, end: str) -> InputError:
    return InputError(
        f"{lines.place(start)}: this <doc> has no </doc> before {end}; extract or copy it again"
    )
