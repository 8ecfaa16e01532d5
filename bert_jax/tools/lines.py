# SPDX-License-Identifier: Apache-2.0
"""Reads lines of text from a file or from standard input."""

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from bert_jax.data.sources.formats import decoded_lines, is_json_lines
from bert_jax.errors import InputError, reading
from bert_jax.storage.files import open_binary
from bert_jax.storage.places import to_place
from bert_jax.storage.urls import local_copy
from bert_jax.storage.writing import atomic_path
from bert_jax.tasks.embeddings.corpus import is_table, passage_of, table_rows
from bert_jax.tasks.json_values import parse_json

Item = TypeVar("Item")


@contextlib.contextmanager
def open_lines(path: str) -> Iterator[IO[bytes]]:
    """Yields the bytes of a file or URL, decompressed, or of standard input for "-".

    Raises: InputError if it cannot be read.
    """
    if path == "-":
        if sys.stdin is None:
            raise InputError("standard input is closed; give a file as --input, or open it")
        yield sys.stdin.buffer
        return
    if path.endswith(".csv"):
        # a table of training data, given to predict
        print(f"note: {path} is read as lines of text, not as a table", file=sys.stderr)
    with reading(path):
        local = local_copy(path)
        # of a pipe no byte is read twice
        stream = open_binary(local) if os.path.isfile(local) else open(local, "rb")
    with stream:
        yield stream


@contextlib.contextmanager
def open_writer(path: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that writes a line: to standard output for "-", or to a file that appears whole at the end."""
    if path == "-":
        yield lambda line: print(line, flush=True)
        return
    with atomic_path(to_place(path)) as temporary, open(temporary, "w", encoding="utf-8") as stream:
        yield lambda line: print(line, file=stream)


def read_input(stream: IO[bytes], path: str) -> Iterator[tuple[str, str]]:
    """Yields the position and the stripped text of each line. Raises: InputError if a line is not UTF-8."""
    name = "line " if path == "-" else f"{path}:"
    path = "standard input" if path == "-" else path
    for where, text in decoded_lines(stream, path, name):
        yield where, text.strip()


def read_passages(path: str) -> Iterator[tuple[Any, str]]:
    """Yields the id and the text of each line or row of a table, blank ones too, as `passage_of`, which says more."""
    if is_table(path):
        for number, (where, row) in enumerate(table_rows(path), 1):
            yield passage_of(number, where, row, is_json=False)
        return
    with open_lines(path) as stream:
        for number, (where, text) in enumerate(read_input(stream, path), 1):
            yield passage_of(number, where, text, is_json_lines(path))


def parse_line(line: str, where: str, is_words: bool) -> object:
    """Returns a line as tasks read it: an object of JSON, a list of texts or a text; tabs do not part words."""
    if line[:1] == "{":
        return parse_json(line, where)
    with contextlib.suppress(InputError):
        value = parse_json(line, where) if line[:1] == "[" else None
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return value
    return line.split("\t") if "\t" in line and not is_words else line


def batches_of(
    items: Iterator[Item], size: int, pause: float | None = None
) -> Iterator[list[Item]]:
    """Yields the items in order, `size` at a time; fewer where none comes for `pause` seconds, if that is not None.

    An error of the iterator is raised after the items before it. It is read in a thread of its own.
    """
    # A thread, since only a queue can be waited for with a limit: a line that has come is answered
    # while the next is awaited. Its size keeps a fast reader from filling the memory.
    fetched: queue.Queue[tuple[Item] | Exception] = queue.Queue(2 * size)

    def read() -> None:
        end: Exception = StopIteration()
        try:
            for item in items:
                fetched.put((item,))
        except Exception as error:  # noqa: BLE001, the caller's thread raises it
            end = error
        fetched.put(end)

    threading.Thread(target=read, daemon=True).start()
    end = None
    while end is None:
        batch: list[Item] = []
        while len(batch) < size and end is None:
            try:
                item = fetched.get(timeout=pause if batch else None)
            except queue.Empty:
                break
            if isinstance(item, Exception):
                end = item
            else:
                batch += item
        if batch:
            yield batch
    if not isinstance(end, StopIteration):
        raise end


def told(batches: Iterator[list[Item]], what: str, seconds: float = 10.0) -> Iterator[list[Item]]:
    """Yields batches, and prints the number of finished items to stderr, every `seconds`."""
    count = 0
    began = time.monotonic()
    reported = began
    for batch in batches:
        yield batch
        count += len(batch)
        if (now := time.monotonic()) - reported > seconds:
            print(
                f"{count:,} {what} after {now - began:.0f} s ({count / (now - began):.1f} a second)",
                file=sys.stderr,
            )
            reported = now


def converse(lines: Iterator[tuple[str, str]], answer: Callable[[tuple[str, str]], object]) -> None:
    """Answers line by line. An error in a line is printed, and the next line is read."""
    for line in lines:
        try:
            answer(line)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
