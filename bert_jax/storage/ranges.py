# SPDX-License-Identifier: Apache-2.0
"""Ranges of bytes of files behind URLs. A read that fails or stalls is repeated, with pauses that grow."""

import random
import time
from collections.abc import Callable
from typing import Any

from bert_jax.errors import InputError, StoppedError, one_line
from bert_jax.storage.answers import explain
from bert_jax.storage.stores import file_system, remote_errors

TRIES = 8
TIMEOUT = 30.0  # seconds for a request, of a block
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds; each pause is about twice the one before
LONGEST_WAIT = 300.0  # seconds, if the server says how long to wait (Retry-After)
_AGAIN = {408, 425, 429}  # HTTP statuses below 500 that are worth a retry


class RangeReader:
    """Reads ranges of the files below a URL, from any number of threads."""

    def __init__(self, root: str):
        """Raises: InputError if the package for the URL's protocol is not installed."""
        self._root = root.rstrip("/")
        with remote_errors(self._root):
            self._files, self._path = file_system(self._root)

    def read(self, name: str, start: int, end: int, find_damage: Callable[[bytes], str]) -> bytes:
        """Returns the bytes start..end of the file `name`, of one block; tries again, with pauses between.

        `find_damage` returns a description of their damage, or "" if there is none; damaged bytes are read again.

        Raises: InputError if the file is missing or may not be read, StoppedError if all tries fail. Both name the
        file, the error and the number of tries.
        """
        url = f"{self._root}/{name}"
        began = time.monotonic()
        reason = ""
        for number in range(TRIES):
            try:
                content = self._request(name, start, end)
                if damage := find_damage(content):
                    raise _Failed(damage)
                return content
            # of the URL itself, and no try is better than another
            except InputError:
                raise
            except Exception as error:  # noqa: BLE001 - every file system has errors of its own
                reason = _describe(error)
                status = _status(error)
                refused = status is not None and 400 <= status < 500 and status not in _AGAIN
                if refused or isinstance(error, (FileNotFoundError, PermissionError)):
                    raise InputError(explain(url, "read", error)) from None
                if number + 1 < TRIES:
                    time.sleep(_pause(number, error))
        tries = f"the last of {TRIES} tries in {time.monotonic() - began:.0f} s"
        raise StoppedError(f"cannot read {url}: {reason}, at {tries}; give the same command again")

    def _request(self, name: str, start: int, end: int) -> bytes:
        """Returns the bytes of one request for a range, if they have the expected length."""
        from fsspec import asyn

        path = f"{self._path.rstrip('/')}/{name}"
        files: Any = self._files
        content: Any
        if getattr(files, "async_impl", False):  # its own call would wait for minutes
            content = asyn.sync(
                files.loop, files._cat_file, path, start=start, end=end, timeout=TIMEOUT
            )
        else:
            content = files.cat_file(path, start=start, end=end)
        # such a server sends the whole file for every block, so another try is no better
        if len(content) > end - start:
            raise InputError(
                f"{self._root}/{name}: the server knows no ranges; copy the data here (data.stream=off)"
            )
        if len(content) < end - start:
            raise _Failed(f"{len(content)} of {end - start} bytes arrived")
        return content


class _Failed(Exception):
    """A read that ended with the wrong bytes."""


def _status(error: Exception) -> int | None:
    """Returns the HTTP status that an error of a file system stands for."""
    values = (getattr(error, name, None) for name in ("status", "code"))
    return next((value for value in values if isinstance(value, int)), None)


def _describe(error: Exception) -> str:
    """Returns what went wrong in words: no answer in time, or the HTTP status with the text of the server."""
    import fsspec.exceptions

    if isinstance(error, fsspec.exceptions.FSTimeoutError | TimeoutError):
        return f"no answer, or half of one, in {TIMEOUT:.0f} s"
    status = _status(error)
    text = one_line(error)[:200]
    return (
        f"HTTP status {status} ({text})" if status is not None and str(status) not in text else text
    )


def _pause(number: int, error: Exception) -> float:
    """Returns the seconds to wait after failure `number`, the first being 0: the server's Retry-After, if given."""
    wanted = str((getattr(error, "headers", None) or {}).get("Retry-After", ""))
    if wanted.isdigit():
        return min(float(wanted), LONGEST_WAIT)
    # A random part, so that many hosts do not come back at the same moment.
    return min(FIRST_PAUSE * 2**number, LONGEST_PAUSE) * random.uniform(0.75, 1.25)
