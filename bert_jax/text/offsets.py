# SPDX-License-Identifier: Apache-2.0
"""Offsets: the spans of tokens in their text, in code points.

A token's span covers the characters from which it was made. Spans overlap if one character became several tokens, as
a Hangul syllable can. Spans of blank tokens are empty. Characters that normalisation drops belong to no token, except
accents, which belong to the letter before them.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.storage.protobuf import DELIMITED, parse_fields, parse_varint

_SURROGATES = re.compile("[\ud800-\udfff]")


class TracedText(NamedTuple):
    """Text, with the start and end in the original text of each of its characters."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]

    def translate(self, images: Mapping[int, str], marks: Collection[int]) -> "TracedText":
        """Translates like `str.translate`; a dropped character in `marks` extends the span of the one before it."""
        parts: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        last = 0  # the length of the last image
        for char, start, end in zip(self.text, self.starts, self.ends):
            image = images[ord(char)]
            if image:
                last = len(image)
                parts.append(image)
                starts += [start] * last
                ends += [end] * last
            elif last and ord(char) in marks:
                ends[-last:] = [max(end, ends[-1])] * last
        return TracedText("".join(parts), starts, ends)

    def reorder(self, order: Sequence[int]) -> "TracedText":
        """Returns the characters at the positions `order`, in this order; others are dropped."""
        return TracedText(
            "".join([self.text[index] for index in order]),
            [self.starts[index] for index in order],
            [self.ends[index] for index in order],
        )

    def split(self) -> list["TracedText"]:
        """Returns the words between blanks, as `str.split` does."""
        words = []
        position = 0
        for word in self.text.split():
            start = self.text.index(word, position)
            position = start + len(word)
            words.append(TracedText(word, self.starts[start:position], self.ends[start:position]))
        return words

    def original_spans(self, spans: np.ndarray, length: int) -> np.ndarray:
        """Converts spans [n, 2] of this text to spans, [n, 2] int32, of the original, of `length` characters.

        An empty span stays empty, where the character at it begins.
        """
        starts, ends = (
            np.append(self.starts, length)[spans[:, 0]],
            np.append(0, self.ends)[spans[:, 1]],
        )
        return np.stack(
            [starts, np.where(spans[:, 0] == spans[:, 1], starts, ends)], axis=1
        ).astype(np.int32)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Returns the smallest span of the original that covers the characters [start, end)."""
        return min(self.starts[start:end]), max(self.ends[start:end])


def trace(text: str) -> TracedText:
    """Returns the traced form of an original text."""
    return TracedText(text, range(len(text)), range(1, len(text) + 1))


def without_surrogates(text: str) -> str:
    """Returns the text without halves of surrogate pairs, which libraries in other languages cannot have."""
    return text if text.isascii() else _SURROGATES.sub("", text)


def trace_without_surrogates(text: str) -> TracedText:
    """Returns the traced form of `without_surrogates`."""
    traced = trace(text)
    if text.isascii() or not _SURROGATES.search(text):
        return traced
    return traced.reorder(
        [position for position, char in enumerate(text) if not _SURROGATES.match(char)]
    )


def move_spans(spans: Sequence[int], counts: Sequence[int], distances: Sequence[int]) -> np.ndarray:
    """Returns [n, 2] int32 spans: the first `counts[0]` of them moved by `distances[0]`, and so on.

    `spans` are start, end, start, end..
    """
    moved = np.array(spans, np.int32).reshape(-1, 2)
    return moved + np.repeat(np.array(distances, np.int32), counts)[:, None]


def read_piece_spans(content: bytes) -> tuple[list[int], np.ndarray]:
    """Returns the ids of a SentencePieceText, and [n, 2] int64 spans of its pieces in bytes of UTF-8.

    Source: sentencepiece.proto of google/sentencepiece. The message is the only form of spans that all versions of
    the library hand out.
    """
    ids: list[int] = []
    spans: list[int] = []
    for tag, first, last in parse_fields(content, 0, len(content)):
        if tag == 2 << 3 | DELIMITED:  # a piece; other fields are the text and its score
            values = [0] * 6  # of its fields: 2 is its id, 4 and 5 are begin and end
            for inner, start, stop in parse_fields(content, first, last):
                if inner in (2 << 3, 4 << 3, 5 << 3):
                    values[inner >> 3] = (
                        content[start]
                        if stop == start + 1
                        else parse_varint(content, start, stop)[0]
                    )
            ids.append(values[2])
            spans += values[4:]
    return ids, np.array(spans, np.int64).reshape(-1, 2)


def to_code_points(text: str, spans: np.ndarray) -> np.ndarray:
    """Converts spans in bytes of UTF-8 to int32 spans in code points; a part of a character counts as all of it."""
    if text.isascii():
        return spans.astype(np.int32)
    # all bytes but those that continue a character
    leads = (np.frombuffer(text.encode("utf-8"), np.uint8) & 0xC0) != 0x80
    begun = np.concatenate([[0], np.cumsum(leads)])  # characters that begin before each byte
    starts = begun[np.minimum(spans[:, 0] + 1, len(leads))] - 1
    starts = np.where(spans[:, 0] >= len(leads), begun[-1], starts)
    return np.stack([starts, np.maximum(begun[spans[:, 1]], starts)], axis=1).astype(np.int32)


def trim_blanks(text: str, spans: np.ndarray, is_blank: np.ndarray) -> np.ndarray:
    """Returns [n, 2] int32 spans without blanks at their ends. Only spans of blank tokens may become empty.

    Args:
      text: the text that the spans refer to.
      spans: [n, 2] integers. If a character became several pieces, SentencePiece assigns it to the last.
      is_blank: [n] bool, whether a token is only a blank.
    """
    # For each position, the next character that is not blank, and the end of the last such character before it.
    solid = np.array([not char.isspace() for char in text], bool)
    places = np.arange(len(text) + 1)
    next_solid = np.append(np.where(solid, places[:-1], len(text)), len(text))
    next_solid = np.minimum.accumulate(next_solid[::-1])[::-1]
    last_solid = np.maximum.accumulate(np.append(0, np.where(solid, places[1:], 0)))
    starts = np.minimum(next_solid[spans[:, 0]], spans[:, 1])
    ends = np.maximum(last_solid[spans[:, 1]], starts)
    empty = (starts == ends) & ~is_blank
    starts = np.where(empty, np.minimum(next_solid[starts], max(len(text) - 1, 0)), starts)
    ends = np.where(empty, np.minimum(starts + 1, len(text)), ends)
    return np.stack([starts, ends], axis=1).astype(np.int32)
