# SPDX-License-Identifier: Apache-2.0
"""A data set in the making: a run that was stopped continues, one whose input is refused leaves nothing behind."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from bert_jax.data import records
from bert_jax.data.processes import say
from bert_jax.errors import InputError, StoppedError
from bert_jax.storage import files, locks, writing
from bert_jax.storage.files import JsonObject
from bert_jax.text.tokenizer import Tokenizer

WORK, _IDENTITY = "unfinished", "options.json"


def finished_manifest(path: Path, identity: JsonObject) -> JsonObject | None:
    """Returns the manifest of a data set that is finished already, or None if there is none.

    Raises: InputError if it is of another input, tokenizer or options than `identity`.
    """
    if not (path / records.MANIFEST).is_file():
        return None
    manifest = files.read_json(path / records.MANIFEST)
    _check_identity(path, identity, manifest.get("identity") if isinstance(manifest, dict) else None)
    shutil.rmtree(path / WORK, ignore_errors=True)
    say(f"{path} is already complete")
    return manifest


@contextlib.contextmanager
def unfinished(path: Path, identity: JsonObject, tokenizer: Tokenizer) -> Iterator[Path]:
    """Yields the directory for what is finished in part, below `path`; it is gone when the block ends.

    Other commands that would make a data set there are refused as long as the block lasts. If the block is stopped
    (`StoppedError`, a killed process), all is kept, and the next call with the same `identity` continues. If it refuses
    its input, what was made is removed: it is of no use to the input that will be mended.

    Raises: InputError if `path` holds something else, or if another command is at work there.
    """
    with alone(path):
        begun = path / WORK / _IDENTITY
        if begun.is_file():
            _check_identity(path, identity, files.read_json(begun))
            say(f"continuing in {path}")
        for left_over in path.glob("**/.*.tmp"):  # of a run that was killed while it wrote
            left_over.unlink()
        writing.write_json(begun, identity)
        tokenizer.save(path / records.TOKENIZER)
        try:
            yield path / WORK
        except StoppedError:
            raise
        except InputError:
            remove(path)
            raise
        shutil.rmtree(path / WORK, ignore_errors=True)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Makes the directory `path` and keeps others from making a data set there until the block ends.

    Raises: InputError if it holds something that is no data set in the making, or if another command is at work there.
    """
    _check_place(path)
    try:
        with locks.writing(path, inside=True):
            _check_place(path)
            yield
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()  # unless there is something in it


def _check_place(path: Path) -> None:
    """Raises: InputError if there is something at `path` but an empty directory, or a data set in the making."""
    if (path / records.MANIFEST).is_file():
        raise InputError(f"output {path} has just been finished by another command; use it, or choose a new directory")
    if (path / WORK / _IDENTITY).is_file() or not os.path.lexists(path):
        return
    if not path.is_dir() or any(child.name not in (WORK, locks.LOCK) for child in path.iterdir()):
        raise InputError(f"output {path} exists and is not a data set of this program; choose a new directory")


def remove(path: Path) -> None:
    """Removes all that the making of a data set writes, and the directory if nothing else is in it."""
    for made in (*path.glob("train-*.npy"), *path.glob("heldout-*.npy"), path / records.TOKEN_COUNTS):
        made.unlink(missing_ok=True)
    for made in (records.TOKENIZER, WORK):
        shutil.rmtree(path / made, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.rmdir()


def _check_identity(path: Path, ours: JsonObject, theirs: object) -> None:
    """Raises: InputError if the directory was made of something else."""
    theirs = theirs if isinstance(theirs, dict) else {}
    remedy = "choose another output directory, or delete this one"
    options = theirs.get("options")
    for name, value in ours["options"].items():
        other = options.get(name) if isinstance(options, dict) else None
        if other != value:
            raise InputError(f"{path} was begun with {name} {repr(other)[:80]}, not {value!r}; {remedy}")
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise InputError(f"{path} was begun with another {name}; {remedy}")
