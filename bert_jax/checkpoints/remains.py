# SPDX-License-Identifier: Apache-2.0
"""What runs that were killed leave in their work directory, and how it goes.

A checkpoint is renamed before it is deleted, so it is there whole or not at all, and what a kill leaves of it has a
name that says so. Damaged checkpoints are moved to "damaged/", where the newest `KEPT_DAMAGED` stay.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

DELETED = ".deleted"
KEPT_DAMAGED = 2  # to look into, or to rescue by hand
# What a run writes in its work directory whole or not at all, and the directories that are its own. Other commands may
# write beside these meanwhile, under temporary names of their own.
_WRITTEN = ("config.json", "metrics.jsonl", "curves.png", "results.json", "sweep.json", "pretrained", "finetuned")
_DIRECTORIES = ("tokenizer", "predictions", "revisions")
_TEMPORARY = re.compile(r"\.(?P<name>.+?)\.(\d+(-[0-9a-f]+)?\.)?tmp")
_SIGN = re.compile(r"\.seen-\w+")  # of `cluster.check_shared`


def delete(path: Path) -> None:
    """Deletes a directory: for readers it is gone at once, and `sweep` finds what a kill leaves of it."""
    doomed = path.with_name(f".{path.name}{DELETED}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def set_aside(path: Path) -> None:
    """Moves a checkpoint to "damaged/" beside the directory it is in; of those there the newest stay."""
    aside = path.parent.parent / "damaged" / path.name
    aside.parent.mkdir(exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    os.utime(aside)
    for older in sorted(aside.parent.iterdir(), key=lambda each: each.stat().st_mtime_ns)[:-KEPT_DAMAGED]:
        shutil.rmtree(older, ignore_errors=True)


def sweep(directory: Path, checkpoints: list[Path], is_complete: Callable[[Path], bool]) -> None:
    """Deletes what is left of checkpoints that were being deleted.

    `checkpoints` are those of the directory, oldest first. One that is not complete and older than one that is was
    being deleted, by a version that did not rename. What cannot be deleted is tried again the next time.
    """
    for path in directory.glob(f".*{DELETED}"):
        shutil.rmtree(path, ignore_errors=True)
    complete = [is_complete(path) for path in checkpoints]
    newest = max((number for number, whole in enumerate(complete) if whole), default=0)
    for path, whole in zip(checkpoints[:newest], complete[:newest]):
        if not whole:
            with contextlib.suppress(OSError):
                delete(path)


def sweep_temporaries(workdir: Path) -> None:
    """Deletes files and models that a killed run was writing; to be called by the one run that may write there."""
    for path in [path for path in workdir.iterdir() if path.name.startswith(".")]:
        found = _TEMPORARY.fullmatch(path.name)
        if _SIGN.fullmatch(path.name) or (found and found["name"] in _WRITTEN):
            _delete_any(path)
    for directory in [workdir / name for name in _DIRECTORIES if (workdir / name).is_dir()]:
        for path in [path for path in directory.iterdir() if _TEMPORARY.fullmatch(path.name)]:
            _delete_any(path)


def _delete_any(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
