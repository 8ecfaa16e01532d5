# SPDX-License-Identifier: Apache-2.0
"""Parameters of some steps of a run, kept for good as models of their own: WORKDIR@STEP."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bert_jax.checkpoints.states import checkpoint_steps
from bert_jax.devices import cluster
from bert_jax.errors import InputError

REVISIONS = "revisions"  # the directory of a work directory that has them


def revision_path(workdir: Path, step: int) -> Path:
    """Returns where a work directory has the revision of a step."""
    return workdir / REVISIONS / f"{step:08d}"


def find_revision(path: str | Path) -> str | Path:
    """Returns the directory that WORKDIR@STEP names; any other path as it is.

    Raises: InputError, with the steps that there are, if the work directory has no revision of this step.
    """
    workdir, _, step = str(path).rpartition("@")
    if not (workdir and step.isdecimal() and len(step) < 19) or Path(path).exists() or not Path(workdir).is_dir():
        return path
    found = revision_path(Path(workdir), int(step))
    if not found.is_dir():
        steps = [str(kept) for kept in checkpoint_steps(Path(workdir) / REVISIONS)]
        there = f"it has those of steps {', '.join(steps)}" if steps else "it has none"
        raise InputError(
            f"{workdir} has no revision of step {step}; {there}: checkpoint.keep_every says which are kept"
        )
    return found


def save_revision(
    workdir: Path, save: Callable[..., None], step: int, params: Any, seen: Mapping[str, int] | None
) -> None:
    """Keeps the parameters of a step for good, as a model of its own; one that is there already stays.

    `save` is `save_pretrained` with all that the steps of a run share, and `seen` are the counts of what was trained
    on, if they are known. Every process calls this.

    Raises: InputError if the model cannot be written.
    """
    path = revision_path(workdir, step)
    if cluster.first_says(int(path.exists())):
        return
    on_host, trained = cluster.on_host(params), {"step": step, **(seen or {})}
    cluster.first_does(f"write the revision {path}", lambda: save(path, params=on_host, trained=trained))
