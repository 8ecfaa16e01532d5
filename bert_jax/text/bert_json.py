# SPDX-License-Identifier: Apache-2.0
"""Tells whether Hugging Face's tokenizer.json is BERT's WordPiece, and reads its options and vocabulary if it is."""

from pathlib import Path
from typing import Any

from bert_jax.errors import InputError, shown
from bert_jax.text.vocab import CONTINUATION, MAX_WORD_LENGTH, SPECIAL_TOKENS, JsonObject
from bert_jax.text.wordpiece import LONGEST_WORD

OPTIONS = {"lowercase": "do_lower_case", "strip_accents": "strip_accents",
           "handle_chinese_chars": "tokenize_chinese_chars"}  # fmt: skip
OTHER = "what it makes of a text cannot be computed here"
_COPY = "copy it again"


def is_plain(backend: Any, path: Path) -> bool:
    """Returns whether tokenizer.json is BERT's WordPiece, with BERT's rows, and adds no tokens found in raw text."""
    try:
        berts_options(backend, path)
        added = {token["content"] for token in backend.get("added_tokens") or []}
        rows = backend.get("post_processor")
        return added <= {*SPECIAL_TOKENS} and (
            rows is None or read_rows(rows) == ("[CLS]", "[SEP]", 1, 1)
        )
    # whatever its form is, it is not this one
    except (InputError, AttributeError, KeyError, TypeError):
        return False


def berts_options(backend: JsonObject, path: Path) -> JsonObject:
    """Returns the options of a tokenizer.json that is BERT's, under the names of tokenizer_config.json.

    Raises: InputError if it is another tokenizer, or damaged.
    """
    parts: list[Any] = [backend.get(name) for name in ("model", "normalizer", "pre_tokenizer")]
    if not all(isinstance(part, dict) for part in parts):
        raise InputError(f"{path}: model, normalizer and pre_tokenizer are not objects; {_COPY}")
    model, normalizer, splitter = parts
    for setting, value, wanted in (
        ("model", model.get("type", "WordPiece"), "WordPiece"),
        ("normalizer", normalizer.get("type"), "BertNormalizer"),
        ("pre_tokenizer", splitter.get("type"), "BertPreTokenizer"),
        (
            "continuing_subword_prefix",
            model.get("continuing_subword_prefix", CONTINUATION),
            CONTINUATION,
        ),
        ("unk_token", model.get("unk_token", "[UNK]"), "[UNK]"),
        ("clean_text", normalizer.get("clean_text", True), True),
    ):
        if value != wanted:
            raise InputError(
                f"{path}: {setting} is {shown(value)}, BERT's is {shown(wanted)}; {OTHER}"
            )
    return {
        ours: normalizer[name] for name, ours in OPTIONS.items() if normalizer.get(name) is not None
    }


def longest_word(model: JsonObject, path: Path) -> int:
    """Returns the most characters of a word that is not [UNK]: Google's default, if it is not among the options."""
    longest = model.get(LONGEST_WORD, MAX_WORD_LENGTH)
    if type(longest) is not int or longest < 1:
        raise InputError(
            f"{path}: {LONGEST_WORD} is {shown(longest)}; make it a number of characters, such as 100"
        )
    return longest


def berts_vocab(backend: JsonObject, path: Path) -> list[str]:
    """Returns the tokens of BERT's tokenizer.json in the order of their ids, as the lines of vocab.txt are read."""
    ids = backend["model"].get("vocab")
    if not isinstance(ids, dict) or not ids or list(range(len(ids))) != sorted(ids.values()):
        raise InputError(f"{path}: its vocabulary is not a map to the ids 0, 1, 2, ...; {_COPY}")
    return [token.strip() for token in sorted(ids, key=ids.__getitem__)]


def read_rows(processor: Any, has_types: bool = True) -> tuple[str, str, int, int]:
    """Returns [CLS], [SEP], the number of [SEP] between two texts, and the type of the second text, 0 without types.

    Raises: InputError if rows are not [CLS] A [SEP] and [CLS] A [SEP] .. B [SEP].
    """
    try:
        if processor["type"] == "Sequence":
            # ByteLevel changes spans alone
            (processor,) = [step for step in processor["processors"] if step["type"] != "ByteLevel"]
        if processor["type"] in ("RobertaProcessing", "BertProcessing"):
            berts = processor["type"] == "BertProcessing"
            return (
                str(processor["cls"][0]),
                str(processor["sep"][0]),
                1 if berts else 2,
                int(berts and has_types),
            )
        single, pair = (
            [
                (name, part["id"], has_types and part["type_id"])
                for entry in processor[kind]
                for name, part in entry.items()
            ]
            for kind in ("single", "pair")
        )
        (_, cls, _), _, (_, sep, _) = single
        separators = len(pair) - 4
        second = int(pair[-1][2])
        first = [("SpecialToken", cls, 0), ("Sequence", "A", 0)]
        last = [("Sequence", "B", second), ("SpecialToken", sep, second)]
        end = ("SpecialToken", sep, 0)
        if separators in (1, 2) and second in (0, 1) and single == [*first, end]:
            if pair == [*first, *[end] * separators, *last]:
                return cls, sep, separators, second
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        pass
    raise InputError(
        "its post_processor makes other rows than [CLS] A [SEP] and [CLS] A [SEP] B [SEP] of two types"
    )
