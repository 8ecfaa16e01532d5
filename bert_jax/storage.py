# SPDX-License-Identifier: Apache-2.0
"""Files: opened whatever their compression, written whole or not at all, and checked by their sha256."""

import contextlib
import glob
import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import google_crc32c
import numpy as np

from bert_jax.errors import InputError


def expand_globs(patterns: str) -> list[str]:
    """Returns the files that comma-separated glob patterns name, sorted within each pattern, each once.

    Raises: InputError if a pattern matches no file.
    """
    paths: dict[str, None] = {}
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        matches = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
        if not matches:
            raise InputError(f"input {pattern!r} matches no file; give a path or a quoted glob such as 'text/*.txt.gz'")
        paths.update(dict.fromkeys(matches))
    if not paths:
        raise InputError(f"input {patterns!r} names no file; give paths or globs, separated by commas")
    return list(paths)


def is_compressed(path: str) -> bool:
    """Returns whether `open_binary` decompresses the file; gzip is recognised by its first bytes.

    Raises: InputError if the file cannot be opened.
    """
    try:
        with open(path, "rb") as stream:
            return stream.read(2) == b"\x1f\x8b"
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from None


def open_binary(path: str) -> IO[bytes]:
    """Returns the (decompressed) bytes of a file as a stream. Raises: InputError if it cannot be opened."""
    return gzip.open(path, "rb") if is_compressed(path) else open(path, "rb")  # type: ignore[return-value]


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary name beside `path`, and renames it to `path` if the block ends without an error.

    A reader never sees half a file, and a full disk leaves what was there before. The temporary name is
    removed when the block fails.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another place"
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


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
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); it is damaged or another kind of file") from None


def sha256_file(path: str | os.PathLike) -> str:
    """Returns the hexadecimal sha256 of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def masked_crc32c(data: bytes) -> int:
    """Returns the CRC-32C of `data`, masked as TFRecord files hold it: rotated right by 15 bits, plus a constant.

    Source: "Masked CRC" of TensorFlow's TFRecord format; a checksum of bytes that hold checksums would be weak.
    """
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
