# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: files and directories that appear whole or not at all."""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bert_jax.errors import InputError, StoppedError, one_line
from bert_jax.storage.locks import writing
from bert_jax.storage.places import (
    AnyPath,
    Place,
    RemotePath,
    is_taken,
    scratch,
    to_place,
    upload_directory,
)

# complete a directory: of a data set, of a model
WRITTEN_LAST = ("manifest.json", "checksums.json")


@contextlib.contextmanager
def atomic_path(path: AnyPath, durable: bool = True) -> Iterator[Path]:
    """Yields a temporary name beside `path`, and renames it to `path` if the block ends without an error.

    A reader never sees half a file. If the disk is full, the old file stays. The temporary file is removed when the
    block fails. For a URL the temporary file is on this machine, and is uploaded.

    Unless it is `durable`, the file may be lost or damaged if the power fails, and the disk is not waited for.
    """
    path = to_place(path)
    if isinstance(path, RemotePath):
        with scratch(path) as folder:
            yield (temporary := Path(folder, path.name))
            path.put(temporary)
        return
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if durable:
            # the bytes before the name: after a loss of power it could else stand for an empty file
            sync(temporary)
        os.replace(temporary, path)
        if durable:
            sync(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def new_directory(
    path: AnyPath, replaces: Callable[[Place], bool] = lambda path: False
) -> Iterator[Path]:
    """Yields an empty directory with a temporary name beside `path`; renamed to `path` if the block ends well.

    So the directory appears whole or not at all; the temporary one is removed when the block fails. Other commands
    cannot write there during the block. If `replaces(path)`, an existing directory is replaced: the old one is deleted
    only after the new one is in place, so a kill leaves one of the two.

    For a URL the directory is on this machine, and is uploaded when the block ends; its manifest or checksums come
    last. Until then the upload has an object ".unfinished", and one that was stopped may be replaced.

    Raises: InputError if there is something else at `path`, if another command is writing there, or if a file cannot be
    written.
    """
    path = to_place(path)
    _check_free(path, replaces)
    if isinstance(path, RemotePath):
        with writing(path), scratch(path) as folder:
            yield (temporary := Path(folder))
            _check_free(path, replaces)
            upload_directory(temporary, path, WRITTEN_LAST)
        return
    temporary = _temporary(path)
    old = path.with_name(f".{path.name}.old")
    try:
        with writing(path):
            _check_free(path, replaces)
            left_over = re.compile(rf"\.{re.escape(path.name)}\.(\d+(-[0-9a-f]+)?\.)?tmp")
            for other in path.parent.iterdir():
                if left_over.fullmatch(other.name):  # of a command that was killed
                    shutil.rmtree(other, ignore_errors=True)
            try:
                # a kill between the two renames below
                if old.exists() and not os.path.lexists(path):
                    old.rename(path)
                remove(old)
                temporary.mkdir()
                yield temporary
                for written in (*temporary.rglob("*"), temporary):
                    # before the name: if the power fails, the directory is whole or not there
                    sync(written)
                _check_free(path, replaces)  # again: not every program asks for the lock
                if os.path.lexists(path) and replaces(path):
                    path.rename(old)
                temporary.rename(path)
                sync(path.parent)
                remove(old)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    except StoppedError as error:  # of a file in it
        raise StoppedError(str(error).replace(str(temporary), str(path))) from error


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk; not all file systems can."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:  # a directory above, in which others' names may not be listed
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a file, a link or a directory, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _check_free(path: Place, replaces: Callable[[Place], bool]) -> None:
    """Raises: InputError if there is something at `path` that must not be replaced."""
    if is_taken(path) and not replaces(path):
        raise InputError(f"output {path} exists; give a directory that does not")


def _temporary(path: Path) -> Path:
    """Returns a name beside `path` that no other process takes, on this machine or on one that shares its files."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def check_file(path: AnyPath, *inputs: AnyPath) -> None:
    """Raises: InputError, before any work, if no file can be written at `path`, or if it is one of the `inputs`."""
    place = to_place(path)
    try:
        if isinstance(place, Path) and place.is_dir():
            raise InputError(
                f"output {path} is a directory; name a file, such as {place / 'output.json'}"
            )
        for given in map(to_place, inputs):
            is_same = given == place
            if isinstance(given, Path) and isinstance(place, Path):
                with contextlib.suppress(OSError, ValueError):  # it is not there, or is a pattern
                    is_same = os.path.samefile(given, place)
            if is_same:
                raise InputError(f"output {path} is the input too; name another file")
        if not isinstance(place, Path):
            return
        if place.exists() and not place.is_file():
            raise InputError(f"output {path} is a device or a pipe; name a file")
        # Tried, and not asked for: rights alone tell neither of a full disk nor of a mount that is
        # read-only.
        temporary = _temporary(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise cannot_write(path, error) from error


def check_space(directory: Path, num_bytes: int) -> None:
    """Raises: StoppedError if a directory has no room for `num_bytes` more."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        sizes = f"it takes {num_bytes / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
        raise StoppedError(
            f"cannot write {directory}: {sizes}; free some space or choose another place"
        )


_REMEDIES = dict.fromkeys(
    (errno.EACCES, errno.EPERM, errno.EROFS), "check its permissions or choose another place"
) | dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "correct the path")


def cannot_write(path: AnyPath, error: Exception) -> StoppedError:
    """Returns the error to raise after `error` has interrupted the writing of `path`."""
    number = getattr(error, "errno", None) or 0
    place = to_place(path)
    reason = getattr(error, "strerror", None) or one_line(error)[:200]
    remedy = _REMEDIES.get(number, "free some space or choose another place")
    if re.fullmatch(r"\d+ requested and \d+ written", reason):  # as NumPy calls a full disk
        reason = "No space left on device"
    if number in (errno.EEXIST, errno.ENOTEMPTY):
        reason = "something else has made it meanwhile"
        remedy = "choose another place"
    if number in (errno.EEXIST, errno.ENOTDIR) and isinstance(place, Path):
        if above := [parent for parent in place.parents if parent.is_file()]:
            reason = f"{above[0]} is a file"
            remedy = "correct the path"
    return StoppedError(f"cannot write {path}: {reason}; {remedy}")


def write_json(path: AnyPath, value: object, durable: bool = True) -> None:
    """Writes `value` as indented JSON with sorted keys, whole or not at all; `durable` as in `atomic_path`."""
    with atomic_path(path, durable) as temporary:
        temporary.write_text(
            json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def write_array(path: AnyPath, array: np.ndarray, durable: bool = True) -> None:
    """Writes an array as a `.npy` file, whole or not at all; `durable` as in `atomic_path`."""
    with atomic_path(path, durable) as temporary, open(temporary, "wb") as stream:
        np.save(stream, array)
