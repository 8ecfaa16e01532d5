# SPDX-License-Identifier: Apache-2.0
"""Cleaning up after killed runs: temporary files, half-deleted checkpoints, damaged checkpoints.

A checkpoint is renamed before it is deleted. So it is complete or absent to readers, and the name shows what a killed
deletion left. Damaged checkpoints are moved to "damaged/", where the newest `KEPT_DAMAGED` stay.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

DELETED = ".deleted"
KEPT_DAMAGED = 2  # to look into, or to rescue by hand
# The files that a run writes atomically in its work directory, and the directories that it owns. Other commands may be
# writing other files there, with temporary names of their own.
_WRITTEN = (
    "config.json",
    "about.json",
    "metrics.jsonl",
    "curves.png",
    "results.json",
    "sweep.json",
    "pretrained",
    "finetuned",
)
_DIRECTORIES = ("tokenizer", "predictions", "revisions")
_TEMPORARY = re.compile(r"\.(?P<name>.+?)\.(\d+(-[0-9a-f]+)?\.)?tmp")
_SIGN = re.compile(r"\.seen-\w+")  # of `cluster.check_shared`


def delete(path: Path) -> None:
    """Deletes a directory. Readers lose it at once; `sweep` deletes what is left if this process is killed."""
    doomed = path.with_name(f".{path.name}{DELETED}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def set_aside(path: Path) -> None:
    """Moves a checkpoint to "damaged/" beside its directory, and deletes all but the newest `KEPT_DAMAGED` there."""
    aside = path.parent.parent / "damaged" / path.name
    aside.parent.mkdir(exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    os.utime(aside)
    for older in sorted(aside.parent.iterdir(), key=lambda each: each.stat().st_mtime_ns)[:-KEPT_DAMAGED]:
        shutil.rmtree(older, ignore_errors=True)


def sweep(directory: Path, checkpoints: list[Path], is_complete: Callable[[Path], bool]) -> None:
    """Finishes the deletion of checkpoints that a killed run was deleting.

    `checkpoints` are those of the directory, oldest first. An incomplete one that is older than a complete one was
    being deleted by an early version, which did not rename. Failures are ignored; the next run tries again.
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
    """Deletes temporary files of a killed run. Only the run that holds the lock may call this."""
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
