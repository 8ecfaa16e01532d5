# SPDX-License-Identifier: Apache-2.0
"""Tokenizers by their path: their files are read here, and what these mean is in `text`."""

from pathlib import Path

from bert_jax.errors import InputError
from bert_jax.storage import files
from bert_jax.storage.folder import Folder
from bert_jax.storage.places import AnyPath
from bert_jax.storage.resolve import resolve
from bert_jax.text.hf_tokenizer import load_hf_tokenizer, parse_tokenizer
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.tokenizer_files import (
    ADDED,
    DESCRIBED,
    SETTINGS,
    SPECIAL,
    VOCABULARIES,
    TokenizerFiles,
)

_OF_MODEL = "config.json"


def load_tokenizer(
    path: AnyPath, lowercase: bool | None = None, strip_accents: bool | None = None
) -> Tokenizer:
    """Returns the tokenizer of a vocabulary file, or of a directory with vocab.txt, spiece.model or tokenizer.json.

    A directory's tokenizer_config.json holds the options. A tokenizer.json that is not BERT's precedes vocab.txt.

    Args:
      path: the file or directory, ours or Hugging Face's, or its URL; a file whose name ends in .model is
        SentencePiece's, in .json Hugging Face's.
      lowercase: overrides tokenizer_config.json. Without either, text is lower-cased unless the vocabulary
        holds capital letters (bracketed tokens such as [CLS] apart).
      strip_accents: overrides tokenizer_config.json. Without either it follows `lowercase`; with SentencePiece
        accents stay.
    Raises: InputError if there is no vocabulary, or an unusable one.

    Examples:
      >>> tokenizer = bert_jax.load_tokenizer("models/bert-mini-en")
      >>> tokenizer.encode("the king opened")
      [1579, 2343, 3997]
    """
    found = resolve(path)
    if "file" in found.kinds:
        return read_vocabulary(found.on_this_machine(), lowercase, strip_accents)
    if "nothing" in found.kinds:
        raise InputError(
            f"vocabulary {path} does not exist; give a file of one token per line, or a directory"
        )
    return read_tokenizer(found.folder(), lowercase, strip_accents)


def read_vocabulary(
    path: Path, lowercase: bool | None = None, strip_accents: bool | None = None
) -> Tokenizer:
    """Returns the tokenizer of a vocabulary file on this machine; see `load_tokenizer`."""
    content = files.read_json(path) if path.suffix == ".json" else files.read_file(path)
    return parse_tokenizer(content, path, lowercase, strip_accents)


def read_tokenizer(
    folder: Folder, lowercase: bool | None = None, strip_accents: bool | None = None
) -> Tokenizer:
    """Returns the tokenizer of a directory; see `load_tokenizer`."""
    names = (*VOCABULARIES, DESCRIBED)
    if not any(name in folder for name in names):
        inside = folder.inside("tokenizer")  # of a data set, and of a work directory
        hint = f" (did you mean {inside.path}?)" if any(name in inside for name in names) else ""
        raise InputError(
            f"directory {folder.path} holds none of {', '.join(names)}{hint}; see build_vocab"
        )
    return load_hf_tokenizer(read_tokenizer_files(folder), lowercase, strip_accents)[0]


def read_tokenizer_files(folder: Folder) -> TokenizerFiles:
    """Returns what the files of a tokenizer hold. Raises: InputError if one cannot be read, or holds no object."""
    return TokenizerFiles(
        where=folder.path,
        contents={name: folder.read_bytes(name) for name in VOCABULARIES if name in folder},
        described=folder.object(DESCRIBED) if DESCRIBED in folder else None,
        settings=folder.object(SETTINGS),
        special_tokens=folder.object(SPECIAL),
        added_tokens=folder.object(ADDED),
        model=folder.object(_OF_MODEL) if _OF_MODEL in folder else None,
    )
