# SPDX-License-Identifier: Apache-2.0
"""WordPiece: splits each word of a text into the longest tokens that match, as BERT does."""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from bert_jax.text.normalize import (
    Normalizer,
    blank_separated,
    spans_between_blanks,
    unicode_tables,
)
from bert_jax.text.offsets import move_spans
from bert_jax.text.tokenizer_files import VOCAB
from bert_jax.text.vocab import (
    CONTINUATION,
    MAX_WORD_LENGTH,
    JsonObject,
    Template,
    encode_between,
    vocab_bytes,
)
from bert_jax.text.words import BatchEncoder

GOOGLE = "google_rules"  # our own option: `Normalizer.google`
ODD = "odd_token_to_longer"  # our own option: `Template.odd_to_longer`
INPUTS = "model_input_names"  # Hugging Face's: what rows have; without token_type_ids these are 0
LONGEST_WORD = "max_input_chars_per_word"  # Hugging Face's name of the option
GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that follow tokenizer.json
# Its classes of BERT's tokenizer, and those that say nothing; another class splits text in another way.
_OF_BERT = (
    "Bert",
    "DistilBert",
    "MobileBert",
    "Electra",
    "ConvBert",
    "SqueezeBert",
    "LayoutLM",
    "Lxmert",
)
BERTS = tuple(f"{model}Tokenizer" for model in _OF_BERT)  # which are the same
# with nothing said, and a SentencePiece model of ours
CLASSES = ("", "SentencePiece", *BERTS)
# about 150 MB; as many different words as there are in 50 MB of English text
_CACHED_WORDS = 500_000

_FIRST_LETTERS = 4  # of a word, which limit the length of a token that begins it
_SHORT_SIZES = tuple(range(_FIRST_LETTERS - 1, 0, -1))
_BERTS_ROWS = Template()


class WordPiece:
    """Maps text to ids: words by `Normalizer`, then the longest token that matches, again and again.

    Each distinct word is split once; most words of a text were seen before and cost one look-up.

    Source: google-research/bert tokenization.py, FullTokenizer and WordpieceTokenizer.
    """

    kind = "wordpiece"
    file_name = VOCAB
    class_name = "BertTokenizer"  # Hugging Face's, which reads both files

    def __init__(
        self,
        vocab: Sequence[str],
        normalizer: Normalizer,
        longest: int = MAX_WORD_LENGTH,
        template: Template = _BERTS_ROWS,
    ):
        self.vocab = tuple(vocab)
        self.template = template
        self.normalizer = normalizer
        self.longest = longest  # characters; a longer word is [UNK]
        # of duplicate tokens the last counts
        self.ids = {token: index for index, token in enumerate(vocab)}
        self._heads = _Pieces(self.ids)
        self._tails = _Pieces(
            {
                token.removeprefix(CONTINUATION): index
                for token, index in self.ids.items()
                if token.startswith(CONTINUATION)
            }
        )
        self._words = _Memo(self._blank_separated)
        self._normal_words = _Memo(self._pieces_of_word)
        self._spans = _Memo(self._spans_between_blanks)

    def __reduce__(self) -> tuple:
        # without the words seen so far
        return WordPiece, (self.vocab, self.normalizer, self.longest, self.template)

    def __call__(self, text: str) -> list[int]:
        return list(
            itertools.chain.from_iterable(map(self._words.__getitem__, blank_separated(text)))
        )

    def with_template(self, template: Template) -> "WordPiece":
        """Returns the same with rows of another form."""
        return WordPiece(self.vocab, self.normalizer, self.longest, template)

    def encode_arrays(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the concatenated ids of all texts, and the number of ids of each."""
        return self._batches(texts)

    def encode_special(self, text: str) -> list[int]:
        """Returns the ids of text in which special tokens stand for themselves."""
        return encode_between(text, self.ids, self, self)

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Returns the ids of `text`, and their spans in it, [n, 2] int32; see `Tokenizer`."""
        ids: list[int] = []
        spans: list[int] = []
        counts = []
        starts = []
        for word, start in spans_between_blanks(text):
            word_ids = self._words[word]
            ids += word_ids
            spans += self._spans[word]
            counts.append(len(word_ids))
            starts.append(start)
        return ids, move_spans(spans, counts, starts)

    @functools.cached_property
    def _batches(self) -> BatchEncoder:
        return BatchEncoder(self.normalizer, self._pieces_of_word, len(self.vocab))

    @property
    def config(self) -> JsonObject:
        """Returns the options, under Hugging Face's names."""
        own: JsonObject = {LONGEST_WORD: self.longest} if self.longest != MAX_WORD_LENGTH else {}
        if not self.normalizer.google:
            own[GOOGLE] = False
        if self.template.odd_to_longer:
            own[ODD] = True
        if not self.template.second_type:
            own[INPUTS] = ["input_ids", "attention_mask"]
        return own | {
            "do_lower_case": self.normalizer.lowercase,
            "strip_accents": self.normalizer.strip_accents,
            "tokenize_chinese_chars": self.normalizer.split_chinese,
        }

    @functools.cached_property
    def content(self) -> bytes:
        """Returns the content of the vocabulary file: one token per line."""
        return vocab_bytes(self.vocab)

    def begins_word(self, token: str) -> bool:
        """Returns whether the token begins a word, that is, is not a `##` piece."""
        return not token.startswith(CONTINUATION)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the tokens separated by blanks, with `##` pieces joined to the piece before."""
        return " ".join(self.vocab[index] for index in ids).replace(" " + CONTINUATION, "")

    def _blank_separated(self, word: str) -> tuple[int, ...]:
        """Returns the ids of text without blanks, such as "(Hello)," or a Chinese sentence."""
        return tuple(
            itertools.chain.from_iterable(
                map(self._normal_words.__getitem__, self.normalizer(word))
            )
        )

    def _spans_between_blanks(self, text: str) -> tuple[int, ...]:
        """Returns start, end, start, end.. of the tokens of text without blanks; [UNK] covers its whole word."""
        spans: list[int] = []
        for word in self.normalizer.trace(text):
            ids = self._normal_words[word.text]
            end = 0
            for index in ids:
                token = self.vocab[index]
                start, end = end, end + len(token.removeprefix(CONTINUATION) if end else token)
                spans += (
                    word.span(start, end)
                    if index != self.ids["[UNK]"]
                    else word.span(0, len(word.text))
                )
        return tuple(spans)

    def _pieces_of_word(self, word: str) -> tuple[int, ...]:
        """Returns the ids of a normalised word, or [UNK] if a part of it has no token."""
        if len(word) > self.longest:
            return (self.ids["[UNK]"],)
        ids = []
        pieces = self._heads
        while word:
            # No token that begins with these letters is longer than they are, if the table lacks
            # them.
            for size in pieces.sizes.get(word[:_FIRST_LETTERS], _SHORT_SIZES):
                piece = pieces.ids.get(word[:size])
                if piece is not None:
                    break
            else:
                return (self.ids["[UNK]"],)
            ids.append(piece)
            word, pieces = word[size:], self._tails
        return tuple(ids)


class _Pieces:
    """The tokens that begin a word, or those that continue one.

    Attributes:
      ids: of the tokens.
      sizes: the lengths of tokens by their first letters, longest first, so that few have to be tried.
    """

    def __init__(self, ids: dict[str, int]):
        self.ids = ids
        lengths: dict[str, set[int]] = {}
        for token in ids:
            if len(token) >= _FIRST_LETTERS:
                lengths.setdefault(token[:_FIRST_LETTERS], set()).add(len(token))
        self.sizes = {
            first: (*sorted(sizes, reverse=True), *_SHORT_SIZES) for first, sizes in lengths.items()
        }


def make_wordpiece(vocab: Sequence[str], options: JsonObject) -> WordPiece:
    """Returns the algorithm with the options of tokenizer_config.json, of which `do_lower_case` must be given."""
    normalizer = Normalizer(
        options["do_lower_case"],
        options.get("strip_accents"),
        split_chinese=options.get("tokenize_chinese_chars") is not False,
        google=options.get(GOOGLE) is not False,
    )
    return WordPiece(
        vocab,
        normalizer,
        options.get(LONGEST_WORD) or MAX_WORD_LENGTH,
        Template(
            second_type=second_type(options),
            odd_to_longer=options.get(ODD) is True,
        ),
    )


def second_type(options: JsonObject) -> int:
    """Returns the type of the second text's tokens, given the options of tokenizer_config.json."""
    inputs = options.get(INPUTS)
    return int(not isinstance(inputs, list) or not inputs or "token_type_ids" in inputs)


def is_lowercase(vocab: Sequence[str], config: JsonObject, given: bool | None = None) -> bool:
    """Returns whether text is lower-cased: as given, else as in `config`, else if no token has a capital letter.

    Bracketed tokens such as [CLS] and <s> do not count.
    """
    if (option := config.get("do_lower_case") if given is None else given) is not None:
        return bool(option)
    bracketed = re.compile(r"\[.*\]|<.*>")
    capitals = unicode_tables().lower
    return not any(
        ord(char) in capitals for token in vocab if not bracketed.fullmatch(token) for char in token
    )


class _Memo(dict[str, tuple[int, ...]]):
    """A function of a word that caches its results; the cache is cleared when it is full, to bound memory."""

    def __init__(self, function: Callable[[str], tuple[int, ...]]):
        super().__init__()
        self._function = function

    def __missing__(self, word: str) -> tuple[int, ...]:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        ids = self._function(word)
        # a page of Chinese has no blanks: it is one long "word", seen once
        if len(word) <= MAX_WORD_LENGTH:
            self[word] = ids
        return ids
