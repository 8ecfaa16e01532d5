# SPDX-License-Identifier: Apache-2.0
"""Text to words, exactly as Google's BasicTokenizer does it under Python 3.11, on every Python.

With two exceptions, the result for a character depends only on that character. So all steps below are combined
into one table, code point -> replacement, that `str.translate` applies at C speed:

    drop control characters -> blanks to " " -> Chinese characters apart -> lower case -> decompose (NFD) ->
    drop accents -> punctuation apart

The exceptions are the Greek sigma, whose lower-case form depends on its neighbours, and 25 combining characters
that are not accents and that NFD may reorder. Both are rare and are handled separately.

The interpreter's own Unicode tables are not used: they change with Python releases, and the same text must always
give the same tokens. `unicode_14.json` has the tables of Python 3.11; characters added later are unassigned.
`unicode_library.json` has what the library `tokenizers` knows otherwise, for models that its file alone describes.

Source: google-research/bert tokenization.py, BasicTokenizer. `strip_accents` apart from lower-casing is ours.
"""

import bisect
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from bert_jax.text.offsets import TracedText, trace

UNICODE_VERSION = "14.0.0"
TABLES_PATH = Path(__file__).with_name("unicode_14.json")

# The Chinese characters of the reference. They exclude kana and Hangul, whose scripts write words.
_CHINESE = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)
_NOT_CHINESE = range(0x2B820, 0x2B920)  # to the library `tokenizers`
_PRIVATE = ((0xE000, 0xF8FF), (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD))
_CHINESE_BOUNDS = [bound for start, end in _CHINESE for bound in (start, end + 1)]
# ASCII symbols such as $ and ^ count as punctuation too, though Unicode puts them elsewhere.
_ASCII_PUNCTUATION = ((0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E))

# `str.split` treats these as blanks. The reference drops them as control characters, which joins their neighbours.
_CONTROL_BLANKS = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_BETWEEN_BLANKS = re.compile(rf"[\S{_CONTROL_BLANKS}]+")


class UnicodeTables(NamedTuple):
    """The character properties of Unicode 14.0 that normalisation uses; integers are code points."""

    control: frozenset[int]
    space: frozenset[int]
    punctuation: frozenset[int]
    nonspacing_mark: frozenset[int]
    cased: frozenset[int]
    case_ignorable: frozenset[int]
    combining_class: dict[int, int]
    lower: dict[int, str]
    decomposition: dict[int, str]

    def decompose(self, char: str) -> str:
        """Returns the full canonical decomposition of one character."""
        # Hangul: a leading consonant, a vowel, and perhaps a trailing consonant
        if "가" <= char <= "힣":
            syllable = ord(char) - 0xAC00
            leading = syllable // 588
            vowel = syllable % 588 // 28
            trailing = syllable % 28
            return (
                chr(0x1100 + leading)
                + chr(0x1161 + vowel)
                + (chr(0x11A7 + trailing) if trailing else "")
            )
        return self.decomposition.get(ord(char), char)


class Normalizer:
    """Splits text into the words that WordPiece then splits further.

    Args:
      lowercase: whether to write all letters small.
      strip_accents: whether to decompose characters and drop the accents (all nonspacing marks). None, as in
        the reference: if and only if `lowercase`.
      split_chinese: whether each Chinese character is a word.
      google: whether a capital sigma that ends a word becomes the final small one, characters for private use stay, and
        U+2B820 to U+2B91F are Chinese, as in the reference. If not, none of this, as in the library `tokenizers`.
    """

    def __init__(
        self,
        lowercase: bool,
        strip_accents: bool | None = None,
        split_chinese: bool = True,
        google: bool = True,
    ):
        self.lowercase = lowercase
        self.strip_accents = lowercase if strip_accents is None else strip_accents
        self.split_chinese = split_chinese
        self.google = google
        self._tables = unicode_tables() if google else library_tables()
        self._letters = letter_images(lowercase, self.strip_accents, self._tables)
        self._whole = _Images(self._whole_image)
        self._clean = _Images(self._clean_image)
        self._decomposed = _Images(self._decomposed_image)

    def __reduce__(self) -> tuple:
        return Normalizer, (self.lowercase, self.strip_accents, self.split_chinese, self.google)

    def __call__(self, text: str) -> list[str]:
        """Returns the words of `text`, in order."""
        if not text.isascii():
            if self.lowercase and self.google and "Σ" in text:
                text = _lower_googles(text.translate(self._clean))
            if self.strip_accents and _reorderable(self.google).search(text):
                text = text.translate(self._clean).translate(self._decomposed)
                text = "".join([text[position] for position in _canonical_order(text)])
        return text.translate(self._whole).split()

    def image(self, char: str) -> str:
        """Returns the replacement of an ASCII character, which is the same in any context; blanks separate words."""
        return self._whole[ord(char)]

    def trace(self, text: str) -> list[TracedText]:
        """Returns the words of `text` as `__call__` does, with the position in `text` of each of their characters."""
        marks = self._tables.nonspacing_mark
        traced = trace(text)
        if not text.isascii():
            if self.lowercase and self.google and "Σ" in text:
                traced = traced.translate(self._clean, marks)
                traced = traced._replace(text=_lower_googles(traced.text))
            if self.strip_accents and _reorderable(self.google).search(traced.text):
                traced = traced.translate(self._clean, marks).translate(self._decomposed, marks)
                traced = traced.reorder(_canonical_order(traced.text))
        return traced.translate(self._whole, marks).split()

    def stands_alone(self, char: str) -> bool:
        """Returns whether `char` is never a part of a longer word: punctuation, a Chinese character, a blank."""
        return len(self("a" + char)) != 1 or not self(char)

    def _clean_image(self, code: int) -> str:
        if chr(code) in "\t\n\r" or code in self._tables.space:
            return " "
        if code in self._tables.control or code == 0xFFFD:
            return ""
        if not self.google and any(first <= code <= last for first, last in _PRIVATE):
            return ""
        if (
            self.split_chinese
            and is_chinese(chr(code))
            and (self.google or code not in _NOT_CHINESE)
        ):
            return f" {chr(code)} "
        return chr(code)

    def _decomposed_image(self, code: int) -> str:
        text = self._tables.lower.get(code, chr(code)) if self.lowercase else chr(code)
        return "".join(map(self._tables.decompose, text))

    def _whole_image(self, code: int) -> str:
        text = self._clean_image(code).translate(self._letters)
        return "".join(
            [f" {char} " if ord(char) in self._tables.punctuation else char for char in text]
        )


def letter_images(
    lowercase: bool, strip_accents: bool, tables: UnicodeTables | None = None
) -> Mapping[int, str]:
    """Returns a table for `str.translate` that lower-cases letters, drops accents, or both."""
    tables = tables or unicode_tables()

    def image(code: int) -> str:
        text = tables.lower.get(code, chr(code)) if lowercase else chr(code)
        if not strip_accents:
            return text
        decomposed = "".join(map(tables.decompose, text))
        return "".join([char for char in decomposed if ord(char) not in tables.nonspacing_mark])

    return _Images(image)


def is_chinese(char: str) -> bool:
    """Returns whether the reference treats it as a Chinese character."""
    # after a start and before its end
    return bisect.bisect_right(_CHINESE_BOUNDS, ord(char)) % 2 == 1


def blank_separated(text: str) -> list[str]:
    """Returns the strings between blanks; the words of `text` are the words of these strings, in order."""
    return without_control_blanks(text).split()


def without_control_blanks(text: str) -> str:
    """Returns `text` without the control characters that `str.split` treats as blanks; it has the same words."""
    for char in _CONTROL_BLANKS:
        if char in text:
            text = text.replace(char, "")
    return text


def spans_between_blanks(text: str) -> list[tuple[str, int]]:
    """Returns each string between blanks of `text`, unchanged, and its start.

    Unlike those of `blank_separated`, they may contain control characters, or only those; their words are the same.
    """
    return [(match[0], match.start()) for match in _BETWEEN_BLANKS.finditer(text)]


@functools.cache
def unicode_tables() -> UnicodeTables:
    """Returns the frozen tables, read from the package when first needed."""
    data = json.loads(TABLES_PATH.read_text(encoding="utf-8"))
    lower = _read_mappings(data["lower_to_several"])
    for run in data["lower"].split():
        start, end, step, shift = re.fullmatch(r"(\w+)-(\w+)/(\d)([+-]\w+)", run).groups()  # type: ignore[union-attr]
        for code in range(int(start, 16), int(end, 16) + 1, int(step)):
            lower[code] = chr(code + int(shift, 16))
    ascii_punctuation = {
        code for start, end in _ASCII_PUNCTUATION for code in range(start, end + 1)
    }
    return UnicodeTables(
        control=_read_ranges(data["control"]),
        space=_read_ranges(data["space"]),
        punctuation=_read_ranges(data["punctuation"]) | ascii_punctuation,
        nonspacing_mark=_read_ranges(data["nonspacing_mark"]),
        cased=_read_ranges(data["cased"]),
        case_ignorable=_read_ranges(data["case_ignorable"]),
        combining_class={
            code: int(value)
            for value, ranges in data["combining_class"].items()
            for code in _read_ranges(ranges)
        },
        lower=lower,
        decomposition=_read_mappings(data["decomposition"]),
    )


@functools.cache
def library_tables() -> UnicodeTables:
    """Returns the tables of the library `tokenizers`, whose parts know other versions of Unicode."""
    tables = unicode_tables()
    other = json.loads(TABLES_PATH.with_name("unicode_library.json").read_text(encoding="utf-8"))
    return tables._replace(
        control=tables.control ^ _read_ranges(other["control"]),
        punctuation=tables.punctuation ^ _read_ranges(other["punctuation"]),
        nonspacing_mark=tables.nonspacing_mark ^ _read_ranges(other["nonspacing_mark"]),
        lower=tables.lower | _read_mappings(other["lower"]),
        decomposition=tables.decomposition | _read_mappings(other["decomposition"]),
    )


class _Images(dict[int, str]):
    """A table for `str.translate` that computes the replacement of a character when it first occurs."""

    def __init__(self, image: Callable[[int], str]):
        super().__init__()
        self._image = image

    def __missing__(self, code: int) -> str:
        return self.setdefault(code, self._image(code))


def _lower_googles(text: str) -> str:
    """Returns `text` with each capital sigma at the end of a word replaced by the final small sigma.

    A sigma is final if a cased letter comes before it and none after it, ignoring case-ignorable characters.
    Source: the Unicode standard, section 3.13, Final_Sigma; `str.lower`.
    """
    tables = unicode_tables()
    chars = list(text)

    def cased_letter(positions: range) -> bool:
        for position in positions:
            if ord(text[position]) not in tables.case_ignorable:
                return ord(text[position]) in tables.cased
        return False

    for position, char in enumerate(chars):
        if char == "Σ":
            before = range(position - 1, -1, -1)
            after = range(position + 1, len(text))
            if cased_letter(before) and not cased_letter(after):
                chars[position] = "ς"
    return "".join(chars)


def _canonical_order(text: str) -> list[int]:
    """Returns the positions of the characters of decomposed `text`, each run of combining ones sorted by class."""
    classes = unicode_tables().combining_class
    # A character that combines with nothing ends a run; the sort is stable.
    runs = itertools.accumulate(ord(char) not in classes for char in text)
    keys = [(run, classes.get(ord(char), 0)) for run, char in zip(runs, text)]
    return sorted(range(len(text)), key=keys.__getitem__)


@functools.cache
def _reorderable(google: bool) -> re.Pattern[str]:
    """Returns a pattern for characters with a combining class that survive the dropping of accents."""
    tables = unicode_tables() if google else library_tables()
    survivors = tables.combining_class.keys() - tables.nonspacing_mark
    sources = [
        code
        for code, image in tables.decomposition.items()
        if any(ord(char) in survivors for char in image)
    ]
    return re.compile("[" + "".join(map(chr, sorted(survivors.union(sources)))) + "]")


def _read_ranges(text: str) -> frozenset[int]:
    ends = [[int(end, 16) for end in item.split("-")] for item in text.split()]
    return frozenset(code for item in ends for code in range(item[0], item[-1] + 1))


def _read_mappings(text: str) -> dict[int, str]:
    pairs = [item.split("=") for item in text.split()]
    return {
        int(code, 16): "".join(chr(int(part, 16)) for part in image.split("."))
        for code, image in pairs
    }
