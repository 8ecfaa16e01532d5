# SPDX-License-Identifier: Apache-2.0
"""Lines of text that a command is given: in a file, or on standard input."""

import contextlib
import sys
from collections.abc import Iterator
from typing import BinaryIO

from bert_jax.errors import InputError


@contextlib.contextmanager
def open_lines(path: str) -> Iterator[BinaryIO]:
    """Yields the bytes of a file, or of standard input for "-". Raises: InputError if it cannot be read."""
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = open(path, "rb")
    except OSError as error:
        raise InputError(f"input {path} cannot be read: {error.strerror}") from None
    with stream:
        yield stream


def read_lines(stream: BinaryIO, path: str) -> Iterator[tuple[str, str]]:
    """Yields where a line stands and the line, without blanks around it. Raises: InputError if one is not UTF-8."""
    name = "line " if path == "-" else f"{path}:"
    for number, line in enumerate(stream, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name}{number} is not UTF-8 ({error.reason} at byte {error.start + 1} of the line); convert it"
            ) from None
        yield f"{name}{number}", text.strip()
