# SPDX-License-Identifier: Apache-2.0
"""Encodes many texts at once: words are found, looked up and joined as arrays, without a Python loop over words.

Texts are UTF-8 bytes. A word seen before costs one look-up in a hash table made of arrays. Only new words are
normalised and split into tokens, by the same code as for a single text, so the ids are the same.

Measured on 20 MB of English Wikipedia, a dict of words takes 2.3 times the CPU time; see docs/optimization_log.md,
entry 10.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.text.normalize import Normalizer, without_control_blanks

_KEY_BYTES = 16  # of a word that the table holds; a longer one is in a dict
# as many different ones as there are in 50 MB of English text; 30 MB with their ids
_CACHED_WORDS = 500_000

# The code points that `str.split` takes for blanks, beside 9 to 13, 28 to 31 and 32.
# two or three bytes
_WIDE_BLANKS = [chr(code).encode() for code in range(128, 0x10000) if chr(code).isspace()]
_WIDE_LEADS = np.isin(np.arange(256), [blank[0] for blank in _WIDE_BLANKS])
_WIDE_CODES = {
    size: np.array([int.from_bytes(blank, "big") for blank in _WIDE_BLANKS if len(blank) == size])
    for size in (2, 3)
}
# What a key keeps of the 8 bytes at a word's start, and of the next 8, by the word's length.
_MASKS = [
    np.array(
        [(1 << 8 * min(max(size - skipped, 0), 8)) - 1 for size in range(_KEY_BYTES + 1)], "<u8"
    )
    for skipped in (0, 8)
]


class Words(NamedTuple):
    """The words of some lines: byte ranges between blanks."""

    raw: bytes  # all lines, and `_KEY_BYTES` more
    starts: np.ndarray  # int64 [W]
    stops: np.ndarray  # int64 [W]
    line_counts: np.ndarray  # int64 [lines]: the number of words of each line


def find_words(lines: bytes) -> Words:
    r"""Returns the words of lines separated by "\n", as `str.split` finds them."""
    # Blanks around, so that the first and the last word have two edges; and zeros, so that a key
    # can be read at every byte.
    raw = b"\n" + lines + b"\n" + bytes(_KEY_BYTES)
    data = np.frombuffer(raw, np.uint8)[:-_KEY_BYTES]
    # Unsigned: what is below 9 or 28 wraps around and is large, so one comparison does for a range.
    blank = (data == ord(" ")) | (data - np.uint8(9) <= 13 - 9) | (data - np.uint8(28) <= 31 - 28)
    if not lines.isascii():
        leads = np.flatnonzero(data >= 128)
        leads = leads[_WIDE_LEADS[data[leads]]]
        codes = data[leads].astype(np.int64) << 8 | data[leads + 1]
        for size, known in _WIDE_CODES.items():
            if size == 3:
                codes = codes << 8 | data[np.minimum(leads + 2, len(data) - 1)]
            wide = leads[np.isin(codes, known)]
            for offset in range(size):
                blank[wide + offset] = True
    edges = np.flatnonzero(blank[1:] != blank[:-1]) + 1
    starts = edges[::2]
    stops = edges[1::2]
    ends = np.flatnonzero(data[1:] == ord("\n")) + 1
    return Words(raw, starts, stops, np.diff(np.searchsorted(starts, ends), prepend=0))


class WordNumbers:
    """Numbers for distinct words, from 1: a hash table with vectorized look-ups.

    Number 0 means no word. It is also the number of a word of NUL bytes, which are dropped from any text.
    """

    def __init__(self) -> None:
        self.count = 1  # numbers given, 0 among them
        # the numbers of words, near their hashes; 0 is free
        self._slots = np.zeros(1 << 10, np.int32)
        self._keys = np.zeros((2, 1 << 10), "<u8")  # the bytes of each short word, by its number
        self._long: dict[bytes, int] = {}

    def look_up(self, words: Words) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of words [W], and the indices [N] of new ones, in the order of their numbers."""
        lengths = words.stops - words.starts
        num_places = len(words.raw) - 7
        # Eight bytes from every byte on, as numbers, without a copy: items of a view that overlap,
        # one byte apart.
        first, second = (
            np.ndarray(num_places - skipped, "<u8", words.raw, skipped, (1,))[words.starts]
            & masks.take(np.minimum(lengths, _KEY_BYTES))
            for skipped, masks in zip((0, 8), _MASKS)
        )
        (long,) = np.nonzero(lengths > _KEY_BYTES)
        if len(long):
            (short,) = np.nonzero(lengths <= _KEY_BYTES)
            numbers = np.zeros(len(lengths), np.int32)
            numbers[short], new = self._look_up_short(first[short], second[short])
            new = short[new]
        else:
            numbers, new = self._look_up_short(first, second)
        new_long = []
        for index in long.tolist():
            word = words.raw[words.starts[index] : words.stops[index]]
            number = self._long.get(word)
            if number is None:
                number = self._long[word] = self.count
                self.count += 1
                new_long.append(index)
            numbers[index] = number
        return numbers, np.concatenate([new, np.array(new_long, np.int64)])

    def _look_up_short(
        self, first: np.ndarray, second: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of keys [W], and the indices of new ones."""
        self._make_room(len(first))
        slots = self._home(first, second)
        numbers = self._slots[slots]
        new = []
        pending = np.flatnonzero(
            (self._keys[0][numbers] != first) | (self._keys[1][numbers] != second)
        )
        while len(pending):
            wanted = slots[pending]
            free = self._slots[wanted] == 0
            if free.any():
                # Each key claims its slot; if several want one, the last to write gets it.
                claimed = wanted[free]
                places = pending[free]
                claims = np.arange(len(places), dtype=np.int32)
                self._slots[claimed] = claims
                won = self._slots[claimed] == claims
                places = places[won]
                new.append(places)
                given = slice(self.count, self.count + len(places))
                self._keys[0, given], self._keys[1, given] = first[places], second[places]
                self._slots[claimed[won]] = np.arange(given.start, given.stop)
                self.count = given.stop
            held = self._slots[wanted]
            right = (self._keys[0][held] == first[pending]) & (
                self._keys[1][held] == second[pending]
            )
            numbers[pending[right]] = held[right]
            pending = pending[~right]
            slots[pending] = (slots[pending] + 1) & (len(self._slots) - 1)
        return numbers, np.concatenate([*new, np.zeros(0, np.int64)])

    def _home(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Returns the first slot to look at."""
        mixed = (first ^ (second * np.uint64(0xC2B2AE3D27D4EB4F))) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
        # The upper bits of a product depend on all bits of its factors, the lower ones on the lower
        # alone.
        return (mixed >> np.uint64(65 - len(self._slots).bit_length())).astype(np.int64)

    def _make_room(self, num_words: int) -> None:
        """Makes room for more words; half of the slots stay free."""
        most = self.count + num_words
        if most > self._keys.shape[1]:
            self._keys = np.pad(self._keys, ((0, 0), (0, 2 * most - self._keys.shape[1])))
        if 2 * most <= len(self._slots):
            return
        numbers = self._slots[self._slots > 0]
        self._slots = np.zeros(2 << (2 * most).bit_length(), np.int32)
        slots = self._home(self._keys[0][numbers], self._keys[1][numbers])
        # Whoever finds another number in its slot goes on to the next one.
        while len(numbers):
            free = self._slots[slots] == 0
            self._slots[slots[free]] = numbers[free]
            left = self._slots[slots] != numbers
            numbers, slots = numbers[left], (slots[left] + 1) & (len(self._slots) - 1)


class Lists:
    """Lists of ids by word number; number 0 has an empty list."""

    def __init__(self, dtype: np.dtype):
        self.counts = np.zeros(1, np.int64)
        self._starts = np.zeros(1, np.int64)
        self.ids = np.zeros(0, dtype)

    def extend(self, ids: np.ndarray, counts: np.ndarray) -> None:
        """Adds lists for the next numbers, given as concatenated ids and the length of each list."""
        self._starts = np.concatenate([self._starts, len(self.ids) + np.cumsum(counts) - counts])
        self.counts = np.concatenate([self.counts, counts])
        self.ids = np.concatenate([self.ids, ids.astype(self.ids.dtype)])

    def join(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the concatenated ids of the words with these numbers, and the end of each word."""
        counts = self.counts[numbers]
        ends = np.cumsum(counts)
        positions = np.repeat(self._starts[numbers] - ends + counts, counts)
        positions += np.arange(len(positions))
        return self.ids[positions], ends


class BatchEncoder:
    """Maps texts to ids: `normalizer` makes words of a text, and `pieces_of_word` gives the ids of a word."""

    def __init__(
        self,
        normalizer: Normalizer,
        pieces_of_word: Callable[[str], Sequence[int]],
        vocab_size: int,
    ):
        self._normalizer = normalizer
        self._pieces_of_word = pieces_of_word
        self._dtype = np.min_scalar_type(vocab_size - 1)
        # The replacement of each byte; bytes that are not ASCII stay, and so do line ends.
        images = [
            b"\n" if code == 10 else normalizer.image(chr(code)).encode() for code in range(128)
        ]
        images += [bytes([code]) for code in range(128, 256)]
        self._bytes = Lists(np.dtype(np.uint8))
        self._bytes.extend(np.frombuffer(b"".join(images), np.uint8), np.array([*map(len, images)]))
        self._lock = threading.Lock()  # all threads share the tables below
        self._forget()

    def _forget(self) -> None:
        self._raw = WordNumbers()
        self._raw_ids = Lists(self._dtype)
        self._normal = WordNumbers()
        self._normal_ids = Lists(self._dtype)

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the concatenated ids of all texts, and the number of ids of each."""
        lines = "\n".join(texts)
        if lines.count("\n") != max(len(texts) - 1, 0):
            lines = "\n".join(text.replace("\n", " ") for text in texts)
        words = find_words(_to_bytes(without_control_blanks(lines)))
        with self._lock:
            # All at once: the numbers of one table are places in another.
            if (
                max(self._raw.count, self._normal.count, len(self._raw_ids.ids) // 4)
                > _CACHED_WORDS
            ):
                self._forget()
            numbers, new = self._raw.look_up(words)
            if len(new):
                self._raw_ids.extend(*self._encode_words(_take_words(words, new)))
            ids, counts = _count_lines(*self._raw_ids.join(numbers), words.line_counts)
        return ids, counts[: len(texts)]  # no text is a line too

    def _encode_words(self, blank_separated: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the concatenated ids of strings without blanks, and the number of ids of each."""
        # A string that is not ASCII is normalised as a single text; ASCII in its words is mapped to itself below.
        plain = [
            word if word.isascii() else " ".join(self._normalizer(word)) for word in blank_separated
        ]
        letters = np.frombuffer(_to_bytes("\n".join(plain)), np.uint8).astype(np.int64)
        letters += 1  # number 0 has nothing
        words = find_words(self._bytes.join(letters)[0].tobytes())
        numbers, new = self._normal.look_up(words)
        if len(new):
            pieces = list(map(self._pieces_of_word, _take_words(words, new)))
            counts = np.fromiter(map(len, pieces), np.int64, len(pieces))
            self._normal_ids.extend(
                np.array([index for word in pieces for index in word], self._dtype), counts
            )
        return _count_lines(*self._normal_ids.join(numbers), words.line_counts)


class SpacedEncoder:
    """Maps texts to ids where a word has the same ids, with the blank before it, in every text.

    A text whose words have one blank between them is looked up word by word. Any other is encoded whole, as new words
    are, by `encode`, which returns the concatenated ids of texts, and the number of ids of each.
    """

    def __init__(
        self, encode: Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]], vocab_size: int
    ):
        self._encode = encode
        self._dtype = np.min_scalar_type(vocab_size - 1)
        self._lock = threading.Lock()  # all threads share the tables below
        self._forget()

    def _forget(self) -> None:
        self._numbers = WordNumbers()
        self._ids = Lists(self._dtype)

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the concatenated ids of all texts, and the number of ids of each."""
        # A line is a text, and NUL would be part of a word that the table cannot tell from one without it.
        lines = ["" if "\n" in text or "\0" in text else text for text in texts]
        words, spaced = _spaced_words(find_words(_to_bytes("\n".join(lines))))
        spaced = spaced[: len(texts)]  # no text is a line too
        with self._lock:
            if max(self._numbers.count, len(self._ids.ids) // 4) > _CACHED_WORDS:
                self._forget()
            try:
                numbers, new = self._numbers.look_up(words)
                if len(new):
                    self._ids.extend(*self._encode(_take_words(words, new)))
            except BaseException:
                self._forget()  # some words have numbers, and no ids
                raise
            looked_up, counts_of_spaced = _count_lines(*self._ids.join(numbers), words.line_counts)
        if spaced.all():
            return looked_up, counts_of_spaced
        whole, counts_of_others = self._encode(
            [text for text, is_spaced in zip(texts, spaced) if not is_spaced]
        )
        counts = np.zeros(len(texts), np.int64)
        counts[spaced], counts[~spaced] = counts_of_spaced, counts_of_others
        of_spaced = np.repeat(spaced, counts)
        ids = np.zeros(len(of_spaced), self._dtype)
        ids[of_spaced], ids[~of_spaced] = looked_up, whole
        return ids, counts


def _spaced_words(words: Words) -> tuple[Words, np.ndarray]:
    """Returns the words, with the blank before each, of lines with one between them, and which lines [n] those are."""
    data = np.frombuffer(words.raw, np.uint8)
    before = data[words.starts - 1]
    is_odd = (before != ord(" ")) & (before != ord("\n"))
    edges = np.cumsum(np.append(0, words.line_counts))
    in_words, odd = (
        np.diff(np.append(0, np.cumsum(each))[edges])
        for each in (words.stops - words.starts, is_odd)
    )
    sizes = np.diff(np.flatnonzero(data == ord("\n"))) - 1
    spaced = (sizes == in_words + words.line_counts - 1) & (odd == 0)
    chosen = np.repeat(spaced, words.line_counts)
    starts = (words.starts - (before == ord(" ")))[chosen]
    return Words(words.raw, starts, words.stops[chosen], words.line_counts[spaced]), spaced


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _take_words(words: Words, indices: np.ndarray) -> list[str]:
    """Returns the words at these indices [N]."""
    spans = zip(words.starts[indices].tolist(), words.stops[indices].tolist())
    return (
        b"\n".join([words.raw[start:stop] for start, stop in spans])
        .decode("utf-8", "surrogatepass")
        .split("\n")
    )


def _count_lines(
    ids: np.ndarray, word_ends: np.ndarray, line_counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids unchanged, and the number of ids of each line."""
    ends = np.append(0, word_ends)[np.cumsum(line_counts)]
    return ids, np.diff(ends, prepend=0)
