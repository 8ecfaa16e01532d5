# SPDX-License-Identifier: Apache-2.0
"""The directory of an unfinished data set: a stopped run can continue, and invalid input leaves no files."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from bert_jax.data import records
from bert_jax.data.processes import say
from bert_jax.errors import InputError, StoppedError
from bert_jax.storage import files, locks, places, urls, writing
from bert_jax.storage.files import JsonObject
from bert_jax.storage.places import AnyPath
from bert_jax.text.tokenizer import Tokenizer

WORK = "unfinished"
_IDENTITY = "options.json"


def finished_manifest(path: Path, identity: JsonObject) -> JsonObject | None:
    """Returns the manifest of a finished data set at `path`, or None if there is no finished data set.

    Raises: InputError if it was made from another input, tokenizer or options than `identity`.
    """
    if not (path / records.MANIFEST).is_file():
        return None
    manifest = files.read_json(path / records.MANIFEST)
    stored = manifest.get("identity") if isinstance(manifest, dict) else None
    if (
        isinstance(stored, dict)
        and "splitter" not in stored
        and isinstance(made := manifest.get("made_with"), dict)
    ):
        # versions up to 0.2 had it there alone
        stored = {**stored, "splitter": f"sentencex {made.get('sentencex')}"}
    check_identity(path, identity, stored)
    # left by a run that was killed after it had written its manifest
    shutil.rmtree(path / WORK, ignore_errors=True)
    say(f"{path} is already complete")
    return manifest


@contextlib.contextmanager
def unfinished(path: Path, identity: JsonObject, tokenizer: Tokenizer) -> Iterator[Path]:
    """Yields a directory below `path` for intermediate files, and removes it when the block ends.

    Other commands cannot make a data set there during the block. If the block is stopped (`StoppedError`, a killed
    process), all files are kept, and the next call with the same `identity` continues. If the block raises another
    InputError, all files are removed, since the corrected input will need new ones.

    Raises: InputError if `path` holds something else, or if another command is writing there.
    """
    with alone(path):
        begun = path / WORK / _IDENTITY
        if begun.is_file():
            check_identity(path, identity, files.read_json(begun))
            say(f"continuing in {path}")
        for left_over in path.glob("**/.*.tmp"):  # of a run that was killed while it wrote
            left_over.unlink()
        writing.write_json(begun, identity)
        tokenizer.save(path / records.TOKENIZER)
        try:
            yield path / WORK
        # a full disk or a kill: the same command goes on from what is finished
        except StoppedError:
            raise
        except InputError:
            remove_unfinished(path)
            raise
        shutil.rmtree(path / WORK, ignore_errors=True)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Makes the directory `path` and prevents other commands from making a data set there during the block.

    Raises: InputError if it holds anything but an unfinished data set, or if another command is writing there.
    """
    _check_place(path)
    try:
        with locks.writing(path, inside=True):
            _check_place(path)
            yield
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()  # unless there is something in it


def uploaded(url: str, make: Callable[[str], JsonObject]) -> JsonObject:
    """Returns the manifest of a data set that `make` makes in a local directory, which is then uploaded to a URL.

    The directory is in the cache, so that a stopped command continues; it is deleted after the upload, in which the
    manifest comes last. A data set that is at the URL already is compared, and not made again.

    Raises: InputError if `make` does, if the URL cannot be written, or if it holds something else.
    """
    target = places.RemotePath(url)
    with locks.writing(target):
        folder = (
            urls.user_cache()
            / "outputs"
            / hashlib.sha256(str(target).encode()).hexdigest()[:16]
            / target.name
        )
        finished = (target / records.MANIFEST).is_file()
        if finished:
            shutil.rmtree(folder.parent, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / records.MANIFEST).write_bytes((target / records.MANIFEST).read_bytes())
        elif places.is_taken(target):
            raise InputError(
                f"output {target} exists and is not a data set of this program; choose a new place"
            )
        try:
            manifest = make(str(folder))
        except InputError as error:
            raise type(error)(str(error).replace(str(folder), str(target))) from None
        finally:
            if finished:
                shutil.rmtree(folder.parent, ignore_errors=True)
        if not finished:
            places.upload_directory(folder, target, writing.WRITTEN_LAST)
            shutil.rmtree(folder.parent, ignore_errors=True)
        say(f"{target} is complete")
    return manifest


def _check_place(path: Path) -> None:
    """Raises: InputError if `path` exists and is neither an empty directory nor an unfinished data set."""
    if (path / records.MANIFEST).is_file():
        raise InputError(
            f"output {path} has just been finished by another command; use it, or choose a new directory"
        )
    if (path / WORK / _IDENTITY).is_file() or not os.path.lexists(path):
        return
    if not path.is_dir() or any(child.name not in (WORK, locks.LOCK) for child in path.iterdir()):
        raise InputError(
            f"output {path} exists and is not a data set of this program; choose a new directory"
        )


def remove_unfinished(path: Path) -> None:
    """Removes all files of an unfinished data set, and the directory if it is empty then."""
    for file in (
        *path.glob("train-*.npy"),
        *path.glob("heldout-*.npy"),
        path / records.TOKEN_COUNTS,
        path / records.LENGTHS,
    ):
        file.unlink(missing_ok=True)
    for folder in (records.TOKENIZER, WORK):
        shutil.rmtree(path / folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.rmdir()


def check_identity(path: AnyPath, ours: JsonObject, theirs: object) -> None:
    """Raises: InputError if the directory was made from another input, tokenizer or options."""
    theirs = theirs if isinstance(theirs, dict) else {}
    remedy = "choose another output directory, or delete this one"
    options = theirs.get("options")
    for name, value in ours["options"].items():
        other = options.get(name) if isinstance(options, dict) else None
        if other != value:
            raise InputError(
                f"{path} was begun with {name} {repr(other)[:80]}, not {value!r}; {remedy}"
            )
    for name, value in ours.items():
        if theirs.get(name) != value:
            other = f"{theirs.get(name)}, not {value}" if name == "splitter" else f"another {name}"
            raise InputError(f"{path} was begun with {other}; {remedy}")
