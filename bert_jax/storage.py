# SPDX-License-Identifier: Apache-2.0
"""Files: wherever they are, opened whatever their compression, written whole or not at all, and checked by checksums.

A file behind a URL (gs://, s3://, any that fsspec knows) is read from a copy in a local cache: the directory in
the environment variable BERT_JAX_CACHE, or ~/.cache/bert_jax. It may be deleted whenever nothing reads it.
"""

import concurrent.futures
import contextlib
import errno
import glob
import gzip
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import google_crc32c
import numpy as np

from bert_jax.errors import InputError, StoppedError
from bert_jax.locks import lock_file, writing
from bert_jax.zstd import ZstdError, ZstdFile

# Finding files


def expand_globs(patterns: str) -> list[str]:
    """Returns the files that comma-separated glob patterns name, sorted within each pattern, each once.

    A pattern may be a URL; so are then its files. Raises: InputError if a pattern matches no file.
    """
    paths: dict[str, None] = {}
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        matches = _remote_glob(pattern) if is_remote(pattern) else glob.glob(pattern, recursive=True)
        matches = sorted(path for path in matches if is_remote(path) or os.path.isfile(path))
        if not matches:
            raise InputError(f"input {pattern!r} matches no file; give a path or a quoted glob such as 'text/*.txt.gz'")
        paths.update(dict.fromkeys(matches))
    if not paths:
        raise InputError(f"input {patterns!r} names no file; give paths or globs, separated by commas")
    return list(paths)


def _remote_glob(url: str) -> list[str]:
    """Returns the URLs of the files that a pattern matches; a file's own name needs no pattern."""
    with _remote_errors(url):
        files, pattern = _file_system(url)
        if files.isfile(pattern):
            return [url]
        found = files.glob(pattern, detail=True)
        return [files.unstrip_protocol(path) for path, info in found.items() if info["type"] == "file"]


# Reading


def is_compressed(path: str) -> bool:
    """Returns whether `open_binary` decompresses the file.

    Raises: InputError if the file cannot be opened.
    """
    return bool(_compression(path))


def open_binary(path: str) -> IO[bytes]:
    """Returns the bytes of a local file as a stream, decompressed if their first ones are those of gzip or zstd.

    A stream that breaks off raises one of the errors that `reading` knows. Raises: InputError if the file cannot
    be opened.
    """
    compression = _compression(path)
    if compression == "gzip":
        return io.BufferedReader(gzip.open(path, "rb"), 1 << 17)  # whose own lines are slow: they are read in Python
    if compression == "zstd":
        return io.BufferedReader(ZstdFile(path), 1 << 17)
    return open(path, "rb")


def read_whole(path: str, name: str) -> bytes:
    """Returns what a local file holds, decompressed; messages call it `name`.

    Raises: InputError if it cannot be read, or is far more than its size on disk makes expect.
    """
    most = max(64 << 20, 200 * os.path.getsize(path)) if is_compressed(path) else -1  # text has a tenth of that ratio
    with reading(name), open_binary(path) as stream:
        content = stream.read(most + 1 if most >= 0 else -1)
    if len(content) > most >= 0:
        raise InputError(f"{name} holds more than {most >> 20} MiB, far more than compressed text does; decompress it")
    return content


def check_is_file(path: str | os.PathLike) -> None:
    """Raises: InputError if there is something at `path` that is no file: what reads a pipe may wait for ever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"{path} is no file, but a directory, a pipe or a device; give a file")


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns the errors of a file that is damaged or cannot be read into an `InputError` that calls it `name`."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, ZstdError) as error:
        raise InputError(f"{name} is truncated or damaged ({error}); copy it again") from None
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror or error}; check the path and its permissions") from None


def _compression(path: str) -> str:
    """Returns "gzip", "zstd" or "", by the first bytes of a file."""
    with reading(path), open(path, "rb") as stream:
        start = stream.read(4)
    if start[:2] == b"\x1f\x8b":
        return "gzip"
    skippable = start[1:] == b"\x2a\x4d\x18" and start[0] & 0xF0 == 0x50  # pzstd begins with a frame of sizes
    return "zstd" if start == b"\x28\xb5\x2f\xfd" or skippable else ""


# Files behind URLs


def is_remote(path: str | os.PathLike) -> bool:
    """Returns whether a path is a URL, such as gs://bucket/file."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", os.fspath(path)) is not None


def local_copy(path: str) -> str:
    """Returns the path itself, or for a URL that of a copy of its file in the cache, under the same name.

    The place in the cache depends on the URL and on what its file system says of the version (checksum, size,
    times), so a changed file is copied again. A copy appears whole or not at all; of several processes that ask
    for it at once one copies, and the others wait.

    Raises: InputError if the file cannot be read, or the cache not be written.
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
    """Returns what `local_copy` does for each path, copying several files at a time."""
    return list(_at_once(local_copy, paths))


def copy_beside(first: str, url: str, names: list[str]) -> None:
    """Copies the files `url/name` to the directory of `first`, a copy that `local_copy` made, unless they are there.

    So their place in the cache is that of this version of the first file, which must imply the others. A name
    that ends in "/" stands for all files of a directory. Raises: InputError if a file cannot be read or written.
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
    """Returns whether there is something at a path or URL. Raises: InputError if that cannot be found out."""
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
_VERSION_FIELDS = ("size", "crc32c", "md5Hash", "generation", "etag", "ETag", "VersionId", "content_md5", "mtime",
                   "LastModified", "last_modified", "updated", "created")  # fmt: skip


def user_cache() -> Path:
    """Returns the directory for what can be made again: BERT_JAX_CACHE, or ~/.cache/bert_jax."""
    return Path(os.environ.get("BERT_JAX_CACHE") or "~/.cache/bert_jax").expanduser()


def _copy(url: str, target: Path) -> Path:
    """Returns `target`, after copying the file at the URL to it unless it is there."""
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


def _at_once(function: Any, arguments: list[str]) -> Iterator[Any]:
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
    """Turns whatever a file system raises into an `InputError` that names the URL, but for a full local disk."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{url} does not exist; check the address") from None
    except ImportError as error:
        remedy = "pip install 'bert_jax[gcs]'" if url.startswith(("gs://", "gcs://")) else "install that package"
        raise InputError(f"{url} cannot be read ({_one_line(error)}): {remedy}") from None
    except Exception as error:  # every file system has errors of its own
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            f"cannot {verb} {url}: {_one_line(error)}; check the address, your rights and the network"
        ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# Writing


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary name beside `path`, and renames it to `path` if the block ends without an error.

    A reader never sees half a file, and a full disk leaves what was there before. The temporary name is
    removed when the block fails.
    """
    path = Path(path)
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


@contextlib.contextmanager
def new_directory(path: str | os.PathLike, replaces: Callable[[Path], bool] = lambda path: False) -> Iterator[Path]:
    """Yields an empty directory with a temporary name beside `path`; renamed to `path` if the block ends well.

    So the directory appears whole or not at all; the temporary one is removed when the block fails. Other commands that
    would write there are refused as long as the block lasts. `replaces(path)` says whether what is at `path` already
    is deleted at the end, once the new directory has its place: a kill leaves one of the two.

    Raises: InputError if there is something else at `path`, if another command is writing there, or if a file cannot be
    written.
    """
    path = Path(path)
    _check_free(path, replaces)
    temporary, old = _temporary(path), path.with_name(f".{path.name}.old")
    try:
        with writing(path):
            _check_free(path, replaces)
            left_over = re.compile(rf"\.{re.escape(path.name)}\.(\d+(-[0-9a-f]+)?\.)?tmp")
            for other in path.parent.iterdir():
                if left_over.fullmatch(other.name):  # of a command that was killed
                    shutil.rmtree(other, ignore_errors=True)
            try:
                if old.exists() and not os.path.lexists(path):  # a kill between the two renames below
                    old.rename(path)
                shutil.rmtree(old, ignore_errors=True)
                temporary.mkdir()
                yield temporary
                _check_free(path, replaces)  # again: not every program asks for the lock
                if os.path.lexists(path) and replaces(path):
                    path.rename(old)
                temporary.rename(path)
                shutil.rmtree(old, ignore_errors=True)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    except StoppedError as error:  # of a file in it
        raise StoppedError(str(error).replace(str(temporary), str(path))) from error


def _check_free(path: Path, replaces: Callable[[Path], bool]) -> None:
    """Raises: InputError if there is something at `path` that is not to be replaced."""
    if os.path.lexists(path) and not replaces(path):
        raise InputError(f"output {path} exists; give a directory that does not")


def _temporary(path: Path) -> Path:
    """Returns a name beside `path` that no other process takes, on this machine or on one that shares its files."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def check_space(directory: Path, num_bytes: int) -> None:
    """Raises: StoppedError if there is no room in a directory for so many bytes more."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        sizes = f"it takes {num_bytes / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
        raise StoppedError(f"cannot write {directory}: {sizes}; free some space or choose another place")


def cannot_write(path: str | os.PathLike, error: Exception) -> StoppedError:
    """Returns what to tell the user of an error that broke off the writing of `path`."""
    number, text = getattr(error, "errno", None), getattr(error, "strerror", None)
    reason = text or _one_line(error)[:200]
    if re.fullmatch(r"\d+ requested and \d+ written", reason):  # as NumPy calls a full disk
        reason = "No space left on device"
    if number in (errno.EEXIST, errno.ENOTEMPTY):
        return StoppedError(f"cannot write {path}: something else has made it meanwhile; choose another place")
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoppedError(f"cannot write {path}: {reason}; check its permissions or choose another place")
    return StoppedError(f"cannot write {path}: {reason}; free some space or choose another place")


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes `value` as indented JSON with sorted keys, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def write_array(path: str | os.PathLike, array: np.ndarray) -> None:
    """Writes an array as a `.npy` file, whole or not at all."""
    with atomic_path(path) as temporary, open(temporary, "wb") as stream:
        np.save(stream, array)


def read_json(path: str | os.PathLike) -> Any:
    """Returns the value of a JSON file. Raises: InputError if it is missing or not JSON."""
    check_is_file(path)
    try:
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))  # some editors put a mark before it
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); it is damaged or another kind of file") from None


def sha256_file(path: str | os.PathLike) -> str:
    """Returns the hexadecimal sha256 of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def masked_crc32c(data: bytes | np.ndarray) -> int:
    """Returns the CRC-32C of bytes, or of a contiguous array's, masked as TFRecord files hold it: rotated right by
    15 bits, plus a constant.

    Source: "Masked CRC" of TensorFlow's TFRecord format; a checksum of bytes that hold checksums would be weak.
    """
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
