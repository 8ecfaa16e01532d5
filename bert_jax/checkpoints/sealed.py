# SPDX-License-Identifier: Apache-2.0
"""Seals of checkpoints and models: a file that lists every other file with its size and a checksum.

On a file system the checksum is a sha256, computed from the data written. In gs:// it is the store's own, the CRC-32C
of each object. So neither a seal nor a check reads a checkpoint back from a bucket.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict, TypeVar

from bert_jax.devices.work import beat
from bert_jax.errors import InputError
from bert_jax.storage import schema
from bert_jax.storage.files import JsonObject, read_json, sha256_file
from bert_jax.storage.places import Place, RemotePath, scratch
from bert_jax.storage.schema import Count, FileName, Meta, Sha256
from bert_jax.storage.stores import Checksums, crc32c_of
from bert_jax.storage.writing import sync, write_json

Read = TypeVar("Read")

SEAL = "checksums.json"
_ATTEMPTS = 5  # to read checkpoints while a run deletes old ones


class _File(TypedDict):
    bytes: Count
    sha256: NotRequired[Sha256]
    crc32c: NotRequired[str]


class _Notes(TypedDict, total=False):
    unreported: dict[str, tuple[float, float]]
    seen: dict[str, Count] | None
    overdue: bool
    best: list[float]


class _Seal(TypedDict):
    files: dict[FileName, _File]
    arrays: dict[str, tuple[str, list[Annotated[int, Meta(ge=0, lt=2**31)]]]]
    notes: NotRequired[_Notes]
    phase: NotRequired[Count]
    step: NotRequired[Count]
    state: NotRequired[Annotated[str, Meta(pattern=r"^state(-\w+)?\Z")]]
    tokenizer: NotRequired[str]


def seal(directory: Place, about: dict[str, object], below: str = "") -> None:
    """Writes `checksums.json` with `about` and the size and checksum of every file below the directory.

    In a bucket it lists only objects whose names begin with `below`: a predecessor may still write others.

    The files are synced to disk before the seal, so that no seal outlives its files in a power failure.

    Raises: InputError if there is no file, because something else has moved or deleted the directory.
    """
    files: dict[str, Checksums] = {}
    if isinstance(directory, RemotePath):
        for name, sums in directory.listing().items():
            if name == SEAL or not name.startswith(below):
                continue
            if "crc32c" not in sums:  # the store has none
                sha256 = hashlib.sha256((directory / name).read_bytes()).hexdigest()
                sums = {"bytes": sums["bytes"], "sha256": sha256}
            files[name] = sums
    else:
        files = {
            str(path.relative_to(directory)): {
                "bytes": path.stat().st_size,
                "sha256": _digest(path),
            }
            for path in sorted(directory.rglob("*"))
            if path.is_file() and path != directory / SEAL
        }
    if not files:
        raise InputError(
            f"{directory} has no file to seal: something else moved it; let one run alone use its workdir"
        )
    if isinstance(directory, Path):
        # Directories too: the sync of a file does not keep its name.
        for path in (directory.parent, directory, *directory.rglob("*")):
            sync(path)
            beat()
    write_seal(directory, about | {"files": files})


def write_seal(directory: Place, content: Mapping[str, object]) -> None:
    """Writes or replaces a seal, with a digest of itself."""
    content = {**content, "format": 2}
    write_json(directory / SEAL, {**content, "digest": _digest_of(content)})


def read_seal(directory: Place) -> JsonObject:
    """Returns the content of a seal.

    Raises: InputError if it cannot be read or is not as it was written.
    """
    content = read_json(directory / SEAL)
    schema.check(content, _Seal, directory / SEAL, "it is damaged")
    # as versions before format 2 sealed
    if content.get("format", 1) == 1 and "digest" not in content:
        return content
    try:
        same = content["digest"] == _digest_of(content)
    except (KeyError, RecursionError):  # something is nested too deep
        same = False
    if not same:
        raise InputError(
            f"{directory / SEAL} is damaged: it has another digest than when it was written"
        )
    return content


def state_place(directory: Place, sealed: JsonObject) -> Place:
    """Returns the path of the arrays of a sealed checkpoint."""
    return directory / sealed.get("state", "state")


def _digest_of(content: Mapping[str, object]) -> str:
    """Returns the sha256 of the content of a seal, without its digest, as JSON gives it back."""
    # Through JSON and back: a tuple becomes a list there, and a key a text, as when the seal is
    # read again.
    text = json.dumps({name: value for name, value in content.items() if name != "digest"})
    return hashlib.sha256(json.dumps(json.loads(text), sort_keys=True).encode()).hexdigest()


def find_damage(directory: Place) -> str | None:
    """Returns the damage of a sealed directory, with the name of the file; None if all checksums are right."""
    if not (directory / SEAL).exists():
        return f"{SEAL} is missing, so it was never finished"
    try:
        content = read_seal(directory)
    except InputError as error:
        return str(error).removeprefix(f"{directory}/")
    for part in ("arrays", "files"):
        if not content[part]:
            return f"{SEAL} names no {part}"
    objects = directory.listing() if isinstance(directory, RemotePath) else {}
    for name, expected in content["files"].items():
        try:
            if isinstance(directory, RemotePath):
                actual = _object_sums(directory / name, objects[name], expected)
            else:
                actual = _file_sums(directory / name, expected)
        except (FileNotFoundError, KeyError):  # deleted, maybe meanwhile
            return f"file {name} is missing"
        except PermissionError:  # of this user: the file may be whole
            raise
        except OSError as error:  # a bad sector
            return f"file {name} cannot be read: {error.strerror or error}"
        if actual["bytes"] != expected["bytes"]:
            return f"file {name} has {actual['bytes']} bytes in place of {expected['bytes']}"
        if any(actual[kind] != expected[kind] for kind in expected.keys() & actual.keys()):
            return f"file {name} has another checksum than when it was written"
    return None


def _digest(path: Path) -> str:
    """Returns the sha256 of a file, and tells the watchdog that work goes on."""
    digest = sha256_file(path)
    beat()
    return digest


def _file_sums(path: Path, expected: Checksums) -> Checksums:
    """Returns the size of a local file, and if that is the expected one the checksums that are expected."""
    actual: Checksums = {"bytes": path.stat().st_size}
    if actual["bytes"] != expected["bytes"]:
        return actual
    if "sha256" in expected:
        actual["sha256"] = _digest(path)
    if "crc32c" in expected:  # of a checkpoint that was copied from a bucket
        actual["crc32c"] = crc32c_of(path)
    return actual


def _object_sums(path: RemotePath, actual: Checksums, expected: Checksums) -> Checksums:
    """Returns the store's size and checksum of an object; those that are expected if the store has others."""
    if expected.keys() & actual.keys() == {"bytes"} != expected.keys():
        with scratch(path) as folder:  # it was copied from another kind of place
            copy = Path(folder, "object")
            copy.write_bytes(path.read_bytes())
            actual = _file_sums(copy, expected)
    return actual


def checkpoint_steps(directory: Place) -> list[int]:
    """Returns the steps of the checkpoints in a directory, damaged or not, in ascending order."""
    if isinstance(directory, Path) and not directory.is_dir():
        return []
    # others are not ours
    paths = [path for path in directory.iterdir() if re.fullmatch("[0-9]{8,}", path.name)]
    return sorted(int(path.name) for path in paths if isinstance(path, RemotePath) or path.is_dir())


def newest_whole(directory: Place) -> tuple[Place, list[str]]:
    """Returns the path of the newest undamaged checkpoint, and a line about each newer one that was passed over.

    Raises: InputError, with the damage of each, if all are damaged or there is no checkpoint.
    """
    problems: list[str] = []
    for _ in range(_ATTEMPTS):
        problems = []
        vanished = False
        for step in reversed(checkpoint_steps(directory)):
            path = directory / f"{step:08d}"
            problem = find_damage(path)
            if problem is None:
                return path, [f"checkpoint {line}" for line in problems]
            vanished = vanished or not path.exists()
            problems.append(f"{path} is not used: {problem}")
        if not vanished:  # else a running training has deleted one, and there are newer ones
            break
    raise InputError("; ".join([f"{directory} holds no whole checkpoint", *problems]))


def read_newest(directory: Place, read: Callable[[Place], Read]) -> tuple[Read, list[str]]:
    """Returns `read(path)` of the newest undamaged checkpoint, and a line about each newer one that was passed over.

    A run may be training there: if it deletes the checkpoint during the read, a newer one is read.

    Raises: InputError as `newest_whole`, and any error of `read`.
    """
    for attempt in range(_ATTEMPTS):
        path, passed_over = newest_whole(directory)
        try:
            result = read(path)
        except Exception:  # Orbax has many errors for a file that is gone
            # It is still there, so the error is not of its deletion.
            if (path / SEAL).exists() or attempt == _ATTEMPTS - 1:
                raise
            continue
        # checkpoints are renamed before they are deleted, so the read was complete
        if (path / SEAL).exists():
            return result, passed_over
    raise InputError(
        f"checkpoints of {directory} are deleted while they are read; try again when the run is over"
    )
