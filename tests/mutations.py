# SPDX-License-Identifier: Apache-2.0
"""Damage: what becomes of files that were edited, cut off or written by somebody else; it follows from a seed."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from bert_jax.errors import InputError

# In the place of what a file should say.
WRONG: list[Any] = [
    None, True, "", "x", "../x", "\ud800", -1, 0, 1, 1.5, 2**31, 2**63, 10**300, 1e308, float("nan"), float("inf"),
    [], [1], [[]], ["x"], {}, {"x": 1}, {"": {}},
]  # fmt: skip
MOST_CHARACTERS = 4000  # of a message


def outcome(function: Callable[[], Any]) -> str:
    """Returns the message with which the function refuses its input, one short line; "" if it returns a value."""
    try:
        function()
    except InputError as error:
        message = str(error)
        assert message and message.splitlines() == [message], f"not one line: {message!r}"
        assert len(message) < MOST_CHARACTERS, f"{len(message)} characters: {message[:200]!r}"
        message.encode("utf-8")  # or else no terminal could show it
        return message
    return ""


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yields the path of every value of nested dicts and lists, the whole first."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from places(part, (*path, key))


def replaced(value: Any, path: tuple, new: Any) -> Any:
    """Returns a copy of `value` with `new` at the path."""
    if not path:
        return new
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return value


def without(value: Any, path: tuple) -> Any:
    """Returns a copy of `value` without what is at the path."""
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return value


def damaged_json(value: Any, rng: random.Random) -> Any:
    """Returns a copy of `value` with something replaced, missing, added or said twice."""
    path = rng.choice(list(places(value)))
    kind = rng.random()
    if kind < 0.6 or not path:
        return replaced(value, path, rng.choice(WRONG))
    if kind < 0.8:
        return without(value, path)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    if isinstance(parent, list):
        return replaced(value, path[:-1], [*parent, rng.choice([parent[path[-1]], *WRONG])])
    return replaced(value, (*path[:-1], rng.choice(["x", "", *parent])), rng.choice(WRONG))


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Returns a copy of `content` with bytes flipped, cut off, said twice, put in or taken out."""
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        place = rng.randrange(len(damaged) + 1)
        kind = rng.randrange(8)
        if kind < 3 and place < len(damaged):
            damaged[place] ^= 1 << rng.randrange(8)
        elif kind == 3 and place < len(damaged):
            damaged[place] = rng.choice([0x00, 0x0A, 0x7F, 0x80, 0xC3, 0xED, 0xFF])
        elif kind == 4:
            del damaged[place:]
        elif kind == 5:
            del damaged[place : place + rng.choice([1, 2, 16])]
        elif kind == 6:
            damaged[place:place] = rng.choice(
                [b"\x00", b"\n", b"\r", b"\t", b'"', b"\xff" * 12, b"\xef\xbb\xbf", b"9" * 40]
            )
        else:
            end = place + rng.choice([1, 8, 64])
            damaged[place:place] = damaged[place:end]
    return bytes(damaged)


def damaged_lines(content: bytes, rng: random.Random) -> bytes:
    """Returns a copy of `content` with a line missing, said twice, empty, moved or joined with the next one."""
    lines = content.split(b"\n")
    place = rng.randrange(len(lines))
    kind = rng.randrange(5)
    if kind == 0:
        del lines[place]
    elif kind == 1:
        lines.insert(rng.randrange(len(lines) + 1), lines[place])
    elif kind == 2:
        lines[place] = b""
    elif kind == 3:
        lines.insert(rng.randrange(len(lines)), lines.pop(place))
    else:
        lines[place : place + 2] = [b"".join(lines[place : place + 2])]
    return b"\n".join(lines)


def dump(value: Any) -> bytes:
    """Returns a value as JSON, whatever Python calls JSON: NaN and half characters too."""
    return json.dumps(value).encode("ascii")
