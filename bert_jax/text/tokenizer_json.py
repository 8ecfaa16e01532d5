# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a tokenizer.json, computed by Hugging Face's `tokenizers`. Only this module imports the library.

It is meant for byte-level BPE (RoBERTa, ModernBERT), the Unigram of XLM-R, and whatever else `WordPiece` and
`SentencePieces` are not. BERT's own WordPiece in such a file is `WordPiece`, which is faster.
Reasons for the design: docs/decisions/0008-other-tokenizers.md.
"""

import contextlib
import functools
import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_jax.errors import (
    InputError,
    TextError,
    no_panic,
    one_line,
    package_needed,
    shown,
)
from bert_jax.text.bert_json import read_rows
from bert_jax.text.hf_classes import EXACT, ROLES, token_of
from bert_jax.text.offsets import trace_without_surrogates, trim_blanks, without_surrogates
from bert_jax.text.sentencepieces import BLANK, NO_WORDS, join_ids, stands_alone
from bert_jax.text.tokenizer_files import DESCRIBED
from bert_jax.text.vocab import MIN_COUNT, SPECIAL_TOKENS, JsonObject, Template, reserved_tokens
from bert_jax.text.wordpiece import second_type
from bert_jax.text.words import SpacedEncoder

if TYPE_CHECKING:
    import tokenizers

_USUAL = {*SPECIAL_TOKENS, *(f"<{role}>" for role in ROLES), "<s>", "</s>"}
_COPY = "copy it again"
# before the name of a special token that text shall not become; Unicode gives it no character
_HIDDEN = "\ufdd0"

# How byte-level tokens are written: a character for each byte, its own where that can be seen.
_SEEN = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(byte): byte for byte in _SEEN}
_BYTES |= {
    chr(256 + index): byte for index, byte in enumerate(sorted(set(range(256)) - set(_SEEN)))
}


class DescribedPieces:
    """Maps text to ids by a tokenizer.json, as transformers does if the text has no special token."""

    kind = "tokenizers"
    file_name = DESCRIBED
    class_name = "PreTrainedTokenizerFast"  # Hugging Face's, which follows the file

    def __init__(self, content: bytes, settings: JsonObject):
        """`settings` are those of tokenizer_config.json. To be called where the file is read: it may fail in any way.

        Raises: InputError if ids would be random, or do not say where words begin.
        """
        # What transformers stores here of the last call is not the tokenizer's.
        described = json.loads(content) | {"truncation": None, "padding": None}
        self.content = json.dumps(described, ensure_ascii=False, sort_keys=True).encode(
            "utf-8", "surrogatepass"
        )
        model = described["model"]
        if model.get("dropout"):
            raise InputError(
                f"its dropout {shown(model['dropout'])} makes ids random; set it to null"
            )
        if model.get("end_of_word_suffix"):
            suffix = shown(model["end_of_word_suffix"])
            raise InputError(
                f"its tokens end with {suffix}, so they do not say where words begin; use one without it"
            )
        described_alone = described | {"post_processor": None}
        self._described = json.dumps(described_alone)
        has_types = bool(second_type(settings))
        cls, sep, separators, kind = read_rows(described.get("post_processor"), has_types)
        settings = settings | {"cls_token": cls, "sep_token": sep}
        roles = {token_of(settings, role) for role in ROLES} | _USUAL
        self._exact = bool(settings.get(EXACT))
        hidden = json.dumps(_hide_special(described_alone, roles))
        self._model = _open(hidden, special_is_text=True, exact=self._exact)
        ids = self._model.get_vocab(with_added_tokens=True)
        self.ids = {token.removeprefix(_HIDDEN): index for token, index in ids.items()}
        self.vocab = _in_order(self.ids, described.get("added_tokens"))
        specials = _special_tokens(self, settings, model)
        parts = [described.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
        self._in_bytes = "ByteLevel" in _kinds(parts)
        self._prefix = model.get("continuing_subword_prefix") or ""
        self._blanks = self._in_bytes or any(token.startswith(BLANK) for token in self.vocab)
        # Where a blank is put before every text, as by Llama's normalizer, another would be a token of its own.
        try:
            alone = self("a")
            blank = "" if self(" a") == alone or self("a a") == 2 * alone else " "
        except InputError:  # without a token for what it does not know
            blank = ""
        self.template = Template(
            specials=tuple(specials[role] for role in ROLES),
            separators=separators,
            second_type=kind,
            blank=blank,
            odd_to_longer=True,
        )
        normalizer = self._model.normalizer
        with no_panic():  # else the text "a" would have failed
            small, plain = (
                normalizer.normalize_str(char).strip(BLANK + " ") if normalizer else char
                for char in "Aé"
            )
        self.config = {f"{role}_token": specials[role] for role in ROLES} | {
            "do_lower_case": small == "a",
            "strip_accents": plain == "e",
            "model_input_names": ["input_ids", *["token_type_ids"] * kind, "attention_mask"],
        }
        if self._exact:
            self.config[EXACT] = True

    def __reduce__(self) -> tuple:
        return DescribedPieces, (self.content, self.config)

    @property
    def puts_blank(self) -> bool | None:
        """Whether a blank is put before every text, the option add_prefix_space; None where tokens are not of bytes."""
        return not self.template.blank if self._in_bytes else None

    def with_blanks(self) -> "DescribedPieces":
        """Returns the same with a blank before every text, where that changes tokens: a word is as within a text."""
        if not self.template.blank:
            return self
        described = json.loads(self.content)
        splitter = described.get("pre_tokenizer") or {}
        last = splitter["pretokenizers"][-1] if splitter.get("type") == "Sequence" else splitter
        if splitter.get("type") == "ByteLevel":
            splitter["add_prefix_space"] = True
        elif last.get("type") == "Metaspace":
            last["prepend_scheme"] = "always"
        else:  # in a sequence, a ByteLevel would put it before every part of a text
            before = [
                {"type": "Prepend", "prepend": " "},
                *[part for part in [described.get("normalizer")] if part],
            ]
            described["normalizer"] = {"type": "Sequence", "normalizers": before}
        return DescribedPieces(json.dumps(described).encode(), self.config)

    def __call__(self, text: str) -> list[int]:
        return self._encode(self._model, without_surrogates(text)).ids

    def encode_special(self, text: str) -> list[int]:
        """Returns the ids of text in which special tokens stand for themselves, as transformers reads it."""
        return self._encode(self._with_special, without_surrogates(text)).ids

    def _encode(self, model: "tokenizers.Tokenizer", text: str) -> "tokenizers.Encoding":
        """Returns what the library makes of a text. Raises: InputError if it fails."""
        try:
            with no_panic():
                return model.encode(text, add_special_tokens=False)
        except TypeError:  # it is not a text
            raise
        except Exception as error:  # noqa: BLE001 - the library raises no other
            raise TextError(
                f"what tokenizer.json describes fails on the text {shown(text)} ({one_line(error)[:120]}); correct its "
                "regular expressions, charsmap or unk_token, or leave out the text",
                text,
            ) from None

    @functools.cached_property
    def _with_special(self) -> "tokenizers.Tokenizer":
        return _open(self._described, special_is_text=False, exact=self._exact)

    def encode_arrays(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the concatenated ids of all texts, and the number of ids of each."""
        texts = list(map(without_surrogates, texts))
        if self._by_words is not None:
            with contextlib.suppress(TextError):  # raised again below, with the whole text
                return self._by_words(texts)
        return self._encode_all(texts)

    @functools.cached_property
    def _by_words(self) -> SpacedEncoder | None:
        """What looks up words, where those of the file stand alone."""
        if not _words_stand_alone(json.loads(self.content), self._model.normalizer):
            return None
        return SpacedEncoder(self._encode_all, len(self.vocab))

    def _encode_all(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the concatenated ids of texts without surrogates, and the number of ids of each, by the library."""
        try:
            with no_panic():
                # fast: it keeps no spans, which nobody asks for here
                encodings = self._model.encode_batch_fast(texts, add_special_tokens=False)
        except Exception:  # noqa: BLE001 - one by one, to name the text
            encodings = [self._encode(self._model, text) for text in texts]
        return join_ids([encoding.ids for encoding in encodings], len(self.vocab))

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Returns the ids of `text`, and their spans in it, [n, 2] int32; see `Tokenizer`."""
        traced = trace_without_surrogates(text)
        whole = traced.text
        encoding = self._encode(self._model, whole)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        is_blank = np.array([not whole[start:end].strip() for start, end in encoding.offsets], bool)
        # the blank before a word
        alone = np.array([token == BLANK for token in encoding.tokens], bool)
        spans[alone, 1] = spans[alone, 0]
        spans = trim_blanks(whole, spans, is_blank | alone)
        return encoding.ids, traced.original_spans(spans, len(text))

    def begins_word(self, token: str) -> bool:
        """Returns whether a token begins a word: after a blank, without the prefix of continuations, or by its script.

        Where the tokens do not show it, each counts as a word.
        """
        if token in self.template.specials or not token:
            return True
        if self._in_bytes and not set(token) - _BYTES.keys():
            # The character that a part of it begins may be cut: some character of the same range.
            token = (bytes(map(_BYTES.__getitem__, token)) + b"\x80\x80\x80").decode(
                "utf-8", "replace"
            )
        if self._blanks:
            return token.startswith(BLANK) or token[0].isspace() or stands_alone(token[0])
        return not (self._prefix and token.startswith(self._prefix))

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the tokens."""
        with no_panic():
            return (
                self._model.decode(list(map(int, ids)), skip_special_tokens=False)
                .replace(_HIDDEN, "")
                .strip()
            )


# The parts of the file

# Normalizers that change a character by itself, or with marks after it, wherever it stands.
_LOCAL = "NFC NFD NFKC NFKD Nmt Lowercase StripAccents BertNormalizer Precompiled".split()
# How Llama 3 splits text: a blank can only be the first character of a part.
_OF_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _words_stand_alone(described: JsonObject, normalizer: Any) -> bool:
    """Returns whether a word with the blank before it has the same ids in every text with one blank between words.

    Of what a file may describe this knows the usual parts, of which none looks beyond a blank; others say no.
    `normalizer` is the library's.
    """
    for part in _members(described.get("normalizer"), "normalizers"):
        replaced = part.get("pattern", {}).get("String", " ")
        if part["type"] not in _LOCAL and not (part["type"] == "Replace" and " " not in replaced):
            return False
    for token in described.get("added_tokens") or []:
        name = token["content"]
        forms = [name, normalizer.normalize_str(name)] if normalizer else [name]
        if token["rstrip"] or (name.strip() and any(" " in form for form in forms)):
            return False
    splitters = list(_members(described.get("pre_tokenizer"), "pretokenizers"))
    kinds = [part["type"] for part in splitters]
    last = splitters[-1] if splitters else {}
    if kinds == ["ByteLevel"]:
        return last.get("use_regex", True)
    if kinds == ["Split", "ByteLevel"]:
        return splitters[0]["pattern"] == {"Regex": _OF_LLAMA} and not (
            splitters[0]["invert"] or last["add_prefix_space"]
        )
    if kinds in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        return kinds[0] == "WhitespaceSplit" or last.get("split", True)
    return kinds in (["WhitespaceSplit"], ["BertPreTokenizer"])


def _members(part: JsonObject | None, name: str) -> Iterator[JsonObject]:
    """Yields the parts of a normalizer or pre-tokenizer that follow each other."""
    if not part:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for member in part[name]:
        yield from _members(member, name)


def _library() -> types.ModuleType:
    """Returns the module of the library, which only some vocabularies need. Raises: InputError if it is missing."""
    with package_needed("tokenizers", "a vocabulary in tokenizer.json"):
        import tokenizers
    return tokenizers


def _hide_special(described: JsonObject, roles: set[str]) -> JsonObject:
    """Returns the tokenizer with names for the special tokens of `roles` that are not in texts: a Unigram has them as
    pieces. Other special tokens, such as the marks of an entity, are there to be in texts, as all added tokens are.
    """
    model = described["model"]
    added = []
    hide = {}
    for token in described.get("added_tokens") or []:
        name = token["content"]
        is_special = token["special"] and name in roles
        if is_special and name != model.get("unk_token"):
            hide[name] = _HIDDEN + name
        added.append(token | {"special": is_special, "content": hide.get(name, name)})
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        vocab = {hide.get(token, token): index for token, index in vocab.items()}
    elif isinstance(vocab, list):
        vocab = [[hide.get(token, token), score] for token, score in vocab]
    return described | {"added_tokens": added, "model": model | {"vocab": vocab}}


def _open(described: str, special_is_text: bool, exact: bool) -> "tokenizers.Tokenizer":
    """Returns the library's tokenizer; `exact` is for a Unigram, whose scores in a file it reads but for the last bit.

    That decides between pieces of the same sum: "0" + "00" or "00" + "0".
    """
    with no_panic():
        model = _library().Tokenizer.from_str(described)
        if exact:
            given = json.loads(described)["model"]
            pieces = [(piece, score) for piece, score in given["vocab"]]
            unigram = _library().models.Unigram
            model.model = unigram(pieces, unk_id=given["unk_id"], byte_fallback=False)
    model.encode_special_tokens = special_is_text
    return model


def _in_order(ids: Mapping[str, int], added: object) -> tuple[str, ...]:
    """Returns the tokens by their ids, "" where there is none. Raises: InputError if ids differ from the file's."""
    size = max(ids.values(), default=-1) + 1
    if not ids or size > 2 * len(ids) + 1000:
        raise InputError(f"its {len(ids)} tokens have ids up to {size - 1}; {_COPY}")
    for token in added if isinstance(added, list) else ():
        if ids.get(token["content"]) != token["id"]:
            raise InputError(f"the added token {shown(token['content'])} has the id {shown(token['id'])}, and the "
                             f"vocabulary gives it {ids.get(token['content'])}; correct it")  # fmt: skip
    vocab = [""] * size
    for token, index in ids.items():
        vocab[index] = token
    return tuple(vocab)


def _special_tokens(
    pieces: DescribedPieces, settings: JsonObject, model: JsonObject
) -> dict[str, str]:
    """Returns the token of each role: from tokenizer_config.json, from the model, or by its usual name."""
    tokens = {}
    ids = pieces.ids
    vocab = pieces.vocab
    for role, usual in zip(ROLES, SPECIAL_TOKENS, strict=True):
        named = token_of(settings, role)
        if not named and role == "unk":
            unk_id = model.get("unk_id")
            named = (
                vocab[unk_id]
                if isinstance(unk_id, int) and 0 <= unk_id < len(vocab)
                else model.get("unk_token")
            )
        named = named or next((token for token in (usual, f"<{role}>") if token in ids), None)
        if role == "unk" and model.get("type") == "BPE" and not named:
            # never given: without one, a BPE leaves out what it does not know
            named = tokens["pad"]
        if named not in ids:
            what = (
                f"{role}_token {shown(named)} is not in"
                if named
                else f"nothing names the {role}_token of"
            )
            raise InputError(
                f"{what} the vocabulary of {len(ids)} tokens; name one of it in tokenizer_config.json"
            )
        tokens[role] = named
    return tokens


def _kinds(part: Any) -> Iterator[Any]:
    """Yields the types of all parts inside a part of the file."""
    if isinstance(part, dict):
        yield part.get("type")
    for member in (
        part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    ):
        yield from _kinds(member)


# Learning


def learn_bytes(
    lines: Sequence[str],
    vocab_size: int,
    lowercase: bool = False,
    strip_accents: bool = False,
    num_unused: int = 0,
) -> DescribedPieces:
    """Returns a byte-level BPE of exactly `vocab_size` tokens: special and unused ones, the 256 bytes, then pieces.

    The same lines give the same bytes: the library's trainer breaks ties by ids, whatever its threads do.

    Raises: InputError if vocab_size is too small for the bytes or too large for the text.
    """
    library = _library()
    reserved = reserved_tokens(num_unused)
    if vocab_size < (least := len(reserved) + 256):
        raise InputError(f"vocab_size {vocab_size} is too small for {len(reserved)} special and unused tokens and 256 "
                         f"bytes; use --vocab_size={least} or more")  # fmt: skip
    if not any(line.split() for line in lines):
        raise InputError(NO_WORDS)
    normalizers = library.normalizers
    chain = [normalizers.NFD(), normalizers.StripAccents()] if strip_accents else []
    chain += [normalizers.NFC(), *[normalizers.Lowercase()] * lowercase]
    model = library.Tokenizer(library.models.BPE())
    model.normalizer = normalizers.Sequence(chain)
    # A blank before every text, so that a sentence has the same tokens alone and after another.
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=True)
    model.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_COUNT,
        special_tokens=reserved,
        initial_alphabet=sorted(_BYTES),
        show_progress=False,
    )
    model.train_from_iterator(map(without_surrogates, lines), trainer)
    if (size := model.get_vocab_size()) < vocab_size:
        raise InputError(f"vocab_size {vocab_size} is too large for this text: no more than {size} tokens occur "
                         f"{MIN_COUNT} times; use --vocab_size={size} or less, or more text")  # fmt: skip
    model.post_processor = library.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, model.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return DescribedPieces(model.to_str().encode(), {})
