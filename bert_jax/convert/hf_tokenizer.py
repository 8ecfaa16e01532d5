# SPDX-License-Identifier: Apache-2.0
"""The tokenizer files of a Hugging Face directory: vocab.txt or spiece.model, tokenizer.json, tokenizer_config.json.

Where two files speak of one option, tokenizer_config.json is right, as it is to transformers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.errors import InputError
from bert_jax.storage import read_json, write_json
from bert_jax.text.tokenizer import Tokenizer, load_tokenizer, wordpiece_tokenizer
from bert_jax.text.vocab import read_vocab

# Those of BERT, and those that say nothing; another class splits text in another way.
_CLASSES = ("", "BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend", "SentencePiece")
_OPTIONS = {"lowercase": "do_lower_case", "strip_accents": "strip_accents",
            "handle_chinese_chars": "tokenize_chinese_chars"}  # fmt: skip


def load_hf_tokenizer(directory: Path) -> Tokenizer:
    """Returns the tokenizer of a directory. Raises: InputError if it has none, or one that is not BERT's."""
    settings = _read_object(directory / "tokenizer_config.json")
    kind = settings.get("tokenizer_class") or ""
    if kind not in _CLASSES:
        raise InputError(
            f"{directory / 'tokenizer_config.json'}: tokenizer_class {kind} is not BERT's WordPiece; what it makes of "
            "a text cannot be computed here"
        )
    if (directory / "spiece.model").exists():
        return load_tokenizer(directory)
    backend = _read_object(directory / "tokenizer.json")
    options = _backend_options(backend, directory / "tokenizer.json") if backend else {}
    options |= {name: settings[name] for name in _OPTIONS.values() if settings.get(name) is not None}
    path = directory / "vocab.txt"
    if path.exists():
        vocab: Sequence[str] = read_vocab(path)
    elif backend:
        path, vocab = directory / "tokenizer.json", _backend_vocab(backend, directory / "tokenizer.json")
    else:
        raise InputError(
            f"{directory} has no vocab.txt and no tokenizer.json; copy one of them from where it came from"
        )
    _check_added_tokens(directory, settings, backend, len(vocab))
    if "do_lower_case" not in options:  # nobody says: capitals in the vocabulary do
        return load_tokenizer(path)
    try:
        return wordpiece_tokenizer(
            vocab,
            options["do_lower_case"],
            options.get("strip_accents"),
            options.get("tokenize_chinese_chars", True),
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def save_hf_tokenizer(directory: Path, tokenizer: Tokenizer, max_positions: int) -> list[str]:
    """Writes the vocabulary and tokenizer_config.json; returns what the user should know."""
    tokenizer.save(directory)
    settings = read_json(directory / "tokenizer_config.json")
    write_json(directory / "tokenizer_config.json", settings | {"model_max_length": max_positions})
    if tokenizer.kind != "wordpiece":
        return ["transformers has no tokenizer for spiece.model with BERT's tokens; bert_jax.load_tokenizer reads it"]
    return []


def _read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, {} if there is no file."""
    content = read_json(path) if path.exists() else {}
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object, so it describes no tokenizer; copy it again")
    return content


def _backend_options(backend: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the options of tokenizer.json under the names of tokenizer_config.json."""
    model, normalizer, splitter = (backend.get(name) or {} for name in ("model", "normalizer", "pre_tokenizer"))
    for what, found, wanted in (
        ("model", model.get("type", "WordPiece"), "WordPiece"),
        ("normalizer", normalizer.get("type"), "BertNormalizer"),
        ("pre_tokenizer", splitter.get("type"), "BertPreTokenizer"),
        ("continuing_subword_prefix", model.get("continuing_subword_prefix", "##"), "##"),
        ("clean_text", normalizer.get("clean_text", True), True),
    ):
        if found != wanted:
            raise InputError(
                f"{path}: {what} is {found!r}, BERT's is {wanted!r}; what it makes of a text cannot be computed here"
            )
    return {ours: normalizer[name] for name, ours in _OPTIONS.items() if normalizer.get(name) is not None}


def _backend_vocab(backend: dict[str, Any], path: Path) -> list[str]:
    """Returns the tokens of tokenizer.json in the order of their ids."""
    ids = (backend.get("model") or {}).get("vocab")
    if not isinstance(ids, dict) or sorted(ids.values()) != list(range(len(ids))):
        raise InputError(f"{path}: its vocabulary is not a map to the ids 0, 1, 2, ...; copy it again")
    return sorted(ids, key=ids.__getitem__)


def _check_added_tokens(directory: Path, settings: dict[str, Any], backend: dict[str, Any], vocab_size: int) -> None:
    """Raises: InputError if there are tokens that the vocabulary lacks."""
    ids = {str(token): int(index) for token, index in _read_object(directory / "added_tokens.json").items()}
    ids |= {str(token.get("content")): int(token.get("id", 0)) for token in backend.get("added_tokens", [])}
    decoder = settings.get("added_tokens_decoder", {})
    ids |= {str(token.get("content")): int(index) for index, token in decoder.items()}
    beyond = sorted((index, token) for token, index in ids.items() if index >= vocab_size)
    if beyond:
        raise InputError(
            f"{directory} adds {len(beyond)} tokens to its vocabulary of {vocab_size}, {beyond[0][1]!r} the first; "
            "they are found in raw text, which this tokenizer does not do: append them to vocab.txt as words, in the "
            "order of their ids, and remove them from the other files"
        )
