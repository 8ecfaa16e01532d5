# SPDX-License-Identifier: Apache-2.0
"""Blocks of neighbouring rows: the parts of a shard that have their own checksums and are read remotely at once."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from bert_jax.errors import InputError
from bert_jax.storage import files
from bert_jax.storage.files import JsonObject
from bert_jax.storage.ranges import RangeReader

BLOCK_BYTES = 1 << 20  # of a block, about


class RowSource(Protocol):
    """The rows of a split, wherever they are."""

    @property
    def dtype(self) -> np.dtype: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    def gather(self, row_indices: np.ndarray) -> np.ndarray:
        """Returns the rows [n] with these indices [n], in their order, as records of `dtype` in memory."""
        ...

    def close(self) -> None:
        """Stops background work, if any."""
        ...


def block_rows(dtype: np.dtype) -> int:
    """Returns the rows of a block: of all blocks of a shard but the last, which may have fewer."""
    return max(1, BLOCK_BYTES // dtype.itemsize)


class BlockSums:
    """The checksums of the blocks of rows that come in parts of any size."""

    def __init__(self, rows: int, itemsize: int):
        self._rows = rows
        self._bytes = rows * itemsize
        self._sums: list[int] = []
        self._filled = 0  # bytes of the last block

    def update(self, part: bytes) -> None:
        """Takes the next bytes of rows."""
        view = memoryview(part)
        while view:
            # Only when more bytes come, since a block that is full may be the last one.
            if self._filled in (0, self._bytes):
                self._sums.append(0)
                self._filled = 0
            taken = view[: self._bytes - self._filled]
            self._sums[-1] = files.crc32c(taken, self._sums[-1])
            self._filled += len(taken)
            view = view[len(taken) :]

    def result(self) -> JsonObject:
        """Returns the manifest's record of the blocks: the rows of each, and their CRC-32C in hexadecimal."""
        return {"rows": self._rows, "crc32c": "".join(f"{value:08x}" for value in self._sums)}


class Blocks:
    """The blocks of a split, numbered through all shards."""

    def __init__(self, shards: Sequence[JsonObject], dtype: np.dtype):
        """Raises: InputError if the manifest contradicts itself."""
        self.shards = shards
        self.dtype = dtype
        table: list[tuple[int, int, int]] = []
        for number, shard in enumerate(shards):
            if shard["bytes"] < shard["rows"] * dtype.itemsize:
                raise InputError(
                    f"the manifest's bytes of {shard['name']} are too few for its rows; prepare it again"
                )
            size = shard.get("blocks", {}).get("rows") or block_rows(dtype)
            table += [
                (number, first, min(size, shard["rows"] - first))
                for first in range(0, shard["rows"], size)
            ]
        # For each block: the number of its shard, its first row there, and its number of rows.
        self.homes, self.firsts, self.rows = np.array(table, np.int64).reshape(-1, 3).T
        self.ends = np.cumsum(self.rows)

    @property
    def most_rows(self) -> int:
        """The rows of the largest block."""
        return int(self.rows.max(initial=1))

    def read(self, reader: RangeReader, number: int, verify: bool) -> bytes:
        """Returns the rows of a block as bytes.

        Raises: InputError or StoppedError if they cannot be read, or are damaged on every try.
        """
        shard = self.shards[self.homes[number]]
        size = self.dtype.itemsize
        first = int(self.firsts[number])
        rows = int(self.rows[number])
        # what a .npy file has before its rows
        header = shard["bytes"] - shard["rows"] * size

        def find_damage(content: bytes) -> str:
            index = first // shard["blocks"]["rows"] if verify else 0
            if (
                not verify
                or f"{files.crc32c(content):08x}"
                == shard["blocks"]["crc32c"][8 * index : 8 * index + 8]
            ):
                return ""
            return (
                f"rows {first} to {first + rows} are damaged: their checksum is not the manifest's"
            )

        return reader.read(
            shard["name"], header + first * size, header + (first + rows) * size, find_damage
        )
