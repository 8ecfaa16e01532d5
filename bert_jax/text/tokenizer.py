# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back.

`Tokenizer` is what the rest of the project knows: a vocabulary, and a function from text to ids. `WordPiece` is
that function for BERT's vocabularies, token for token what google-research/bert computes.
"""

import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax import storage
from bert_jax.errors import InputError
from bert_jax.text.normalize import Normalizer, blank_separated, unicode_tables
from bert_jax.text.vocab import CONTINUATION, MAX_WORD_LENGTH, SPECIAL_TOKENS, read_vocab, vocab_bytes

_CACHED_WORDS = 500_000  # about 150 MB; as many different words as there are in 50 MB of English text
_CONFIG_NAME = "tokenizer_config.json"


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary and the function that turns text into its ids.

    Attributes:
      vocab: the tokens, in the order of their ids.
      pieces: text -> ids, without special tokens; specials written out in the text are ordinary characters to it.
      config: the options of `pieces`, under Hugging Face's names; what `save` writes beside the vocabulary.
      kind: the algorithm of `pieces`.
    """

    vocab: Sequence[str]
    pieces: Callable[[str], list[int]]
    config: dict[str, Any]
    kind: str = "wordpiece"
    _ids: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", {token: index for index, token in enumerate(self.vocab)})

    @property
    def vocab_size(self) -> int:
        """Returns V, the number of ids."""
        return len(self.vocab)

    @property
    def lowercase(self) -> bool:
        """Returns whether text is lower-cased."""
        return self.config["do_lower_case"]

    @property
    def strip_accents(self) -> bool:
        """Returns whether accents are dropped."""
        return self.config["strip_accents"]

    @property
    def pad_id(self) -> int:
        """Returns the id of [PAD]."""
        return self._ids["[PAD]"]

    @property
    def unk_id(self) -> int:
        """Returns the id of [UNK]."""
        return self._ids["[UNK]"]

    @property
    def cls_id(self) -> int:
        """Returns the id of [CLS]."""
        return self._ids["[CLS]"]

    @property
    def sep_id(self) -> int:
        """Returns the id of [SEP]."""
        return self._ids["[SEP]"]

    @property
    def mask_id(self) -> int:
        """Returns the id of [MASK]."""
        return self._ids["[MASK]"]

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Returns the ids of [PAD], [UNK], [CLS], [SEP] and [MASK], in this order."""
        return tuple(self._ids[token] for token in SPECIAL_TOKENS)

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        """Returns [V] bool: whether a token begins a word, so False for the `##` pieces."""
        return np.array([not token.startswith(CONTINUATION) for token in self.vocab])

    @functools.cached_property
    def fingerprint(self) -> str:
        """Returns a sha256 over all that decides which ids a text gets: vocabulary, options and algorithm."""
        options = json.dumps([self.kind, self.config], sort_keys=True)
        return hashlib.sha256(options.encode() + b"\n" + vocab_bytes(self.vocab)).hexdigest()

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Returns the ids of `text`; no special tokens are added.

        Args:
          text: any text; line ends are blanks.
          allow_special: whether special tokens written out, as in "Paris is the [MASK] of France.", stand for
            themselves. If not, they are text, as in the reference: `[ mask ]`.
        """
        if not allow_special:
            return self.pieces(text)
        parts = re.split("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")", text)
        ids = [[self._ids[part]] if part in SPECIAL_TOKENS else self.pieces(part) for part in parts]
        return list(itertools.chain.from_iterable(ids))

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Returns the ids of each text."""
        return [self.pieces(text) for text in texts]

    def tokenize(self, text: str, allow_special: bool = False) -> list[str]:
        """Returns the tokens of `text`: "unaffable" -> ["una", "##ffa", "##ble"]."""
        return self.tokens(self.encode(text, allow_special))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Returns the tokens with these ids."""
        return [self.vocab[index] for index in ids]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Returns readable text: words parted by blanks, `##` pieces joined to the piece before.

        Args:
          ids: token ids.
          skip_special: whether to leave out the five special tokens.
        """
        skipped = frozenset(self.special_ids if skip_special else ())
        text = " ".join(self.vocab[index] for index in ids if index not in skipped)
        return text.replace(" " + CONTINUATION, "")

    def id_of(self, token: str) -> int:
        """Returns the id of a token; where the vocabulary has it twice, the last one.

        Raises: InputError if the vocabulary does not have it.
        """
        if token not in self._ids:
            raise InputError(f"token {token!r} is not in the vocabulary of {self.vocab_size}; tokenize() splits words")
        return self._ids[token]

    def save(self, directory: str | os.PathLike) -> None:
        """Writes vocab.txt and tokenizer_config.json, which Hugging Face's BertTokenizer reads too."""
        with storage.atomic_path(Path(directory) / "vocab.txt") as temporary:
            temporary.write_bytes(vocab_bytes(self.vocab))
        storage.write_json(Path(directory) / _CONFIG_NAME, {"tokenizer_class": "BertTokenizer", **self.config})


class WordPiece:
    """Maps text to ids: words by `Normalizer`, then the longest token that matches, again and again.

    The work is done once per different word: most of a text is words seen before, which cost one look-up.

    Source: google-research/bert tokenization.py, FullTokenizer and WordpieceTokenizer.
    """

    def __init__(self, vocab: Sequence[str], normalizer: Normalizer):
        self._vocab = vocab
        self.normalizer = normalizer
        self._tokens = {token: index for index, token in enumerate(vocab)}
        self._longest = max(map(len, vocab))
        self._words = _Memo(self._blank_separated)
        self._normal_words = _Memo(self._pieces_of_word)

    def __reduce__(self) -> tuple:
        return WordPiece, (self._vocab, self.normalizer)  # without the words seen so far

    def __call__(self, text: str) -> list[int]:
        return list(itertools.chain.from_iterable(map(self._words.__getitem__, blank_separated(text))))

    def _blank_separated(self, word: str) -> tuple[int, ...]:
        """Returns the ids of text without blanks, such as "(Hello)," or a Chinese sentence."""
        return tuple(itertools.chain.from_iterable(map(self._normal_words.__getitem__, self.normalizer(word))))

    def _pieces_of_word(self, word: str) -> tuple[int, ...]:
        """Returns the ids of a normalised word; [UNK] if any part of it has no token."""
        if len(word) > MAX_WORD_LENGTH:
            return (self._tokens["[UNK]"],)
        ids = []
        prefix, start = "", 0
        while start < len(word):
            for end in range(min(len(word), start + self._longest), start, -1):
                piece = self._tokens.get(prefix + word[start:end])
                if piece is not None:
                    break
            else:
                return (self._tokens["[UNK]"],)
            ids.append(piece)
            prefix, start = CONTINUATION, end
        return tuple(ids)


def wordpiece_tokenizer(
    vocab: Sequence[str], lowercase: bool, strip_accents: bool | None = None, split_chinese: bool = True
) -> Tokenizer:
    """Returns the tokenizer of a WordPiece vocabulary.

    Args:
      vocab: the tokens in the order of their ids.
      lowercase: whether text is lower-cased.
      strip_accents: whether accents are dropped; None follows `lowercase`.
      split_chinese: whether each Chinese character is a word.
    Raises: InputError if a special token is missing.
    """
    missing = [token for token in SPECIAL_TOKENS if token not in vocab]
    if missing:
        raise InputError(
            f"the vocabulary of {len(vocab)} tokens lacks {', '.join(missing)}; each of {', '.join(SPECIAL_TOKENS)}"
            " must be a line of it"
        )
    normalizer = Normalizer(lowercase, strip_accents, split_chinese)
    config = {
        "do_lower_case": normalizer.lowercase,
        "strip_accents": normalizer.strip_accents,
        "tokenize_chinese_chars": normalizer.split_chinese,
    }
    return Tokenizer(tuple(vocab), WordPiece(tuple(vocab), normalizer), config)


def load_tokenizer(
    path: str | os.PathLike, lowercase: bool | None = None, strip_accents: bool | None = None
) -> Tokenizer:
    """Returns the tokenizer of a vocabulary file, or of a directory with vocab.txt and tokenizer_config.json.

    Args:
      path: the file or directory, ours or Hugging Face's.
      lowercase: overrides tokenizer_config.json. Without either, text is lower-cased unless the vocabulary
        holds capital letters (bracketed tokens such as [CLS] apart).
      strip_accents: overrides tokenizer_config.json. Without either it follows `lowercase`.
    Raises: InputError if there is no vocabulary, or an unusable one.
    """
    path, config = Path(path), {}
    if path.is_dir():
        if (path / _CONFIG_NAME).exists():
            config = storage.read_json(path / _CONFIG_NAME)
        if not (path / "vocab.txt").exists():
            raise InputError(f"directory {path} holds no vocab.txt; give a vocabulary file, or where build_vocab wrote")
        path = path / "vocab.txt"
    if not isinstance(config, dict) or not config.get("do_basic_tokenize", True):
        raise InputError(f"{path.with_name(_CONFIG_NAME)} does not describe a BERT tokenizer; give vocab.txt itself")
    vocab = read_vocab(path)
    if lowercase is None:
        lowercase = config.get("do_lower_case")
    if strip_accents is None:
        strip_accents = config.get("strip_accents")
    try:
        return wordpiece_tokenizer(
            vocab,
            lowercase=not _holds_capitals(vocab) if lowercase is None else lowercase,
            strip_accents=strip_accents,
            split_chinese=config.get("tokenize_chinese_chars", True),
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _holds_capitals(vocab: Sequence[str]) -> bool:
    bracketed = re.compile(r"\[.*\]|<.*>")
    capitals = unicode_tables().lower
    return any(ord(char) in capitals for token in vocab if not bracketed.fullmatch(token) for char in token)


class _Memo(dict[str, tuple[int, ...]]):
    """A function of a word with its results so far; forgotten when there are too many, to bound memory."""

    def __init__(self, function: Callable[[str], tuple[int, ...]]):
        super().__init__()
        self._function = function

    def __missing__(self, word: str) -> tuple[int, ...]:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        ids = self._function(word)
        if len(word) <= MAX_WORD_LENGTH:  # a page of Chinese has no blanks: it is one long "word", seen once
            self[word] = ids
        return ids
