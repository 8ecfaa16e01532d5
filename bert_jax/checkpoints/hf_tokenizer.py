# SPDX-License-Identifier: Apache-2.0
"""The tokenizer files of a Hugging Face directory: vocab.txt or spiece.model, tokenizer.json, tokenizer_config.json.

Where two files speak of one option, tokenizer_config.json is right for BERT's own classes, and tokenizer.json for the
two general ones, as it is to transformers.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.errors import InputError, shown
from bert_jax.storage.files import JsonObject, read_json
from bert_jax.storage.writing import write_json
from bert_jax.text.tokenizer import Tokenizer, load_tokenizer, wordpiece_tokenizer
from bert_jax.text.vocab import CONTINUATION, MAX_WORD_LENGTH, SPECIAL_TOKENS, read_vocab
from bert_jax.text.wordpiece import LONGEST_WORD, WordPiece, holds_capitals

_SETTINGS, _BACKEND = "tokenizer_config.json", "tokenizer.json"
_SPECIAL_NAMES = ("pad", "unk", "cls", "sep", "mask")  # as SPECIAL_TOKENS

# Those of BERT, and those that say nothing; another class splits text in another way.
_OF_BERT = ("Bert", "DistilBert", "MobileBert", "Electra", "ConvBert")  # whose tokenizers are the same
_CLASSES = (
    *("", "AutoTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "SentencePiece"),
    *(f"{model}Tokenizer{fast}" for model in _OF_BERT for fast in ("", "Fast")),
)
_GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")  # they do what tokenizer.json says
_OTHER = "what it makes of a text cannot be computed here"
_OPTIONS = {"lowercase": "do_lower_case", "strip_accents": "strip_accents",
            "handle_chinese_chars": "tokenize_chinese_chars"}  # fmt: skip


def load_hf_tokenizer(directory: Path) -> tuple[Tokenizer, list[str]]:
    """Returns the tokenizer of a directory, and lines that the user should see.

    Raises: InputError if it has none, or one that is not BERT's.
    """
    settings = _read_object(directory / _SETTINGS)
    _check_settings(settings, directory / _SETTINGS)
    if (directory / "spiece.model").exists():
        return load_tokenizer(directory), []
    backend = _read_object(directory / _BACKEND)
    options = _backend_options(backend, directory / _BACKEND) if backend else {}
    is_general = bool(backend) and settings.get("tokenizer_class") in _GENERAL
    if is_general and "post_processor" in backend and backend["post_processor"] is None:
        raise InputError(f"{directory / _BACKEND}: post_processor is null, so it adds no [CLS] and [SEP]; {_OTHER}")
    if not is_general:
        options |= {name: settings[name] for name in _OPTIONS.values() if settings.get(name) is not None}
    for name, value in options.items():
        if not isinstance(value, bool):
            raise InputError(f"{directory}: the tokenizer's {name} is {shown(value)}; make it true or false")
    path = directory / "vocab.txt"
    if path.exists():
        vocab: Sequence[str] = read_vocab(path)
        if backend:
            _check_same(vocab, _backend_vocab(backend, directory / _BACKEND), directory)
    elif backend:
        path, ids = directory / _BACKEND, _backend_vocab(backend, directory / _BACKEND)
        if sorted(ids.values()) != list(range(len(ids))):
            raise InputError(f"{path}: its vocabulary is not a map to the ids 0, 1, 2, ...; copy it again")
        vocab = [token.strip() for token in sorted(ids, key=ids.__getitem__)]  # as the lines of vocab.txt are read
    else:
        raise InputError(
            f"{directory} has no vocab.txt and no tokenizer.json; copy one of them from where it came from"
        )
    if "do_lower_case" not in options:  # nobody says: capitals in the vocabulary do
        options["do_lower_case"] = not holds_capitals(vocab)
    try:
        tokenizer = wordpiece_tokenizer(
            vocab,
            options["do_lower_case"],
            options.get("strip_accents"),
            options.get("tokenize_chinese_chars", True),
            _longest_word(backend, directory / _BACKEND),
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return tokenizer, _check_added_tokens(directory, settings, backend, tokenizer)


def save_hf_tokenizer(directory: Path, tokenizer: Tokenizer, max_positions: int) -> list[str]:
    """Writes the vocabulary, tokenizer_config.json and tokenizer.json; returns what the user should know.

    transformers needs no tokenizer.json of a BERT; programs that read text without Python do.
    """
    tokenizer.save(directory)
    settings = read_json(directory / _SETTINGS) | {"model_max_length": max_positions}
    if tokenizer.kind != "wordpiece":
        write_json(directory / _SETTINGS, settings)
        return ["transformers has no tokenizer for spiece.model with BERT's tokens; bert_jax.load_tokenizer reads it"]
    special = {f"{name}_token": token for name, token in zip(_SPECIAL_NAMES, SPECIAL_TOKENS, strict=True)}
    write_json(directory / _SETTINGS, settings | special)
    if len(set(tokenizer.vocab)) == tokenizer.vocab_size:  # it has no place for two tokens of one name
        write_json(directory / _BACKEND, _make_backend(tokenizer))
    return []


def _make_backend(tokenizer: Tokenizer) -> JsonObject:
    """Returns what tokenizer.json says. Source: the files of tokenizers 0.22, which have no other description."""
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


def _read_object(path: Path) -> JsonObject:
    """Returns the object in a JSON file, {} if there is no file."""
    content = read_json(path) if path.exists() else {}
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object, so it describes no tokenizer; copy it again")
    return content


def _check_settings(settings: JsonObject, path: Path) -> None:
    """Raises: InputError if tokenizer_config.json describes a tokenizer that is not BERT's WordPiece."""
    kind = settings.get("tokenizer_class") or ""
    if kind not in _CLASSES:
        raise InputError(f"{path}: tokenizer_class {str(kind)[:80]} is not BERT's WordPiece; {_OTHER}")
    named = {f"{name}_token": token for name, token in zip(_SPECIAL_NAMES, SPECIAL_TOKENS, strict=True)}
    wanted = named | {"do_basic_tokenize": True, "never_split": None}
    for name, value in wanted.items():
        found = settings.get(name)
        found = found.get("content") if isinstance(found, dict) else found
        if found not in (None, value, []):
            raise InputError(f"{path}: {name} is {shown(found)}, BERT's is {shown(value)}; {_OTHER}")


def _backend_options(backend: JsonObject, path: Path) -> JsonObject:
    """Returns the options of tokenizer.json under the names of tokenizer_config.json."""
    parts = [_only_one(backend.get(name) or {}) for name in ("model", "normalizer", "pre_tokenizer")]
    if not all(isinstance(part, dict) for part in parts):
        raise InputError(f"{path}: model, normalizer and pre_tokenizer are not objects; copy it again")
    model, normalizer, splitter = parts
    for what, found, wanted in (
        ("model", model.get("type", "WordPiece"), "WordPiece"),
        ("normalizer", normalizer.get("type"), "BertNormalizer"),
        ("pre_tokenizer", splitter.get("type"), "BertPreTokenizer"),
        ("continuing_subword_prefix", model.get("continuing_subword_prefix", "##"), "##"),
        ("unk_token", model.get("unk_token", "[UNK]"), "[UNK]"),
        ("clean_text", normalizer.get("clean_text", True), True),
    ):
        if found != wanted:
            raise InputError(f"{path}: {what} is {shown(found)}, BERT's is {shown(wanted)}; {_OTHER}")
    return {ours: normalizer[name] for name, ours in _OPTIONS.items() if normalizer.get(name) is not None}


def _only_one(part: Any) -> Any:
    """Returns the member of a Sequence that has no other, such as {"type": "Sequence", "normalizers": [...]}."""
    while isinstance(part, dict) and part.get("type") == "Sequence":
        members = part.get("normalizers", part.get("pretokenizers"))
        if not isinstance(members, list) or len(members) != 1:
            break
        part = members[0]
    return part


def _longest_word(backend: JsonObject, path: Path) -> int:
    """Returns the most characters of a word that is not [UNK]: as tokenizer.json says, or as Google's code has it."""
    longest = (backend.get("model") or {}).get(LONGEST_WORD, MAX_WORD_LENGTH)
    if type(longest) is not int or longest < 1:
        raise InputError(f"{path}: {LONGEST_WORD} is {shown(longest)}; make it a number of characters, such as 100")
    return longest


def _backend_vocab(backend: JsonObject, path: Path) -> dict[str, int]:
    """Returns the ids of tokenizer.json."""
    ids = (backend.get("model") or {}).get("vocab")
    if not isinstance(ids, dict) or not all(type(index) is int for index in ids.values()):
        raise InputError(f"{path}: its vocabulary is not a map to the ids 0, 1, 2, ...; copy it again")
    return ids


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
        pairs = [*_read_object(directory / "added_tokens.json").items()]
        pairs += [(token["content"], token["id"]) for token in backend.get("added_tokens") or []]
        pairs += [(token["content"], index) for index, token in decoder.items()]
        ids = {str(token): int(index) for token, index in pairs}
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise InputError(
            f"{directory}: what its tokenizer files say of added tokens is no list of tokens and ids; copy them again"
        ) from None
    beyond = sorted((index, token) for token, index in ids.items() if not 0 <= index < len(vocab))
    never = [token for token in ids if not _is_word(token, tokenizer)]
    if beyond:
        where = "tokenizer.json (model.vocab)" if backend else "vocab.txt"
        fix = f"add them to {where} as words, with their ids, and remove them from what is added"
        if of_these := [token for _, token in beyond if token in never]:
            fix = f"{shown(of_these[0])} is no word, which no text would give here, so this model cannot be used"
        raise InputError(
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
        raise InputError(
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
