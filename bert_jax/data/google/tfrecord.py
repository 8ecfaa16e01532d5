# SPDX-License-Identifier: Apache-2.0
"""TFRecord files and the `tf.train.Example` messages in them, without TensorFlow.

A file is a sequence of records: the number of bytes (8 bytes, little-endian), its checksum (4), the bytes, their
checksum (4). An Example is a protocol buffer of named features, each a list of byte strings, floats or integers.
Source: tensorflow/core/lib/io/record_writer.cc; tensorflow/core/example/{example,feature}.proto; the encoding of
protocol buffers at protobuf.dev.

The values of many examples are decoded together: a feature's payloads, one for each example, are joined
before numpy sees them.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.storage import files
from bert_jax.storage.protobuf import DELIMITED, FIXED32, VARINT, parse_fields

# an example is some kB; a larger record is not an example, and would fill the memory
MAX_RECORD_BYTES = 1 << 24

BYTES, FLOATS, INTEGERS = 1, 2, 3  # the kinds of a feature, by the numbers of their fields
_ONE_VALUE = {BYTES: DELIMITED, FLOATS: FIXED32, INTEGERS: VARINT}
_FIRST, _SECOND = 1 << 3 | DELIMITED, 2 << 3 | DELIMITED  # tags of fields that hold bytes
_KINDS = {kind << 3 | DELIMITED: kind for kind in (BYTES, FLOATS, INTEGERS)}


class Feature(NamedTuple):
    """A feature of one example.

    `payload` is the strings of a list of strings, or else the numbers one after the other: 4 bytes for a float,
    a varint (7 bits a byte, the lowest first) for an integer.
    """

    kind: int
    payload: bytes | list[bytes]


# Files


def read_records(path: str) -> Iterator[bytes]:
    """Yields the bytes of each record of a file, compressed or not.

    A file that was cut between two records cannot be told from a whole one: the format has no end mark.

    Raises: InputError at a checksum that is wrong, or an end inside a record.
    """
    with files.open_binary(path) as stream:
        for number in itertools.count(1):
            with files.reading(f"{path}, record {number}"):
                header = stream.read(12)
                if not header:
                    return
                length = int.from_bytes(header[:8], "little")
                # A header that is cut has no right checksum either. The length is believed after this alone:
                # any number may stand there, and so many bytes are then asked of memory.
                if files.masked_crc32c(header[:8]) != int.from_bytes(header[8:], "little"):
                    raise ValueError(f"its length, {length}, has another checksum, or is cut off")
                if length > MAX_RECORD_BYTES:
                    raise ValueError(f"it has {length} bytes, {MAX_RECORD_BYTES} is the most")
                record = stream.read(length)
                checksum = stream.read(4)
                if files.masked_crc32c(record) != int.from_bytes(checksum, "little"):
                    raise ValueError(f"its {length} bytes have another checksum, or are cut off")
            yield record


# Examples


def parse_example(data: bytes) -> dict[str, Feature]:
    """Returns the features of a serialized tf.train.Example, by name; fields that it does not define are skipped.

    As in every reader of protocol buffers, repeated fields are joined, and the last value of a map's key counts.

    Raises: ValueError, with the reason, if it is not a tf.train.Example.
    """
    features: dict[str, Feature] = {}
    for tag, start, stop in parse_fields(data, 0, len(data)):
        if tag == _FIRST:  # Example.features
            for tag, first, last in parse_fields(data, start, stop):
                if tag == _FIRST:  # Features.feature, a map
                    name, feature = _parse_entry(data, first, last)
                    features[name] = feature
    return features


def _parse_entry(data: bytes, start: int, stop: int) -> tuple[str, Feature]:
    """Returns the name and the feature of an entry of the map."""
    name = b""
    kind = 0
    payload: bytes | list[bytes] = b""
    for tag, first, last in parse_fields(data, start, stop):
        if tag == _FIRST:
            name = data[first:last]
        elif tag == _SECOND:
            for tag_of_list, begin, end in parse_fields(data, first, last):
                if tag_of_list in _KINDS:
                    before = payload if kind == _KINDS[tag_of_list] else None
                    kind = _KINDS[tag_of_list]
                    values = _parse_list(data, begin, end, kind)
                    if kind == BYTES:
                        payload = [*(before or []), *values]  # type: ignore[misc]
                    else:
                        payload = b"".join([before, *values] if before else values)  # type: ignore[list-item]
    return name.decode("utf-8"), Feature(kind, payload)  # UnicodeDecodeError is a ValueError


def _parse_list(data: bytes, start: int, stop: int, kind: int) -> list[bytes]:
    """Returns the strings of a list, or bytes that together are its numbers, however it is divided."""
    parts = []
    for tag, first, last in parse_fields(data, start, stop):
        if tag == _FIRST:
            if kind == FLOATS and (last - first) % 4:
                raise ValueError(f"{last - first} bytes of floats are not a multiple of 4")
            if kind == INTEGERS and last > first and data[last - 1] >= 0x80:
                raise ValueError("an integer goes on after the end of its list")
            parts.append(data[first:last])
        elif tag == 8 | _ONE_VALUE[kind]:  # a list that is not packed: each value is a field
            parts.append(data[first:last])
    return parts


def decode_payloads(kind: int, payloads: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Returns all numbers of the payloads, int64 or float32, and the count of each payload, [number of payloads].

    Raises: ValueError if an integer has more than ten bytes.
    """
    joined = b"".join(payloads)
    stops = np.cumsum(np.fromiter(map(len, payloads), np.int64, len(payloads)))
    if kind == FLOATS:
        return np.frombuffer(joined, "<f4").astype(np.float32), np.diff(stops // 4, prepend=0)
    data = np.frombuffer(joined, np.uint8)
    # The last byte of a number has no bit 0x80, in whichever payload it is.
    ends = np.flatnonzero(data < 0x80) + 1
    counts = np.diff(np.searchsorted(ends, stops, side="right"), prepend=0)
    if len(ends) == len(data):
        return data.astype(np.int64), counts
    starts = np.concatenate([[0], ends[:-1]])
    sizes = ends - starts
    if sizes.max() > 10:
        raise ValueError(f"an integer has {sizes.max()} bytes, and 10 is the most")
    values = (data[starts] & np.uint8(0x7F)).astype(np.uint64)
    # All second bytes, then all third ones: most numbers have no more than two.
    for byte in range(1, int(sizes.max())):
        (longer,) = np.nonzero(sizes > byte)
        bits = (data[starts[longer] + byte] & np.uint8(0x7F)).astype(np.uint64)
        values[longer] |= bits << np.uint64(7 * byte)
    # a negative number is written as its 64 bits
    return values.view(np.int64), counts
