# SPDX-License-Identifier: Apache-2.0
"""Places to read and write: a path of this machine, or a `RemotePath` in an object store.

`to_place` is where a text becomes one or the other. A `RemotePath` has the methods of pathlib.Path that this package
uses, so that most code does not ask which of the two it has. It is not an os.PathLike: `open` and the functions of `os`
and `shutil` refuse it, where they would take a URL for a local name.
"""

import fnmatch
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from bert_jax.errors import InputError
from bert_jax.storage import leases, stores

UNFINISHED = ".unfinished"  # an object of a directory whose upload has begun and has not ended


class RemotePath:
    """An object of an object store, or all objects below a prefix; both are called by their URL.

    Writes replace a whole object. They raise StoppedError if a lease on the place was lost.
    """

    __slots__ = ("url",)

    def __init__(self, url: str) -> None:
        self.url = re.sub("^gcs://", "gs://", url.rstrip("/"))  # Orbax knows gs:// alone

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __lt__(self, other: "RemotePath") -> bool:
        return self.url < other.url

    def __truediv__(self, name: str | PurePosixPath) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        parent = self.url.rpartition("/")[0]
        return self if parent.endswith(":/") else RemotePath(parent)  # a bucket is in no other

    def with_name(self, name: str) -> "RemotePath":
        return self.parent / name

    def absolute(self) -> "RemotePath":
        return self

    def exists(self) -> bool:
        return stores.info_of(self.url) is not None

    def is_file(self) -> bool:
        return (stores.info_of(self.url) or {}).get("type") == "file"

    def is_dir(self) -> bool:
        return (stores.info_of(self.url) or {}).get("type") == "directory"

    def iterdir(self) -> Iterator["RemotePath"]:
        """Yields the objects and prefixes directly below this one, sorted; nothing if there are none."""
        with stores.opened(self.url) as (files, root):
            try:
                paths = files.ls(root, detail=False)
            except FileNotFoundError:
                return
        names = {
            path.rstrip("/").rpartition("/")[2]
            for path in paths
            # a store may list the prefix itself
            if path.strip("/") != root.strip("/")
        }
        yield from (self / name for name in sorted(names))

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """Yields the objects and prefixes directly below this one that match a pattern without "/", sorted."""
        yield from (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def listing(self) -> dict[str, stores.Checksums]:
        """Returns all objects below, as `stores.list_below` does."""
        return stores.list_below(self.url)

    def read_bytes(self) -> bytes:
        return stores.read_bytes(self.url)

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def write_bytes(self, content: bytes) -> None:
        self.check_writable()
        stores.write_bytes(self.url, content)

    def touch(self) -> None:
        self.write_bytes(b"")

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: object stores have no directories."""

    def unlink(self, missing_ok: bool = False) -> None:
        self.check_writable()
        stores.remove(self.url)

    def delete_all(self, first: tuple[str, ...] = ()) -> None:
        """Deletes everything below, the objects called `first` before all others."""
        self.check_writable()
        for name in first:
            stores.remove(f"{self.url}/{name}")
        stores.remove(self.url, below=True)

    def put(self, path: Path) -> None:
        """Replaces the object by a local file."""
        self.check_writable()
        stores.put_file(path, self.url)

    def check_writable(self) -> None:
        """Raises: StoppedError if a lease on this place was lost to another run; InputError if the name is a glob."""
        stores.check_no_pattern(self.url)
        leases.check_held(self.url)


Place: TypeAlias = Path | RemotePath
AnyPath: TypeAlias = str | os.PathLike | RemotePath


def to_place(path: AnyPath) -> Place:
    """Returns the place of a path or URL. Raises: InputError if a URL names no bucket."""
    if isinstance(path, (Path, RemotePath)):
        return path
    if not stores.is_remote(os.fspath(path)):
        return Path(path)
    stores.check_bucket(os.fspath(path))
    return RemotePath(os.fspath(path))


def check_no_pattern(place: Place) -> None:
    """Raises: InputError if Orbax would take the path for a pattern, and not find again the arrays that it wrote."""
    stores.check_no_pattern(
        str(place.absolute()), "or a link to it" if isinstance(place, Path) else ""
    )


def check_workdir_place(place: Place) -> None:
    """Raises: InputError if checkpoints cannot be written to a place with this protocol or path."""
    check_no_pattern(place)
    if isinstance(place, RemotePath) and stores.protocol_of(str(place)) != "gs":
        raise InputError(
            f"workdir {place} cannot hold checkpoints, as gs:// and file systems do; mount the bucket"
        )


def upload_directory(source: Path, target: RemotePath, last: tuple[str, ...]) -> None:
    """Replaces everything below `target` by the files of a local directory, those named `last` after all others.

    The object `UNFINISHED` is there from before the first write until after the last one.

    Raises: StoppedError if it cannot be written.
    """
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    names = {path.relative_to(source).as_posix() for path in files}
    before = target.listing().keys() - {UNFINISHED}

    def put(name: str) -> None:
        (target / name).put(source / name)

    def unlink(name: str) -> None:
        (target / name).unlink()

    # Stopped anywhere below, it is seen as unfinished. What says that it is whole goes first and
    # comes last, since others read it without asking for the marker.
    (target / UNFINISHED).touch()
    for name in before & set(last):
        unlink(name)
    list(stores.at_once(put, sorted(names - set(last))))
    list(stores.at_once(unlink, before - names - set(last)))
    for name in last:
        if name in names:
            put(name)
    unlink(UNFINISHED)


def is_taken(path: Place) -> bool:
    """Returns whether anything exists at a place, other than the remains of a stopped upload."""
    if isinstance(path, Path):
        return os.path.lexists(path)
    return path.exists() and not (path / UNFINISHED).exists()


def scratch(path: RemotePath) -> "tempfile.TemporaryDirectory[str]":
    """Returns a local temporary directory for files to upload to `path`.

    Raises: InputError if it cannot be made.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="bert_jax_", ignore_cleanup_errors=True)
    except OSError as error:
        raise InputError(
            f"{path} needs a temporary directory ({error.strerror}); set TMPDIR"
        ) from None
