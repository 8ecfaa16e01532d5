# SPDX-License-Identifier: Apache-2.0
"""WordPiece vocabularies: reads them from a file, or learns them from text.

Learning is deterministic: it uses only the counts of words, and ties go to the pair of tokens that was learnt first.
Hash order, threads and the division of the text into files have no effect.
"""

import collections
import heapq
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from bert_jax.errors import InputError, not_utf8
from bert_jax.text.normalize import Normalizer, blank_separated

JsonObject: TypeAlias = dict[str, Any]  # an object as json.loads returns it

CONTINUATION = "##"  # marks a token that goes on with a word
MAX_WORD_LENGTH = 200  # characters; a longer word is [UNK]
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Template(NamedTuple):
    """How rows are made of texts: [CLS] A [SEP], and [CLS] A [SEP] B [SEP], by these names."""

    specials: tuple[str, ...] = SPECIAL_TOKENS  # the names of `SPECIAL_TOKENS` in the vocabulary
    separators: int = 1  # the number of [SEP] between A and B
    second_type: int = 1  # the type of B's tokens; 0 as A's
    # put before a sentence or word that follows another, where that changes its tokens
    blank: str = ""
    # Where both texts of a pair are cut and the room for tokens is odd, the longer text has one more, as in Hugging
    # Face's tokenizers, or the second of equals; if not, the first has it, as in Google's code.
    odd_to_longer: bool = False


MIN_COUNT = 2  # a token must occur this often in the text
_UNUSED_BEFORE_UNK = 99  # in Google's files [UNK] has id 100


def parse_vocab(content: bytes, where: object) -> list[str]:
    """Returns the tokens of a vocabulary file, one per line, in the order of their ids.

    Raises: InputError, with the name of the file, if it is empty or not UTF-8.
    """
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()  # the line end of the last token
    if not any(map(bytes.strip, lines)):
        raise InputError(f"vocabulary {where} is empty; give a file of one token per line")
    vocab = []
    for number, line in enumerate(lines, 1):
        try:
            vocab.append(line.decode("utf-8").strip())
        except UnicodeDecodeError as error:
            raise not_utf8(error, f"vocabulary {where}, line {number}") from None
    return vocab


def vocab_bytes(vocab: Sequence[str]) -> bytes:
    """Returns the content of a vocabulary file."""
    return "".join(token + "\n" for token in vocab).encode("utf-8")


def encode_between(
    text: str,
    ids: Mapping[str, int],
    encode: Callable[[str], list[int]],
    go_on: Callable[[str], list[int]],
) -> list[int]:
    """Returns the ids of text in which `SPECIAL_TOKENS` stand for themselves; `go_on` encodes the text after one."""
    first, *parts = re.split("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")", text)
    encoded = list(encode(first))
    for part in parts:
        encoded += [ids[part]] if part in SPECIAL_TOKENS else go_on(part)
    return encoded


class WordCounts:
    """Counts the words of any amount of text in bounded memory.

    Counts are exact for up to `max_words` different words. Above that, the rarest words are dropped until half of
    `max_words` are left. With a million words, the dropped ones are too rare to become tokens.
    """

    def __init__(self, normalizer: Normalizer, max_words: int = 1_000_000):
        self.normalizer = normalizer
        self.max_words = max_words
        # Counts of raw strings between blanks, so that each different string is normalised only once.
        self._raw: collections.Counter[str] = collections.Counter()
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, text: str) -> None:
        """Counts the words of `text`, which must be whole lines: a word must not continue in the next call."""
        self._raw.update(blank_separated(text))
        if len(self._raw) + len(self._counts) > self.max_words:
            self._normalize()
            self._forget()

    def result(self) -> dict[str, int]:
        """Returns word -> count, sorted by word."""
        self._normalize()
        return dict(sorted(self._counts.items()))

    def _normalize(self) -> None:
        for raw, count in self._raw.items():
            for word in self.normalizer(raw):
                self._counts[word] += count
        self._raw.clear()

    def _forget(self) -> None:
        threshold = 0
        while len(self._counts) > self.max_words // 2:
            threshold += 1
            self._counts = collections.Counter(
                {word: count for word, count in self._counts.items() if count > threshold}
            )


@dataclass(frozen=True)
class LearntVocab:
    """A vocabulary and how well it fits the text it was learnt from.

    Attributes:
      vocab: the tokens in the order of their ids.
      num_words: words counted in the text.
      unknown_words: those that become [UNK], for a character outside the alphabet or for their length.
      num_tokens: tokens that the other words become.
      num_characters: characters of the other words.
    """

    vocab: list[str]
    num_words: int
    unknown_words: int
    num_tokens: int
    num_characters: int


def learn_vocab(
    counts: dict[str, int],
    normalizer: Normalizer,
    vocab_size: int,
    alphabet_size: int = 1000,
    num_unused: int = 0,
) -> LearntVocab:
    """Returns a vocabulary of exactly `vocab_size` tokens: special, unused, characters, then frequent pieces.

    Starting from single characters, the pair of neighbouring tokens that occurs most often becomes a token,
    again and again (byte-pair encoding). WordPiece proper weighs pairs by likelihood, but Google never published
    its trainer, and Hugging Face's WordPieceTrainer counts pairs too.

    Args:
      counts: word -> how often the text has it.
      normalizer: what made the words; characters that it sets apart need no `##` form.
      vocab_size: V.
      alphabet_size: the most characters that get tokens, most frequent first. Words with others are [UNK].
        English Wikipedia quotes thousands of Chinese characters, which would crowd out words.
      num_unused: places named [unused0], [unused1].. for tokens added later, laid out as in Google's files.
    Raises: InputError if vocab_size is too small for the characters or too large for the text.
    """
    reserved = reserved_tokens(num_unused)
    alphabet = _alphabet(counts, alphabet_size)
    inner = [CONTINUATION + char for char in alphabet if not normalizer.stands_alone(char)]
    vocab = [*reserved, *alphabet, *inner]
    if not alphabet:
        raise InputError("the input holds no words to learn a vocabulary from; give text")
    if len(vocab) > vocab_size:
        few = f"vocab_size {vocab_size} is too small for special, unused and one-character tokens"
        raise InputError(
            f"{few}; use --vocab_size={len(vocab)} or more, or a smaller --alphabet_size"
        )
    known = set(alphabet)
    words = {
        word: count
        for word, count in counts.items()
        if len(word) <= MAX_WORD_LENGTH and known.issuperset(word)
    }
    pieces = _PieceLearner(vocab, words)
    while len(pieces.vocab) < vocab_size:
        if not pieces.learn_one():
            most = f"--vocab_size={len(pieces.vocab)} or less, or more text"
            raise InputError(f"vocab_size {vocab_size} is too large for this text; use {most}")
    num_words = sum(counts.values())
    return LearntVocab(
        vocab=pieces.vocab,
        num_words=num_words,
        unknown_words=num_words - sum(words.values()),
        num_tokens=pieces.num_tokens(),
        num_characters=sum(len(word) * count for word, count in words.items()),
    )


def reserved_tokens(num_unused: int) -> list[str]:
    """Returns the special tokens, and the unused ones where Google's vocabularies have them."""
    unused = [f"[unused{index}]" for index in range(num_unused)]
    return [
        "[PAD]",
        *unused[:_UNUSED_BEFORE_UNK],
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *unused[_UNUSED_BEFORE_UNK:],
    ]


def _alphabet(counts: dict[str, int], size: int) -> list[str]:
    """Returns the most frequent characters, sorted by code point."""
    chars: collections.Counter[str] = collections.Counter()
    for word, count in counts.items():
        for char in word:
            chars[char] += count
    return sorted(sorted(chars, key=lambda char: (-chars[char], char))[:size])


class _PieceLearner:
    """Words as lists of tokens, and where each pair of neighbours occurs, kept up to date as tokens are joined.

    A pair of token ids (left, right) is stored as one integer, left << 32 | right: faster than a tuple.
    """

    def __init__(self, vocab: list[str], words: dict[str, int]):
        self.vocab = list(vocab)
        self._ids = {token: index for index, token in enumerate(vocab)}
        self._counts = list(words.values())
        self._words = [
            [
                self._ids[char if position == 0 else CONTINUATION + char]
                for position, char in enumerate(word)
            ]
            for word in words
        ]
        self._pair_counts: collections.defaultdict[int, int] = collections.defaultdict(int)
        # Words that have, or once had, the pair: checking a few words in vain is cheaper than exact lists.
        self._places: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
        for index, (word, count) in enumerate(zip(self._words, self._counts)):
            for left, right in zip(word, word[1:]):
                pair = left << 32 | right
                self._pair_counts[pair] += count
                self._places[pair].append(index)
        # Counts in the heap may be out of date, but never too small: a pair is pushed whenever it grows.
        self._heap = [(-count, pair) for pair, count in self._pair_counts.items()]
        heapq.heapify(self._heap)

    def learn_one(self) -> bool:
        """Makes the most frequent pair one token. Returns whether there was one to make.

        The vocabulary may stay as it is: "a" + "##bc" and "ab" + "##c" are the same token.
        """
        while self._heap:
            negative_count, pair = heapq.heappop(self._heap)
            count = self._pair_counts.get(pair, 0)
            if count == -negative_count and count >= MIN_COUNT:
                self._join(pair)
                return True
            # It has lost some of its places to other pairs since it was pushed.
            if MIN_COUNT <= count < -negative_count:
                heapq.heappush(self._heap, (-count, pair))
        return False

    def num_tokens(self) -> int:
        """Returns the current number of tokens of the text."""
        return sum(len(word) * count for word, count in zip(self._words, self._counts))

    def _join(self, pair: int) -> None:
        left = pair >> 32
        right = pair & 0xFFFFFFFF
        token = self.vocab[left] + self.vocab[right].removeprefix(CONTINUATION)
        joined = self._ids.setdefault(token, len(self.vocab))
        if joined == len(self.vocab):
            self.vocab.append(token)
        grown = set()
        counts = self._pair_counts
        # Sets of integers, whose order does not show: counts are sums, and the heap orders what is
        # pushed.
        for index in set(self._places.pop(pair)):
            word = self._words[index]
            count = self._counts[index]
            for position in range(len(word) - 1):
                if word[position : position + 2] != [left, right]:
                    continue
                word[position : position + 2] = [joined]  # and its neighbours have a new neighbour
                if position > 0:
                    counts[word[position - 1] << 32 | left] -= count
                    grown.add(new_pair := word[position - 1] << 32 | joined)
                    counts[new_pair] += count
                    self._places[new_pair].append(index)
                if position + 1 < len(word):
                    counts[right << 32 | word[position + 1]] -= count
                    grown.add(new_pair := joined << 32 | word[position + 1])
                    counts[new_pair] += count
                    self._places[new_pair].append(index)
        del counts[pair]
        for new_pair in grown:
            heapq.heappush(self._heap, (-counts[new_pair], new_pair))
