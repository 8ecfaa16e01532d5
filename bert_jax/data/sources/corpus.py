# SPDX-License-Identifier: Apache-2.0
"""Inputs to documents. A document is the list of its lines, each a sentence or a paragraph.

Inputs are separated by commas, and each is one of

- a file, a quoted glob, or a URL of either (gs://bucket/text/*.gz), of text, JSON lines or WikiExtractor's output,
  plain or compressed by gzip or zstd, told apart by the first bytes (`formats`);
- the same of Parquet files ('wiki/*.parquet', 'hf://datasets/ORG/NAME/*.parquet'): a row is a document (`parquet`);
- tfds:NAME, a prepared data set of TensorFlow Datasets (`tfds_text`).
"""

import hashlib
import os
from collections.abc import Iterator
from typing import TypeAlias

from bert_jax.data.sources import formats, parquet, tfds_text
from bert_jax.data.sources.formats import TEXT_COLUMN, Piece
from bert_jax.errors import InputError
from bert_jax.storage import files, urls
from bert_jax.storage.files import JsonObject

# small enough that the workers of a file of some 10 MB end at about the same time
PIECE_BYTES = 4 << 20
Content: TypeAlias = tuple[str, str, int]  # a single input, its sha256, the bytes of its file


def iterate_documents(inputs: str, text_column: str = TEXT_COLUMN) -> Iterator[list[str]]:
    """Yields the documents of the inputs, in order. `text_column` is that of Parquet files, or the key of JSON lines.

    Raises: InputError if an input is missing, unreadable, not UTF-8 or breaks the rules of its format, or if they
    have no document at all.
    """
    has_document = False
    for piece in plan_pieces(inputs, text_column=text_column):
        for document in read_piece(piece):
            has_document = True
            yield document
    if not has_document:
        raise _no_document(inputs)


def plan_pieces(
    inputs: str, piece_bytes: int = PIECE_BYTES, *, text_column: str = TEXT_COLUMN
) -> list[Piece]:
    """Returns the pieces of the inputs, whose documents one after the other are those of `iterate_documents`.

    A plain file is cut into pieces of about `piece_bytes`, where documents end, and so are a TFDS data set and the row
    groups of a Parquet file; a compressed file cannot be.

    Raises: InputError if an input is missing or unreadable, or all are empty.
    """
    sources = list_sources(inputs)
    paths = urls.local_copies(sources)
    pieces = [
        piece
        for source, path in zip(sources, paths)
        for piece in plan_source(source, path, piece_bytes, text_column=text_column)
    ]
    if not pieces:
        raise _no_document(inputs)
    return pieces


def plan_source(
    source: str, path: str, piece_bytes: int = PIECE_BYTES, *, text_column: str = TEXT_COLUMN
) -> list[Piece]:
    """Returns the pieces of a single input, whose file is at `path`."""
    if source.startswith(tfds_text.PREFIX):
        return list(tfds_text.plan_examples(source, piece_bytes))
    if parquet.is_parquet(path, source):
        return parquet.plan_row_groups(path, source, piece_bytes, text_column)
    return formats.plan_file(path, source, piece_bytes, text_column)


def read_piece(piece: Piece) -> Iterator[list[str]]:
    """Yields the documents of a piece.

    Raises: InputError if it cannot be read or breaks a rule, naming the input and the line or example.
    """
    if piece.kind == parquet.PARQUET:
        return parquet.read_row_groups(piece)
    return tfds_text.read_texts(piece) if piece.kind == tfds_text.TFDS else formats.read_file(piece)


def contents_of(inputs: str, text_column: str = TEXT_COLUMN) -> list[Content]:
    """Returns the `fingerprint_source` of each of the inputs."""
    sources = list_sources(inputs)
    paths = urls.local_copies(sources)
    return [fingerprint_source(*pair, text_column) for pair in zip(sources, paths)]


def fingerprint_source(source: str, path: str, text_column: str = TEXT_COLUMN) -> Content:
    """Returns a single input, a sha256 of its contents, and the bytes of its file, which is at `path`.

    Another column than the usual one changes the sha256, as it changes which text is read; see `tfds_text` for that of
    a data set. The bytes are -1 if it is not a file.
    """
    if source.startswith(tfds_text.PREFIX):
        return source, tfds_text.examples_fingerprint(source), -1
    content = files.sha256_file(path)
    num_bytes = os.path.getsize(path)
    if text_column != TEXT_COLUMN and (
        parquet.is_parquet(path, source)
        or formats.detect_format(path, source) == formats.JSON_LINES
    ):  # a format in which the text has a column or key
        content = hashlib.sha256(f"{content} {text_column}".encode()).hexdigest()
    return source, content, num_bytes


def join_fingerprints(contents: list[Content]) -> str:
    """Returns the fingerprint of inputs from the `fingerprint_source` of each."""
    return hashlib.sha256(" ".join(content for _, content, _ in contents).encode()).hexdigest()


def public_names(inputs: str) -> list[str]:
    """Returns the inputs as they were given, each once, files and URLs by their `files.public_name`."""
    parts = filter(None, files.split_places(inputs))
    return list(
        dict.fromkeys(files.public_name(part) if _is_file(part) else part for part in parts)
    )


def describe_inputs(names: list[str], contents: list[Content]) -> JsonObject:
    """Returns the record of the inputs in a manifest: their `public_names`, the number of files, and their bytes."""
    sizes = [num_bytes for _, _, num_bytes in contents if num_bytes >= 0]
    return {"names": names, "files": len(sizes), "bytes": sum(sizes)}


def list_sources(inputs: str) -> list[str]:
    """Returns the single inputs, each once: the globs among them as the files that they match."""
    sources: dict[str, None] = {}
    for part in filter(None, files.split_places(inputs)):
        sources.update(dict.fromkeys(files.expand_globs(part) if _is_file(part) else [part]))
    return list(sources) or files.expand_globs(inputs)  # which raises the error for no input at all


def _is_file(part: str) -> bool:
    """Returns whether a part of the inputs names files."""
    return not part.startswith(tfds_text.PREFIX)


def _no_document(inputs: str) -> InputError:
    return InputError(
        f"input {inputs!r} holds no document: all its lines are blank; give files with text"
    )
