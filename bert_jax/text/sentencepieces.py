# SPDX-License-Identifier: Apache-2.0
"""SentencePiece tokenization: pieces of a text, including its blanks. Only this module imports the library.

It is meant for scripts that do not separate words by blanks, and for ALBERT. Normalisation is part of the model file.
Reasons for the design: docs/decisions/0008-other-tokenizers.md.
"""

import base64
import functools
import heapq
import io
import itertools
import math
import random
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_jax.errors import InputError, TextError, one_line, package_needed, reading, shown
from bert_jax.storage.protobuf import parse_fields, parse_message
from bert_jax.text.normalize import is_chinese, letter_images, unicode_tables
from bert_jax.text.offsets import (
    read_piece_spans,
    to_code_points,
    trace_without_surrogates,
    trim_blanks,
    without_surrogates,
)
from bert_jax.text.tokenizer_files import SPIECE
from bert_jax.text.vocab import SPECIAL_TOKENS, JsonObject, Template, encode_between
from bert_jax.text.wordpiece import is_lowercase

if TYPE_CHECKING:
    import sentencepiece

BLANK = "\u2581"  # how a piece writes the blank before a word

# of the trainer. Fixed: floating-point sums depend on it, and so do the bytes of the file.
_THREADS = 16
_LONGEST_LINE = 4096  # characters; the trainer skips lines that are too long, so they are cut

NO_WORDS = "the input holds no words to learn a vocabulary from; give text"

# Letters of scripts that do not separate words by blanks. There each piece counts as a word.
_UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # the marks that repeat or stand for a Chinese character
    (0x3040, 0x30FF),  # kana
    (0x31F0, 0x31FF), (0xFF66, 0xFF9F),
)  # fmt: skip


def stands_alone(char: str) -> bool:
    """Returns whether a piece that begins with `char` begins a word: punctuation, or of a script without blanks."""
    return (
        ord(char) in unicode_tables().punctuation
        or is_chinese(char)
        or any(first <= ord(char) <= last for first, last in _UNSPACED)
    )


def join_ids(encoded: Sequence[list[int]], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the concatenated ids of all texts, in the smallest type, and the number of ids of each."""
    counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return np.fromiter(
        itertools.chain.from_iterable(encoded), np.min_scalar_type(vocab_size - 1), counts.sum()
    ), counts


class SentencePieces:
    """Maps text to ids by a SentencePiece model, unigram or BPE.

    Text never becomes a control symbol, so "[MASK]" in it is six characters. Special tokens have BERT's names in
    `vocab`, independent of their names in the model.
    """

    kind = "sentencepiece"
    file_name = SPIECE
    class_name = "SentencePiece"
    template = Template()

    def __init__(self, content: bytes, lowercase: bool, strip_accents: bool = False):
        """Raises: InputError if `content` is not a whole model, or cannot be used with these options."""
        self.content = content
        self._model = _open_model(content)
        folds = _folds(self._model)
        if folds and not lowercase:
            raise InputError("the model lower-cases text itself; it cannot be used cased")
        self.config = {"do_lower_case": lowercase, "strip_accents": strip_accents}
        # Lower-casing and dropping of accents that the model does not do itself.
        in_front = lowercase and not folds, strip_accents
        self._letters = letter_images(*in_front) if any(in_front) else None
        self.vocab = _vocab(self._model)
        self.ids = {token: index for index, token in enumerate(self.vocab)}
        self._specials = {self.ids[token]: token for token in SPECIAL_TOKENS if token in self.ids}

    def __reduce__(self) -> tuple:
        return SentencePieces, (
            self.content,
            self.config["do_lower_case"],
            self.config["strip_accents"],
        )

    def __call__(self, text: str) -> list[int]:
        return self._encode(self._model, self._prepared(text))

    def _encode(
        self, model: "sentencepiece.SentencePieceProcessor", text: str, **options: Any
    ) -> Any:
        """Returns what the library makes of a text. Raises: InputError if it fails, as with a damaged charsmap."""
        try:
            return model.encode(text, **options)
        except (RuntimeError, UnicodeDecodeError) as error:
            problem = (
                f"the SentencePiece model fails on the text {shown(text)} ({one_line(error)[:120]})"
            )
            raise TextError(f"{problem}; copy it again", text) from None

    def _prepared(self, text: str) -> str:
        """Returns the text that the model gets. It cannot have halves of surrogate pairs, which are dropped."""
        text = without_surrogates(text)
        return text if self._letters is None else text.translate(self._letters)

    def encode_arrays(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the concatenated ids of all texts, and the number of ids of each."""
        return join_ids([self(text) for text in texts], len(self.vocab))

    def encode_special(self, text: str) -> list[int]:
        """Returns the ids of text with special tokens; after one, text without a leading blank begins no word."""

        def go_on(rest: str) -> list[int]:
            begins_word = not rest or rest[0].isspace()
            model = self._model if begins_word else self._inner_model
            return self._encode(model, self._prepared(rest))

        return encode_between(text, self.ids, self, go_on)

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Returns the ids of `text`, and their spans in it, [n, 2] int32; see `Tokenizer`."""
        traced = trace_without_surrogates(text)
        if self._letters is not None:
            traced = traced.translate(self._letters, unicode_tables().nonspacing_mark)
        ids, spans = read_piece_spans(
            self._encode(self._model, traced.text, out_type="serialized_proto")
        )
        is_blank = np.array([self.vocab[index] == BLANK for index in ids], bool)
        spans = trim_blanks(traced.text, to_code_points(traced.text, spans), is_blank)
        return ids, traced.original_spans(spans, len(text))

    @functools.cached_property
    def _inner_model(self) -> "sentencepiece.SentencePieceProcessor":
        """The model, but for the blank that it puts before every text."""
        # Fields at the end of a protocol buffer override earlier ones: normalizer_spec.add_dummy_prefix = false.
        return _open_model(
            self.content + bytes([_NORMALIZER << 3 | 2, 2, _ADD_DUMMY_PREFIX << 3, 0])
        )

    def begins_word(self, token: str) -> bool:
        """Returns whether a token begins a word.

        It does after a blank, and so do special tokens, punctuation, and every piece of a script without blanks.
        """
        return token.startswith(BLANK) or token in SPECIAL_TOKENS or stands_alone(token[0])

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the pieces, special tokens set apart by blanks."""
        # The library drops control symbols, so they are put between runs of other pieces.
        parts: list[str] = []
        run: list[int] = []
        for index in ids:
            if index in self._specials:
                parts += [self._model.decode(run), self._specials[index]]
                run = []
            else:
                run.append(index)
        return " ".join(" ".join([*parts, self._model.decode(run)]).split())


def read_sentencepieces(
    content: bytes, config: JsonObject, lowercase: bool | None, strip_accents: bool | None
) -> SentencePieces:
    """Returns the algorithm of a model's file, with the options of `config` unless the arguments say otherwise."""
    if lowercase is None:
        lowercase = config.get("do_lower_case")
    if lowercase is None:
        model = _open_model(content)
        # one that folds case may know the Turkish İ
        lowercase = _folds(model) or is_lowercase(_vocab(model), {})
    if strip_accents is None:
        strip_accents = config.get("strip_accents", not config.get("keep_accents", True))
    return SentencePieces(content, bool(lowercase), bool(strip_accents))


def _folds(model: "sentencepiece.SentencePieceProcessor") -> bool:
    """Returns whether a model lower-cases text itself."""
    return model.normalize("Aa").strip(BLANK) == "aa"


def _library() -> types.ModuleType:
    """Returns the module of SentencePiece, which only some vocabularies need. Raises: InputError if it is missing."""
    with package_needed("sentencepiece", "a SentencePiece vocabulary", "'bert_jax[sentencepiece]'"):
        import sentencepiece
    return sentencepiece


def _open_model(content: bytes) -> "sentencepiece.SentencePieceProcessor":
    """Returns the processor of a model. Raises: InputError if it is empty, cut short, damaged, or not a model."""
    sentencepiece = _library()
    sentencepiece.set_min_log_level(2)  # or else it logs to stderr
    model = sentencepiece.SentencePieceProcessor()
    with reading("the SentencePiece model"):
        _check_model(content)
        model.load_from_serialized_proto(content)
        model.normalize("Aa")  # if its output is not text, this fails
        model.decode([model.unk_id()])
        for index in range(len(model)):
            model.id_to_piece(index)  # which fails unless it is a text
            if not math.isfinite(model.get_score(index)):
                raise ValueError("a piece has a score that is not finite")
    return model


_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # numbers of fields in a model's file
_PIECE, _SCORE, _TYPE = 1, 2, 3  # in the first of these
_CONTROL, _USER_DEFINED = 3, 4  # types
_MODEL_TYPE, _BLANK_AS_SUFFIX, _UNKNOWN = 3, 24, 40  # in the second
_CHARSMAP, _ADD_DUMMY_PREFIX = 2, 3  # in the third


@functools.lru_cache(maxsize=2)
def _check_model(content: bytes) -> None:
    """Raises: ValueError if the file is not a whole model, InputError if words do not begin after its blanks.

    The library takes a file cut between two pieces for a smaller model: what comes after them must be there.
    """
    fields = parse_fields(content, 0, len(content))
    if not {_PIECES, _NORMALIZER} <= {tag >> 3 for tag, *_ in fields}:
        raise ValueError("it is not a whole SentencePiece model")
    for tag, first, last in fields:
        if tag >> 3 == _TRAINER:
            about = parse_message(content[first:last])
            if about.get(_BLANK_AS_SUFFIX, [0])[-1]:
                raise InputError(
                    "its pieces end with blanks; train a model without treat_whitespace_as_suffix"
                )


def read_unigram(content: bytes) -> tuple[JsonObject, list[JsonObject], bool]:
    """Returns a model's file as tokenizer.json has it, its tokens that are found in text, and whether it is a BPE.

    The vocabulary is a list of pieces and their scores. To be called where the file is read: it may fail in any way.
    """
    _check_model(content)
    pieces: list[str] = []
    scores: list[int] = []  # the bits of each
    tokens: list[JsonObject] = []
    others: dict[int, dict[int, list[Any]]] = {}
    for tag, first, last in parse_fields(content, 0, len(content)):
        message: dict[int, list[Any]] = {**parse_message(content[first:last])}
        if tag >> 3 != _PIECES:
            others[tag >> 3] = message
            continue
        kind = message.get(_TYPE, [0])[-1]
        pieces.append(message[_PIECE][-1].decode())
        scores.append(message.get(_SCORE, [0])[-1])
        if kind in (_CONTROL, _USER_DEFINED):
            tokens.append({"content": pieces[-1], "special": kind == _CONTROL})
    vocab = zip(pieces, np.array(scores, np.uint32).view(np.float32).tolist())
    trainer = others.get(_TRAINER, {})
    charsmap = others[_NORMALIZER].get(_CHARSMAP, [b""])[-1]
    table = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    described = {
        "model": {"vocab": [*map(list, vocab)], "unk_id": trainer.get(_UNKNOWN, [0])[-1]},
        "normalizer": table if charsmap else None,
    }
    return described, tokens, trainer.get(_MODEL_TYPE, [1])[-1] != 1


def _vocab(model: "sentencepiece.SentencePieceProcessor") -> tuple[str, ...]:
    """Returns the pieces in the order of their ids, special tokens under our names.

    Raises: InputError if text could become a special token.
    """
    vocab = [model.id_to_piece(index) for index in range(model.get_piece_size())]
    names = dict(zip(vocab, range(len(vocab))))
    for token in SPECIAL_TOKENS:
        other = f"<{token[1:-1].lower()}>"  # as ALBERT and XLNet write some of them
        index = model.unk_id() if token == "[UNK]" else names.get(token, names.get(other, -1))
        if index < 0:
            continue  # `Tokenizer` raises for those that are missing
        if not (model.is_control(index) or model.is_unknown(index) or model.is_unused(index)):
            raise InputError(f"{vocab[index]} is not a control symbol, so text could become it")
        vocab[index] = token
    return tuple(vocab)


class LineSample:
    """A random sample of lines that fits in memory; all of them, where they do.

    Every line is as likely to be in it as any other. The generator's seed is fixed, so the same lines in the same
    order give the same sample, however they come in files.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_lines = 0  # seen
        self._bytes = 0
        self._rng = random.Random(0)
        self._heap: list[tuple[float, int, str]] = []  # the first is the next to be dropped

    def add(self, line: str) -> None:
        """Takes a line into account."""
        # The lines with the largest random numbers stay, whatever comes later: that is a uniform
        # sample of what was seen, and nobody has to know how much text there is.
        heapq.heappush(self._heap, (self._rng.random(), self.num_lines, line))
        self.num_lines += 1
        self._bytes += _cost(line)
        while self._bytes > self.max_bytes and len(self._heap) > 1:
            self._bytes -= _cost(heapq.heappop(self._heap)[2])

    def lines(self) -> list[str]:
        """Returns the sample, in the order of the text."""
        return [line for _, _, line in sorted(self._heap, key=lambda item: item[1])]


def _cost(line: str) -> int:
    """Returns the bytes that a line counts for: a very short one takes more memory than its text."""
    return max(len(line.encode()), 100)


def learn_sentencepieces(
    lines: Sequence[str],
    vocab_size: int,
    model_type: str = "unigram",
    lowercase: bool = False,
    strip_accents: bool = False,
    character_coverage: float = 0.9995,
    num_unused: int = 0,
) -> SentencePieces:
    """Returns a model of exactly `vocab_size` pieces: special and unused ones first, then those of the text.

    Args:
      lines: of text, without line ends; about 25 times their size is needed in memory.
      vocab_size: V.
      model_type: "unigram" or "bpe".
      lowercase: whether text is case-folded (NFKC either way).
      strip_accents: whether accents are dropped.
      character_coverage: the share of all characters of the text that get pieces, most frequent first; others are
        [UNK].
      num_unused: places named [unused0], [unused1].. after the special tokens.
    Raises: InputError if vocab_size is too small for the characters or too large for the text.
    """
    if not 0.98 <= character_coverage <= 1:
        raise InputError(
            f"character_coverage {character_coverage} is not in 0.98..1; 0.9995 and 1 are usual"
        )
    if not any(line.split() for line in lines):  # older trainers end the process
        raise InputError(NO_WORDS)
    letters = letter_images(lowercase=False, strip_accents=True) if strip_accents else {}
    content = io.BytesIO()
    library = _library()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=_cut(line.translate(letters) for line in lines),
            model_writer=content,
            model_type=model_type,
            # with fewer its error is of no use
            vocab_size=max(vocab_size, len(SPECIAL_TOKENS) + num_unused),
            normalization_rule_name="nmt_nfkc_cf" if lowercase else "nmt_nfkc",
            character_coverage=character_coverage,
            pad_id=0,
            pad_piece="[PAD]",
            unk_id=1,
            unk_piece="[UNK]",
            bos_id=-1,
            eos_id=-1,
            control_symbols=[
                *SPECIAL_TOKENS[2:],
                *(f"[unused{index}]" for index in range(num_unused)),
            ],
            max_sentence_length=4 * _LONGEST_LINE,  # bytes
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2]  # after the place in its source
        raise InputError(f"vocab_size {vocab_size} does not fit this text: {reason}") from None
    return SentencePieces(content.getvalue(), lowercase, strip_accents)


def _cut(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield from (
            line[start : start + _LONGEST_LINE] for start in range(0, len(line), _LONGEST_LINE)
        )
