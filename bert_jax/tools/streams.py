# SPDX-License-Identifier: Apache-2.0
"""Standard streams: UTF-8 in every locale, and training that continues when the terminal is closed."""

import io
import os
import sys


class _Lasting(io.FileIO):
    """A file descriptor that drops all output once its reader is gone."""

    def write(self, content) -> int:
        try:
            return super().write(content) or 0
        except OSError:  # the reader of the pipe has ended, or the terminal was closed
            # The descriptor itself, so that C libraries that write to it do not fail either.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(content)


def prepare_streams() -> None:
    """Makes stdout and stderr UTF-8. Errors in writing to stderr are ignored, since it carries only messages.

    A stream that was closed before the start is None, and stays None.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    if isinstance(sys.stderr, io.TextIOWrapper):
        raw = io.BufferedWriter(_Lasting(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(
            raw, encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
