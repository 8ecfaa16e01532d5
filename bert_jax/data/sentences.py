# SPDX-License-Identifier: Apache-2.0
"""Paragraphs to sentences: the only home of the splitter (docs/decisions/0003-sentence-splitter.md)."""

import functools
import re
from collections.abc import Callable, Iterable
from importlib import metadata

from bert_jax.errors import package_needed

# The splitter keeps text between quotation marks or brackets together. One mark that is never closed would then
# swallow a page, so sentences longer than this are split again with those marks hidden.
_LONGEST_QUOTATION = 1000  # characters
_PAIRED_MARKS = str.maketrans(dict.fromkeys("\"'()[]{}«»‹›“”„‟‘’‚‛「」『』《》〈〉（）", " "))

# At each end of a sentence the splitter looks back to the last blank. Where there is none, as in Chinese, its time
# would grow with the square of the length of a line. Such lines are shown to it in windows.
_LONGEST_WORD = 1000  # characters between blanks
# a quotation that begins in its first half ends in it, or is too long
_WINDOW = 4 * _LONGEST_QUOTATION

# sentencex 1.0.32 panics at most full stops after a capital letter and a blank that is not ASCII. Such blanks are
# shown to it as ASCII ones. Other blanks are only if it still panics, as that may change where it splits.
_WIDE_BLANKS = [chr(code) for code in range(128, 0x10000) if chr(code).isspace()]
_ASCII_BLANKS = str.maketrans(dict.fromkeys(_WIDE_BLANKS, " "))
_BLANKS_BEFORE_STOP = re.compile(r"(?<=[A-Z])\s*[^\S\x00-\x7f](?=\.)")

# ends of sentences in any of the splitter's languages, : and ; in some alone
_ASCII_END = re.compile(r"[\n!.:;?]")


class _PanicError(Exception):
    """The splitter, which is compiled code, panicked."""


def splitter_version() -> str:
    """Returns the name and version of the splitter, as data sets keep them: another one may split differently."""
    _splitter()
    return f"sentencex {metadata.version('sentencex')}"


def split_lines(lines: Iterable[str], language: str) -> tuple[list[str], int]:
    """Returns the sentences of all lines, and the number of lines at which the splitter failed.

    Sentences are stripped; what is left between them is white space only. A line that is one sentence stays one, and so
    does one at which the splitter fails. `language` is an ISO 639 code; one without rules of its own gets those of its
    nearest relative.
    """
    sentences: list[str] = []
    num_failed = 0
    for line in lines:
        try:
            sentences += _split(line, language)
        except _PanicError:
            sentences += filter(None, [line.strip()])
            num_failed += 1
    return sentences, num_failed


def _split(line: str, language: str) -> list[str]:
    if line.isascii() and not _ASCII_END.search((only := line.strip())[:-1]):
        return [only] if only else []
    sentences: list[str] = []
    for sentence in _call(line, language) if line.isascii() else _segment(line, language):
        if len(sentence) > _LONGEST_QUOTATION:
            # the same lengths: nothing is dropped
            hidden = _segment(sentence.translate(_PAIRED_MARKS), language)
            sentences += filter(None, (part.strip() for part in _cut(sentence, hidden)))
        elif stripped := sentence.strip():
            sentences.append(stripped)
    return sentences


def _segment(text: str, language: str) -> list[str]:
    """Returns the parts of a text as the splitter finds them."""
    shown = text
    if any(blank in text for blank in _WIDE_BLANKS):
        shown = _BLANKS_BEFORE_STOP.sub(lambda match: match[0].translate(_ASCII_BLANKS), text)
    if len(text) <= _LONGEST_WORD or max(map(len, text.split()), default=0) <= _LONGEST_WORD:
        return _cut(text, _call(shown, language))
    parts: list[str] = []
    start = 0
    window = _WINDOW
    while start < len(text):
        segments = _call(shown[start : start + window], language)
        if start + window < len(text):
            end = 0
            whole = []
            for part in segments[:-1]:  # the last one may go on
                if whole and end + len(part) > window // 2:
                    break
                whole.append(part)
                end += len(part)
            if not whole:
                window *= 2
                continue
            segments = whole
        parts += segments
        start, window = start + sum(map(len, segments)), _WINDOW
    return _cut(text, parts)


def _call(text: str, language: str) -> list[str]:
    """Returns the parts from the splitter. Raises: _PanicError if it panics whatever the blanks are."""
    shown = text
    for _ in range(2):
        try:
            parts = _splitter()(language, shown)
        except BaseException as error:  # a panic is not an `Exception`
            if type(error).__module__ != "pyo3_runtime":
                raise
        else:
            if sum(map(len, parts)) == len(text):
                return parts
        shown = text.translate(_ASCII_BLANKS)
    raise _PanicError


def _cut(text: str, parts: Iterable[str]) -> list[str]:
    """Returns a text cut into pieces with the lengths of `parts`."""
    pieces = []
    start = 0
    for part in parts:
        pieces.append(text[start : start + len(part)])
        start += len(part)
    return pieces


@functools.cache
def _splitter() -> Callable[[str, str], list[str]]:
    """Returns the splitter's function. Raises: InputError if the library is not installed."""
    with package_needed("sentencex", "splitting text into sentences", "'bert_jax[train]'"):
        from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue]: compiled
    return segment
