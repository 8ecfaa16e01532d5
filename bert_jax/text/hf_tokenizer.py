# SPDX-License-Identifier: Apache-2.0
"""The tokenizer files of a Hugging Face directory: vocab.txt or spiece.model, tokenizer.json, tokenizer_config.json.

BERT's WordPiece is computed by our own code, any other tokenizer.json by the library that wrote it. What the files mean
is what the class of transformers 5 that reads them makes of them: `hf_classes`.
"""

from collections.abc import Sequence
from pathlib import Path

from bert_jax.errors import InputError, reading, shown
from bert_jax.storage.writing import write_json
from bert_jax.text.bert_json import (
    OPTIONS,
    OTHER,
    berts_options,
    berts_vocab,
    is_plain,
    longest_word,
)
from bert_jax.text.hf_classes import (
    LONGEST,
    ROLES,
    as_loaded,
    bert_parts,
    class_of,
    make_rows,
    vocab_with_added,
)
from bert_jax.text.tokenizer import Tokenizer, tokenizer_of
from bert_jax.text.tokenizer_files import DESCRIBED, SETTINGS, SPIECE, VOCAB, TokenizerFiles
from bert_jax.text.tokenizer_json import DescribedPieces, read_pieces
from bert_jax.text.vocab import MAX_WORD_LENGTH, SPECIAL_TOKENS, JsonObject
from bert_jax.text.wordpiece import (
    CLASSES,
    GENERAL,
    GOOGLE,
    INPUTS,
    LONGEST_WORD,
    WordPiece,
    is_lowercase,
    make_wordpiece,
)


def load_hf_tokenizer(files: TokenizerFiles) -> tuple[Tokenizer, list[str]]:
    """Returns the tokenizer of a directory, and notes for the user.

    Raises: InputError if no file describes one, or it is one that cannot be computed here.
    """
    settings, backend = files.settings, files.described or {}
    kind, notes = class_of(files, settings), _side_notes(settings, backend)
    if SPIECE in files.contents and not backend:
        _check_settings(kind, files)
        return tokenizer_of(files), notes
    if not backend and VOCAB not in files.contents:
        fix = "write one with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        raise InputError(
            f"{files.where} has no vocab.txt and no tokenizer.json; copy one, or {fix}"
        )
    if backend:
        backend, settings, more = as_loaded(files, backend, settings)
        notes += more
    elif made := vocab_with_added(files):
        return Tokenizer(read_pieces(files.where / VOCAB, *made)), notes
    if backend and (not is_plain(backend, files.where / DESCRIBED) or kind not in CLASSES):
        return Tokenizer(read_pieces(files.where / DESCRIBED, backend, settings)), notes
    _check_settings(kind, files)
    tokenizer, more = _load_berts(files, settings, backend)
    return tokenizer, notes + more


def _side_notes(settings: JsonObject, backend: JsonObject) -> list[str]:
    """Returns notes for texts that are cut, or padded, at their beginning."""
    notes = []
    for part, side, what in (
        ("truncation", "truncation_side", "a text that is too long loses its end here"),
        ("padding", "padding_side", "rows are padded at their end here, which changes no result"),
    ):
        of_file = backend.get(part)
        value = settings.get(side) or (
            of_file.get("direction") if isinstance(of_file, dict) else None
        )
        if value and str(value).lower() != "right":
            notes.append(f"{side} {shown(value)} is not kept; {what}")
    return notes


def _load_berts(
    files: TokenizerFiles, settings: JsonObject, backend: JsonObject
) -> tuple[Tokenizer, list[str]]:
    """Returns BERT's WordPiece, and notes."""
    directory, described = files.where, files.where / DESCRIBED
    options = berts_options(backend, described) if backend else {}
    is_general = bool(backend) and settings.get("tokenizer_class") in GENERAL
    if is_general and backend.get("post_processor") is None:
        raise InputError(
            f"{described}: post_processor is null, so it adds no [CLS] and [SEP]; {OTHER}"
        )
    names = [*([] if is_general else OPTIONS.values()), INPUTS, GOOGLE]
    options |= {name: settings[name] for name in names if settings.get(name) is not None}
    for name, value in options.items():
        if not isinstance(value, bool) and name != INPUTS:
            raise InputError(
                f"{directory}: the tokenizer's {name} is {shown(value)}; make it true or false"
            )
    notes = []
    of_google = VOCAB in files.contents
    if of_google:
        vocab: Sequence[str] = files.vocab
        if backend:
            berts_vocab(backend, described, whole=False)
            _check_same(vocab, backend["model"]["vocab"], directory)
    else:
        vocab = berts_vocab(backend, described)
    if "do_lower_case" not in options:  # not given: decided by capitals in the vocabulary
        options["do_lower_case"] = is_lowercase(vocab, {})
        if not options["do_lower_case"]:
            notes.append("text is not lower-cased, since vocab.txt has capitals; transformers does it unless "
                         "do_lower_case in tokenizer_config.json is false")  # fmt: skip
    if GOOGLE not in options:
        options[GOOGLE] = of_google
        if of_google and options["do_lower_case"] and any("\u03c2" in token for token in vocab):
            notes.append(
                "a Greek capital sigma that ends a word becomes the final small one, as Google's code does with this "
                "vocab.txt; transformers makes the other one of it"
            )
    options[LONGEST_WORD] = longest_word(backend, described)
    with reading(str(directory / (VOCAB if of_google else DESCRIBED))):
        return Tokenizer(make_wordpiece(vocab, options)), notes


def save_hf_tokenizer(directory: Path, tokenizer: Tokenizer, max_positions: int) -> list[str]:
    """Writes the vocabulary, tokenizer_config.json and tokenizer.json; returns notes for the user.

    transformers needs no tokenizer.json of a BERT; programs that read text without Python do.
    """
    tokenizer.save(directory)
    settings = tokenizer.settings | {"model_max_length": max_positions}
    if isinstance(tokenizer.pieces, DescribedPieces):
        blank = tokenizer.pieces.puts_blank
        write_json(
            directory / SETTINGS, settings | ({} if blank is None else {"add_prefix_space": blank})
        )
        return []
    if tokenizer.kind != WordPiece.kind:
        write_json(directory / SETTINGS, settings)
        return [
            "transformers has no tokenizer for spiece.model with BERT's tokens; bert_jax.load_tokenizer reads it"
        ]
    special = {f"{name}_token": token for name, token in zip(ROLES, SPECIAL_TOKENS, strict=True)}
    if tokenizer.config.get(LONGEST_WORD, LONGEST) not in (LONGEST, MAX_WORD_LENGTH):
        special["tokenizer_class"] = GENERAL[0]  # BERT's own class has 100 whatever the file says
        inputs = ["input_ids", "token_type_ids", "attention_mask"]
        settings = {INPUTS: inputs} | settings
    write_json(directory / SETTINGS, settings | special)
    if len(set(tokenizer.vocab)) == tokenizer.vocab_size:  # it cannot hold two tokens of one name
        write_json(directory / DESCRIBED, make_backend(tokenizer))
    return []


def make_backend(tokenizer: Tokenizer) -> JsonObject:
    """Returns the contents of tokenizer.json."""
    marked = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    parts = bert_parts(
        {token: index for index, token in enumerate(tokenizer.vocab)},
        lowercase=tokenizer.lowercase,
        strip_accents=tokenizer.strip_accents,
        split_chinese=tokenizer.config["tokenize_chinese_chars"],
        longest=tokenizer.config.get(LONGEST_WORD, MAX_WORD_LENGTH),
    )
    return parts | {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **marked}
            for index, token in sorted(zip(tokenizer.special_ids, SPECIAL_TOKENS, strict=True))
        ],
        "post_processor": make_rows("[CLS]", "[SEP]", parts["model"]["vocab"]),
    }


def _check_settings(kind: str, files: TokenizerFiles) -> None:
    """Raises: InputError if the settings describe a tokenizer that is not BERT's WordPiece."""
    if kind not in CLASSES:
        fix = "write one with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        raise InputError(
            f"{files.where}: {kind[:80]} is not BERT's WordPiece, and there is no tokenizer.json; {fix}"
        )
    for name, value in (("do_basic_tokenize", True), ("never_split", None)):
        given = files.settings.get(name)
        if given not in (None, value, []):
            raise InputError(
                f"{files.where / SETTINGS}: {name} is {shown(given)}, BERT's is {shown(value)}; {OTHER}"
            )


def _check_same(vocab: Sequence[str], ids: dict[str, int], directory: Path) -> None:
    """Raises: InputError if vocab.txt and tokenizer.json disagree about a token."""
    for token, index in ids.items():
        if not 0 <= index < len(vocab) or vocab[index].strip() != token.strip():
            both = (
                f"vocab.txt and tokenizer.json disagree about {shown(token)} with id {shown(index)}"
            )
            raise InputError(f"{directory}: {both}; remove the one that is not this model's")
