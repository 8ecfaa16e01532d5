# SPDX-License-Identifier: Apache-2.0
"""Standard streams: UTF-8 whatever the locale, and an end of the terminal that ends no training."""

import io
import os
import sys


class _Lasting(io.FileIO):
    """A file descriptor whose reader may go away: what is written from then on is dropped."""

    def write(self, content) -> int:
        try:
            return super().write(content) or 0
        except OSError:  # a pipe whose reader has ended, or a terminal that was closed
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(content)


def prepare() -> None:
    """Makes stdout and stderr UTF-8, and stderr, which only informs, one whose reader may go away.

    A stream is None where it was closed before the start, and stays so.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    if isinstance(sys.stderr, io.TextIOWrapper):
        raw = io.BufferedWriter(_Lasting(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
