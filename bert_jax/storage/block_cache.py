# SPDX-License-Identifier: Apache-2.0
"""Blocks of records that are fetched from far away, in a file of limited size on the local disk.

The file has no name: it is gone when the process ends in any way, and two processes never share one.
"""

import collections
import contextlib
import heapq
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bert_jax.storage.writing import cannot_write

_NOW = -1  # the due time of blocks that somebody waits for


class BlockCache:
    """Fetches blocks in the background in order of their due times, and evicts the least recently used.

    A wanted block is not evicted until it has been released as often as it was wanted.
    """

    def __init__(
        self,
        fetch: Callable[[int], bytes],
        block_records: int,
        itemsize: int,
        num_slots: int,
        folder: Path,
    ):
        """Makes the file, with room for `num_slots` blocks of at most `block_records` records.

        `fetch(number)` returns the records of a block as bytes; it is called in several threads.

        Raises: StoppedError if the file cannot be made.
        """
        self._fetch = fetch
        self._block_records = block_records
        self._itemsize = itemsize
        self._slot_bytes = block_records * itemsize
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)
            # which takes no space yet
            os.ftruncate(self._file.fileno(), num_slots * self._slot_bytes)
        except OSError as error:
            raise cannot_write(folder, error) from error
        self._folder = folder
        # Read by a map and written by plain writes: on a full disk a write through a map would kill the process.
        shape = (num_slots * block_records, itemsize)
        self._records = np.memmap(self._file, np.uint8, "r", shape=shape)
        self._changed = threading.Condition()
        self._free = list(range(num_slots))
        self._slots: dict[int, int] = {}  # of the cached blocks
        self._idle: dict[int, None] = {}  # blocks that nobody wants, in the order of their release
        self._wanted: collections.Counter[int] = collections.Counter()
        self._due: list[tuple[int, int]] = []  # a heap of (due, block)
        self._fetching: set[int] = set()
        self._failed: dict[int, BaseException] = {}
        self._readers = 0
        self._closed = False
        self.num_slots = num_slots
        self.bytes_fetched = 0
        # each holds a block in memory
        num_threads = max(1, min(8, (256 << 20) // self._slot_bytes))
        for number in range(num_threads):
            threading.Thread(target=self._work, name=f"fetch-{number}", daemon=True).start()

    def want(self, blocks: np.ndarray, due: int) -> None:
        """Fetches blocks in the background, in order of `due`, and keeps them until they are released."""
        with self._changed:
            for block in blocks.tolist():
                self._wanted[block] += 1
                self._failed.pop(block, None)
                self._idle.pop(block, None)
                if block not in self._slots:
                    heapq.heappush(self._due, (due, block))
            self._changed.notify_all()

    def release(self, blocks: np.ndarray) -> None:
        """Ends what `want` began. The blocks stay cached until their space is needed."""
        with self._changed:
            for block in blocks.tolist():
                self._wanted[block] -= 1
                if not self._wanted[block]:
                    del self._wanted[block]
                    if block in self._slots:
                        self._idle[block] = None
            self._changed.notify_all()

    def gather(self, blocks: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Returns the records [n, bytes of one] at places [n] of blocks [n], after waiting for missing blocks.

        Raises: any error of fetching a block, and StoppedError if the local disk is full.
        """
        records = np.empty((len(blocks), self._itemsize), np.uint8)
        order = np.argsort(blocks, kind="stable")
        numbers, starts = np.unique(blocks[order], return_index=True)
        ends = [*starts[1:].tolist(), len(order)]
        at_once = max(1, self.num_slots // 4)  # leaves room for other readers
        for first in range(0, len(numbers), at_once):
            last = min(first + at_once, len(numbers))
            mine = order[starts[first] : ends[last - 1]]
            with self._held(numbers[first:last]) as slots:
                homes = slots[np.searchsorted(numbers[first:last], blocks[mine])]
                records[mine] = self._records.take(
                    homes * self._block_records + places[mine], axis=0
                )
        return records

    def close(self) -> None:
        """Ends the threads and gives the disk's space back. Whoever waits for a block gets an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            # a read of the map beyond the end of the file would kill the process
            while self._readers:
                self._changed.wait()
        with contextlib.suppress(OSError):
            os.ftruncate(self._file.fileno(), 0)

    @contextlib.contextmanager
    def _held(self, blocks: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the slots of blocks, which stay cached until the block of code ends."""
        self.want(blocks, _NOW)
        try:
            with self._changed:
                for block in blocks.tolist():
                    while block not in self._slots and not self._closed:
                        if block in self._failed:
                            raise self._failed[block]
                        self._changed.wait()
                if self._closed:
                    raise RuntimeError("the cache was closed")
                self._readers += 1
                slots = np.array([self._slots[block] for block in blocks.tolist()])
            try:
                yield slots
            finally:
                with self._changed:
                    self._readers -= 1
        finally:
            self.release(blocks)

    def _work(self) -> None:
        """Fetches due blocks until the cache is closed."""
        while (task := self._next_task()) is not None:
            block, slot = task
            error: BaseException | None = None
            try:
                content = self._fetch(block)
                self._write(slot, content)
                self.bytes_fetched += len(content)
            except BaseException as raised:  # noqa: BLE001 - raised where the block is waited for
                error = raised
            with self._changed:
                self._fetching.discard(block)
                if error is None:
                    self._slots[block] = slot
                    if block not in self._wanted:
                        self._idle[block] = None
                else:
                    self._failed[block] = error
                    self._free.append(slot)
                self._changed.notify_all()

    def _write(self, slot: int, content: bytes) -> None:
        # a nearly full disk takes a part, and tells of the rest at the next call
        view = memoryview(content)
        offset = slot * self._slot_bytes
        try:
            while view:
                written = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise cannot_write(self._folder, error) from error

    def _next_task(self) -> tuple[int, int] | None:
        """Returns a block to fetch and a slot for it; None when the cache is closed."""
        with self._changed:
            while not self._closed:
                # A heap forgets nothing in its middle: what came meanwhile, or is no longer wanted, goes here.
                while self._due:
                    block = self._due[0][1]
                    busy = block in self._slots or block in self._fetching or block in self._failed
                    if block in self._wanted and not busy:
                        break
                    heapq.heappop(self._due)
                if self._due and (self._free or self._idle):
                    if not self._free:  # the block unwanted for the longest time gives its slot
                        oldest = next(iter(self._idle))
                        del self._idle[oldest]
                        self._free.append(self._slots.pop(oldest))
                    block = heapq.heappop(self._due)[1]
                    self._fetching.add(block)
                    return block, self._free.pop()
                self._changed.wait()
        return None
