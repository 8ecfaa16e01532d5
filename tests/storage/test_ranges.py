# SPDX-License-Identifier: Apache-2.0
"""Ranges of files of a server that fails, stalls or says that it is busy: read again, or named in one line."""

import time
from typing import Any

import fsspec
import pytest
from object_server import serving

from bert_jax.errors import InputError, StoppedError
from bert_jax.storage import ranges

CONTENT = bytes(range(256)) * 100


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Yields a server of a file, to readers whose pauses are short."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(CONTENT)
    monkeypatch.setattr(ranges, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(ranges, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(ranges, "TRIES", 4)
    with serving(tmp_path) as server:
        yield server


def nothing_wrong(content: bytes) -> str:
    return ""


def read(server, start=100, end=1000, find_damage=nothing_wrong) -> bytes:
    return ranges.RangeReader(f"{server.url}/folder/").read("file", start, end, find_damage)


def first(count: int, what: str):
    """Returns a fault of the first `count` requests."""
    left = iter([what] * count)
    return lambda path, start: next(left, "")


def test_a_range_is_read(server):
    assert read(server) == CONTENT[100:1000]
    assert server.requests == [("folder/file", 100, 1000)] and server.bytes_sent == 900


@pytest.mark.parametrize("fault", ["500", "429", "cut"])
def test_a_read_that_fails_is_repeated(server, fault):
    server.retry_after = "0"
    server.fault = first(3, fault)
    assert read(server) == CONTENT[100:1000]


def test_wrong_bytes_are_read_again(server):
    server.fault = first(2, "wrong")

    def find_damage(content: bytes) -> str:
        return "" if content == CONTENT[100:1000] else "not what it was"

    assert read(server, find_damage=find_damage) == CONTENT[100:1000]
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("500", "500"), ("429", "429"), ("cut", "not enough data"), ("wrong", "the checksum is another")],
)
def test_a_server_that_goes_on_failing_is_named(server, fault, reason):
    server.retry_after = "0"
    server.fault = lambda path, start: fault
    with pytest.raises(StoppedError) as caught:
        read(server, find_damage=lambda content: "the checksum is another")
    message = str(caught.value)
    assert message.startswith(f"cannot read {server.url}/folder/file: ") and reason in message.lower()
    assert "at the last of 4 tries in 0 s" in message
    assert "\n" not in message and len(message) < 500


def test_a_server_that_is_busy_says_how_long_to_wait(server):
    server.retry_after = "1"
    server.fault = first(1, "429")
    began = time.monotonic()
    assert read(server) == CONTENT[100:1000]
    assert 1 <= time.monotonic() - began


def test_the_pause_is_what_the_server_says():
    error: Any = Exception("busy")
    error.headers = {"Retry-After": "7"}
    assert ranges._pause(0, error) == 7
    error.headers = {"Retry-After": "7000"}
    assert ranges._pause(0, error) == ranges.LONGEST_WAIT
    for headers in ({}, {"Retry-After": "soon"}, None):
        error.headers = headers
        assert [0.7 * 2**number < ranges._pause(number, error) < 1.3 * 2**number for number in (-1, 0, 3)]
    assert ranges._pause(50, error) <= 1.25 * ranges.LONGEST_PAUSE


@pytest.mark.slow
def test_a_server_that_stalls_is_asked_again(server, monkeypatch):
    monkeypatch.setattr(ranges, "TIMEOUT", 1.0)
    server.fault = first(1, "stall")
    began = time.monotonic()
    assert read(server) == CONTENT[100:1000]
    assert time.monotonic() - began < 20
    monkeypatch.setattr(ranges, "TRIES", 2)
    server.fault = lambda path, start: "stall"
    with pytest.raises(StoppedError, match=r"/folder/file: no answer, or half of one, in 1 s, at the last of 2 tries"):
        read(server)


def test_what_does_not_pass_is_not_tried_again(server):
    with pytest.raises(InputError, match=r"/folder/none does not exist; check the address") as caught:
        ranges.RangeReader(f"{server.url}/folder").read("none", 0, 10, nothing_wrong)
    assert not isinstance(caught.value, StoppedError)
    server.knows_ranges = False
    with pytest.raises(InputError, match="the server"):
        read(server)
    assert len(server.requests) == 1


def test_other_file_systems_are_read_the_same_way(tmp_path):
    fsspec.filesystem("memory").pipe("/ranges/file", CONTENT)
    (tmp_path / "file").write_bytes(CONTENT)
    for root in ("memory://ranges", f"file://{tmp_path}"):
        assert ranges.RangeReader(root).read("file", 5, 700, nothing_wrong) == CONTENT[5:700]
        with pytest.raises(InputError, match="does not exist"):
            ranges.RangeReader(root).read("none", 5, 700, nothing_wrong)


def test_a_file_that_is_shorter_than_it_should_be_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "TRIES", 2)
    monkeypatch.setattr(ranges, "FIRST_PAUSE", 0.01)
    (tmp_path / "file").write_bytes(CONTENT)
    with pytest.raises(StoppedError, match=r"/file: 100 of 200 bytes arrived, at the last of 2 tries"):
        ranges.RangeReader(f"file://{tmp_path}").read("file", len(CONTENT) - 100, len(CONTENT) + 100, nothing_wrong)


def test_an_unknown_protocol_is_refused():
    with pytest.raises(InputError, match=r"^cannot read nowhere://bucket: Protocol not known: nowhere"):
        ranges.RangeReader("nowhere://bucket")
