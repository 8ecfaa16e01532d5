# SPDX-License-Identifier: Apache-2.0
"""Whose a work directory is: a run that resumes must be the one that began there."""

from pathlib import Path
from typing import Any

from bert_jax.checkpoint import checkpoint_steps
from bert_jax.config import PretrainConfig
from bert_jax.errors import InputError
from bert_jax.phases import may_change
from bert_jax.settings import changed_keys, from_dict, to_dict
from bert_jax.storage import read_json


def changes_of(workdir: Path, identity: dict[str, Any], config: PretrainConfig) -> tuple[str, ...]:
    """Returns which settings may differ from those that the run in `workdir` has had; see `phases.may_change`.

    Raises: InputError if a phase that has begun would get other data.
    """
    path = workdir / "config.json"
    if not path.is_file():
        return ()
    before = read_json(path)
    run_before = _with_defaults(before.get("run", {}), PretrainConfig)
    allowed = may_change(run_before, config, max(checkpoint_steps(workdir / "checkpoints"), default=0))
    if "phase2" not in allowed and before.get("later_datasets") != identity["later_datasets"]:
        raise InputError(f"workdir {workdir} is in its second phase, on other data than {config.phase2.path}")
    return allowed


def check_workdir(workdir: Path, identity: dict[str, Any], kind: type, may_change: tuple[str, ...]) -> None:
    """Raises: InputError if the work directory belongs to another run, saying what differs.

    `kind` is the dataclass of the run's settings; those that start with one of `may_change` may differ.
    """
    path = workdir / "config.json"
    if not path.exists():
        if workdir.exists() and not workdir.is_dir():
            raise InputError(f"workdir {workdir} is a file; give a directory")
        return
    before = read_json(path)
    if before.get("dataset") != identity["dataset"]:
        raise InputError(f"workdir {workdir} was trained on other data; give another workdir or the data it began with")
    changed = [
        name
        for name in changed_keys(_with_defaults(before.get("run", {}), kind), identity["run"])
        if not any(name == allowed or name.startswith(allowed + ".") for allowed in may_change)
    ]
    if changed:
        raise InputError(
            f"workdir {workdir} belongs to a run with another {', '.join(changed)}; give another workdir, or the same "
            f"settings to resume (only {', '.join(may_change)} may change)"
        )


def _with_defaults(run: dict[str, Any], kind: type) -> dict[str, Any]:
    """Returns a run's settings with those added that are newer than it, which had their defaults' meaning then."""
    try:
        return to_dict(from_dict(kind, run))
    except InputError:  # a setting that is no more
        return run
