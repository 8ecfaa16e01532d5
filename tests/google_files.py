# SPDX-License-Identifier: Apache-2.0
"""Files of Google's formats, written for tests of their readers: TensorFlow's checkpoints, TFRecords, examples."""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from bert_jax.checkpoints.bundle import _DTYPES, _FOOTER_BYTES, _MAGIC, Entry, data_path, index_path
from bert_jax.checkpoints.families import SETTINGS
from bert_jax.checkpoints.names import from_params
from bert_jax.data.google.examples import INPUTS, LABELS, PREDICTIONS, Columns
from bert_jax.data.google.tfrecord import BYTES, FLOATS, INTEGERS, Feature
from bert_jax.model.heads.table import infer_head
from bert_jax.model.objective import Params, parts_of
from bert_jax.settings.model import ModelConfig
from bert_jax.storage import files
from bert_jax.storage.protobuf import DELIMITED, FIXED32, VARINT
from bert_jax.text.tokenizer import Tokenizer

KINDS = {dtype: number for number, dtype in _DTYPES.items()}  # TensorFlow's numbers of dtypes

# Protocol buffers


def encode_varint(value: int) -> bytes:
    """Returns the bytes of an unsigned integer, 7 bits a byte and the lowest first."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def delimited(field: int, value: bytes) -> bytes:
    """Returns a field of a message that is a string, a message or a packed list."""
    return encode_varint(field << 3 | DELIMITED) + encode_varint(len(value)) + value


# Checkpoints of TensorFlow

_BLOCK_BYTES = 1 << 18  # size at which a block is full
_RESTART_INTERVAL = 16  # entries; the first of them has its whole key
HEADER = bytes([1 << 3 | VARINT, 1]) + delimited(3, bytes([1 << 3 | VARINT, 1]))  # one data file, version 1


def write_bundle(prefix: str | os.PathLike, tensors: Mapping[str, np.ndarray | jax.Array]) -> None:
    """Writes a checkpoint, byte for byte as TensorFlow: one data file, tensors in the order of their names."""
    pairs, offset = [(b"", HEADER)], 0
    with open(data_path(prefix), "wb") as stream:
        for name in sorted(tensors):
            array = np.asarray(tensors[name], order="C")
            kind = KINDS[array.dtype.newbyteorder("<")]
            raw = array.astype(_DTYPES[kind], copy=False).reshape(-1).view(np.uint8)
            stream.write(raw)
            entry = Entry(kind, array.shape, 0, offset, raw.size, files.masked_crc32c(raw), num_slices=0)
            pairs.append((name.encode(), encode_entry(entry)))
            offset += raw.size
    index_path(prefix).write_bytes(encode_table(pairs))


def encode_entry(entry: Entry) -> bytes:
    """Returns the BundleEntryProto; numbers that are 0 are left out."""
    encoded = _encode_number(1, entry.kind)
    encoded += delimited(2, b"".join(delimited(2, _encode_number(1, size)) for size in entry.shape))
    for field, number in ((3, entry.shard), (4, entry.offset), (5, entry.size)):
        encoded += _encode_number(field, number)
    return encoded + struct.pack("<BI", 6 << 3 | FIXED32, entry.checksum)


def _encode_number(field: int, value: int) -> bytes:
    return encode_varint(field << 3 | VARINT) + encode_varint(value) if value else b""


def encode_table(pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Returns the table of keys, which ascend, and values."""
    table, index, block = bytearray(), _Block(restart_interval=1), _Block(_RESTART_INTERVAL)

    def append(block: _Block) -> bytes:
        contents = block.finish() + b"\0"  # not compressed
        handle = encode_varint(len(table)) + encode_varint(len(contents) - 1)
        table.extend(contents + struct.pack("<I", files.masked_crc32c(contents)))
        return handle

    for number, (key, value) in enumerate(pairs, start=1):
        block.add(key, value)
        if number == len(pairs) or block.size >= _BLOCK_BYTES:
            index.add(key, append(block))  # LevelDB writes a shorter key that parts the blocks, too
            block = _Block(_RESTART_INTERVAL)
    handles = append(_Block(restart_interval=1)) + append(index)  # the first is the empty metaindex
    return bytes(table) + _footer(handles)


class _Block:
    """A block that is being filled."""

    def __init__(self, restart_interval: int):
        self._interval, self._number = restart_interval, 0
        self._entries, self._restarts, self._last = bytearray(), [0], b""

    @property
    def size(self) -> int:
        """Returns the size of the finished block in bytes."""
        return len(self._entries) + 4 * len(self._restarts) + 4

    def add(self, key: bytes, value: bytes) -> None:
        shared = _num_shared(self._last, key)
        if self._number % self._interval == 0:
            shared = 0
            if self._number:
                self._restarts.append(len(self._entries))
        for number in (shared, len(key) - shared, len(value)):
            self._entries += encode_varint(number)
        self._entries += key[shared:] + value
        self._number, self._last = self._number + 1, key

    def finish(self) -> bytes:
        numbers = [*self._restarts, len(self._restarts)]
        return bytes(self._entries) + struct.pack(f"<{len(numbers)}I", *numbers)


def _num_shared(first: bytes, second: bytes) -> int:
    """Returns the length of the common prefix."""
    different = (index for index, (one, other) in enumerate(zip(first, second)) if one != other)
    return next(different, min(len(first), len(second)))


def _footer(handles: bytes) -> bytes:
    return handles.ljust(_FOOTER_BYTES - len(_MAGIC), b"\0") + _MAGIC


def save_tf1(
    directory: Path,
    config: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    task: str = "pretraining",
    labels: tuple[str, ...] = (),
) -> None:
    """Writes a directory of Google's, with what versions up to 0.3 of bert_jax kept under a key of their own."""
    directory.mkdir(parents=True)
    ours = {}
    if config.activation != "gelu_tanh":
        ours["activation"] = config.activation
    if config.layer_norm_epsilon != ModelConfig.layer_norm_epsilon:
        ours["layer_norm_epsilon"] = config.layer_norm_epsilon
    if task != infer_head(parts_of(params)).name:
        ours["task"] = task
    if labels:
        ours["labels"] = list(labels)
    settings = {theirs: getattr(config, name) for name, theirs in SETTINGS.items() if name != "layer_norm_epsilon"}
    settings |= {"hidden_act": "gelu", "directionality": "bidi"} | ({"bert_jax": ours} if ours else {})
    write_bundle(directory / "bert_model.ckpt", from_params(params, "tf1", config))
    (directory / "bert_config.json").write_text(json.dumps(settings))
    tokenizer.save(directory)
    lines = ('model_checkpoint_path: "bert_model.ckpt"', 'all_model_checkpoint_paths: "bert_model.ckpt"')
    (directory / "checkpoint").write_text("".join(f"{line}\n" for line in lines))


# TFRecords


def write_records(path: str | os.PathLike, records: Iterable[bytes]) -> int:
    """Writes a TFRecord file, and returns its number of records."""
    number = 0
    with open(path, "wb") as stream:
        for data in records:
            length = struct.pack("<Q", len(data))
            checksums = [struct.pack("<I", files.masked_crc32c(part)) for part in (length, data)]
            stream.write(b"".join((length, checksums[0], data, checksums[1])))
            number += 1
    return number


def encode_payloads(values: np.ndarray) -> list[Feature]:
    """Returns a feature for each row of numbers [R, n], floats or integers."""
    if values.dtype.kind == "f":
        return [Feature(FLOATS, row.tobytes()) for row in values.astype("<f4")]
    bits = values.astype(np.int64).view(np.uint64)
    shifts = np.arange(0, 70, 7, dtype=np.uint64)
    width = 1 + int(np.count_nonzero(bits.max(initial=0) >> shifts[1:]))
    groups = bits[..., None] >> shifts[:width]  # [R, n, width]
    used = groups > 0
    used[..., 0] = True
    encoded = (groups & np.uint64(0x7F)).astype(np.uint8)
    encoded[..., :-1] |= used[..., 1:].astype(np.uint8) << 7  # another byte follows
    stops = np.cumsum(np.count_nonzero(used, axis=(1, 2))).tolist()
    data = encoded[used].tobytes()
    return [Feature(INTEGERS, data[start:stop]) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


def encode_example(features: Mapping[str, Feature]) -> bytes:
    """Returns a serialized tf.train.Example, features in the order given, lists of numbers packed."""
    entries = []
    for name, feature in features.items():
        if feature.kind == BYTES:
            values = b"".join(delimited(1, value) for value in feature.payload)  # type: ignore[arg-type]
        else:
            values = delimited(1, feature.payload) if feature.payload else b""  # type: ignore[arg-type]
        value = delimited(feature.kind, values)
        entries.append(delimited(1, delimited(1, name.encode()) + delimited(2, value)))
    return delimited(1, b"".join(entries))


def write_examples(path: str | os.PathLike, batches: Iterable[Columns]) -> int:
    """Writes pre-training examples [R, ...] as a TFRecord file, and returns their number."""
    names = (*INPUTS, *PREDICTIONS, LABELS)

    def encoded() -> Iterator[bytes]:
        for columns in batches:
            features = [encode_payloads(columns[name]) for name in names]
            for values in zip(*features, strict=True):
                yield encode_example(dict(zip(names, values, strict=True)))

    return write_records(path, encoded())
