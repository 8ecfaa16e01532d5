# SPDX-License-Identifier: Apache-2.0
"""Readers of one format, by a path: those of the package take a directory that was listed."""

from pathlib import Path

from bert_jax.checkpoints import hf, tf1
from bert_jax.checkpoints.names import Imported
from bert_jax.storage.folder import open_folder
from bert_jax.text import hf_tokenizer
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tokenizing import read_tokenizer_files


def load_hf(directory: Path) -> Imported:
    """Returns the model in a directory of Hugging Face's."""
    return hf.load_hf(open_folder(directory))


def load_tf1(path: Path) -> Imported:
    """Returns the model of a directory of Google's, or of a checkpoint's prefix."""
    if path.is_dir():
        return tf1.load_tf1(open_folder(path))
    return tf1.load_tf1(open_folder(path.parent), path.name)


def load_hf_tokenizer(directory: Path) -> tuple[Tokenizer, list[str]]:
    """Returns the tokenizer in a directory of Hugging Face's, and notes."""
    return hf_tokenizer.load_hf_tokenizer(read_tokenizer_files(open_folder(directory)))
