# SPDX-License-Identifier: Apache-2.0
"""Offsets: the spans of tokens in their text, in code points.

A token's span covers the characters from which it was made. Spans overlap if one character became several tokens, as
a Hangul syllable can. Spans of blank tokens are empty. Characters that normalisation drops belong to no token, except
accents, which belong to the letter before them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np


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
        last = 0  # the number of characters that the last image has
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
        """Returns the characters at the positions `order`, in this order."""
        return TracedText(
            "".join([self.text[index] for index in order]),
            [self.starts[index] for index in order],
            [self.ends[index] for index in order],
        )

    def split(self) -> list["TracedText"]:
        """Returns the words between blanks, as `str.split` does."""
        words, position = [], 0
        for word in self.text.split():
            start = self.text.index(word, position)
            position = start + len(word)
            words.append(TracedText(word, self.starts[start:position], self.ends[start:position]))
        return words

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Returns the smallest span of the original that covers the characters [start, end)."""
        return min(self.starts[start:end]), max(self.ends[start:end])


def trace(text: str) -> TracedText:
    """Returns the traced form of an original text."""
    return TracedText(text, range(len(text)), range(1, len(text) + 1))


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
    position = 0
    while position < len(content):
        tag, size, position = _tag_and_value(content, position)
        if tag != 2 << 3 | 2:  # the text itself, or its score
            position += _length(tag, size)
            continue
        stop, values = position + size, [0] * 6
        while position < stop:  # the fields of a piece: 2 is its id, 4 and 5 are begin and end
            tag, value, position = _tag_and_value(content, position)
            if tag & 7:
                position += _length(tag, value)
            elif tag >> 3 < 6:
                values[tag >> 3] = value
        ids.append(values[2])
        spans += values[4:]
    return ids, np.array(spans, np.int64).reshape(-1, 2)


def _tag_and_value(content: bytes, position: int) -> tuple[int, int, int]:
    """Returns the tag of a protocol buffer's field, its number or the size of its content, and the next position."""
    tag, value = content[position], content[position + 1]
    position += 2
    if value >= 0x80 and tag & 5 == 0:
        shift, value = 7, value & 0x7F
        while True:
            byte = content[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
    return tag, value, position


def _length(tag: int, size: int) -> int:
    """Returns the number of bytes of a field that follow those read by `_tag_and_value`."""
    return {0: 0, 1: 7, 2: size, 5: 3}[tag & 7]  # a number of fixed size has 8 or 4 bytes


def to_code_points(text: str, spans: np.ndarray) -> np.ndarray:
    """Converts spans in bytes of UTF-8 to int32 spans in code points; a part of a character counts as all of it."""
    if text.isascii():
        return spans.astype(np.int32)
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
