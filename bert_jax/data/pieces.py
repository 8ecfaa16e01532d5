# SPDX-License-Identifier: Apache-2.0
"""Encodes pieces of text as arrays of token ids on disk, and reads them by ranges of document hashes.

A piece becomes files: `tokens` (flat ids), `sentences` (tokens of each) and `parts` (`DOCUMENT`
records), in order of the documents' hashes. So the documents of a range are contiguous in every file. A fourth
file, `lines`, has the sorted hashes of its lines, for counting exact copies.

A long document has several records, one for each part of about `PART_TOKENS`, which ends where a sentence does.
So it can be cut into passages when all text is known (`unite`): docs/decisions/0011-rows-and-packing.md.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_jax.data.instances import Document
from bert_jax.data.order import mix
from bert_jax.data.sentences import split_lines
from bert_jax.data.sources import corpus
from bert_jax.errors import InputError, TextError
from bert_jax.storage import files, writing
from bert_jax.text.tokenizer import Tokenizer

PART_TOKENS = 1024  # a part of a document has as many, and fewer than twice as many

COUNTED = ("sentences", "tokens", "text_bytes", "words")  # words are separated by white space

# A part of a document: the hash of the document's text, which part it is, how much of the piece's arrays belongs to it,
# and in how many of its lines the splitter found no sentences because it failed.
DOCUMENT = np.dtype(
    [("key", "<u8"), ("part", "<i4"), ("failed", "<i4")] + [(name, "<i8") for name in COUNTED]
)

_LINES_AT_ONCE = 4096  # of text, in one call of the tokenizer
_BYTES_AT_ONCE = 4 << 20  # characters, as lines may be of any length


def write_piece(
    folder: Path, index: int, piece: corpus.Piece, tokenizer: Tokenizer, seed: int, language: str
) -> None:
    """Writes the files of piece number `index` into `folder`, unless they are there.

    There may be as many pieces as small files, so the disk is not waited for: what is lost with the power is not what
    its checksums say, and is made again.

    Raises: InputError if the text cannot be read.
    """
    if _is_finished(folder, index):
        return
    try:
        encoded = encode_documents(corpus.read_piece(piece), tokenizer, seed, language)
    except TextError as error:
        raise error.at(_where(piece, error.text)) from None
    for name in EncodedPiece._fields:
        writing.write_array(_file(folder, name, index), getattr(encoded, name), durable=False)
    # Last, and of what was meant to be written: a piece that was cut off by the power does not
    # match.
    sums = {name: files.masked_crc32c(array) for name, array in encoded._asdict().items()}
    writing.write_json(folder / f"sums-{index:06d}.json", sums, durable=False)


def _where(piece: corpus.Piece, text: str) -> str:
    """Returns the input of a piece, and the line of its first line that holds a text, if the input has lines."""
    try:
        with files.open_binary(piece.path) as stream:
            for number, line in enumerate(stream, 1):
                if text.encode() in line:
                    return f"{piece.source}, line {number}"
    except (OSError, InputError):  # it is no file, or has been removed meanwhile
        pass
    return piece.source


def _is_finished(folder: Path, index: int) -> bool:
    """Returns whether the files of a piece are there and whole."""
    try:
        sums = json.loads((folder / f"sums-{index:06d}.json").read_bytes())
        return all(
            files.masked_crc32c(np.load(_file(folder, name, index))) == known
            for name, known in sums.items()
        )
    except (OSError, ValueError, EOFError):
        return False


class EncodedPiece(NamedTuple):
    """The encoded text of a piece."""

    parts: np.ndarray  # [D] records of `DOCUMENT`, in order of their hashes, ties as in the text
    sentences: np.ndarray  # int32 [S]: the tokens of each sentence of each document
    tokens: np.ndarray  # [T] flat ids
    lines: np.ndarray  # uint64: the sorted hashes of all lines


def encode_documents(
    documents: Iterable[list[str]], tokenizer: Tokenizer, seed: int, language: str
) -> EncodedPiece:
    """Returns the documents with at least one token, and the hashes of all lines."""
    batches = [_encode(batch, tokenizer, seed, language) for batch in _batches(documents)]
    records, sentences, tokens, lines = (np.concatenate(arrays) for arrays in zip(*batches))
    # stable: parts of one document have one hash, and stay in their order
    order = np.argsort(records["key"], kind="stable")
    order = order[records["tokens"][order] > 0]
    flat = {}
    for name, array in (("sentences", sentences), ("tokens", tokens)):
        ends = np.cumsum(records[name])
        parts = [array[ends[index] - records[name][index] : ends[index]] for index in order]
        flat[name] = np.concatenate([array[:0], *parts])
    return EncodedPiece(records[order], flat["sentences"], flat["tokens"], np.sort(lines))


def keys_of(documents: np.ndarray, passage: int) -> np.ndarray:
    """Returns the hashes uint64 [D] of the passages of `passage` parts, or with 0 of the documents, of records [D]."""
    if not passage:
        return documents["key"]
    # The step of splitmix64: parts of a document get hashes that have nothing to do with each
    # other.
    return mix(
        documents["key"]
        + (documents["part"] // passage + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    )


def unite(documents: np.ndarray, passage: int) -> np.ndarray:
    """Returns records of whole documents, or of their passages of `passage` parts, made of records of parts [D]."""
    keys = keys_of(documents, passage)
    first = documents["part"] % passage == 0 if passage else documents["part"] == 0
    first[1:] |= keys[1:] != keys[:-1]
    first[:1] = True
    (starts,) = np.nonzero(first)
    united = documents[starts]
    united["key"] = keys[starts]
    if len(starts):
        for name in ("failed", *COUNTED):
            united[name] = np.add.reduceat(documents[name], starts)
    return united


def read_documents(folder: Path, num_pieces: int) -> np.ndarray:
    """Returns the parts of documents [D] of all pieces, as records of `DOCUMENT`."""
    return np.concatenate([np.load(_file(folder, "parts", index)) for index in range(num_pieces)])


def read_range(
    folder: Path, num_pieces: int, first_key: int, last_key: int, passage: int = 0
) -> tuple[np.ndarray, list[Document], dict]:
    """Returns the documents with hashes in first_key..last_key: flat ids [T], bounds in order of hash, and counts.

    With `passage`, a passage of that many parts is a document; see `unite`.
    """
    all_documents = []
    all_sentences = []
    all_tokens = []
    for index in range(num_pieces):
        documents = unite(np.load(_file(folder, "parts", index)), passage)
        inside = (documents["key"] >= np.uint64(first_key)) & (
            documents["key"] <= np.uint64(last_key)
        )
        # the last one all the same, since arrays of no piece would have no type to be joined with
        if not inside.any() and index + 1 < num_pieces:
            continue
        # Several stretches, since passages lie in the order of their documents and not of their own
        # hashes.
        edges = np.flatnonzero(np.diff(inside, prepend=False, append=False))
        for name, arrays in (("sentences", all_sentences), ("tokens", all_tokens)):
            ends = np.append(0, np.cumsum(documents[name]))
            array = _load(folder, name, index)
            arrays += [
                np.array(array[ends[first] : ends[last]]) for first, last in edges.reshape(-1, 2)
            ]
            arrays.append(np.array(array[:0]))
        all_documents.append(documents[inside])
    documents, sentences, tokens = map(np.concatenate, (all_documents, all_sentences, all_tokens))
    return tokens, *order_documents(documents, sentences)


def order_documents(
    documents: np.ndarray, sentences: np.ndarray
) -> tuple[list[Document], dict[str, int]]:
    """Returns the bounds of documents [D] in order of their hashes, ties as they stand, and the sums of their counts.

    The ids of the documents are one flat array, in the order of `documents`; `sentences` are the lengths in it.
    """
    starts = [0, *np.cumsum(sentences, dtype=np.int64).tolist()]
    stops = np.cumsum(documents["sentences"])
    order = np.argsort(documents["key"], kind="stable")
    bounds = [
        starts[stops[index] - documents["sentences"][index] : stops[index] + 1] for index in order
    ]
    counts = {name: int(documents[name].sum()) for name in COUNTED}
    return bounds, {"documents": len(documents), **counts}


def count_lines(folder: Path, num_pieces: int) -> int:
    """Returns the number of lines of all pieces."""
    return sum(len(_load(folder, "lines", index)) for index in range(num_pieces))


def count_different_lines(folder: Path, num_pieces: int, hashes: tuple[int, int]) -> int:
    """Returns the number of different lines with hashes from the first to the last; equal hashes count as copies."""
    first_hash, last_hash = hashes
    inside = []
    for index in range(num_pieces):
        lines = _load(folder, "lines", index)
        first = np.searchsorted(lines, np.uint64(first_hash), side="left")
        last = np.searchsorted(lines, np.uint64(last_hash), side="right")
        inside.append(np.array(lines[first:last]))  # a copy: a view would keep the file open
    lines = np.concatenate(inside)
    lines.sort()
    return int(np.count_nonzero(lines[1:] != lines[:-1])) + bool(len(lines))


def document_key(lines: list[str], seed: int) -> int:
    """Returns a 64-bit hash of a document's text, another for each seed."""
    text = "\n".join(lines).encode()
    return int.from_bytes(
        hashlib.blake2b(text, digest_size=8, key=str(seed).encode()).digest(), "little"
    )


def _batches(documents: Iterable[list[str]]) -> Iterator[list[list[str]]]:
    """Yields the documents in lists of about `_LINES_AT_ONCE` lines or less, the last of which may be empty."""
    batch: list[list[str]] = []
    num_lines = num_bytes = 0
    for document in documents:
        batch.append(document)
        num_lines += len(document)
        num_bytes += sum(map(len, document))
        if num_lines >= _LINES_AT_ONCE or num_bytes >= _BYTES_AT_ONCE:
            yield batch
            batch = []
            num_lines = 0
            num_bytes = 0
    yield batch


def _encode(
    documents: list[list[str]], tokenizer: Tokenizer, seed: int, language: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns `DOCUMENT`s [D], the tokens of each sentence [S], the flat ids [T] and the hashes of the lines.

    Empty sentences are dropped.
    """
    sentences: list[str] = []
    # of each document's sentences, and the end of the last one's; its lines that failed
    starts = [0]
    failed = []
    for lines in documents:
        document_sentences, num_failed = split_lines(lines, language)
        sentences += document_sentences
        starts.append(len(sentences))
        failed.append(num_failed)
    tokens, lengths = _encode_sentences(sentences, tokenizer)
    records: list[tuple[int, ...]] = []
    digests = []
    for lines, num_failed, start, end in zip(documents, failed, starts, starts[1:]):
        raw = [line.encode() for line in lines]
        digests.extend(hashlib.blake2b(line, digest_size=8).digest() for line in raw)
        # with an end for each line
        key = document_key(lines, seed)
        num_bytes = sum(map(len, raw)) + len(raw)
        num_words = sum(len(line.split()) for line in lines)
        for part, counts in enumerate(
            _parts(lengths[start:end], sentences[start:end], (num_bytes, num_words))
        ):
            records.append((key, part, 0 if part else num_failed, *counts))
    lines = np.frombuffer(b"".join(digests), "<u8")
    return np.array(records, DOCUMENT), lengths[lengths > 0].astype(np.int32), tokens, lines


def _encode_sentences(sentences: list[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns the flat ids of sentences and the length of each; about `_BYTES_AT_ONCE` are encoded at a time."""
    stretches = np.cumsum([0, *map(len, sentences)])[:-1] // _BYTES_AT_ONCE
    cuts = [0, *(np.flatnonzero(np.diff(stretches)) + 1).tolist(), len(sentences)]
    if blank := tokenizer.template.blank:
        sentences = [blank + sentence for sentence in sentences]
    encoded = [
        tokenizer.encode_arrays(sentences[first:last]) for first, last in zip(cuts, cuts[1:])
    ]
    return np.concatenate([tokens for tokens, _ in encoded]), np.concatenate(
        [lengths for _, lengths in encoded]
    )


def _parts(
    lengths: np.ndarray, sentences: list[str], totals: tuple[int, int]
) -> list[tuple[int, ...]]:
    """Returns the `COUNTED` of each part of a document of sentences with `lengths` [S] tokens.

    Each part gets a share of `totals`, the document's bytes and words, by the characters of its sentences.
    """
    total = int(lengths.sum())
    if (count := total // PART_TOKENS) < 2:
        return [(int(np.count_nonzero(lengths)), total, *totals)]
    ends = np.cumsum(lengths)
    middle = np.unique(np.searchsorted(ends, np.arange(1, count) * total // count)) + 1
    cuts = np.array([0, *middle[ends[middle - 1] < total], len(lengths)])
    sizes = np.cumsum([0, *map(len, sentences)])
    shares = [sizes[cuts] * whole // sizes[-1] for whole in totals]
    sums = np.append(0, np.cumsum(lengths > 0))[cuts], np.append(0, ends)[cuts], *shares
    return list(zip(*(np.diff(column).tolist() for column in sums)))


def _file(folder: Path, array: str, index: int) -> Path:
    return folder / f"{array}-{index:06d}.npy"


def _load(folder: Path, array: str, index: int) -> np.ndarray:
    """Returns an array as a map, which keeps the file open."""
    return np.load(_file(folder, array, index), mmap_mode="r")
