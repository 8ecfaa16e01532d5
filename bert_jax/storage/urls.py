# SPDX-License-Identifier: Apache-2.0
"""Files at URLs: gs://, s3://, and all other protocols of fsspec.

They are copied into a local cache and read from there: the directory BERT_JAX_CACHE of the environment, or
~/.cache/bert_jax. The cache may be deleted while no command is reading from it.
"""

import glob
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from bert_jax.errors import InputError
from bert_jax.storage.leases import LEASE
from bert_jax.storage.locks import lock_file
from bert_jax.storage.places import UNFINISHED, RemotePath
from bert_jax.storage.stores import at_once, is_remote, opened
from bert_jax.storage.writing import atomic_path


def remote_glob(url: str) -> list[str]:
    """Returns the URLs of the files that match a pattern, or the URL itself if it names a file."""
    with opened(url) as (files, pattern):
        if files.isfile(pattern):
            return [url]
        infos = files.glob(pattern, detail=True)
        return [
            files.unstrip_protocol(path) for path, info in infos.items() if info["type"] == "file"
        ]


def local_copy(path: str) -> str:
    """Returns the path itself, or for a URL the path of a copy in the cache, with its file name.

    The cache key is made of the URL and of the version that its file system reports (checksum, size, times), so a
    changed file is copied again. A file without a version, as some web servers have, is copied by every process that
    asks for it. Copies are atomic. If several processes ask for a file at once, one copies it and
    the others wait.

    Raises: InputError if the file cannot be read, or if the cache cannot be written.
    """
    if not is_remote(path):
        return path
    name = path.rstrip("/").rpartition("/")[2]
    if re.match("https?://", path, re.IGNORECASE):  # what follows "?" may be secret
        parts = re.split("[?#]", path)[0].rstrip("/").split("/")
        name = parts[-1] if len(parts) > 3 else "file"
    version = _version(path)
    if version.keys() <= {"size"}:
        return _copy_of_no_version(path, name)
    return str(_copy(path, _folder(path, version) / name))


def _version(path: str) -> dict[str, str]:
    """Returns the metadata of a file at a URL that changes when the file does."""
    with opened(path) as (files, remote):
        info = files.info(remote)
    return {name: str(info[name]) for name in _VERSION_FIELDS if info.get(name) is not None}


def _folder(path: str, version: Mapping[str, object]) -> Path:
    """Returns the directory of the cache for a version of a URL."""
    return (
        user_cache()
        / hashlib.sha256(json.dumps([path, version], sort_keys=True).encode()).hexdigest()[:32]
    )


# by this process: URLs without versions, and where their copies are
_copied: dict[tuple[str, Path], str] = {}
_copying = threading.Lock()


def _copy_of_no_version(path: str, name: str) -> str:
    """Returns the path of a copy that this process has made. Its version is its content."""
    with _copying:
        known = (path, user_cache())
        if known not in _copied or not os.path.isfile(_copied[known]):
            # A folder of its own for the bytes while they come; then the one named for them, which
            # others have too.
            new = _copy(path, _folder(path, {"process": f"{os.getpid()}-{time.time_ns()}"}) / name)
            with open(new, "rb") as stream:
                target = (
                    _folder(path, {"sha256": hashlib.file_digest(stream, "sha256").hexdigest()})
                    / name
                )
            target.parent.mkdir(exist_ok=True)
            os.replace(new, target)
            shutil.rmtree(new.parent, ignore_errors=True)
            _copied[known] = str(target)
        return _copied[known]


def local_copies(paths: list[str]) -> list[str]:
    """Returns `local_copy` of each path, copying several files at a time."""
    return list(at_once(local_copy, paths))


def copy_beside(first: str, url: str, names: list[str]) -> None:
    """Copies the files `url/name` beside `first`, a copy made by `local_copy`, unless they exist there.

    So they are cached by the version of the first file, which must change whenever one of them does. A name that ends
    in "/" stands for all files of a directory. Raises: InputError if a file cannot be read or written.
    """
    folder = Path(first).parent
    wanted = [name for name in names if not name.endswith("/")]
    for name in set(names) - set(wanted):
        with opened(url) as (files, root):
            paths = files.find(f"{root.rstrip('/')}/{name}")
        wanted.extend(path.removeprefix(root).lstrip("/") for path in paths)
    # all of them before the first is copied
    for name in wanted:
        _inside(folder, name, url)
    list(at_once(lambda name: _copy(f"{url.rstrip('/')}/{name}", folder / name), wanted))


def local_directory(path: RemotePath, names: tuple[str, ...] = ()) -> Path:
    """Returns the local copy of everything below a URL, or of `names` alone: files, and directories that end in "/".

    It is in the cache, by the checksums of all files; files are copied once, by the first process that asks.

    Raises: InputError if there is nothing, if an upload to this place has not ended, or if a file cannot be read.
    """
    objects = {name: about for name, about in path.listing().items() if name != LEASE}
    if UNFINISHED in objects:
        raise InputError(
            f"{path} is half a directory: its upload was stopped; give the command that wrote it again"
        )
    folders = tuple(name for name in names if name.endswith("/"))
    wanted = [name for name in objects if not names or name in names or name.startswith(folders)]
    if not wanted:
        raise InputError(f"{path} does not exist or is empty; check the address")
    # Where the listing has no checksums, the size alone would not tell of every change.
    versions = {
        name: objects[name] if len(objects[name]) > 1 else _version(str(path / name))
        for name in wanted
    }
    folder = _folder(str(path), versions) / path.name
    list(at_once(lambda name: _copy(str(path / name), _inside(folder, name, str(path))), wanted))
    return folder


def _inside(folder: Path, name: str, url: str) -> Path:
    """Returns the path of a file in a directory. Raises: InputError if its name leads out of the directory."""
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"{url} names a file {name!r} outside its directory; it is not what it seems: do not use it"
        )
    return folder / name


# What file systems call the fields that change when a file does.
_VERSION_FIELDS = (
    "size",
    "crc32c",
    "md5Hash",
    "generation",
    "etag",
    "ETag",
    "blob_id",
    "VersionId",
    "content_md5",
    "mtime",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "Content-MD5",
    "Digest",
    "modify",
    "sha",
    "updated",
    "created",
)


def user_cache() -> Path:
    """Returns the cache directory: BERT_JAX_CACHE, or ~/.cache/bert_jax."""
    return Path(os.environ.get("BERT_JAX_CACHE") or "~/.cache/bert_jax").expanduser()


def _copy(url: str, target: Path) -> Path:
    """Copies the file at the URL to `target` unless `target` exists, and returns `target`."""
    if target.is_file():
        return target
    # The lock's file stays: another process may be about to wait for it.
    with lock_file(target.with_name(f".{target.name}.lock"), wait=True, keep=True):
        if target.is_file():  # another process was faster
            return target
        for left_over in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
            left_over.unlink()
        with atomic_path(target) as temporary, opened(url) as (files, remote):
            size = files.info(remote).get("size")
            files.get_file(remote, str(temporary))
            copied = temporary.stat().st_size
            if size is not None and copied != size:
                raise InputError(f"{url} has {size} bytes, {copied} arrived; try again")
    return target
