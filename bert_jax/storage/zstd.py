# SPDX-License-Identifier: Apache-2.0
"""Reads zstd files as streams. Only this module imports the library."""

import io
from typing import Any

import zstandard
from zstandard import ZstdError

__all__ = ["ZstdError", "ZstdFile"]


_CHUNK = 1 << 10  # bytes to decompress at a time; they give 32 MiB at most, since 4 bytes may encode 128 KiB


class ZstdFile(io.RawIOBase):
    """The decompressed bytes of a file of zstd frames.

    The library's own stream ends silently at the end of a truncated file; this one raises EOFError.
    """

    def __init__(self, path: str):
        self._source = open(path, "rb")
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # zstd --long=31
        self._frame: zstandard.ZstdDecompressionObj | None = None  # of the current frame; None between frames
        self._compressed = b""  # that was read from the source and belongs to the next frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            compressed = self._compressed or self._source.read(_CHUNK)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is not complete")
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._ready = memoryview(self._frame.decompress(compressed))
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        view = memoryview(buffer)
        num_bytes = min(len(view), len(self._ready))
        view[:num_bytes] = self._ready[:num_bytes]
        self._ready = self._ready[num_bytes:]
        return num_bytes

    def close(self) -> None:
        self._source.close()
        super().close()
