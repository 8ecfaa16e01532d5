# SPDX-License-Identifier: Apache-2.0
"""Vectors of texts on disk, as many as it holds: shards that are mapped into memory, ids, texts and a manifest.

A directory has `manifest.json`, and of each shard `vectors-00000.npy` [n, K] and `texts-00000.parquet` with the columns
`id` and `text`. Vectors have length 1. Codes are those of sentence-transformers' quantize_embeddings (6.2), bit by bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np

from bert_jax.data.sources import parquet
from bert_jax.errors import InputError
from bert_jax.storage import files, schema, writing
from bert_jax.storage.files import JsonObject
from bert_jax.storage.places import AnyPath, Place
from bert_jax.storage.resolve import MANIFEST, resolve
from bert_jax.storage.schema import Count, FileName, Sha256

FORMAT = "bert_jax vectors"
VERSION = 1
PRECISIONS = ("float32", "float16", "int8", "uint8", "binary", "ubinary")
RANGED = ("int8", "uint8")
BITS = ("binary", "ubinary")
_REMEDY = "copy the directory again, or make it anew"


class _File(TypedDict):
    name: FileName
    bytes: Count
    sha256: Sha256


class _Shard(TypedDict):
    rows: Count
    vectors: _File
    texts: _File


class _Identity(TypedDict):
    model: NotRequired[str]


class _Manifest(TypedDict):
    format: Literal["bert_jax vectors"]
    version: Literal[1]
    identity: _Identity
    precision: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]
    dimensions: Count
    ranges: list[list[float]]
    rows: Count
    shards: list[_Shard]


def quantize(vectors: np.ndarray, precision: str, ranges: np.ndarray | None = None) -> np.ndarray:
    """Returns codes of vectors [N, K], which take less room.

    "int8" and "uint8" [N, K] are the step, of 255 between the two `ranges` [2, K] of a dimension, that a number is in;
    those outside take the first or the last. Without `ranges` they are the smallest and the largest of these vectors.
    "binary" (int8) and "ubinary" (uint8) [N, K / 8, rounded up] are whether a number is above 0, dimension 0 in the
    highest bit; int8 is less by 128. "float16" and "float32" are the numbers themselves.

    Raises: InputError if there is no such precision, one vector is to give ranges, or a number is not finite then.

    Examples:
      >>> bert_jax.quantize(np.array([[-1.0, 0.5], [1.0, 0.0]], np.float32), "ubinary").tolist()
      [[64], [128]]
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision {precision!r} is unknown; use {', '.join(PRECISIONS)}")
    vectors = np.asarray(vectors)
    with np.errstate(over="ignore"):  # it is refused
        numbers = vectors.astype(np.float16) if precision == "float16" else vectors
    if not np.isfinite(numbers).all():
        raise InputError(f"vectors have numbers that {precision} does not hold; correct them")
    if precision in BITS:
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits ^ np.uint8(128)).view(np.int8)
    if precision not in RANGED:
        return numbers.astype(precision)
    if ranges is None:
        if len(vectors) < 2:
            raise InputError("one vector has no ranges; give `ranges` of those it is compared with")
        ranges = np.stack([vectors.min(axis=0), vectors.max(axis=0)])
    low, step = steps_of(ranges)
    levels = np.clip(np.floor((vectors - low) / step), 0, 255)
    return levels.astype(np.uint8) if precision == "uint8" else (levels - 128).astype(np.int8)


def steps_of(ranges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the smallest number and the step of each dimension [K] float32, for `ranges` [2, K]."""
    low, high = np.asarray(ranges, np.float32)
    step = (high - low) / 255
    return low, np.where(step == 0, np.float32(1), step)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Returns vectors [n, K] of length 1, the same bits where they have it within 1e-5; those of zeros stay so."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where((np.abs(lengths - 1) < 1e-5) | (lengths == 0), 1, lengths)


# Writing


def write_texts(folder: Place, name: str, passages: Sequence[tuple[str, str]]) -> JsonObject:
    """Writes the ids and texts of a shard and returns the record of their file."""
    with writing.atomic_path(folder / name) as temporary:
        parquet.write_passages(str(temporary), passages)
        return _record(temporary, name)


def write_codes(folder: Place, name: str, codes: np.ndarray) -> JsonObject:
    """Writes the vectors of a shard, or their codes, and returns the record of their file."""
    with writing.atomic_path(folder / name) as temporary:
        with open(temporary, "wb") as stream:
            np.save(stream, codes)
        return _record(temporary, name)


def _record(path: Path, name: str) -> JsonObject:
    return {"name": name, "bytes": path.stat().st_size, "sha256": files.sha256_file(path)}


def write_manifest(folder: Place, identity: JsonObject, shards: Sequence[JsonObject]) -> None:
    """Writes the manifest, which completes a directory that has its shards."""
    ranges = ranges_of(shards)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "identity": identity,
        "precision": identity["options"]["precision"],
        "dimensions": ranges.shape[1],
        "ranges": ranges.tolist(),
        "rows": sum(shard["rows"] for shard in shards),
        "shards": [{name: shard[name] for name in _Shard.__annotations__} for shard in shards],
    }
    writing.write_json(folder / MANIFEST, manifest)


def ranges_of(shards: Sequence[JsonObject]) -> np.ndarray:
    """Returns the smallest and the largest number of each dimension of all shards, [2, K] float32."""
    ranges = np.array([shard["ranges"] for shard in shards], np.float32)
    return np.stack([ranges[:, 0].min(axis=0), ranges[:, 1].max(axis=0)])


# Reading


class Vectors(NamedTuple):
    """The vectors of a directory, numbered through its shards. `open_vectors` makes it."""

    place: Path
    manifest: JsonObject
    shards: Sequence[np.ndarray]  # memory maps [n, K], or of bits [n, K / 8]
    ends: np.ndarray  # int64: where the vectors of each shard end

    @property
    def ranges(self) -> np.ndarray:
        """The smallest and the largest number of each dimension, [2, K] float32, before they became codes."""
        return np.array(self.manifest["ranges"], np.float32)

    def blocks(self, most: int) -> Iterator[np.ndarray]:
        """Yields all vectors in their order, `most` of them at once or fewer, without reading them."""
        for shard in self.shards:
            for first in range(0, len(shard), most):
                yield shard[first : first + most]

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the vectors, or codes, with these numbers [n]."""
        places = zip(np.searchsorted(self.ends, numbers, side="right"), numbers)
        return np.stack([self.shards[home][number - self.ends[home]] for home, number in places])

    def passages(self, numbers: np.ndarray) -> dict[int, tuple[str, str]]:
        """Returns the id and the text of each of these numbers, of any shape."""
        found: dict[int, tuple[str, str]] = {}
        homes = np.searchsorted(self.ends, numbers, side="right")
        for home in np.unique(homes):
            inside = np.unique(numbers[homes == home])
            path = self.place / self.manifest["shards"][home]["texts"]["name"]
            rows = inside - self.ends[home] + len(self.shards[home])
            found |= zip(inside.tolist(), parquet.read_passages(str(path), rows.tolist()))
        return found


def open_vectors(path: AnyPath, verify: bool = True) -> Vectors:
    """Returns the vectors in a directory, which are mapped into memory; those at a URL are copied to the cache.

    Sizes are always checked; `verify` also compares all checksums, about a second per gigabyte.

    Raises: InputError if there are none, or a file is missing or damaged.
    """
    source = resolve(path)
    source.expect("data")
    place = source.on_this_machine()
    manifest = read_manifest(place)
    files.allow_many_files()  # each shard is one
    size = manifest["dimensions"]
    like = quantize(np.zeros((2, size), np.float32), manifest["precision"])
    rows = sum(shard["rows"] for shard in manifest["shards"])
    if rows != manifest["rows"] or [*map(len, manifest["ranges"])] != [size, size]:
        raise InputError(f"{place / MANIFEST} contradicts itself; {_REMEDY}")
    shards = []
    for shard in manifest["shards"]:
        check_files(place, shard, verify)
        name = shard["vectors"]["name"]
        with files.reading(str(place / name)):
            codes = np.load(place / name, mmap_mode="r")
        if (codes.dtype, codes.shape) != (like.dtype, (shard["rows"], like.shape[1])):
            raise InputError(f"{place / name} is not as {MANIFEST} says; {_REMEDY}")
        shards.append(codes)
    return Vectors(place, manifest, shards, np.cumsum([len(shard) for shard in shards]))


def check_files(folder: Path, shard: Mapping[str, Any], verify: bool = True) -> None:
    """Raises: InputError if a file of a shard is missing, of another size or, if it is to be verified, damaged."""
    records = [shard["vectors"], shard["texts"]]
    files.check_sizes(folder, records, _REMEDY)
    if verify:
        files.check_sums(folder, records, _REMEDY)


def read_manifest(place: Place) -> JsonObject:
    """Returns the manifest of a directory. Raises: InputError if it has none, or holds something else."""
    fix = "give a directory that extract_features --output=DIR/ has written"
    return schema.read_record(place / MANIFEST, _Manifest, fix)
