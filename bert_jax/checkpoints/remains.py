# SPDX-License-Identifier: Apache-2.0
"""Cleaning up after killed runs: temporary files, half-deleted checkpoints, damaged checkpoints.

A checkpoint is renamed before it is deleted. So it is complete or absent to readers, and the name shows what a killed
deletion left. Object stores cannot rename: there the seal is deleted first, and without it nothing counts. Damaged
checkpoints are moved to "damaged/", where the newest `KEPT_DAMAGED` stay.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from bert_jax.checkpoints.sealed import SEAL
from bert_jax.errors import StoppedError
from bert_jax.storage.places import Place, RemotePath
from bert_jax.storage.stores import copy_below
from bert_jax.storage.writing import remove

DELETED = ".deleted"
KEPT_DAMAGED = 2  # to look into, or to rescue by hand
# The files that a run writes atomically in its work directory, and the directories that it owns. Other commands may be
# writing other files there, with temporary names of their own.
WRITTEN = (
    "config.json",
    "about.json",
    "metrics.jsonl",
    "curves.png",
    "results.json",
    "sweep.json",
    "pretrained",
    "finetuned",
)
DIRECTORIES = ("tokenizer", "predictions", "revisions")
_TEMPORARY = re.compile(r"\.(?P<name>.+?)\.(\d+(-[0-9a-f]+)?\.)?tmp")
_SIGN = re.compile(r"\.seen-\w+")  # of `Job.check_shared`
_COMMITTED = "commit_success.txt"  # Orbax's own last object, where there is no rename


def delete(path: Place) -> None:
    """Deletes a directory. Readers lose it at once; `sweep_checkpoints` deletes what a killed process leaves."""
    if isinstance(path, RemotePath):
        path.delete_all(first=(SEAL, _COMMITTED))
        return
    doomed = path.with_name(f".{path.name}{DELETED}")
    shutil.rmtree(doomed, ignore_errors=True)
    # One step, after which no reader finds a half of it.
    path.rename(doomed)
    shutil.rmtree(doomed)


def set_aside(path: Place) -> None:
    """Moves a checkpoint to "damaged/" beside its directory, and deletes all but the newest `KEPT_DAMAGED` there."""
    if isinstance(path, RemotePath):  # within the store; the highest steps stay there
        of_store = path.parent.parent / "damaged"
        (of_store / path.name).delete_all()
        copy_below(str(path), str(of_store / path.name))
        delete(path)
        for older in sorted(of_store.iterdir())[:-KEPT_DAMAGED]:
            if older.name != path.name:
                older.delete_all()
        return
    aside = path.parent.parent / "damaged" / path.name
    aside.parent.mkdir(exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    # a renamed directory keeps the time of its last change, by which the newest are told below
    os.utime(aside)
    by_age = sorted(aside.parent.iterdir(), key=lambda entry: entry.stat().st_mtime_ns)
    for entry in by_age[:-KEPT_DAMAGED]:
        shutil.rmtree(entry, ignore_errors=True)


def sweep_checkpoints(directory: Place, checkpoints: Sequence[Place]) -> None:
    """Finishes the deletion of checkpoints that a killed run was deleting.

    `checkpoints` are the directory's, oldest first. One without a seal that is older than one with a seal was being
    deleted. Failures are ignored; the next run tries again.
    """
    if isinstance(directory, Path):
        for path in directory.glob(f".*{DELETED}"):
            shutil.rmtree(path, ignore_errors=True)
    sealed = [(path / SEAL).exists() for path in checkpoints]
    newest = max((number for number, whole in enumerate(sealed) if whole), default=0)
    for path, whole in zip(checkpoints[:newest], sealed):
        if not whole:
            with contextlib.suppress(OSError, StoppedError):
                delete(path)


def sweep_temporaries(workdir: Place) -> None:
    """Deletes temporary files of a killed run. Only the run that holds the lock may call this."""
    if isinstance(workdir, RemotePath):
        for sign in [path for path in workdir.glob(".seen-*") if _SIGN.fullmatch(path.name)]:
            sign.unlink()
        return
    for path in list(workdir.iterdir()):
        match = _TEMPORARY.fullmatch(path.name)
        if _SIGN.fullmatch(path.name) or (match and match["name"] in WRITTEN):
            remove(path)
    for directory in [workdir / name for name in DIRECTORIES if (workdir / name).is_dir()]:
        for path in [path for path in directory.iterdir() if _TEMPORARY.fullmatch(path.name)]:
            remove(path)
