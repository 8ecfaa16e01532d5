# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's tensor bundle, the format of its checkpoints since 2016, read without TensorFlow.

A checkpoint `prefix` is an index, `prefix.index`, and the bytes of the tensors, `prefix.data-00000-of-00001`, one file
or several. The index is a sorted table: blocks of entries whose keys omit the prefix shared with the key before, a
block with the positions of these blocks, and a footer with that of the last; each block has a checksum. A key is
a tensor's name, its value a protocol buffer with type, shape, place and checksum; the empty key holds a header.

Source: tensorflow/core/util/tensor_bundle; tensorflow/core/protobuf/tensor_bundle.proto; tensorflow/core/lib/io/table*
and the page "leveldb File format" of LevelDB, from which that table comes; the kinds of numbers are those of
tensorflow/core/framework/types.proto.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from bert_jax.errors import InputError
from bert_jax.storage import files
from bert_jax.storage.protobuf import parse_message, parse_varint

# TensorFlow's numbers of dtypes, without strings (7), quantized and other rare types.
_DTYPES = {
    number: np.dtype(dtype)
    for number, dtype in {
        1: "<f4",
        2: "<f8",
        3: "<i4",
        4: "u1",
        5: "<i2",
        6: "i1",
        8: "<c8",
        9: "<i8",
        10: "?",
        14: jnp.bfloat16,
        17: "<u2",
        18: "<c16",
        19: "<f2",
        22: "<u4",
        23: "<u8",
    }.items()
}

_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")  # ends every such table
_FOOTER_BYTES = 48  # two handles, zeros and the magic number
_TRAILER_BYTES = 5  # of a block: how it is compressed, and its checksum


class Entry(NamedTuple):
    """The index entry of a tensor."""

    kind: int  # TensorFlow's number of its dtype
    shape: tuple[int, ...]
    shard: int  # which data file has its bytes
    offset: int
    size: int  # in bytes
    checksum: int  # of its bytes, masked
    num_slices: int  # 0 unless it is a partitioned variable, whose parts are tensors of their own

    @property
    def dtype(self) -> np.dtype | None:
        """Returns the dtype; None for strings and other types that are not supported."""
        return _DTYPES.get(self.kind)


class Index(NamedTuple):
    """The content of an index file."""

    num_shards: int  # data files
    entries: dict[str, Entry]  # by the names of the tensors, sorted


class Bundle:
    """The tensors of a checkpoint, read on demand."""

    def __init__(self, prefix: str | os.PathLike):
        """Opens the checkpoint `prefix.index`.

        Raises: InputError if the index is damaged, or a data file missing or too short.
        """
        self.prefix = os.fspath(prefix)
        self._num_shards, self.entries = read_index(index_path(prefix))
        ends: dict[int, tuple[int, str]] = {}  # of the last tensor in a file, and its name
        for name, entry in self.entries.items():
            if not entry.num_slices:
                ends[entry.shard] = max(
                    ends.get(entry.shard, (0, "")), (entry.offset + entry.size, name)
                )
        for shard in range(self._num_shards):
            end, name = ends.get(shard, (0, ""))
            # Now, and not when a tensor is read: before that, arrays of the shapes that an index may claim are made.
            with files.opened(data_path(prefix, shard, self._num_shards)) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size < end:
                    raise ValueError(f"it has {size} bytes, and tensor {name} ends at byte {end}")

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor, after verifying its checksum.

        Raises: InputError if its dtype is not supported, or its bytes are damaged.
        """
        entry = self.entries[name]
        path = data_path(self.prefix, entry.shard, self._num_shards)
        with files.reading(str(path)):
            if entry.dtype is None or entry.num_slices:
                raise InputError(
                    f"{path}: tensor {name} is a text, a quantized one or divided into parts, as no BERT's is"
                )
            data = np.fromfile(path, np.uint8, count=entry.size, offset=entry.offset)
            if len(data) < entry.size or files.masked_crc32c(data) != entry.checksum:
                raise ValueError(f"tensor {name} has another checksum")
            return data.view(entry.dtype).reshape(entry.shape)


def index_path(prefix: str | os.PathLike) -> Path:
    """Returns the path of a checkpoint's index."""
    return Path(f"{os.fspath(prefix)}.index")


def data_path(prefix: str | os.PathLike, shard: int = 0, num_shards: int = 1) -> Path:
    """Returns the path of one of a checkpoint's data files."""
    return Path(f"{os.fspath(prefix)}.data-{shard:05d}-of-{num_shards:05d}")


# Reading the index


def read_index(path: str | os.PathLike) -> Index:
    """Returns the content of an index file; no data file is opened.

    Raises: InputError if the file cannot be read, is damaged or is not an index.
    """
    with files.reading(os.fspath(path)):
        pairs = list(_read_table(Path(path).read_bytes()))
        if not pairs or pairs[0][0] != b"":
            raise ValueError("it has no header")
        header = parse_message(pairs[0][1])
        num_shards = _number(header, 1)
        is_big_endian = _number(header, 2)
        if is_big_endian:  # it would be read as other numbers
            raise ValueError("its numbers are big-endian, which is not supported")
        # Names that begin with a zero byte belong to the parts of partitioned variables.
        entries = {key.decode(): _parse_entry(value) for key, value in pairs[1:] if key[0]}
        for name, entry in entries.items():
            if problem := _problem(entry, num_shards):
                raise ValueError(f"tensor {name} {problem}")
    return Index(num_shards, entries)


def _read_table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table, whose keys ascend.

    Raises: ValueError, with the reason, if it is not a table.
    """
    footer = content[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or footer[-8:] != _MAGIC:
        raise ValueError(f"of its {len(content)} bytes the last ones do not end a table")
    numbers = []
    position = 0
    for _ in range(4):
        number, end = parse_varint(footer, position, _FOOTER_BYTES - 8)
        # The footer alone has no checksum. A flipped bit that changes no number it holds is damage
        # all the same.
        if footer[end - 1] == 0 and end > position + 1:
            raise ValueError("its footer holds a number that is longer than it need be")
        numbers.append(number)
        position = end
    if any(footer[position:-8]):
        raise ValueError("its footer holds more than two handles")
    _read_block(content, *numbers[:2])  # the metaindex, which is empty; its checksum must be right
    previous = None
    for _, handle in _block_entries(_read_block(content, *numbers[2:])):
        offset, position = parse_varint(handle, 0, len(handle))
        size, _ = parse_varint(handle, position, len(handle))
        for key, value in _block_entries(_read_block(content, offset, size)):
            if previous is not None and key <= previous:
                raise ValueError(f"key {key!r} comes after {previous!r}")
            yield key, value
            previous = key


def _read_block(content: bytes, offset: int, size: int) -> bytes:
    """Returns a block, after verifying its checksum."""
    block = content[offset : offset + size + _TRAILER_BYTES]
    if len(block) < size + _TRAILER_BYTES:
        raise ValueError(f"the block at byte {offset} ends after the file")
    if files.masked_crc32c(block[:-4]) != int.from_bytes(block[-4:], "little"):
        raise ValueError(f"the checksum of the block at byte {offset} is wrong")
    if block[size]:
        raise ValueError(f"the block at byte {offset} is compressed, as TensorFlow's are not")
    return block[:size]


def _block_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a block; the positions of whole keys at its end serve searches, and are skipped."""
    stop = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    if stop < 0:
        raise ValueError("a block is shorter than it says")
    key = b""
    position = 0
    while position < stop:
        shared, position = parse_varint(block, position, stop)
        added, position = parse_varint(block, position, stop)
        length, position = parse_varint(block, position, stop)
        if shared > len(key) or position + added + length > stop:
            raise ValueError("an entry reaches beyond its block")
        key = key[:shared] + block[position : position + added]
        position += added + length
        yield key, block[position - length : position]


def _parse_entry(value: bytes) -> Entry:
    """Returns the entry of a BundleEntryProto."""
    entry = parse_message(value)
    dimensions = [
        parse_message(size)
        for size in parse_message(_bytes(entry, 2)).get(2, [])
        if isinstance(size, bytes)
    ]
    shape = tuple(_number(dimension, 1) for dimension in dimensions)
    kind, shard, offset, size, checksum = (_number(entry, number) for number in (1, 3, 4, 5, 6))
    return Entry(kind, shape, shard, offset, size, checksum, num_slices=len(entry.get(7, [])))


def _problem(entry: Entry, num_shards: int) -> str:
    """Returns the inconsistency of an entry, or ""."""
    if entry.dtype is None or entry.num_slices:  # it cannot be read
        return ""
    if entry.shard >= num_shards:
        return f"is in data file {entry.shard} of {num_shards}"
    if entry.size != math.prod(entry.shape) * entry.dtype.itemsize:
        return f"of shape {entry.shape} and type {entry.dtype} has {entry.size} bytes"
    return ""


def _number(message: dict[int, list[int | bytes]], field: int) -> int:
    """Returns an integer field; 0 if it is absent."""
    value = message.get(field, [0])[-1]
    if not isinstance(value, int):
        raise ValueError(f"field {field} is not a number")
    return value


def _bytes(message: dict[int, list[int | bytes]], field: int) -> bytes:
    """Returns a message field; an empty one if it is absent."""
    value = message.get(field, [b""])[-1]
    if not isinstance(value, bytes):
        raise ValueError(f"field {field} is not a message")
    return value
