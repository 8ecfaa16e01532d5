# SPDX-License-Identifier: Apache-2.0
"""TFRecord files and Examples: what TensorFlow and the protobuf library read and write, and damage refused."""

import gzip
from pathlib import Path

import google_files
import numpy as np
import pytest
from builders import message
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from bert_jax.data.google import tfrecord
from bert_jax.data.google.tfrecord import BYTES, FLOATS, INTEGERS


@pytest.fixture(scope="module")
def google_file(repository: Path) -> Path:
    """Returns the examples that create_pretraining_data.py wrote."""
    return repository / "tests" / "golden" / "google_examples.tfrecord"


@pytest.fixture(scope="module")
def google_records(google_file) -> list[bytes]:
    return list(tfrecord.read_records(str(google_file)))


EXAMPLE_PROTO = """
name: "example.proto" package: "example" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type {
  name: "FloatList"
  field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED options { packed: true } }
}
message_type {
  name: "Int64List"
  field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED options { packed: true } }
}
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".example.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".example.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".example.Int64List" oneof_index: 0 }
}
message_type {
  name: "Features"
  nested_type {
    name: "FeatureEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".example.Feature" label: LABEL_OPTIONAL }
  }
  field {
    name: "feature" number: 1 type: TYPE_MESSAGE type_name: ".example.Features.FeatureEntry" label: LABEL_REPEATED
  }
}
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".example.Features" } }
"""


def make_example_class(proto: str):
    """Returns the protobuf library's class of tf.train.Example."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(proto, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("example.Example"))


EXAMPLE = make_example_class(EXAMPLE_PROTO)
UNPACKED_EXAMPLE = make_example_class(EXAMPLE_PROTO.replace("packed: true", "packed: false"))


def library_values(example) -> dict:
    """Returns what an example of the protobuf library holds: name -> (kind, values)."""
    lists = {"bytes_list": BYTES, "float_list": FLOATS, "int64_list": INTEGERS, None: 0}
    return {
        name: (lists[kind], list(getattr(feature, kind).value) if kind else [])
        for name, feature in example.features.feature.items()
        for kind in [feature.WhichOneof("kind")]
    }


def decode_example(data: bytes) -> dict:
    """Returns the values of an example: int64 [n] or float32 [n] arrays, or lists of bytes; without a kind, []."""
    return {
        name: tfrecord.decode_payloads(kind, [payload])[0] if isinstance(payload, bytes) and kind else list(payload)
        for name, (kind, payload) in tfrecord.parse_example(data).items()
    }


def our_values(data: bytes) -> dict:
    """Returns the same of our reader."""
    kinds = tfrecord.parse_example(data)
    return {name: (kinds[name].kind, list(value)) for name, value in decode_example(data).items()}


def assert_same(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, (kind, values) in ours.items():
        assert (kind, len(values)) == (theirs[name][0], len(theirs[name][1]))
        if kind == FLOATS:
            # a signalling NaN turns quiet on its way through a Python float
            np.testing.assert_array_equal(np.array(values, "<f4"), np.array(theirs[name][1], "<f4"))
        else:
            assert values == theirs[name][1]


def random_example(kind, rng) -> tuple:
    """Returns an example of the library with all kinds of values, and the same values."""
    example = kind()
    feature = example.features.feature
    integers = [0, 1, -1, 127, 128, 2**63 - 1, -(2**63), *rng.integers(-(2**63), 2**63 - 1, 20).tolist()]
    floats = np.array([0.0, -0.0, 1.5, np.inf, 1e-45, *rng.normal(size=20)], np.float32)
    feature["ints"].int64_list.value.extend(integers)
    feature["floats"].float_list.value.extend(floats.tolist())
    feature["strings"].bytes_list.value.extend([b"", b"text", rng.bytes(300)])
    feature["none"].int64_list.SetInParent()
    _ = feature["of no kind"]
    return example, integers, floats


# Examples


def test_google_examples_are_what_tensorflow_reads(repository, google_records):
    with np.load(repository / "tests" / "golden" / "google_examples.npz") as golden:
        names = set(golden.files) - {"made_with", "text", "vocab"}
        examples = [decode_example(record) for record in google_records]
        assert all(set(example) == names for example in examples)
        for name in names:
            ours = np.stack([example[name] for example in examples])
            assert ours.dtype == golden[name].dtype
            np.testing.assert_array_equal(ours, golden[name])


@pytest.mark.parametrize("kind", [EXAMPLE, UNPACKED_EXAMPLE])
def test_examples_are_read_as_the_protobuf_library_writes_them(kind):
    example, integers, floats = random_example(kind, np.random.default_rng(0))
    values = decode_example(example.SerializeToString(deterministic=True))
    assert values["ints"].tolist() == integers and values["ints"].dtype == np.int64
    assert values["floats"].tobytes() == floats.tobytes()
    assert values["strings"] == list(example.features.feature["strings"].bytes_list.value)
    assert values["none"].tolist() == [] and values["of no kind"] == []


def test_parts_of_a_message_are_joined_and_unknown_fields_skipped():
    """A key in both parts, of which the later counts; a feature of two kinds; fields that no version here knows."""
    first, second = EXAMPLE(), EXAMPLE()
    first.features.feature["parts"].int64_list.value.extend([1, 2])
    first.features.feature["kinds"].int64_list.value.append(4)
    second.features.feature["kinds"].bytes_list.value.append(b"x")
    second.features.feature["parts"].int64_list.value.append(3)
    unknown = b"\x78\x96\x01" + b"\x7a\x03abc"
    data = unknown + first.SerializeToString() + unknown + second.SerializeToString()
    assert our_values(data) == {"parts": (INTEGERS, [3]), "kinds": (BYTES, [b"x"])}
    assert our_values(data) == library_values(EXAMPLE.FromString(data))
    lists = (google_files.delimited(3, google_files.delimited(1, part)) for part in (b"\1\2", b"\3"))
    entry = google_files.delimited(1, b"a") + b"".join(google_files.delimited(2, each) for each in lists)
    data = google_files.delimited(1, google_files.delimited(1, entry))
    assert our_values(data) == library_values(EXAMPLE.FromString(data)) == {"a": (INTEGERS, [1, 2, 3])}


@pytest.mark.parametrize("kind", [EXAMPLE, UNPACKED_EXAMPLE])
def test_damaged_examples_are_read_or_refused_as_by_the_protobuf_library(kind, google_records):
    """Two thousand examples with a byte or two changed, every tenth cut off somewhere too."""
    rng = np.random.default_rng(3)
    whole = random_example(kind, rng)[0].SerializeToString(deterministic=True)
    refused = 0
    for number in range(2000):
        data = bytearray(whole if number % 2 else google_records[number % len(google_records)])
        for _ in range(rng.integers(1, 3)):
            data[rng.integers(len(data))] = rng.integers(256)
        data = bytes(data[: rng.integers(len(data))] if number % 10 == 0 else data)
        try:
            theirs = library_values(EXAMPLE.FromString(data))
        except DecodeError:
            theirs = None
        try:
            ours = our_values(data)
        except ValueError:
            ours = None
        assert (ours is None) == (theirs is None), data
        if ours is not None and theirs is not None:
            # The library drops an entry of a map in which there is a field that it does not know.
            assert_same({name: value for name, value in ours.items() if name in theirs}, theirs)
        refused += ours is None
    assert 400 < refused < 1600


# Files


def write(path: Path, records: list[bytes]) -> bytes:
    assert google_files.write_records(path, records) == len(records)
    return path.read_bytes()


def refusal(path: Path) -> str:
    """Returns the message with which reading fails."""
    found = message(lambda: list(tfrecord.read_records(str(path))))
    assert str(path) in found
    return found


def test_compressed_files(tmp_path, google_file, google_records):
    path = tmp_path / "x.tfrecord.gz"
    path.write_bytes(content := gzip.compress(google_file.read_bytes()))
    assert list(tfrecord.read_records(str(path))) == google_records
    path.write_bytes(content[: len(content) // 2])
    assert "damaged or another kind of file" in refusal(path)


def test_every_flipped_bit_is_refused(tmp_path):
    path = tmp_path / "x.tfrecord"
    content = write(path, [b"some", b"records"])
    for place in range(len(content)):
        for bit in range(8):
            path.write_bytes(content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :])
            assert f"record {1 + (place >= 20)} is damaged" in refusal(path)


def test_every_cut_off_end_is_refused(tmp_path):
    path = tmp_path / "x.tfrecord"
    content = write(path, [b"some", b"records"])
    for length in (*range(1, 20), *range(21, len(content))):
        path.write_bytes(content[:length])
        message = refusal(path)
        assert f"record {1 + (length > 20)} is damaged" in message and "cut off" in message
    path.write_bytes(content[:20])  # between two records a file may end
    assert list(tfrecord.read_records(str(path))) == [b"some"]


def test_a_record_too_long_to_be_an_example(tmp_path, monkeypatch):
    write(tmp_path / "x", [b"12345", b"123456"])
    monkeypatch.setattr(tfrecord, "MAX_RECORD_BYTES", 5)
    assert "record 2 is damaged or another kind of file (it has 6 bytes, 5 is the most)" in refusal(tmp_path / "x")
