# SPDX-License-Identifier: Apache-2.0
"""Object stores behind URLs: gs:// and s3://, and for reading all other protocols of fsspec. The only home of fsspec.

An object store has no rename, no append and no lock. It has whole replacement of an object, a checksum of each object,
and writes that succeed only if the object is absent or is still a given version.
"""

import base64
import concurrent.futures
import contextlib
import datetime
import errno
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import google_crc32c

from bert_jax.errors import InputError, StoppedError, one_line
from bert_jax.storage.answers import explain, is_absent, told_if_slow

Argument = TypeVar("Argument")
Result = TypeVar("Result")
# one of fsspec's; it has no type hints, and each store's has methods of its own
FileSystem: TypeAlias = Any
Info: TypeAlias = dict[str, Any]  # a file system's metadata of an object, under its own names
# of an object: its "bytes", and some of "crc32c", "etag", "md5", "sha256"
Checksums: TypeAlias = dict[str, Any]

# with conditional writes; memory is that of one process, for tests
WORK_PROTOCOLS = ("gs", "gcs", "s3", "memory")
_UPLOADS = 3  # attempts at one upload whose answers are lost


class Version(NamedTuple):
    """An object's content, and the token of this version for `write_if`."""

    content: bytes
    token: str
    age: float  # seconds since it was written, by the store's clock and this machine's


def is_remote(path: object) -> bool:
    """Returns whether a path is a URL, such as gs://bucket/file."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(path)) is not None


def protocol_of(url: str) -> str:
    """Returns the protocol of a URL, such as "gs"."""
    return url.partition("://")[0].lower()


def check_bucket(url: str) -> None:
    """Raises: InputError if a URL names no bucket or host; libraries of stores ask for the empty one for ever."""
    protocol, _, rest = url.partition("://")
    if (
        protocol.lower() in ("gs", "gcs", "s3", "s3a", "http", "https", "hf")
        and not rest.partition("/")[0].strip()
    ):
        raise InputError(
            f"{url} names no bucket or host; write it after {protocol}://, as in {protocol}://NAME/PATH"
        )


def file_system(url: str) -> tuple[FileSystem, str]:
    """Returns the fsspec file system of a URL, and the file's path in it. Raises: InputError as `check_bucket`."""
    check_bucket(url)
    see_writes_of_others()
    import fsspec.core  # slow, and seldom needed

    return fsspec.core.url_to_fs(url)


def see_writes_of_others() -> None:
    """Turns off fsspec's caches of listings, so that objects which others write are seen; also in Orbax."""
    import fsspec.config

    for protocol in ("gs", "gcs", "s3", "s3a"):
        fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
    for name, level in (("gcsfs", logging.CRITICAL), ("google.auth._default", logging.ERROR)):
        logger = logging.getLogger(name)  # they print tracebacks of errors that are raised as well
        logger.setLevel(max(logger.level, level))


@contextlib.contextmanager
def remote_errors(url: str, verb: str = "read") -> Iterator[None]:
    """Turns any error of a file system into an `InputError` with the URL, except that of a full local disk.

    Errors of writing are `StoppedError`: the same command goes on once the reason is gone. A line is printed if it
    takes long.
    """
    try:
        with told_if_slow(url):
            yield
    except InputError:
        raise
    except ImportError as error:
        extra = {"gs": "gcs", "https": "http"}.get(protocol := protocol_of(url), protocol)
        packages = {"s3": "s3fs"} | {name: f"'bert_jax[{name}]'" for name in ("gcs", "http")}
        remedy = f"pip install {packages.get(extra, 'the package that it names')}"
        raise InputError(f"{url} cannot be {_DONE[verb]} ({one_line(error)}): {remedy}") from None
    except Exception as error:  # every file system has errors of its own
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise (StoppedError if verb == "write" else InputError)(explain(url, verb, error)) from None


_DONE = {"read": "read", "write": "written"}


@contextlib.contextmanager
def opened(url: str, verb: str = "read") -> Iterator[tuple[FileSystem, str]]:
    """Yields the file system of a URL, and the path in it. `remote_errors` converts errors of the block."""
    with remote_errors(url, verb):
        yield file_system(url)


def at_once(
    function: Callable[[Argument], Result], arguments: Iterable[Argument]
) -> Iterator[Result]:
    """Yields `function(argument)` for each argument, in their order; eight run at a time."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        try:
            yield from pool.map(function, arguments)
        finally:
            # after an error, or if nobody asks for more, what has not begun is left
            pool.shutdown(cancel_futures=True)


def info_of(url: str) -> Info | None:
    """Returns the file system's metadata of an object or a directory; None if it does not exist.

    Unlike fsspec's `exists`, it does not take a refusal or a lost connection for absence.
    """
    with opened(url) as (files, path):
        try:
            return files.info(path)
        except FileNotFoundError as error:
            if not is_absent(error):
                raise
            return None


def read_bytes(url: str) -> bytes:
    """Returns the content of an object. Raises: InputError if it cannot be read."""
    with opened(url) as (files, path):
        return files.cat_file(path)


def write_bytes(url: str, content: bytes) -> None:
    """Makes or replaces an object. Raises: StoppedError if it cannot be written."""
    with opened(url, "write") as (files, path):
        files.pipe_file(path, content)


def put_file(path: Path, url: str) -> None:
    """Copies a local file to an object, and checks that the object is the same as the file.

    Raises: StoppedError if it cannot be written.
    """
    with opened(url, "write") as (files, target):
        for attempt in range(_UPLOADS):
            try:
                files.put_file(str(path), target)
            # no bucket; or an answer was lost, and gcsfs asked for an upload that has ended
            except FileNotFoundError:
                if attempt == _UPLOADS - 1:
                    raise
                if info_of(url) is None:
                    continue
            about = checksum_in(files.info(target))
            crc = crc32c_of(path)
            if about["bytes"] == path.stat().st_size and about.get("crc32c", crc) == crc:
                return
        raise StoppedError(
            f"cannot write {url}: what arrived is not what was sent; give the command again"
        )


def remove(url: str, below: bool = False) -> None:
    """Deletes an object, or with `below` all objects below a prefix, if there are any."""
    with opened(url, "write") as (files, path), contextlib.suppress(FileNotFoundError):
        files.rm(path, recursive=below)


def check_no_pattern(path: str, remedy: str = "") -> None:
    """Raises: InputError if libraries would take a path for a pattern: they write there, and then find nothing."""
    wildcard = next((sign for sign in path if sign in "*?[\\"), "")
    if wildcard:
        fix = f"give a path without *, ?, [ and \\{remedy and ', ' + remedy}"
        raise InputError(
            f"cannot write to {path}: {wildcard} is read as a pattern when files are looked for; {fix}"
        )


def check_writable(url: str) -> None:
    """Raises: StoppedError if an object cannot be made at a URL: no credentials, no bucket, no right, no protocol."""
    check_no_pattern(url)
    with remote_errors(url, "write"):
        # Beside it, under a name of its own: the object may be there and be needed, and others may
        # ask at once.
        files, path = file_system(f"{url.rstrip('/').rpartition('/')[0]}/.probe-{uuid.uuid4().hex}")
        files.pipe_file(path, b"")
        with contextlib.suppress(FileNotFoundError):
            files.rm(path)


def list_below(url: str) -> dict[str, Checksums]:
    """Returns the objects below a prefix by their names relative to it, each with its "bytes" and a checksum.

    The checksum is the store's own: "crc32c" (hexadecimal), or "etag". Where the store gives none it is missing.
    """
    with opened(url) as (files, root):
        root = root.rstrip("/")
        try:
            infos = files.find(root, detail=True)
        except FileNotFoundError:
            return {}
    found = {}
    for path, info in sorted(infos.items()):
        _, _, name = path.partition(f"{root}/")
        # not empty objects that stand for directories
        if name and not name.endswith("/"):
            found[name] = checksum_in(info)
    return found


def checksum_in(info: Info) -> Checksums:
    """Returns "bytes" and the checksum of an object from its file system's metadata."""
    if info.get("size") is None:  # as of the links of a page behind http
        raise InputError(
            f"{info.get('name')}: the server says no sizes; copy the directory to this machine"
        )
    about: Checksums = {"bytes": int(info["size"])}
    if info.get("crc32c"):
        about["crc32c"] = base64.b64decode(info["crc32c"]).hex()
    elif info.get("ETag"):
        about["etag"] = info["ETag"].strip('"')
    return about


def crc32c_of(path: Path) -> str:
    """Returns the hexadecimal CRC-32C of a local file."""
    checksum = google_crc32c.Checksum()
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 20):
            checksum.update(chunk)
    return checksum.hexdigest().decode()


def copy_below(source: str, target: str) -> None:
    """Copies every object below a prefix to another prefix of the same store; the bytes stay in the store."""
    names = list(list_below(source))
    with opened(target, "write") as (files, goal):
        _, root = file_system(source)
        list(at_once(lambda name: files.cp_file(f"{root}/{name}", f"{goal}/{name}"), names))


def read_version(url: str) -> Version | None:
    """Returns an object with the token of its version; None if it does not exist."""
    info = info_of(url)
    if info is None:
        return None
    try:
        content = read_bytes(url)
    except InputError:
        if info_of(url) is None:  # deleted meanwhile
            return None
        raise
    written = info.get("LastModified") or info.get("mtime") or info.get("created")
    age = 0.0  # where the store does not say when
    if isinstance(written, datetime.datetime):
        if written.tzinfo is None:
            written = written.replace(tzinfo=datetime.UTC)
        age = max(0.0, time.time() - written.timestamp())
    return Version(content, _token(info, content), age)


def write_if(url: str, content: bytes, token: str) -> str:
    """Writes an object if its version is still the one of `token`, or with "" if there is no object.

    Returns the token of the new version, or "" if the condition was not met.

    Raises: StoppedError if the object cannot be written.
    """
    with opened(url, "write") as (files, path):
        try:
            return _CONDITIONAL[protocol_of(url)](files, path, content, token)
        except FileExistsError:  # HTTP status 412
            return ""


def _write_gcs(files: FileSystem, path: str, content: bytes, token: str) -> str:
    """Writes an object of Google Cloud Storage if its generation is still that of the token."""
    bucket, key, _ = files.split_path(path)
    about = json.dumps({"name": key}).encode()
    parts = b"".join(
        b"--=\r\nContent-Type: application/json\r\n\r\n%s\r\n" % part for part in (about, content)
    )
    _, answer = files.call(
        "POST",
        f"{files._location}/upload/storage/v1/b/{{}}/o",
        bucket,
        uploadType="multipart",  # of a plain upload, fake-gcs-server 1.5 ignores the condition
        # 0 stands for an object that is not there
        ifGenerationMatch=token or "0",
        data=parts + b"--=--",
        headers={"Content-Type": 'multipart/related; boundary="="'},
    )
    return str(json.loads(answer)["generation"])


# as s3fs and its cause call it
_UNMET = ("PreconditionFailed", "ConditionalRequestConflict", "pre-conditions")


def _write_s3(files: FileSystem, path: str, content: bytes, token: str) -> str:
    """Writes an object of S3 if its ETag is still the token."""
    bucket, key, _ = files.split_path(path)
    condition = {"IfMatch": token} if token else {"IfNoneMatch": "*"}
    try:
        return files.call_s3("put_object", Bucket=bucket, Key=key, Body=content, **condition)[
            "ETag"
        ].strip('"')
    except Exception as error:
        deleted = bool(token) and isinstance(error, FileNotFoundError)
        if deleted or any(sign in f"{error} {error.__cause__}" for sign in _UNMET):
            return ""
        raise


_memory = threading.Lock()


def _write_memory(files: FileSystem, path: str, content: bytes, token: str) -> str:
    """Writes an object of fsspec's memory if its checksum is still the token."""
    with _memory:
        if token != (_token({}, files.cat_file(path)) if files.exists(path) else ""):
            return ""
        files.pipe_file(path, content)
        return _token({}, content)


_CONDITIONAL = {"gs": _write_gcs, "gcs": _write_gcs, "s3": _write_s3, "memory": _write_memory}


def _token(info: Info, content: bytes) -> str:
    """Returns what tells this version of an object from others: its generation, its ETag, or a checksum."""
    return str(
        info.get("generation")
        or (info.get("ETag") or "").strip('"')
        or google_crc32c.value(content)
    )
