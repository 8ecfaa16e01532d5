# SPDX-License-Identifier: Apache-2.0
"""Blocks on the local disk: fetched in order of need, never more than there is room for."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

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


def first_of(cache, *blocks):
    """Returns the first record of each of these blocks."""
    return cache.gather(np.array(blocks, np.int64), np.zeros(len(blocks), np.int64))


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
    for _ in range(5):
        first_of(cache, *range(12))
    assert sorted(source.asked) == list(range(12))


def test_the_disk_holds_no_more_than_the_limit(cache):
    for _ in range(3):
        first_of(cache, *range(BLOCKS))
        status = os.fstat(cache._file.fileno())
        assert status.st_size == 12 * RECORDS * SIZE and status.st_blocks * 512 <= status.st_size + 4096
    assert status.st_nlink == 0  # nothing is left behind, even by a kill
    cache.close()
    assert os.fstat(cache._file.fileno()).st_blocks == 0


def test_what_is_wanted_stays(cache, source):
    cache.want(np.arange(6), due=0)
    wait_until(lambda: len(source.asked) == 6)
    for wanted in (True, False):
        for block in range(6, BLOCKS):
            first_of(cache, block)
        before = len(source.asked)
        first_of(cache, *range(6))
        assert len(source.asked) == before + (0 if wanted else 6)
        cache.release(np.arange(6))


def test_a_block_that_two_want_stays_until_both_let_go(cache, source):
    for due in (0, 5):
        cache.want(np.array([1]), due)
    cache.release(np.array([1]))
    first_of(cache, *range(2, BLOCKS))
    first_of(cache, 1)
    assert source.asked.count(1) == 1


def test_what_is_due_first_is_fetched_first_and_what_is_waited_for_before_all(tmp_path, source):
    source.open.clear()
    cache = BlockCache(source.fetch, 1 << 20, 300, 12, tmp_path)  # blocks so large that one thread fetches
    assert sum(thread.name.startswith("fetch-") for thread in threading.enumerate()) >= 1
    cache.want(np.array([0]), 0)
    wait_until(lambda: cache._fetching == {0})
    for block, due in ((7, 30), (5, 20), (8, 40)):
        cache.want(np.array([block]), due)
    waiting = threading.Thread(target=first_of, args=(cache, 9))
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
    first_of(cache, 2, 4)
    with pytest.raises(StoppedError, match="no block 3"):
        first_of(cache, 2, 3)
    source.fails = set()
    np.testing.assert_array_equal(first_of(cache, 3), DATA[[3], 0])


def test_a_full_disk_is_named(cache, source, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoppedError, match=r"cache: No space left on device; free some space"):
        first_of(cache, 1)


def test_a_folder_that_cannot_be_made_is_named(tmp_path, source):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoppedError, match=r"cannot write .*file/cache: .*/file is a file; correct the path"):
        BlockCache(source.fetch, RECORDS, SIZE, 12, tmp_path / "file" / "cache")


def test_who_waits_is_told_that_the_cache_was_closed(cache, source):
    source.open.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first_of, cache, 1)
        wait_until(lambda: 1 in cache._wanted)
        cache.close()
        with pytest.raises(RuntimeError, match="the cache was closed"):
            waiting.result(20)


def test_the_file_stays_until_what_is_being_read_has_been_read(cache, monkeypatch):
    """A read beyond the end of a file that is mapped ends the process."""
    begun, may_end = threading.Event(), threading.Event()
    records = cache._records

    def take(*arguments, **options):
        begun.set()
        may_end.wait()
        return records.take(*arguments, **options)

    monkeypatch.setattr(cache, "_records", SimpleNamespace(take=take))
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(first_of, cache, 3)
        assert begun.wait(20)
        closing = pool.submit(cache.close)
        wait_until(lambda: cache._closed)
        time.sleep(0.2)
        assert not closing.done() and os.fstat(cache._file.fileno()).st_size > 0
        may_end.set()
        np.testing.assert_array_equal(reading.result(20), DATA[[3], 0])
    assert os.fstat(cache._file.fileno()).st_size == 0
    with pytest.raises(RuntimeError, match="the cache was closed"):  # of a block that is here, too
        first_of(cache, 3)
