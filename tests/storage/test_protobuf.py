# SPDX-License-Identifier: Apache-2.0
"""Messages of protocol buffers are those of Google's own library; what is not a message is an error."""

import random

import pytest
from google.protobuf import descriptor_pb2
from google_files import encode_varint

from bert_jax.storage.protobuf import parse_fields, parse_message, parse_varint


def message():
    made = descriptor_pb2.FileDescriptorProto(name="a.proto", dependency=["b" * 200, ""], public_dependency=[0, 300])
    made.message_type.add(name="Größe").field.add(name="x", number=2**29 - 1)
    return made


def test_a_message_of_googles_library_is_read():
    values = parse_message(message().SerializeToString())
    assert values[1] == [b"a.proto"] and values[3] == [b"b" * 200, b""] and values[10] == [0, 300]
    inner = parse_message(values[4][0])
    assert inner[1] == ["Größe".encode()] and parse_message(inner[2][0])[3] == [2**29 - 1]


def test_fixed_fields_are_unsigned_integers():
    made = descriptor_pb2.UninterpretedOption(double_value=1.0, negative_int_value=-1)
    assert parse_message(made.SerializeToString()) == {5: [2**64 - 1], 6: [0x3FF0000000000000]}


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**32, 2**63, 2**64 - 1])
def test_an_integer_comes_back(value):
    encoded = encode_varint(value)
    assert parse_varint(b"\xff" + encoded + b"\x01", 1, len(encoded) + 2) == (value, len(encoded) + 1)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x80", "no end"),
        (b"\x08" + b"\x80" * 11, "no end"),
        (b"\x0a\x05abc", "not inside"),
        (b"\x0d\x00\x00", "not inside"),
        (b"\x0b", "unknown type 3"),
        (b"\x00\x00", "not inside"),  # field 0 does not exist
    ],
)
def test_what_is_no_message_is_an_error(data, problem):
    with pytest.raises(ValueError, match=problem):
        parse_message(data)


def test_damaged_messages_are_read_or_refused():
    """Fields that are found lie inside of the message, and follow each other."""
    rng, whole, refused = random.Random(0), message().SerializeToString(), 0
    for _ in range(2000):
        data = bytearray(whole)
        data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            fields = parse_fields(bytes(data), 0, len(data))
        except ValueError:
            refused += 1
            continue
        assert fields[-1][2] == len(data) and all(first <= last for _, first, last in fields)
        assert all(one[2] < other[1] for one, other in zip(fields, fields[1:]))
    assert 0 < refused < 2000
