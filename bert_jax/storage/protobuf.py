# SPDX-License-Identifier: Apache-2.0
"""Decodes protocol buffers at the level of fields, without a message definition.

A message is a sequence of fields, each a tag (the field's number x 8 + how its value is written) and a value.
Source: the encoding of protocol buffers at protobuf.dev.
"""

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5  # the ways in which a value is written


def parse_fields(data: bytes, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Returns the tag (number x 8 + wire type) of each field of a message, and the start and end of its value.

    Raises: ValueError, saying why, if the bytes from `start` to `stop` are not a message.
    """
    fields = []
    while start < stop:
        # Most tags and lengths have one byte. They are read here, since a call for each takes
        # longer than all the rest.
        tag = data[start]
        first = start + 1
        if tag >= 0x80:
            tag, first = parse_varint(data, start, stop)
        wire_type = tag & 7
        if wire_type == DELIMITED:
            if first < stop and data[first] < 0x80:
                last = first + 1 + data[first]
                first += 1
            else:
                length, first = parse_varint(data, first, stop)
                last = first + length
        elif wire_type == VARINT:
            last = (
                first + 1
                if first < stop and data[first] < 0x80
                else parse_varint(data, first, stop)[1]
            )
        elif wire_type in (FIXED32, FIXED64):
            last = first + (4 if wire_type == FIXED32 else 8)
        else:
            raise ValueError(f"byte {start} begins a field of unknown type {wire_type}")
        if last > stop or not 8 <= tag < 1 << 32:
            raise ValueError(f"the field that begins at byte {start} is not inside of its message")
        fields.append((tag, first, last))
        start = last
    return fields


def parse_varint(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """Returns the unsigned integer at `start`, 7 bits a byte and the lowest first, and the position after it.

    Raises: ValueError if it goes on at `stop`, or after ten bytes.
    """
    value = 0
    for position in range(start, min(stop, start + 10)):
        value |= (data[position] & 0x7F) << (7 * (position - start))
        if data[position] < 0x80:
            return value, position + 1
    raise ValueError(f"the integer at byte {start} has no end")


def parse_message(data: bytes) -> dict[int, list[int | bytes]]:
    """Returns the values of a message by the numbers of their fields: unsigned integers, or bytes.

    Raises: ValueError, saying why, if it is not a message.
    """
    values: dict[int, list[int | bytes]] = {}
    for tag, first, last in parse_fields(data, 0, len(data)):
        wire_type = tag & 7
        if wire_type == DELIMITED:
            value = data[first:last]
        elif wire_type == VARINT:
            value = parse_varint(data, first, last)[0]
        else:
            value = int.from_bytes(data[first:last], "little")
        values.setdefault(tag >> 3, []).append(value)
    return values
