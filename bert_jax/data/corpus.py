# SPDX-License-Identifier: Apache-2.0
"""Inputs to documents. A document is the list of its lines, each a sentence or a paragraph.

Inputs are separated by commas, and each is one of

- a file, a quoted glob, or a URL of either (gs://bucket/text/*.gz), of text, JSON lines or WikiExtractor's output,
  plain or compressed by gzip or zstd: what it is shows in its first bytes (`formats`);
- tfds:NAME, a prepared data set of TensorFlow Datasets (`tfds_text`);
- python-docs, the English documentation inside every Python: it needs no file, so it is what tests and the first
  steps are made of.
"""

import hashlib
from collections.abc import Iterator

from bert_jax import storage
from bert_jax.data import formats, python_docs, tfds_text
from bert_jax.data.formats import Piece
from bert_jax.data.python_docs import PYTHON_DOCS
from bert_jax.errors import InputError

PIECE_BYTES = 16 << 20


def iterate_documents(inputs: str) -> Iterator[list[str]]:
    """Yields the documents of the inputs, in order.

    Raises: InputError if an input is missing, unreadable, not UTF-8 or breaks the rules of its format, or if there
    is no document at all.
    """
    found = False
    for piece in plan_pieces(inputs):
        for document in read_piece(piece):
            found = True
            yield document
    if not found:
        raise _no_document(inputs)


def plan_pieces(inputs: str, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Returns the pieces of the inputs, whose documents one after the other are those of `iterate_documents`.

    A plain file is cut into pieces of about `piece_bytes`, where documents end, and so is a TFDS data set; a
    compressed file cannot be. Raises: InputError if an input is missing or unreadable, or all are empty.
    """
    sources = _sources(inputs)
    pieces = []
    for source, path in zip(sources, storage.local_copies(sources)):
        if source == PYTHON_DOCS:
            pieces.append(Piece(source, PYTHON_DOCS))
        elif source.startswith(tfds_text.PREFIX):
            pieces.extend(tfds_text.plan_examples(source, piece_bytes))
        else:
            pieces.extend(formats.plan_file(path, source, piece_bytes))
    if not pieces:
        raise _no_document(inputs)
    return pieces


def read_piece(piece: Piece) -> Iterator[list[str]]:
    """Yields the documents of a piece.

    Raises: InputError if it cannot be read or breaks a rule, naming the input and the line or example.
    """
    if piece.kind == PYTHON_DOCS:
        return python_docs.read_python_docs()
    return tfds_text.read_examples(piece) if piece.kind == tfds_text.TFDS else formats.read_file(piece)


def fingerprint(inputs: str) -> str:
    """Returns a sha256 of the contents of the inputs, whatever their paths; see `tfds_text` for that of a data set."""
    sources = _sources(inputs)
    contents = []
    for source, path in zip(sources, storage.local_copies(sources)):
        if source == PYTHON_DOCS:
            contents.append(python_docs.fingerprint())
        elif source.startswith(tfds_text.PREFIX):
            contents.append(tfds_text.fingerprint(source))
        else:
            contents.append(storage.sha256_file(path))
    if sources == [PYTHON_DOCS]:
        return contents[0]
    return hashlib.sha256(" ".join(contents).encode()).hexdigest()


def _sources(inputs: str) -> list[str]:
    """Returns the single inputs, each once: the globs among them as the files that they match."""
    sources: dict[str, None] = {}
    for part in filter(None, (part.strip() for part in inputs.split(","))):
        is_file = part != PYTHON_DOCS and not part.startswith(tfds_text.PREFIX)
        sources.update(dict.fromkeys(storage.expand_globs(part) if is_file else [part]))
    return list(sources) or storage.expand_globs(inputs)  # which raises the error for no input at all


def _no_document(inputs: str) -> InputError:
    return InputError(f"input {inputs!r} holds no document: all its lines are blank; give files with text")
