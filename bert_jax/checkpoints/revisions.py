# SPDX-License-Identifier: Apache-2.0
"""Revisions: models of some steps of a run, kept permanently and named WORKDIR@STEP."""

from bert_jax.checkpoints.states import checkpoint_steps
from bert_jax.errors import InputError
from bert_jax.storage.places import AnyPath, Place, to_place

REVISIONS = "revisions"  # their directory inside a work directory


def revision_path(workdir: Place, step: int) -> Place:
    """Returns the path of the revision of a step."""
    return workdir / REVISIONS / f"{step:08d}"


def find_revision(path: AnyPath) -> AnyPath:
    """Returns the directory that WORKDIR@STEP names; any other path as it is.

    Raises: InputError, with the steps that there are, if the work directory has no revision of this step.
    """
    workdir, _, step = str(path).rpartition("@")
    if not (workdir and step.isdecimal() and len(step) < 19) or workdir.startswith("hf://"):
        return path
    if to_place(path).exists() or not to_place(workdir).is_dir():
        return path
    found = revision_path(to_place(workdir), int(step))
    if not found.is_dir():
        steps = [str(kept) for kept in checkpoint_steps(to_place(workdir) / REVISIONS)]
        there = f"it has those of steps {', '.join(steps)}" if steps else "it has none"
        raise InputError(
            f"{workdir} has no revision of step {step}; {there}: checkpoint.keep_every says which are kept"
        )
    return found
