# SPDX-License-Identifier: Apache-2.0
"""Files damaged at random, and the promise about them: a reader returns a value or raises an `InputError` of one line.

Hypothesis draws the damage (docs/decisions/0018-fuzzing.md). Cases follow from the test alone: a run can be
repeated, and a failure is shown with the smallest damage that was found. A case has bounds of time and memory.
"""

import contextlib
import gc
import json
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mutations
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

set_hypothesis_home_dir(tempfile.gettempdir())  # it keeps tables of characters, and not in the checkout

SECONDS, MOST_SECONDS = 2.0, 60  # of the processor, and by the clock: other programs may be at work
MEMORY = 3 << 30  # more than was there before: address space, of which libraries take a lot for their threads
SHARE = 30  # of the cases, one in so many is in the fast tests
TIMES = int(os.environ.get("BERT_JAX_FUZZ", "1"))  # so many times the cases, for a campaign

_JSON = (".json",)
_INSERTS = [b"\0", b"\n", b"\r\n", b"\t", b'"', b"\\", b"{", b"[" * 2000, b"\xff" * 12, b"\xef\xbb\xbf", b"9" * 40,
            b"-1", b"NaN", b"\xed\xa0\x80", b"1e999", b" "]  # fmt: skip


class Reader(NamedTuple):
    """Something that reads files."""

    name: str
    make: Callable[[Path], Any]  # writes good files into an empty directory
    read: Callable[[Path], Any]  # reads them as the program does
    files: tuple[str, ...]  # globs of those that are damaged
    cases: int  # in `make test-all`


def make_tests(readers: list[Reader]) -> tuple[Callable, Callable]:
    """Returns two tests of these readers: with a few cases each, and the slow one with all of them."""
    each = pytest.mark.parametrize("reader", readers, ids=[reader.name for reader in readers])

    @each
    def test_some_damage(reader: Reader, tmp_path: Path) -> None:
        attack(reader, tmp_path, max(8, reader.cases // SHARE))

    @pytest.mark.slow
    @each
    def test_much_damage(reader: Reader, tmp_path: Path) -> None:
        attack(reader, tmp_path, reader.cases * TIMES)

    return test_some_damage, test_much_damage


def attack(reader: Reader, directory: Path, cases: int) -> None:
    """Damages a file at a time, as often as asked for, and reads."""
    reader.make(directory)
    paths = sorted({path for pattern in reader.files for path in directory.glob(pattern) if path.is_file()})
    contents = {path: path.read_bytes() for path in paths}
    assert contents and all(contents.values())
    reader.read(directory)  # what is whole is read; it compiles, too

    @settings(
        max_examples=cases, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False,
    )  # fmt: skip
    @given(st.data())
    def damaged_files_are_read_or_refused(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(paths), "file")
        content = data.draw(damaged(contents[path], path.suffix), "content")
        path.write_bytes(content)
        try:
            with bounds():
                mutations.outcome(lambda: reader.read(directory))
        finally:
            path.write_bytes(contents[path])

    damaged_files_are_read_or_refused()


@contextlib.contextmanager
def bounds() -> Iterator[None]:
    """Ends a block that takes too long or too much memory with an error that is no `InputError`."""

    def too_long(*_: object) -> None:
        raise TimeoutError(f"more than {MOST_SECONDS} seconds")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(FileNotFoundError):  # a machine without /proc
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + MEMORY, limits[1]))
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(MOST_SECONDS)
    gc.disable()  # a collection of what other tests have left takes seconds
    started = time.thread_time()
    try:
        yield
    finally:
        signal.alarm(0)
        gc.enable()
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    taken = time.thread_time() - started
    assert taken < SECONDS, f"{taken:.1f} seconds of the processor"


# Damage


def damaged(content: bytes, suffix: str) -> st.SearchStrategy[bytes]:
    """Returns what may become of a file: most often of a kind that its format invites."""
    kinds = [damaged_bytes(content)]
    if content.count(b"\n") > 1:
        kinds.append(damaged_lines(content))
    if suffix in (".jsonl", ".ndjson"):
        kinds += [damaged_json_lines(content)] * 2
    if suffix in _JSON:
        kinds = [damaged_json(json.loads(content))] * 3 + kinds[:1]
    return st.one_of(kinds)


def _places(length: int) -> st.SearchStrategy[int]:
    """Returns places in a file, many of them where most formats have their headers."""
    return st.integers(0, min(length, 2000)) | st.integers(0, length)


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Returns bytes flipped, replaced, cut off, taken out, put in or said twice, at one to three places."""
    changed = bytearray(content)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        place = draw(_places(len(changed)))
        kind = draw(st.sampled_from(["flip", "flip", "flip", "set", "cut", "out", "in", "twice"]))
        if kind in ("flip", "set") and changed:
            place = min(place, len(changed) - 1)
            changed[place] = (
                changed[place] ^ 1 << draw(st.integers(0, 7)) if kind == "flip" else draw(st.integers(0, 255))
            )
        elif kind == "cut":
            del changed[place:]
        elif kind == "out":
            del changed[place : place + draw(st.integers(1, 32))]
        elif kind == "in":
            changed[place:place] = draw(st.sampled_from(_INSERTS) | st.binary(min_size=1, max_size=8))
        else:
            changed[place:place] = changed[place : place + draw(st.integers(1, 64))]
    return bytes(changed)


@st.composite
def damaged_lines(draw: st.DrawFn, content: bytes) -> bytes:
    """Returns lines missing, said twice, empty, in another order, joined, or with another column."""
    lines = content.split(b"\n")
    place = draw(st.integers(0, len(lines) - 1))
    kind = draw(st.sampled_from(["out", "twice", "empty", "move", "join", "column", "value"]))
    if kind == "out":
        del lines[place]
    elif kind == "twice":
        lines.insert(draw(st.integers(0, len(lines))), lines[place])
    elif kind == "empty":
        lines[place] = b""
    elif kind == "move":
        lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(place))
    elif kind == "join":
        lines[place : place + 2] = [b"".join(lines[place : place + 2])]
    else:
        columns = lines[place].split(b"\t")
        column = draw(st.integers(0, len(columns) - 1))
        if kind == "value":
            columns[column] = draw(
                st.sampled_from([b"", b"-1", b"nan", b"1e400", b"9" * 400, "٣".encode(), b"x" * 9999])
            )
        elif draw(st.booleans()):
            del columns[column]
        else:
            columns.insert(column, columns[column])
        lines[place] = b"\t".join(columns)
    return b"\n".join(lines)


_VALUES = st.sampled_from(mutations.WRONG) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=3), parts, max_size=3),
    max_leaves=5,
)


@st.composite
def damaged_json(draw: st.DrawFn, value: Any) -> bytes:
    """Returns JSON with something replaced, missing, or added."""
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        path = draw(st.sampled_from(list(mutations.places(value))))
        kind = draw(st.sampled_from(["replace", "replace", "replace", "without", "add"]))
        if kind == "replace" or not path:
            value = mutations.replaced(value, path, draw(_VALUES))
        elif kind == "without":
            value = mutations.without(value, path)
        else:
            parent = value
            for key in path[:-1]:
                parent = parent[key]
            if isinstance(parent, list):
                value = mutations.replaced(value, path[:-1], [*parent, draw(st.just(parent[path[-1]]) | _VALUES)])
            else:
                name = draw(st.sampled_from(["x", "", "\ud800", "../x", *parent]))
                value = mutations.replaced(value, (*path[:-1], name), draw(_VALUES))
    return mutations.dump(value)


@st.composite
def damaged_json_lines(draw: st.DrawFn, content: bytes) -> bytes:
    """Returns lines of JSON, one of them with something replaced, missing or added."""
    lines = content.rstrip(b"\n").split(b"\n")
    place = draw(st.integers(0, len(lines) - 1))
    lines[place] = draw(damaged_json(json.loads(lines[place])))
    return b"\n".join(lines) + b"\n"
