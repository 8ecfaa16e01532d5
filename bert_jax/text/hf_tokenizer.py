# SPDX-License-Identifier: Apache-2.0
"""Tokenizers from files, a directory of ours or of Hugging Face's, and the files that transformers reads.

A directory has vocab.txt, a model of SentencePiece's or tokenizer.json, and tokenizer_config.json. BERT's WordPiece is
computed by our own code, any other tokenizer.json by the library that wrote it. What the files mean is what the class
of transformers 5 that reads them makes of them: `hf_classes`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
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
    EXACT,
    LONGEST,
    ROLES,
    SOURCES,
    as_loaded,
    bert_parts,
    class_of,
    make_rows,
    read_source,
)
from bert_jax.text.sentencepieces import read_sentencepieces
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.tokenizer_files import DESCRIBED, SETTINGS, SPIECE, VOCAB, TokenizerFiles
from bert_jax.text.tokenizer_json import DescribedPieces
from bert_jax.text.vocab import MAX_WORD_LENGTH, SPECIAL_TOKENS, JsonObject, parse_vocab
from bert_jax.text.wordpiece import (
    CLASSES,
    GENERAL,
    GOOGLE,
    INPUTS,
    LONGEST_WORD,
    ODD,
    WordPiece,
    is_lowercase,
    make_wordpiece,
)

_BOOLEANS = (*OPTIONS.values(), "keep_accents", "split_by_punct", GOOGLE, ODD)
# an added token that text is searched for as it is
_MARKED = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {
    "special": True
}
_WRITE = "write one with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"


def load_hf_tokenizer(
    files: TokenizerFiles, lowercase: bool | None = None, strip_accents: bool | None = None
) -> tuple[Tokenizer, list[str]]:
    """Returns the tokenizer of a directory, and notes for the user. A tokenizer.json that is not BERT's precedes.

    Raises: InputError if no file describes one, or it is one that cannot be computed here.
    """
    settings = files.settings
    backend = files.described
    described = files.where / DESCRIBED
    for name in _BOOLEANS:
        if not isinstance(settings.get(name), bool | None):
            raise InputError(
                f"{files.where / SETTINGS}: {name} is {shown(settings[name])}; make it true or false"
            )
    kind = class_of(files, settings)
    notes = _side_notes(settings, backend or {})
    if backend is not None:
        backend, settings, more = as_loaded(files, backend, settings)
        notes += more
    # transformers makes a tokenizer.json of vocab.txt or of SentencePiece's file; with tokens that
    # other files add it is no longer BERT's.
    elif made := read_source(files):
        described, (backend, settings) = files.where / SOURCES[kind], made
    if backend is not None and not (is_plain(backend, described) and kind in CLASSES):
        return _described(described, backend, settings, lowercase, strip_accents), notes
    if kind not in CLASSES:
        raise InputError(
            f"{files.where}: {kind[:80]} is not BERT's WordPiece, and there is no "
            f"{' and no '.join(filter(None, (SOURCES.get(kind), DESCRIBED)))}; {_WRITE}"
        )
    for name, value in (("do_basic_tokenize", True), ("never_split", None)):
        given = files.settings.get(name)
        if given not in (None, value, []):
            raise InputError(
                f"{files.where / SETTINGS}: {name} is {shown(given)}, BERT's is {shown(value)}; {OTHER}"
            )
    found = [name for name in (VOCAB, SPIECE) if name in files.contents]
    if backend is None and len(found) != 1:
        names = " and ".join(found) or "no vocab.txt and no tokenizer.json"
        raise InputError(f"{files.where} has {names}; give one that you mean, or {_WRITE}")
    if backend is None and SPIECE in files.contents:
        content = files.contents[SPIECE]
        path = files.where / SPIECE
        return _sentencepieces(path, content, settings, lowercase, strip_accents), notes
    vocab, options, more = _berts(files, settings, backend)
    path = files.where / (VOCAB if VOCAB in files.contents else DESCRIBED)
    return _wordpiece(path, vocab, options, lowercase, strip_accents), notes + more


def parse_tokenizer(
    content: bytes | JsonObject, path: Path, lowercase: bool | None, strip_accents: bool | None
) -> Tokenizer:
    """Returns the tokenizer of a vocabulary file's content, that of a tokenizer.json parsed; see `load_tokenizer`."""
    given = (lowercase, strip_accents)
    if not isinstance(content, bytes):
        if not is_plain(content, path):
            return _described(path, content, {}, *given)
        options = {GOOGLE: False, ODD: True, LONGEST_WORD: longest_word(content["model"], path)}
        options |= berts_options(content, path)
        return _wordpiece(path, berts_vocab(content, path), options, *given)
    if path.suffix == ".model":
        return _sentencepieces(path, content, {}, *given)
    return _wordpiece(path, parse_vocab(content, path), {}, *given)


def _described(
    path: Path,
    backend: JsonObject,
    settings: JsonObject,
    lowercase: bool | None,
    strip_accents: bool | None,
) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json. Raises: InputError if an option contradicts it."""
    # written anew, since the settings may have changed parts of it
    with reading(str(path)):
        pieces = DescribedPieces(json.dumps(backend).encode(), settings)
        for name, value in (("do_lower_case", lowercase), ("strip_accents", strip_accents)):
            if value not in (None, pieces.config[name]):
                own = shown(pieces.config[name])
                raise InputError(f"{path}: {name} is {own} in the file itself; leave it so")
        return Tokenizer(pieces)


def _sentencepieces(
    path: Path,
    content: bytes,
    options: JsonObject,
    lowercase: bool | None,
    strip_accents: bool | None,
) -> Tokenizer:
    """Returns the tokenizer of a SentencePiece model.

    Raises: InputError, with the path, if it is damaged or lacks a special token.
    """
    with reading(str(path)):
        return Tokenizer(read_sentencepieces(content, options, lowercase, strip_accents))


def _wordpiece(
    path: Path,
    vocab: Sequence[str],
    options: JsonObject,
    lowercase: bool | None,
    strip_accents: bool | None,
) -> Tokenizer:
    """Returns the tokenizer of a WordPiece vocabulary, with the options of tokenizer_config.json.

    Raises: InputError, with the path, if it lacks a special token.
    """
    options = options | {"do_lower_case": is_lowercase(vocab, options, lowercase)}
    if strip_accents is not None:
        options["strip_accents"] = strip_accents
    with reading(str(path)):
        return Tokenizer(make_wordpiece(vocab, options))


def _side_notes(settings: JsonObject, backend: JsonObject) -> list[str]:
    """Returns notes for texts that are cut, or padded, at their beginning."""
    notes = []
    for part, side, what in (
        ("truncation", "truncation_side", "a text that is too long loses its end here"),
        ("padding", "padding_side", "rows are padded at their end here, which changes no result"),
    ):
        of_file = backend.get(part)
        usual = of_file.get("direction") if isinstance(of_file, dict) else None
        value = settings.get(side) or usual
        if value and str(value).lower() != "right":
            notes.append(f"{side} {shown(value)} is not kept; {what}")
    return notes


def _berts(
    files: TokenizerFiles, settings: JsonObject, backend: JsonObject | None
) -> tuple[Sequence[str], JsonObject, list[str]]:
    """Returns vocabulary and options of BERT's WordPiece, and notes for the user.

    vocab.txt is the vocabulary where it is there; a tokenizer.json beside it must say the same. Options are those of
    tokenizer_config.json, and of tokenizer.json where these say nothing; the general classes follow tokenizer.json.

    Raises: InputError if the two disagree about a token, or rows have no [CLS] and [SEP].
    """
    described = files.where / DESCRIBED
    of_google = VOCAB in files.contents
    names = [*OPTIONS.values(), INPUTS, GOOGLE, ODD]
    options = JsonObject()
    notes = []
    vocab: Sequence[str] = files.vocab if of_google else ()
    if backend is None:
        options[LONGEST_WORD] = longest_word(settings, files.where / SETTINGS)
    else:
        options = berts_options(backend, described)
        options[LONGEST_WORD] = longest_word(backend["model"], described)
        if settings.get("tokenizer_class") in GENERAL:
            names = [INPUTS, GOOGLE, ODD]
            if backend.get("post_processor") is None:
                raise InputError(
                    f"{described}: post_processor is null, so it adds no [CLS] and [SEP]; {OTHER}"
                )
        if of_google:
            _check_same(vocab, backend["model"].get("vocab"), files.where)
        else:
            vocab = berts_vocab(backend, described)
    options |= {name: settings[name] for name in names if settings.get(name) is not None}
    # Google's own models come with a vocab.txt, and follow Google's rules to the last character.
    options.setdefault(GOOGLE, of_google)
    # of a directory that transformers reads
    options.setdefault(ODD, backend is not None or files.model is not None)
    if "do_lower_case" not in options and not is_lowercase(vocab, {}):
        notes.append("text is not lower-cased, since vocab.txt has capitals; transformers does it unless "
                     "do_lower_case in tokenizer_config.json is false")  # fmt: skip
    lowers = is_lowercase(vocab, options)
    if (
        GOOGLE not in settings
        and of_google
        and lowers
        and any("\u03c2" in token for token in vocab)
    ):
        notes.append(
            "a Greek capital sigma that ends a word becomes the final small one, as Google's code does with this "
            "vocab.txt; transformers makes the other one of it"
        )
    return vocab, options, notes


def save_hf_tokenizer(directory: Path, tokenizer: Tokenizer, max_positions: int) -> list[str]:
    """Writes the vocabulary, tokenizer_config.json and tokenizer.json; returns notes for the user.

    transformers needs no tokenizer.json of a BERT; programs that read text without Python do.
    """
    tokenizer.save(directory)
    settings = tokenizer.settings | {"model_max_length": max_positions}
    settings.pop(EXACT, None)  # the class that is written follows the file
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


def with_prompt_tokens(tokenizer: Tokenizer, prompts: Iterable[str]) -> Tokenizer:
    """Returns the tokenizer that takes prompts for a token where the vocabulary has it by this name, as [unused0].

    A blank at the end of a prompt may be part of the name, and need not. One of sentencepiece's stays as it is.
    """
    pieces = tokenizer.pieces
    names = []
    for prompt in prompts:
        name = next((each for each in (prompt, prompt.strip()) if each in pieces.ids), "")
        if name and tokenizer.encode(prompt) != [pieces.ids[name]]:
            names.append(name)
    if not names or tokenizer.kind not in (WordPiece.kind, DescribedPieces.kind):
        return tokenizer
    described = (
        json.loads(pieces.content)
        if isinstance(pieces, DescribedPieces)
        else make_backend(tokenizer)
    )
    added = {token["content"]: token for token in described["added_tokens"]}
    added |= {name: {"id": pieces.ids[name], "content": name, **_MARKED} for name in names}
    described["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
    roles = zip(ROLES, tokenizer.template.specials, strict=True)
    settings = tokenizer.settings | {f"{role}_token": token for role, token in roles}
    return Tokenizer(DescribedPieces(json.dumps(described).encode(), settings))


def make_backend(tokenizer: Tokenizer) -> JsonObject:
    """Returns the contents of tokenizer.json."""
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
            {"id": index, "content": token, **_MARKED}
            for index, token in sorted(zip(tokenizer.special_ids, SPECIAL_TOKENS, strict=True))
        ],
        "post_processor": make_rows("[CLS]", "[SEP]", parts["model"]["vocab"]),
    }


def _check_same(vocab: Sequence[str], ids: Mapping[str, int], directory: Path) -> None:
    """Raises: InputError if vocab.txt and tokenizer.json disagree about a token."""
    with reading(str(directory / DESCRIBED)):
        for token, index in ids.items():
            if not 0 <= index < len(vocab) or vocab[index].strip() != token.strip():
                raise InputError(
                    f"{directory}: vocab.txt and tokenizer.json disagree about {shown(token)} with id {shown(index)}; "
                    "remove the one that is not this model's"
                )
