# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back.

`Tokenizer`, used by the rest of the project, is a vocabulary and a function from text to ids. That function is
`WordPiece`, which gives the same tokens as google-research/bert, `SentencePieces`, or `DescribedPieces`, which gives
those of a tokenizer.json.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence

import numpy as np

from bert_jax.errors import InputError
from bert_jax.storage import writing
from bert_jax.text.hf_classes import EXACT
from bert_jax.text.normalize import Normalizer
from bert_jax.text.sentencepieces import SentencePieces
from bert_jax.text.tokenizer_files import SETTINGS
from bert_jax.text.tokenizer_json import DescribedPieces
from bert_jax.text.vocab import MAX_WORD_LENGTH, JsonObject
from bert_jax.text.wordpiece import GOOGLE, INPUTS, LONGEST_WORD, ODD, WordPiece


class Tokenizer:
    """A vocabulary and the function that turns text into its ids.

    Attributes:
      pieces: text -> ids, without special tokens; a special token written in the text is ordinary text. It also has
        the content of the vocabulary file.
      vocab: the tokens, in the order of their ids.
      vocab_size: V, the number of ids.
      config: the options of `pieces`, under Hugging Face's names; `save` writes them beside the vocabulary.
      kind: the algorithm of `pieces`: "wordpiece", "sentencepiece" or "tokenizers".
      lowercase: whether text is lower-cased.
      strip_accents: whether accents are dropped.
      pad_id, unk_id, cls_id, sep_id, mask_id: the ids of [PAD], [UNK], [CLS], [SEP] and [MASK], whatever their names.
      special_ids: all of these, in this order.
      template: how rows are made of texts.
      between: the ids between the two texts of a pair.

    Raises: InputError if the vocabulary lacks a special token.
    """

    def __init__(self, pieces: WordPiece | SentencePieces | DescribedPieces):
        ids = pieces.ids
        template = pieces.template
        if missing := [token for token in template.specials if token not in ids]:
            raise InputError(
                f"the vocabulary of {len(pieces.vocab)} tokens lacks {', '.join(missing)}; add them"
            )
        self.pieces = pieces
        self.vocab: Sequence[str] = pieces.vocab
        self.vocab_size = len(pieces.vocab)
        self.config: JsonObject = pieces.config
        self.kind = pieces.kind
        self.lowercase: bool = self.config["do_lower_case"]
        self.strip_accents: bool = self.config["strip_accents"]
        self.special_ids = tuple(ids[token] for token in template.specials)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = self.special_ids
        self.template = template
        self.between = (self.sep_id,) * template.separators

    def __reduce__(self) -> tuple:
        return Tokenizer, (self.pieces,)

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        """Returns [V] bool, whether a token begins a word; False for pieces such as `##s`."""
        return np.array([self.pieces.begins_word(token) for token in self.vocab])

    @functools.cached_property
    def fingerprint(self) -> str:
        """Returns a sha256 of vocabulary, options and algorithm, which together determine the ids of a text.

        Google's limit of the length of a word, 200, and Hugging Face's, 100, give the same fingerprint, so that data
        made with a vocab.txt go with a model of its tokenizer.json; so do their rules of a few characters, and the last
        bit of scores.
        """
        config = {
            name: value
            for name, value in self.config.items()
            if (name, value) not in ((LONGEST_WORD, 100), (EXACT, True))
        }
        if self.kind == WordPiece.kind:
            of_rows = (GOOGLE, INPUTS, ODD)
            config = {name: value for name, value in config.items() if name not in of_rows}
        options = json.dumps([self.kind, config], sort_keys=True)
        return hashlib.sha256(options.encode() + b"\n" + self.pieces.content).hexdigest()

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Returns the ids of `text`; no special tokens are added.

        Args:
          text: any text; line ends are blanks.
          allow_special: whether special tokens written out, as in "Paris is the [MASK] of France.", stand for
            themselves. If not, they are text, as in the reference: `[ mask ]`.
        Raises: InputError if it is no text, as a list is, which `encode_batch` takes.
        """
        if not isinstance(text, str):
            raise InputError(
                f"{text!r:.60} is not a text; give a string, or a list to encode_batch"
            )
        return self.pieces.encode_special(text) if allow_special else self.pieces(text)

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Returns the ids of `text` as `encode` does, and the spans of the tokens, [n, 2] int32.

        Spans count code points, so `text[start:end]` is the text of a token. Accents belong to the letter before them,
        [UNK] covers a whole word, and several pieces of one character have the same span.
        """
        return self.pieces.encode_with_offsets(text)

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Returns the ids of each text. Raises: InputError if it is a single text, of which letters would be read."""
        if isinstance(texts, str):
            raise InputError("this is a single text; give a list of them, such as [text]")
        return [self.pieces(text) for text in texts]

    def encode_arrays(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the concatenated ids of all texts, in the smallest integer type, and their count in each text.

        The ids are those of `encode_batch`. With thousands of texts per call this is several times as fast.
        """
        return self.pieces.encode_arrays(texts)

    def tokenize(self, text: str, allow_special: bool = False) -> list[str]:
        """Returns the tokens of `text`: "unaffable" -> ["una", "##ffa", "##ble"]."""
        return self.tokens(self.encode(text, allow_special))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Returns the tokens with these ids; one that a table has beyond the vocabulary is shown as its number."""
        most = self.vocab_size
        return [self.vocab[index] if index < most else f"[{index}]" for index in ids]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Returns readable text: pieces joined to words, words separated by blanks.

        Args:
          ids: token ids.
          skip_special: whether to leave out the five special tokens.
        """
        skipped = frozenset(self.special_ids if skip_special else ())
        return self.pieces.decode([index for index in ids if index not in skipped])

    def id_of(self, token: str) -> int:
        """Returns the id of a token; the last one if the vocabulary has it twice.

        Raises: InputError if the vocabulary does not have it.
        """
        if token not in self.pieces.ids:
            raise InputError(
                f"token {token!r} is not in the vocabulary of {self.vocab_size}; tokenize() splits words"
            )
        return self.pieces.ids[token]

    def with_blanks(self) -> "Tokenizer":
        """Returns the tokenizer that puts a blank before every text, if that changes tokens: for text split in words.

        RoBERTa's, unlike BERT's, has other tokens for a word without a blank before it.
        """
        if not isinstance(self.pieces, DescribedPieces) or not self.template.blank:
            return self
        return Tokenizer(self.pieces.with_blanks())

    def cutting_as_hub(self) -> "Tokenizer":
        """Returns the tokenizer that cuts pairs as Hugging Face's tokenizers do, if it is BERT's; see `Template`."""
        if not isinstance(self.pieces, WordPiece) or self.template.odd_to_longer:
            return self
        return Tokenizer(self.pieces.with_template(self.template._replace(odd_to_longer=True)))

    def save(self, directory: object) -> None:
        """Writes the vocabulary's file, vocab.txt, spiece.model or tokenizer.json, and tokenizer_config.json.

        Hugging Face's BertTokenizer reads the files of WordPiece, AutoTokenizer those of a tokenizer.json.
        """
        folder = str(directory).rstrip("/")  # a path or a URL
        with writing.atomic_path(f"{folder}/{self.pieces.file_name}") as temporary:
            temporary.write_bytes(self.pieces.content)
        writing.write_json(f"{folder}/{SETTINGS}", self.settings)

    @property
    def settings(self) -> JsonObject:
        """The content of tokenizer_config.json."""
        return {"tokenizer_class": self.pieces.class_name, **self.config}


def wordpiece_tokenizer(
    vocab: Sequence[str],
    lowercase: bool,
    strip_accents: bool | None = None,
    split_chinese: bool = True,
    longest: int = MAX_WORD_LENGTH,
) -> Tokenizer:
    """Returns the tokenizer of a WordPiece vocabulary.

    Args:
      vocab: the tokens in the order of their ids.
      lowercase: whether text is lower-cased.
      strip_accents: whether accents are dropped; None follows `lowercase`.
      split_chinese: whether each Chinese character is a word.
      longest: characters of a word; a longer one is [UNK].
    Raises: InputError if a special token is missing.
    """
    return Tokenizer(WordPiece(vocab, Normalizer(lowercase, strip_accents, split_chinese), longest))
