# SPDX-License-Identifier: Apache-2.0
"""Blocks on the local disk: fetched in order of need, never more than there is room for."""

import os
import threading
import time

import numpy as np
import pytest

from bert_jax.errors import StoppedError
from bert_jax.storage.block_cache import BlockCache

RECORDS, SIZE, BLOCKS = 50, 20, 40
DATA = np.random.default_rng(0).integers(0, 256, (BLOCKS, RECORDS, SIZE), np.uint8)


class Source:
    """Where blocks come from; it keeps a list of what was asked for."""

    def __init__(self):
        self.asked: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.fails: set[int] = set()

    def fetch(self, number: int) -> bytes:
        self.open.wait()
        self.asked.append(number)
        if number in self.fails:
            raise StoppedError(f"no block {number}")
        return DATA[number].tobytes()


@pytest.fixture
def source():
    """Returns a source of blocks."""
    return Source()


@pytest.fixture
def cache(source, tmp_path):
    """Yields a cache with room for 12 blocks."""
    cache = BlockCache(source.fetch, RECORDS, SIZE, 12, tmp_path / "cache")
    yield cache
    source.open.set()
    cache.close()


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_records_come_back_whatever_was_dropped_meanwhile(cache, source):
    rng = np.random.default_rng(1)
    for _ in range(50):
        blocks, places = rng.integers(0, BLOCKS, 30), rng.integers(0, RECORDS, 30)
        np.testing.assert_array_equal(cache.gather(blocks, places), DATA[blocks, places])
    assert len(source.asked) > BLOCKS and cache.bytes_fetched == len(source.asked) * RECORDS * SIZE
    assert cache.gather(np.empty(0, np.int64), np.empty(0, np.int64)).shape == (0, SIZE)


def test_what_is_here_is_not_fetched_again(cache, source):
    blocks = np.arange(12)
    for _ in range(5):
        cache.gather(blocks, blocks)
    assert sorted(source.asked) == list(range(12))


def test_the_disk_holds_no_more_than_the_limit(cache):
    everything = np.arange(BLOCKS)
    for _ in range(3):
        cache.gather(everything, everything)
        status = os.fstat(cache._file.fileno())
        assert status.st_size == 12 * RECORDS * SIZE and status.st_blocks * 512 <= status.st_size + 4096
    assert status.st_nlink == 0  # nothing is left behind, even by a kill
    cache.close()
    assert os.fstat(cache._file.fileno()).st_blocks == 0


def test_what_is_wanted_stays(cache, source):
    cache.want(np.arange(6), due=0)
    wait_until(lambda: len(source.asked) == 6)
    for block in range(6, BLOCKS):
        cache.gather(np.array([block]), np.array([0]))
    cache.gather(np.arange(6), np.arange(6))
    assert len(source.asked) == BLOCKS
    cache.release(np.arange(6))
    for block in range(6, BLOCKS):
        cache.gather(np.array([block]), np.array([0]))
    before = len(source.asked)
    cache.gather(np.arange(6), np.arange(6))
    assert len(source.asked) == before + 6


def test_a_block_that_two_want_stays_until_both_let_go(cache, source):
    for due in (0, 5):
        cache.want(np.array([1]), due)
    cache.release(np.array([1]))
    cache.gather(np.repeat(np.arange(2, BLOCKS), 2), np.zeros(2 * BLOCKS - 4, np.int64))
    cache.gather(np.array([1]), np.array([3]))
    assert source.asked.count(1) == 1


def test_what_is_due_first_is_fetched_first_and_what_is_waited_for_before_all(tmp_path, source):
    source.open.clear()
    cache = BlockCache(source.fetch, 1 << 20, 300, 12, tmp_path)  # blocks so large that one thread fetches
    assert sum(thread.name.startswith("fetch-") for thread in threading.enumerate()) >= 1
    cache.want(np.array([0]), 0)
    wait_until(lambda: cache._fetching == {0})
    cache.want(np.array([7]), 30)
    cache.want(np.array([5]), 20)
    cache.want(np.array([8]), 40)
    waiting = threading.Thread(target=lambda: cache.gather(np.array([9]), np.array([0])))
    waiting.start()
    wait_until(lambda: 9 in cache._wanted)
    cache.want(np.array([6]), 10)
    cache.release(np.array([8]))  # nobody wants it any more, so it is not fetched
    source.open.set()
    waiting.join(20)
    wait_until(lambda: len(source.asked) == 5)
    assert source.asked == [0, 9, 6, 5, 7]
    cache.close()


def test_an_error_is_raised_where_the_block_is_needed_and_only_there(cache, source):
    source.fails = {3}
    cache.want(np.arange(6), due=0)
    wait_until(lambda: len(source.asked) == 6)
    cache.gather(np.array([2, 4]), np.array([0, 0]))
    with pytest.raises(StoppedError, match="no block 3"):
        cache.gather(np.array([2, 3]), np.array([0, 0]))
    source.fails = set()
    np.testing.assert_array_equal(cache.gather(np.array([3]), np.array([7])), DATA[[3], [7]])


def test_a_full_disk_is_named(cache, source, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoppedError, match=r"cache: No space left on device; free some space"):
        cache.gather(np.array([1]), np.array([0]))


def test_a_folder_that_cannot_be_made_is_named(tmp_path, source):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoppedError, match=r"cannot write .*file/cache: .*/file is a file; correct the path"):
        BlockCache(source.fetch, RECORDS, SIZE, 12, tmp_path / "file" / "cache")


def test_who_waits_is_told_that_the_cache_was_closed(cache, source):
    source.open.clear()
    raised = []

    def wait():
        try:
            cache.gather(np.array([1]), np.array([0]))
        except RuntimeError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: 1 in cache._wanted)
    cache.close()
    waiting.join(20)
    assert len(raised) == 1


def test_the_file_stays_until_what_is_being_read_has_been_read(cache, monkeypatch):
    """A read beyond the end of a file that is mapped ends the process."""
    begun, may_end, found = threading.Event(), threading.Event(), []
    records = cache._records

    class Slow:
        def take(self, *arguments, **options):
            begun.set()
            may_end.wait()
            return records.take(*arguments, **options)

    monkeypatch.setattr(cache, "_records", Slow())
    reading = threading.Thread(target=lambda: found.append(cache.gather(np.array([3]), np.array([4]))))
    reading.start()
    assert begun.wait(20)
    closing = threading.Thread(target=cache.close)
    closing.start()
    wait_until(lambda: cache._closed)
    closing.join(0.2)
    assert closing.is_alive() and os.fstat(cache._file.fileno()).st_size > 0
    may_end.set()
    for thread in (reading, closing):
        thread.join(20)
    np.testing.assert_array_equal(found[0], DATA[3, 4][None])
    assert os.fstat(cache._file.fileno()).st_size == 0
    with pytest.raises(RuntimeError, match="the cache was closed"):  # of a block that is here, too
        cache.gather(np.array([3]), np.array([4]))
