# SPDX-License-Identifier: Apache-2.0
"""Locks: of several commands that would write one output, one does so, and the others are told who it is.

A lock is a file that the kernel locks for the process that holds it open. The kernel lets go however that process
ends, so a file that is left behind locks nothing.
"""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from bert_jax.errors import InputError

LOCK = ".lock"  # of a directory that is filled in place: the lock's file, inside of it


@contextlib.contextmanager
def lock_file(path: Path, wait: bool = False, keep: bool = False) -> Iterator[str]:
    """Yields "" while this process holds the lock of the file at `path`, or who else holds it.

    The file and its directory are made. With `wait` it is waited for until the lock is free; with `keep` the file
    stays when the block ends. Where the file system has no locks, such as in a bucket that is mounted, "" is yielded
    too: there one has to take care.

    Raises: OSError if the file cannot be made.
    """
    descriptor, holder = _open_and_lock(path, wait)
    try:
        yield holder
    finally:
        if not holder and not keep:  # before the lock ends, so that nobody has locked the file that is removed
            with contextlib.suppress(OSError):
                path.unlink()
        os.close(descriptor)


@contextlib.contextmanager
def writing(output: str | os.PathLike, inside: bool = False) -> Iterator[None]:
    """Keeps other commands from writing `output` until the block ends.

    The lock's file lies beside the output, or with `inside` in it, which is then made: a directory that is filled in
    place. It is gone when the block ends.

    Raises: InputError if another command writes this output, or if nothing can be written there.
    """
    path = Path(output)
    with contextlib.ExitStack() as stack:
        try:
            holder = stack.enter_context(lock_file(path / LOCK if inside else path.with_name(f".{path.name}.lock")))
        except OSError as error:
            raise InputError(
                f"cannot write {path}: {error.strerror or error}; check the place, its permissions and its space"
            ) from None
        if holder:
            raise InputError(
                f"output {path} is being written by another command ({holder}); wait for it, or choose another output"
            )
        yield


def _open_and_lock(path: Path, wait: bool) -> tuple[int, str]:
    """Returns the open file, and "" once this process holds its lock, or who else holds it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # whoever held the lock has just removed the directory
            continue
        try:
            holder = _lock(descriptor, wait)
            if holder or _is_file_of(descriptor, path):
                return descriptor, holder
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # whoever held the lock has removed the file, and the next one makes another


def _lock(descriptor: int, wait: bool) -> str:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        written = os.pread(descriptor, 1000, 0).decode("utf-8", "replace")
        return " ".join(written.split()) or "which has just begun"
    except OSError:  # a file system without locks
        return ""
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return ""


def _is_file_of(descriptor: int, path: Path) -> bool:
    """Returns whether the open file is the one at `path` still."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
