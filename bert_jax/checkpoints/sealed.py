# SPDX-License-Identifier: Apache-2.0
"""Seals of checkpoints and models: a file that lists every other file with its size and sha256."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bert_jax.errors import InputError
from bert_jax.storage import schema
from bert_jax.storage.files import read_json, sha256_file
from bert_jax.storage.writing import write_json

Read = TypeVar("Read")

SEAL = "checksums.json"
_ATTEMPTS = 5  # to read checkpoints while a run deletes old ones

_FILE = schema.record({"bytes": schema.whole(), "sha256": schema.SHA256})
_SUMS = schema.map_of(schema.tuple_of(schema.number(finite=False), schema.number(finite=False)))
_SEAL = schema.record(
    {
        "files": schema.map_of(_FILE, key=schema.file_name),
        "arrays": schema.map_of(schema.tuple_of(schema.text(), schema.list_of(schema.whole(0, 2**31 - 1)))),
    },
    {
        "notes": schema.record(
            {},
            {
                "unreported": _SUMS,
                "seen": schema.or_null(schema.map_of(schema.whole())),
                "overdue": schema.true_or_false,
                "best": schema.list_of(schema.number(finite=False)),
            },
        ),
        "step": schema.whole(),
        "tokenizer": schema.text(),
    },
)


def seal(directory: Path, about: dict[str, object]) -> None:
    """Writes `checksums.json` with `about` and the size and sha256 of every file below the directory.

    Raises: InputError if there is no file, because something else has moved or deleted the directory.
    """
    files = {
        str(path.relative_to(directory)): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path != directory / SEAL
    }
    if not files:
        raise InputError(
            f"{directory} has no file to seal, so something else moved it; let one run alone use its workdir"
        )
    write_json(directory / SEAL, about | {"format": 1, "files": files})


def find_damage(directory: Path) -> str | None:
    """Returns the damage of a sealed directory, with the name of the file; None if all checksums are right."""
    if not (directory / SEAL).exists():
        return f"{SEAL} is missing, so it was never finished"
    try:
        content = read_json(directory / SEAL)
        _SEAL(content, "")
    except InputError:
        return f"{SEAL} is damaged"
    except schema.Mismatch as mismatch:
        return f"{SEAL} is damaged: {mismatch}"
    if not content["arrays"]:
        return f"{SEAL} names no arrays"
    if not content["files"]:
        return f"{SEAL} names no files"
    for name, expected in content["files"].items():
        path, size, checksum = directory / name, expected["bytes"], expected["sha256"]
        try:
            found = path.stat().st_size if path.is_file() else None
            if found is None:
                return f"file {name} is missing"
            if found != size:
                return f"file {name} has {found} bytes in place of {size}"
            if sha256_file(path) != checksum:
                return f"file {name} has another checksum than when it was written"
        except FileNotFoundError:  # deleted meanwhile
            return f"file {name} is missing"
    return None


def is_complete(directory: Path) -> bool:
    """Returns whether a directory is sealed and has every file, whatever their content; True if the seal is damaged."""
    if not (directory / SEAL).exists():
        return False
    try:
        return all((directory / name).is_file() for name in read_json(directory / SEAL)["files"])
    except (InputError, KeyError, TypeError):
        return True


def checkpoint_steps(directory: Path) -> list[int]:
    """Returns the steps of the checkpoints in a directory, damaged or not, in ascending order."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal() and path.is_dir())


def newest_whole(directory: Path) -> tuple[Path, list[str]]:
    """Returns the path of the newest undamaged checkpoint, and a line about each newer one that was passed over.

    Raises: InputError, with the damage of each, if all are damaged or there is no checkpoint.
    """
    problems: list[str] = []
    for _ in range(_ATTEMPTS):
        problems, vanished = [], False
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


def read_newest(directory: Path, read: Callable[[Path], Read]) -> tuple[Read, list[str]]:
    """Returns `read(path)` of the newest undamaged checkpoint, and a line about each newer one that was passed over.

    A run may be training there: if it deletes the checkpoint during the read, a newer one is read.

    Raises: InputError as `newest_whole`; whatever `read` raises.
    """
    for attempt in range(_ATTEMPTS):
        path, passed_over = newest_whole(directory)
        try:
            found = read(path)
        except Exception:  # Orbax has many errors for a file that is gone
            if (path / SEAL).exists() or attempt == _ATTEMPTS - 1:
                raise
            continue
        if (path / SEAL).exists():  # checkpoints are renamed before they are deleted, so the read was complete
            return found, passed_over
    raise InputError(
        f"checkpoints of {directory} are deleted faster than they are read; try again when the run is over"
    )
