# SPDX-License-Identifier: Apache-2.0
"""Files at URLs: gs://, s3://, and all other protocols of fsspec.

They are copied into a local cache and read from there: the directory BERT_JAX_CACHE of the environment, or
~/.cache/bert_jax. The cache may be deleted while no command is reading from it.
"""

import concurrent.futures
import contextlib
import errno
import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from bert_jax.errors import InputError, one_line
from bert_jax.storage.locks import lock_file
from bert_jax.storage.writing import atomic_path

Result = TypeVar("Result")


def remote_glob(url: str) -> list[str]:
    """Returns the URLs of the files that match a pattern, or the URL itself if it names a file."""
    with _remote_errors(url):
        files, pattern = _file_system(url)
        if files.isfile(pattern):
            return [url]
        found = files.glob(pattern, detail=True)
        return [files.unstrip_protocol(path) for path, info in found.items() if info["type"] == "file"]


def is_remote(path: str | os.PathLike) -> bool:
    """Returns whether a path is a URL, such as gs://bucket/file."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", os.fspath(path)) is not None


def local_copy(path: str) -> str:
    """Returns the path itself, or for a URL the path of a copy in the cache, with the same file name.

    The cache key is made of the URL and of the version that its file system reports (checksum, size, times), so a
    changed file is copied again. Copies are atomic. If several processes ask for a file at once, one copies it and
    the others wait.

    Raises: InputError if the file cannot be read, or if the cache cannot be written.
    """
    if not is_remote(path):
        return path
    with _remote_errors(path):
        files, remote = _file_system(path)
        info = files.info(remote)
    version = {name: str(info[name]) for name in _VERSION_FIELDS if info.get(name) is not None}
    key = hashlib.sha256(json.dumps([path, version], sort_keys=True).encode()).hexdigest()[:32]
    return str(_copy(path, user_cache() / key / path.rstrip("/").rpartition("/")[2]))


def local_copies(paths: list[str]) -> list[str]:
    """Returns `local_copy` of each path, copying several files at a time."""
    return list(_at_once(local_copy, paths))


def copy_beside(first: str, url: str, names: list[str]) -> None:
    """Copies the files `url/name` beside `first`, a copy made by `local_copy`, unless they exist there.

    So they are cached by the version of the first file, which must change whenever one of them does. A name that ends
    in "/" stands for all files of a directory. Raises: InputError if a file cannot be read or written.
    """
    folder, wanted = Path(first).parent, [name for name in names if not name.endswith("/")]
    for name in set(names) - set(wanted):
        with _remote_errors(url):
            files, root = _file_system(url)
            found = files.find(f"{root.rstrip('/')}/{name}")
        wanted.extend(path.removeprefix(root).lstrip("/") for path in found)
    for name in wanted:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"{url} names a file {name!r} outside its directory; it is not what it seems: do not use it"
            )
    list(_at_once(lambda name: _copy(f"{url.rstrip('/')}/{name}", folder / name), wanted))


def exists(path: str) -> bool:
    """Returns whether a path or URL exists. Raises: InputError if its file system cannot be reached."""
    if not is_remote(path):
        return os.path.exists(path)
    with _remote_errors(path):
        files, remote = _file_system(path)
        return files.exists(remote)


def upload(path: str | os.PathLike, url: str) -> None:
    """Copies a file of this machine to a URL. Raises: InputError if it cannot be written."""
    with _remote_errors(url, "write"):
        files, remote = _file_system(url)
        files.makedirs(remote.rpartition("/")[0], exist_ok=True)
        files.put_file(os.fspath(path), remote)


# What file systems call the fields that change when a file does.
_VERSION_FIELDS = ("size", "crc32c", "md5Hash", "generation", "etag", "ETag", "blob_id", "VersionId", "content_md5",
                   "mtime", "LastModified", "last_modified", "updated", "created")  # fmt: skip


def user_cache() -> Path:
    """Returns the cache directory: BERT_JAX_CACHE, or ~/.cache/bert_jax."""
    return Path(os.environ.get("BERT_JAX_CACHE") or "~/.cache/bert_jax").expanduser()


def _copy(url: str, target: Path) -> Path:
    """Copies the file at the URL to `target` unless `target` exists, and returns `target`."""
    if target.is_file():
        return target
    with lock_file(target.with_name(f".{target.name}.lock"), wait=True, keep=True):
        if target.is_file():  # another process was faster
            return target
        for left_over in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
            left_over.unlink()
        with atomic_path(target) as temporary, _remote_errors(url):
            files, remote = _file_system(url)
            size = files.info(remote).get("size")
            files.get_file(remote, str(temporary))
            copied = temporary.stat().st_size
            if size is not None and copied != size:
                raise InputError(f"{url} has {size} bytes, {copied} arrived; try again")
    return target


def _at_once(function: Callable[[str], Result], arguments: list[str]) -> Iterator[Result]:
    """Yields `function(argument)` for each argument, in their order; eight run at a time."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        try:
            yield from pool.map(function, arguments)
        finally:
            pool.shutdown(cancel_futures=True)


def _file_system(url: str) -> tuple[Any, str]:
    """Returns the fsspec file system of a URL, and the file's path in it."""
    import fsspec.core  # slow, and seldom needed

    return fsspec.core.url_to_fs(url)


@contextlib.contextmanager
def _remote_errors(url: str, verb: str = "read") -> Iterator[None]:
    """Turns any error of a file system into an `InputError` with the URL, except that of a full local disk."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{url} does not exist; check the address") from None
    except ImportError as error:
        remedy = "pip install 'bert_jax[gcs]'" if url.startswith(("gs://", "gcs://")) else "install that package"
        raise InputError(f"{url} cannot be read ({one_line(error)}): {remedy}") from None
    except Exception as error:  # every file system has errors of its own
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            f"cannot {verb} {url}: {one_line(error)}; check the address, your rights and the network"
        ) from None
