# SPDX-License-Identifier: Apache-2.0
"""Opens files, plain or compressed, and computes their checksums."""

import contextlib
import glob
import gzip
import hashlib
import io
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

import google_crc32c
import numpy as np

from bert_jax.errors import InputError, reading
from bert_jax.storage.places import AnyPath, to_place
from bert_jax.storage.urls import is_remote, remote_glob

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how a file of it begins
LARGEST = 1 << 28  # bytes of a file that is read whole; a vocabulary of 250,000 tokens has 25 MB

JsonObject: TypeAlias = dict[str, Any]  # an object as json.loads returns it


def split_places(places: str) -> list[str]:
    """Returns the paths in a comma-separated list, stripped. A comma in the name of an existing path does not split."""
    parts = places.split(",")
    paths = []
    while parts:
        # The longest name that exists wins; with a bound, or a list of a thousand files would ask
        # the disk half a million times.
        count = min(len(parts), 8)
        while count > 1 and not os.path.exists(",".join(parts[:count]).strip()):
            count -= 1
        paths.append(",".join(parts[:count]).strip())
        del parts[:count]
    return paths


def expand_globs(patterns: str) -> list[str]:
    """Returns the files that match comma-separated glob patterns, sorted within each pattern, without duplicates.

    The files of a URL pattern are URLs. Raises: InputError if a pattern matches no file.
    """
    paths: dict[str, None] = {}
    for pattern in filter(None, split_places(patterns)):
        matches = remote_glob(pattern) if is_remote(pattern) else glob.glob(pattern, recursive=True)
        if os.path.isfile(pattern):  # its name may contain glob characters
            matches = [pattern]
        matches = sorted(path for path in matches if is_remote(path) or os.path.isfile(path))
        if not matches:
            wanted = "give a path or a quoted glob such as 'text/*.txt.gz'"
            if os.path.isdir(pattern):
                wanted = f"it is a directory: give its files, such as '{pattern}/*'"
            raise InputError(f"input {pattern!r} matches no file; {wanted}")
        paths.update(dict.fromkeys(matches))
    if not paths:
        raise InputError(
            f"input {patterns!r} names no file; give paths or globs, separated by commas"
        )
    return list(paths)


def public_name(pattern: str) -> str:
    """Returns a file, glob or URL in a form that a data set may publish.

    A path loses its directories. A URL keeps them, without user, password and what follows "?" over HTTP.
    """
    protocol, _, rest = pattern.partition("://")
    if not is_remote(pattern) or protocol.lower() in ("file", "local"):
        name = os.path.basename(pattern.rstrip("/"))
    else:
        host, slash, path = rest.partition("/")
        path = path.partition("?")[0] if protocol.lower() in ("http", "https") else path
        name = f"{protocol}://{host.rpartition('@')[2]}{slash}{path}"
    # A name that is not UTF-8 could not be written into a manifest.
    return name.encode("utf-8", "replace").decode("utf-8")


def allow_many_files() -> None:
    """Raises this process's limit of open files, and that of processes it starts, as far as the system allows."""
    import resource  # not on every system that can import this module

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # a container may forbid even what its hard limit allows
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def is_compressed(path: str) -> bool:
    """Returns whether `open_binary` decompresses the file.

    Raises: InputError if the file cannot be opened.
    """
    return bool(_compression(path))


def open_binary(path: str) -> IO[bytes]:
    """Returns a stream of a local file, decompressed if its first bytes are those of gzip or zstd.

    A damaged stream raises an error that `reading` turns into an InputError. Raises: InputError if the file cannot
    be opened.
    """
    compression = _compression(path)
    if compression == "gzip":
        # GzipFile splits lines in Python, slowly
        return io.BufferedReader(gzip.open(path, "rb"), 1 << 17)
    if compression == "zstd":
        longest = {zstd.DecompressionParameter.window_log_max: 31}  # as zstd --long=31 writes
        return io.BufferedReader(zstd.ZstdFile(path, options=longest), 1 << 17)  # type: ignore[arg-type]
    return open(path, "rb")


def read_whole(path: str, name: str) -> bytes:
    """Returns the content of a local file, decompressed; messages call the file `name`.

    Raises: InputError if it cannot be read, or if it decompresses to far more than text does.
    """
    # text compresses about 20 times
    most = max(64 << 20, 200 * os.path.getsize(path)) if is_compressed(path) else -1
    with reading(name), open_binary(path) as stream:
        content = stream.read(most + 1 if most >= 0 else -1)
    if len(content) > most >= 0:
        raise InputError(
            f"{name} holds more than {most >> 20} MiB, far more than compressed text does; decompress it"
        )
    return content


def _compression(path: str) -> str:
    """Returns "gzip", "zstd" or "", by the first bytes of a file."""
    with reading(path), open(path, "rb") as stream:
        start = stream.read(4)
    if start[:2] == b"\x1f\x8b":
        return "gzip"
    # pzstd begins with a frame of sizes
    skippable = start[1:] == b"\x2a\x4d\x18" and start[0] & 0xF0 == 0x50
    return "zstd" if start == b"\x28\xb5\x2f\xfd" or skippable else ""


def read_file(path: Path) -> bytes:
    """Returns the whole content of a file.

    Raises: InputError if it cannot be read, is a pipe or a device, is too large, or is a pointer of Git LFS.
    """
    with opened(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > LARGEST:
            raise InputError(
                f"{path} has {size} bytes; give a file of at most {LARGEST} bytes, or copy it again"
            )
        return stream.read(LARGEST)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Yields the stream of a regular file; opening it is the only question to the disk."""
    with reading(str(path)):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # or a pipe would be waited for
        except FileNotFoundError:
            raise InputError(f"{path} does not exist; check the path") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise no_file(path)
        with os.fdopen(descriptor, "rb") as stream:
            if stream.peek(len(LFS_POINTER)).startswith(LFS_POINTER):
                raise InputError(
                    f"{path} is a pointer of Git LFS in place of the file; fetch it with git lfs pull"
                )
            yield stream


def no_file(path: Path) -> InputError:
    """Returns the error for what is not a regular file."""
    return InputError(f"{path} is not a file, but a directory, a pipe or a device; give a file")


def read_json(path: AnyPath) -> Any:
    """Returns the value of a JSON file. Raises: InputError if it is missing or not JSON."""
    place = to_place(path)
    try:
        content = read_file(place) if isinstance(place, Path) else place.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    return parse_json(content, path)


def parse_json(content: bytes, where: AnyPath) -> Any:
    """Returns the value of a JSON file's content. Raises: InputError if it is not JSON."""
    with reading(str(where)):
        return json.loads(content.decode("utf-8-sig"))  # some editors write a byte order mark


def sha256_file(path: str | os.PathLike) -> str:
    """Returns the hexadecimal sha256 of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_sizes(directory: Path, records: Iterable[JsonObject], remedy: str) -> None:
    """Raises: InputError if a file is missing, or its size differs from its record in the manifest."""
    for path, size in ((directory / record["name"], record["bytes"]) for record in records):
        if not path.is_file():
            raise InputError(f"{path} is missing; {remedy}")
        if path.stat().st_size != size:
            raise InputError(
                f"{path} has {path.stat().st_size} bytes, the manifest says {size}; {remedy}"
            )


def check_sums(directory: Path, records: Iterable[JsonObject], remedy: str) -> None:
    """Raises: InputError if the sha256 of a file differs from its record in the manifest."""
    for path, sha256 in ((directory / record["name"], record["sha256"]) for record in records):
        if sha256_file(path) != sha256:
            raise InputError(f"{path} is damaged: its sha256 is not the manifest's; {remedy}")


def crc32c(data: bytes | memoryview, before: int = 0) -> int:
    """Returns the CRC-32C of bytes; `before` is the CRC-32C of the bytes that precede them."""
    return google_crc32c.extend(before, bytes(data))


def masked_crc32c(data: bytes | np.ndarray) -> int:
    """Returns the CRC-32C of bytes, or of a contiguous array's, masked as TFRecord files hold it: rotated right by
    15 bits, plus a constant.

    Source: "Masked CRC" of TensorFlow's TFRecord format; a checksum of bytes that hold checksums would be weak.
    """
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
