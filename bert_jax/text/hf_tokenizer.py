# SPDX-License-Identifier: Apache-2.0
"""The tokenizer files of a Hugging Face directory: vocab.txt or spiece.model, tokenizer.json, tokenizer_config.json.

BERT's WordPiece is computed by our own code, any other tokenizer.json by the library that wrote it.

If two files give the same option, tokenizer_config.json wins for BERT's own classes, and tokenizer.json for the two
general ones, as in transformers.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from bert_jax.errors import InputError, shown
from bert_jax.storage.files import JsonObject, read_json, read_object
from bert_jax.storage.writing import write_json
from bert_jax.text.bert_json import (
    FILE,
    OPTIONS,
    OTHER,
    OtherTokenizer,
    berts_options,
    berts_vocab,
    is_plain,
    longest_word,
)
from bert_jax.text.tokenizer import Tokenizer, load_tokenizer, wordpiece_tokenizer
from bert_jax.text.tokenizer_json import ROLES, DescribedPieces, read_pieces
from bert_jax.text.vocab import CONTINUATION, MAX_WORD_LENGTH, SPECIAL_TOKENS, read_vocab
from bert_jax.text.wordpiece import CLASSES, GENERAL, LONGEST_WORD, WordPiece, is_lowercase

_SETTINGS, _BACKEND = "tokenizer_config.json", FILE


def load_hf_tokenizer(directory: Path) -> tuple[Tokenizer, list[str]]:
    """Returns the tokenizer of a directory, and notes for the user.

    A tokenizer that is not BERT's WordPiece is read from tokenizer.json. Raises: InputError if there is none.
    """
    settings, backend = (read_object(directory / name) for name in (_SETTINGS, _BACKEND))
    notes, side = [], settings.get("truncation_side")
    if side not in (None, "right"):
        notes = [f"truncation_side {shown(side)} is not kept; a text that is too long loses its end here"]
    try:
        _check_settings(settings, directory / _SETTINGS)
        if (directory / "spiece.model").exists():
            return load_tokenizer(directory), notes
        tokenizer, more_notes = _load_berts(directory, settings, backend)
        return tokenizer, notes + more_notes
    except OtherTokenizer as error:
        if not backend or is_plain(backend, directory / _BACKEND) or _disagree(settings, backend):
            raise
        try:
            return Tokenizer(read_pieces(directory / _BACKEND, settings)), notes
        except InputError as problem:
            reason = str(error).replace(f"{directory}/", "")
            raise InputError(f"{problem} (it is not computed as BERT's: {reason})") from None


def _load_berts(directory: Path, settings: JsonObject, backend: JsonObject) -> tuple[Tokenizer, list[str]]:
    """Returns BERT's WordPiece. Raises: OtherTokenizer if it is another tokenizer."""
    options = berts_options(backend, directory / _BACKEND) if backend else {}
    is_general = bool(backend) and settings.get("tokenizer_class") in GENERAL
    if is_general and "post_processor" in backend and backend["post_processor"] is None:
        raise InputError(f"{directory / _BACKEND}: post_processor is null, so it adds no [CLS] and [SEP]; {OTHER}")
    if not is_general:
        options |= {name: settings[name] for name in OPTIONS.values() if settings.get(name) is not None}
    for name, value in options.items():
        if not isinstance(value, bool):
            raise InputError(f"{directory}: the tokenizer's {name} is {shown(value)}; make it true or false")
    path = directory / "vocab.txt"
    if path.exists():
        vocab: Sequence[str] = read_vocab(path)
        if backend:
            berts_vocab(backend, directory / _BACKEND, whole=False)
            _check_same(vocab, backend["model"]["vocab"], directory)
    elif backend:
        path = directory / _BACKEND
        vocab = berts_vocab(backend, path)
    else:
        raise InputError(
            f"{directory} has no vocab.txt and no tokenizer.json; copy one of them from where it came from"
        )
    if "do_lower_case" not in options:  # not given: decided by capitals in the vocabulary
        options["do_lower_case"] = is_lowercase(vocab, {})
    try:
        tokenizer = wordpiece_tokenizer(
            vocab,
            options["do_lower_case"],
            options.get("strip_accents"),
            options.get("tokenize_chinese_chars", True),
            longest_word(backend, directory / _BACKEND),
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return tokenizer, _check_added_tokens(directory, settings, backend, tokenizer)


def save_hf_tokenizer(directory: Path, tokenizer: Tokenizer, max_positions: int) -> list[str]:
    """Writes the vocabulary, tokenizer_config.json and tokenizer.json; returns notes for the user.

    transformers needs no tokenizer.json of a BERT; programs that read text without Python do.
    """
    tokenizer.save(directory)
    settings = read_json(directory / _SETTINGS) | {"model_max_length": max_positions}
    if tokenizer.kind != WordPiece.kind:
        write_json(directory / _SETTINGS, settings)
        if tokenizer.kind == DescribedPieces.kind:
            return []
        return ["transformers has no tokenizer for spiece.model with BERT's tokens; bert_jax.load_tokenizer reads it"]
    special = {f"{name}_token": token for name, token in zip(ROLES, SPECIAL_TOKENS, strict=True)}
    write_json(directory / _SETTINGS, settings | special)
    if len(set(tokenizer.vocab)) == tokenizer.vocab_size:  # it cannot hold two tokens of one name
        write_json(directory / _BACKEND, make_backend(tokenizer))
    return []


def make_backend(tokenizer: Tokenizer) -> JsonObject:
    """Returns the contents of tokenizer.json. Source: the files of tokenizers 0.22, which have no other description."""
    marked = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    cls, sep = ({"SpecialToken": {"id": token, "type_id": 0}} for token in ("[CLS]", "[SEP]"))
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    last = {"SpecialToken": {"id": "[SEP]", "type_id": 1}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **marked}
            for index, token in sorted(zip(tokenizer.special_ids, SPECIAL_TOKENS, strict=True))
        ],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": tokenizer.config["tokenize_chinese_chars"],
            "strip_accents": tokenizer.strip_accents,
            "lowercase": tokenizer.lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [cls, first, sep],
            "pair": [cls, first, sep, second, last],
            "special_tokens": {
                token: {"id": token, "ids": [tokenizer.id_of(token)], "tokens": [token]} for token in ("[CLS]", "[SEP]")
            },
        },
        "decoder": {"type": "WordPiece", "prefix": CONTINUATION, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": CONTINUATION,
            LONGEST_WORD: tokenizer.config.get(LONGEST_WORD, MAX_WORD_LENGTH),
            "vocab": {token: index for index, token in enumerate(tokenizer.vocab)},
        },
    }


def _disagree(settings: JsonObject, backend: JsonObject) -> bool:
    """Returns whether a tokenizer of a BERT class has options that tokenizer.json contradicts."""
    if settings.get("tokenizer_class") in (None, "", *GENERAL):
        return False
    normalizer = backend.get("normalizer")
    options = normalizer if isinstance(normalizer, dict) else {}
    pairs = [(settings.get(ours), options.get(name)) for name, ours in OPTIONS.items()]
    return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def _check_settings(settings: JsonObject, path: Path) -> None:
    """Raises: InputError if tokenizer_config.json describes a tokenizer that is not BERT's WordPiece."""
    kind = settings.get("tokenizer_class") or ""
    if kind not in CLASSES:
        raise OtherTokenizer(f"{path}: tokenizer_class {str(kind)[:80]} is not BERT's WordPiece; {OTHER}")
    named = {f"{name}_token": token for name, token in zip(ROLES, SPECIAL_TOKENS, strict=True)}
    wanted = named | {"do_basic_tokenize": True, "never_split": None}
    for name, value in wanted.items():
        setting = settings.get(name)
        setting = setting.get("content") if isinstance(setting, dict) else setting
        if setting not in (None, value, []):
            error = OtherTokenizer if name in named else InputError
            raise error(f"{path}: {name} is {shown(setting)}, BERT's is {shown(value)}; {OTHER}")


def _check_same(vocab: Sequence[str], ids: dict[str, int], directory: Path) -> None:
    """Raises: InputError if vocab.txt and tokenizer.json disagree about a token."""
    for token, index in ids.items():
        if not 0 <= index < len(vocab) or vocab[index].strip() != token.strip():
            raise InputError(
                f"{directory}: vocab.txt, of {len(vocab)} tokens, and tokenizer.json, of {len(ids)}, disagree about "
                f"{shown(token)} with id {shown(index)}; remove the one that is not this model's"
            )


def _check_added_tokens(directory: Path, settings: JsonObject, backend: JsonObject, tokenizer: Tokenizer) -> list[str]:
    """Returns a line about tokens that are found in raw text.

    Raises: InputError if the vocabulary lacks one, or if text would never give it here.
    """
    vocab = tokenizer.vocab
    decoder = settings.get("added_tokens_decoder") or {}
    try:
        pairs = [*read_object(directory / "added_tokens.json").items()]
        pairs += [(token["content"], token["id"]) for token in backend.get("added_tokens") or []]
        pairs += [(token["content"], index) for index, token in decoder.items()]
        ids = {str(token): int(index) for token, index in pairs}
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise InputError(
            f"{directory}: what its tokenizer files say of added tokens is not a list of tokens and ids; copy them anew"
        ) from None
    beyond = sorted((index, token) for token, index in ids.items() if not 0 <= index < len(vocab))
    never = [token for token in ids if not _is_word(token, tokenizer)]
    if beyond:
        where = "tokenizer.json (model.vocab)" if backend else "vocab.txt"
        fix = f"add them to {where} as words, with their ids, and remove them from what is added"
        if not_words := [token for _, token in beyond if token in never]:
            fix = f"{shown(not_words[0])} is not a word, which no text would give here, so this model cannot be used"
        raise OtherTokenizer(
            f"{directory} adds {len(beyond)} tokens to its vocabulary of {len(vocab)}, "
            f"{shown(beyond[0][1])} the first; they are found in raw text, which this tokenizer does not do: {fix}"
        )
    for token, index in ids.items():
        if token in SPECIAL_TOKENS and vocab[index].strip() != token:
            raise InputError(
                f"{directory}: the added token {shown(token)} has the id {index}, in the vocabulary the id of "
                f"{shown(vocab[index])}; copy the tokenizer's files again"
            )
    others = sorted(ids.keys() - set(SPECIAL_TOKENS), key=ids.__getitem__)
    if not others:
        return []
    if unreachable := [token for token in others if token in never and not re.fullmatch(r"\[unused\d+\]", token)]:
        raise OtherTokenizer(
            f"{directory} has the added token {shown(unreachable[0])}, which transformers finds in raw text and no "
            "text gives here; if yours have none, remove it from the added tokens of tokenizer.json and the other files"
        )
    return [
        f"{len(others)} tokens, {shown(others[0])} the first, are found in raw text by transformers, and are words "
        "like others here"
    ]


def _is_word(token: str, tokenizer: Tokenizer) -> bool:
    """Returns whether text that is a token, or would be if it were in the vocabulary, gives this token."""
    assert isinstance(tokenizer.pieces, WordPiece)
    return token.split() == [token] == tokenizer.pieces.normalizer(token) and len(token) <= tokenizer.pieces.longest
