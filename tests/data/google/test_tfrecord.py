# SPDX-License-Identifier: Apache-2.0
"""TFRecord files and Examples: what TensorFlow and the protobuf library read and write, and damage refused."""

import gzip
from pathlib import Path

import google_files
import numpy as np
import pytest
from builders import message
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
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


def make_example_class(packed: bool = True, file: str = "example"):
    """Returns the protobuf library's class of tf.train.Example, from the definition in example.proto."""
    proto = descriptor_pb2.FileDescriptorProto(name=f"{file}.proto", package=file, syntax="proto3")
    text, message = descriptor_pb2.FieldDescriptorProto, descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE

    def add(owner, name, number, kind, type_name=None, repeated=False):
        field = owner.field.add(name=name, number=number, type=kind, type_name=type_name)
        field.label = text.LABEL_REPEATED if repeated else text.LABEL_OPTIONAL
        return field

    kinds = {"Bytes": text.TYPE_BYTES, "Float": text.TYPE_FLOAT, "Int64": text.TYPE_INT64}
    for name, kind in kinds.items():
        value = add(proto.message_type.add(name=f"{name}List"), "value", 1, kind, repeated=True)
        if name != "Bytes":
            value.options.packed = packed
    feature = proto.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(kinds, 1):
        add(feature, f"{name.lower()}_list", number, message, f".{file}.{name}List").oneof_index = 0
    features = proto.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, text.TYPE_STRING)
    add(entry, "value", 2, message, f".{file}.Feature")
    add(features, "feature", 1, message, f".{file}.Features.FeatureEntry", repeated=True)
    add(proto.message_type.add(name="Example"), "features", 1, message, f".{file}.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file}.Example"))


EXAMPLE, UNPACKED_EXAMPLE = make_example_class(), make_example_class(packed=False)


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
    kinds = {name: feature.kind for name, feature in tfrecord.parse_example(data).items()}
    values = decode_example(data)
    return {name: (kinds[name], list(value)) for name, value in values.items()}


def assert_same(ours: dict, theirs: dict) -> None:
    assert {name: (kind, len(values)) for name, (kind, values) in ours.items()} == {
        name: (kind, len(values)) for name, (kind, values) in theirs.items()
    }
    for name, (kind, values) in ours.items():
        if kind == FLOATS:
            assert np.array(values, "<f4").tobytes() == np.array(theirs[name][1], "<f4").tobytes() or (
                np.isnan(values).any()  # a signalling NaN turns quiet on its way through a Python float
            )
        else:
            assert values == theirs[name][1]


def random_example(kind, rng) -> tuple:
    """Returns an example of the library with all kinds of values, and the same values."""
    example = kind()
    integers = [0, 1, -1, 127, 128, 2**63 - 1, -(2**63), *rng.integers(-(2**63), 2**63 - 1, 20).tolist()]
    floats = np.array([0.0, -0.0, 1.5, np.inf, 1e-45, *rng.normal(size=20)], np.float32)
    example.features.feature["ints"].int64_list.value.extend(integers)
    example.features.feature["floats"].float_list.value.extend(floats.tolist())
    example.features.feature["strings"].bytes_list.value.extend([b"", b"text", rng.bytes(300)])
    example.features.feature["none"].int64_list.SetInParent()
    _ = example.features.feature["of no kind"]
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


def test_fields_of_other_versions_are_skipped_and_parts_joined():
    """A message given in two parts, a key given twice, a feature of two kinds, of which the later counts."""

    def delimited(field: int, value: bytes) -> bytes:
        return bytes([field << 3 | 2, len(value)]) + value

    def entry(name: bytes, *features: bytes) -> bytes:
        return delimited(1, delimited(1, name) + b"".join(delimited(2, unknown + feature) for feature in features))

    def integers(*values: int) -> bytes:
        return delimited(3, unknown + delimited(1, bytes(values)))

    unknown = b"\x78\x96\x01" + b"\x7a\x03abc"
    first = entry(b"parts", integers(1, 2), integers(3)) + entry(b"twice", integers(9))
    second = entry(b"twice", integers(5)) + entry(b"kinds", integers(4), delimited(1, delimited(1, b"x")))
    data = unknown + delimited(1, first) + unknown + delimited(1, second)
    assert our_values(data) == {"parts": (INTEGERS, [1, 2, 3]), "twice": (INTEGERS, [5]), "kinds": (BYTES, [b"x"])}


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
    for length in range(1, len(content)):
        path.write_bytes(content[:length])
        if length == 20:  # between two records a file may end
            assert list(tfrecord.read_records(str(path))) == [b"some"]
        else:
            message = refusal(path)
            assert f"record {1 + (length > 20)} is damaged" in message and "cut off" in message


def test_a_record_too_long_to_be_an_example(tmp_path, monkeypatch):
    write(tmp_path / "x", [b"12345", b"123456"])
    monkeypatch.setattr(tfrecord, "MAX_RECORD_BYTES", 5)
    assert "record 2 is damaged or another kind of file (it has 6 bytes, 5 is the most)" in refusal(tmp_path / "x")
