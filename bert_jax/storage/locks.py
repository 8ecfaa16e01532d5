# SPDX-License-Identifier: Apache-2.0
"""Locks, so that only one command writes an output; the others get an error that names the writer.

A lock is a file on which the process holds an flock(2). The kernel releases it when the process ends in any way, so a
lock file that is left behind does not block anyone.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from bert_jax.errors import InputError
from bert_jax.storage import leases, stores
from bert_jax.storage.places import AnyPath, RemotePath, to_place

LOCK = ".lock"  # name of the lock file inside a directory that is filled in place
# times that the directory of a lock may be gone between its making and its use
_MOST_VANISHED = 100


@contextlib.contextmanager
def lock_file(path: Path, wait: bool = False, keep: bool = False) -> Iterator[str]:
    """Yields "" while this process holds the lock of the file at `path`, or a description of the process that does.

    Makes the file and its directory. `wait` waits until the lock is free; `keep` keeps the file when the block ends.
    Also yields "" on file systems without locks, such as mounted buckets: there nothing is locked.

    Raises: OSError if the file cannot be made.
    """
    descriptor, holder = _open_and_lock(path, wait)
    try:
        yield holder
    finally:
        # before the lock ends, so that nobody has locked the file that is removed
        if not holder and not keep:
            with contextlib.suppress(OSError):
                path.unlink()
        os.close(descriptor)


@contextlib.contextmanager
def writing(output: AnyPath, inside: bool = False) -> Iterator[None]:
    """Keeps other commands from writing `output` until the block ends.

    The lock file is beside the output. With `inside` the output is a directory, which is made, and the lock file is in
    it. The lock file is removed at the end. In an object store it is a lease, and nothing is locked at URLs of other
    protocols.

    Raises: InputError if another command is writing this output, or if the place is not writable.
    """
    path = to_place(output)
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(path, RemotePath):
                holder = ""
                name = (
                    path / leases.LEASE if inside else path.with_name(f".{path.name}{leases.LEASE}")
                )
                if stores.protocol_of(str(path)) in stores.WORK_PROTOCOLS:
                    holder = stack.enter_context(leases.lease(str(name), str(path)))
            else:
                name = path / LOCK if inside else path.with_name(f".{path.name}.lock")
                holder = stack.enter_context(lock_file(name))
        except OSError as error:
            raise InputError(
                f"cannot write {path}: {error.strerror or error}; check the place and its space"
            ) from None
        if holder:
            raise InputError(
                f"output {path} is being written by another command ({holder}); choose another"
            )
        yield


def _open_and_lock(path: Path, wait: bool) -> tuple[int, str]:
    """Returns the open file, and "" if this process holds its lock, or a description of the process that does."""
    vanished = 0
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Not O_TRUNC: until the lock is ours, the file says who has it.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # whoever held the lock has just removed the directory
            vanished += 1
            # no: as where the shell's own directory is gone, or in /proc
            if vanished == _MOST_VANISHED:
                raise
            time.sleep(0.001)
            continue
        try:
            holder = _lock(descriptor, wait)
            # A lock of a file that has lost its name protects nothing: is it still the one at this
            # path?
            with contextlib.suppress(FileNotFoundError):
                if holder or os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor, holder
        except BaseException:
            os.close(descriptor)
            raise
        # whoever held the lock has removed the file, and the next one makes another
        os.close(descriptor)


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
