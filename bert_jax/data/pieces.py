# SPDX-License-Identifier: Apache-2.0
"""Encodes pieces of text as arrays of token ids on disk, and reads them by ranges of document hashes.

A piece becomes three files: `tokens` (flat ids), `sentences` (tokens of each) and `documents` (`DOCUMENT`
records), in order of the documents' hashes. So the documents of a range are contiguous in every file. A fourth
file, `lines`, has the sorted hashes of its lines, for counting exact copies.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_jax.data.instances import Document
from bert_jax.data.sentences import split_sentences
from bert_jax.data.sources import corpus
from bert_jax.storage import writing
from bert_jax.text.tokenizer import Tokenizer

# The hash of a document's text, and how much of the piece's arrays belongs to it.
DOCUMENT = np.dtype([("key", "<u8"), ("sentences", "<i8"), ("tokens", "<i8"), ("text_bytes", "<i8")])

_LINES_AT_ONCE = 4096  # of text, in one call of the tokenizer


def write_piece(folder: Path, index: int, piece: corpus.Piece, tokenizer: Tokenizer, seed: int, language: str) -> None:
    """Writes the files of piece number `index` into `folder`, unless they are there.

    Raises: InputError if the text cannot be read.
    """
    if all(_file(folder, name, index).is_file() for name in ("lines", "documents")):
        return
    encoded = encode_documents(corpus.read_piece(piece), tokenizer, seed, language)
    for name in ("sentences", "tokens", "lines", "documents"):  # the last: now the piece is finished
        writing.write_array(_file(folder, name, index), getattr(encoded, name))


class Encoded(NamedTuple):
    """The encoded text of a piece."""

    documents: np.ndarray  # [D] records of `DOCUMENT`, in order of their hashes, ties as in the text
    sentences: np.ndarray  # int32 [S]: the tokens of each sentence of each document
    tokens: np.ndarray  # [T] flat ids
    lines: np.ndarray  # uint64: the sorted hashes of all lines


def encode_documents(documents: Iterable[list[str]], tokenizer: Tokenizer, seed: int, language: str) -> Encoded:
    """Returns the documents that give a token, and the hashes of all lines."""
    batches = [_encode(batch, tokenizer, seed, language) for batch in _batches(documents)]
    found, sentences, tokens, lines = (np.concatenate(arrays) for arrays in zip(*batches))
    order = np.argsort(found["key"], kind="stable")
    order = order[found["tokens"][order] > 0]
    flat = {}
    for name, array in (("sentences", sentences), ("tokens", tokens)):
        ends = np.cumsum(found[name])
        parts = [array[ends[place] - found[name][place] : ends[place]] for place in order]
        flat[name] = np.concatenate([array[:0], *parts])
    return Encoded(found[order], flat["sentences"], flat["tokens"], np.sort(lines))


def read_documents(folder: Path, num_pieces: int) -> np.ndarray:
    """Returns the documents [D] of all pieces, as records of `DOCUMENT`."""
    return np.concatenate([_load(folder, "documents", index) for index in range(num_pieces)])


def read_range(folder: Path, num_pieces: int, first_key: int, last_key: int) -> tuple[np.ndarray, list[Document], dict]:
    """Returns the documents with hashes in first_key..last_key: flat ids [T], bounds in order of hash, and counts."""
    all_documents, all_sentences, all_tokens = [], [], []
    for index in range(num_pieces):
        documents = _load(folder, "documents", index)
        first = np.searchsorted(documents["key"], np.uint64(first_key), side="left")
        last = np.searchsorted(documents["key"], np.uint64(last_key), side="right")
        for name, arrays in (("sentences", all_sentences), ("tokens", all_tokens)):
            before, inside = documents[name][:first].sum(), documents[name][first:last].sum()
            arrays.append(np.array(_load(folder, name, index)[before : before + inside]))
        all_documents.append(documents[first:last])
    documents, sentences, tokens = map(np.concatenate, (all_documents, all_sentences, all_tokens))
    return tokens, *order_documents(documents, sentences)


def order_documents(documents: np.ndarray, sentences: np.ndarray) -> tuple[list[Document], dict[str, int]]:
    """Returns the bounds of documents [D] in order of their hashes, ties as they stand, and what they count together.

    The ids of the documents are one flat array, in the order of `documents`; `sentences` are the lengths in it.
    """
    starts = [0, *np.cumsum(sentences, dtype=np.int64).tolist()]
    stops = np.cumsum(documents["sentences"])
    order = np.argsort(documents["key"], kind="stable")
    bounds = [starts[stops[place] - documents["sentences"][place] : stops[place] + 1] for place in order]
    counts = {name: int(documents[name].sum()) for name in ("sentences", "tokens", "text_bytes")}
    return bounds, {"documents": len(documents), **counts}


def count_lines(folder: Path, num_pieces: int) -> int:
    """Returns the number of lines of all pieces."""
    return sum(len(_load(folder, "lines", index)) for index in range(num_pieces))


def count_different_lines(folder: Path, num_pieces: int, first_hash: int, last_hash: int) -> int:
    """Returns how many different lines have a hash in first_hash..last_hash; two with one hash count as copies."""
    inside = []
    for index in range(num_pieces):
        hashes = _load(folder, "lines", index)
        first = np.searchsorted(hashes, np.uint64(first_hash), side="left")
        last = np.searchsorted(hashes, np.uint64(last_hash), side="right")
        inside.append(hashes[first:last])
    hashes = np.concatenate(inside)
    hashes.sort()
    return int(np.count_nonzero(hashes[1:] != hashes[:-1])) + bool(len(hashes))


def document_key(lines: list[str], seed: int) -> int:
    """Returns a 64-bit hash of a document's text, another for each seed."""
    text = "\n".join(lines).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=str(seed).encode()).digest(), "little")


def _batches(documents: Iterable[list[str]]) -> Iterator[list[list[str]]]:
    """Yields the documents in lists of about `_LINES_AT_ONCE` lines, the last of which may be empty."""
    batch: list[list[str]] = []
    num_lines = 0
    for document in documents:
        batch.append(document)
        num_lines += len(document)
        if num_lines >= _LINES_AT_ONCE:
            yield batch
            batch, num_lines = [], 0
    yield batch


def _encode(
    documents: list[list[str]], tokenizer: Tokenizer, seed: int, language: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns `DOCUMENT`s [D], the tokens of each sentence [S], the flat ids [T] and the hashes of the lines.

    Empty sentences are dropped.
    """
    sentences: list[str] = []
    starts = [0]  # of each document's sentences, and the end of the last one's
    for lines in documents:
        for line in lines:
            sentences.extend(split_sentences(line, language))
        starts.append(len(sentences))
    tokens, lengths = tokenizer.encode_arrays(sentences)
    found = np.zeros(len(documents), DOCUMENT)
    digests = []
    for place, (lines, start, end) in enumerate(zip(documents, starts, starts[1:])):
        raw = [line.encode() for line in lines]
        digests.extend(hashlib.blake2b(line, digest_size=8).digest() for line in raw)
        mine, num_bytes = lengths[start:end], sum(map(len, raw)) + len(raw)
        found[place] = (document_key(lines, seed), np.count_nonzero(mine), mine.sum(), num_bytes)
    return found, lengths[lengths > 0].astype(np.int32), tokens, np.frombuffer(b"".join(digests), "<u8")


def _file(folder: Path, array: str, index: int) -> Path:
    return folder / f"{array}-{index:06d}.npy"


def _load(folder: Path, array: str, index: int) -> np.ndarray:
    return np.load(_file(folder, array, index), mmap_mode="r")
