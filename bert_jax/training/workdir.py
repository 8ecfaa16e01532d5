# SPDX-License-Identifier: Apache-2.0
"""Work directories: only the run that a directory belongs to may resume in it, and one process at a time."""

import contextlib
import dataclasses
import typing
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from bert_jax.checkpoints.remains import DIRECTORIES, WRITTEN, sweep_temporaries
from bert_jax.checkpoints.sealed import SEAL, checkpoint_steps
from bert_jax.devices.job import this_job
from bert_jax.devices.work import describe
from bert_jax.errors import InputError, without_secrets
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.phases import may_change as may_change_in_phases
from bert_jax.settings.pretraining import MaskingConfig, PretrainConfig, ResolvedConfig
from bert_jax.settings.rules import (
    affecting,
    changed_keys,
    drop_removed,
    is_among,
    to_dict,
    value_at,
)
from bert_jax.storage import schema
from bert_jax.storage.files import read_json
from bert_jax.storage.leases import LEASE, lease
from bert_jax.storage.locks import LOCK, lock_file
from bert_jax.storage.places import Place, RemotePath, check_workdir_place, is_taken
from bert_jax.storage.writing import cannot_write

_KINDS = (PretrainConfig, FinetuneConfig)
FORMAT = 2  # of config.json; runs of 1 drew other bits of dropout


@contextlib.contextmanager
def locked(workdir: Place) -> Iterator[None]:
    """Creates the work directory and locks it until the block ends.

    The kernel releases the lock however this process ends; the file itself may stay. In an object store it is a lease,
    which expires when its holder ends; a run that loses its lease to another ends at once. With several processes the
    first holds the lock, and all fail together if it cannot.

    Raises: InputError if another run uses the directory; nothing has been written then.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(workdir, error) from error
    with contextlib.ExitStack() as stack:

        def hold() -> str:
            if isinstance(workdir, RemotePath):
                lost = partial(this_job().end, InputError.STATUS)
                return stack.enter_context(
                    lease(str(workdir / LEASE), str(workdir), lost, doing=describe)
                )
            # kept: a run that is about to take the lock would otherwise lock a file without a name
            return stack.enter_context(lock_file(workdir / LOCK, keep=True))

        if holder := this_job().first_does(f"lock {workdir}", hold):
            raise InputError(
                f"workdir {workdir} is in use by another run ({holder}); wait for it, or give another"
            )
        this_job().check_shared(workdir)
        if this_job().is_first:
            sweep_temporaries(workdir)
        yield


def common(workdir: Place, identity: Mapping[str, Any]) -> dict[str, object]:
    """Returns the values that must be equal on all processes of a run, for `Job.check_same`.

    The paths of the data may differ: `identity` has their checksums.
    """
    run = {
        section: dict(values) if isinstance(values, Mapping) else values
        for section, values in identity["run"].items()
    }
    for section, _, name in (
        name.partition(".") for kind in _KINDS for name in affecting(kind, "place")
    ):
        run.get(section, {}).pop(name, None)
    return {"workdir": str(workdir), **identity, "run": run}


def _changes_of(
    workdir: Place, before: dict[str, Any], identity: dict[str, Any], config: ResolvedConfig
) -> tuple[str, ...]:
    """Returns the settings of pre-training that may differ from `before`; see `phases.may_change`.

    Raises: InputError if a phase that has begun would get other data.
    """
    run_before = _with_defaults(before["run"], PretrainConfig)
    allowed = may_change_in_phases(
        run_before, config, max(checkpoint_steps(workdir / "checkpoints"), default=0)
    )
    masked = MaskingConfig(run_before["masking"]["rate"], run_before["masking"]["max_predictions"])
    masked.validate()  # NaN is a number, too
    # has one of its own
    lengths = identity.get("row_lengths", [0])[: 1 if config.phase2.max_predictions else None]
    if all(masked.most(length) == config.masking.most(length) for length in lengths):
        # a limit that no sequence reaches, as 20 of 128 tokens
        allowed = (*allowed, "masking.max_predictions")
    if "phase2" not in allowed and before.get("later_datasets") != identity["later_datasets"]:
        second = f"its second phase, on other data than phase2.path {config.phase2.path}"
        raise InputError(
            f"workdir {workdir} is in {second}; give the data that it began with, or another workdir"
        )
    return allowed


def check_workdir(
    workdir: Place,
    identity: dict[str, Any],
    config: ResolvedConfig | FinetuneConfig,
    may_change: tuple[str, ...] = (),
) -> None:
    """Raises: InputError, with the settings that differ, if the work directory belongs to another run, or to no run.

    Settings with a prefix in `may_change` may differ, and so may settings that never affect results.
    """
    check_workdir_place(workdir)
    path = workdir / "config.json"
    for model in (workdir / "pretrained", workdir / "finetuned"):
        if path.exists() and is_taken(model) and not (model / SEAL).exists():
            raise InputError(
                f"{model} lacks its {SEAL}, so it is not a whole model; delete it, or move it away"
            )
    if not path.exists():
        if workdir.exists() and workdir.is_file():
            raise InputError(f"workdir {workdir} is a file; give a directory")
        if workdir.is_dir() and not checkpoint_steps(workdir / "checkpoints"):
            # Without a config.json nothing says that these are a run's, and a run would overwrite
            # them.
            names = {child.name for child in workdir.iterdir()}
            for name in (name for name in (*WRITTEN, *DIRECTORIES) if name in names):
                raise InputError(
                    f"workdir {workdir} holds {name}, which a run would replace; give a new directory"
                )
        return
    kind = type(config)
    before = read_identity(workdir, kind)
    if isinstance(config, PretrainConfig):
        may_change = (*may_change, *_changes_of(workdir, before, identity, config))
    else:
        may_change = (*may_change, *affecting(FinetuneConfig, "end", "place", "work", "nothing"))
    if before.get("dataset") != identity["dataset"]:
        raise InputError(
            f"workdir {workdir} was trained on other data; give another workdir or the data it began with"
        )
    run = _with_defaults(before["run"], kind)
    changed = [
        name for name in changed_keys(run, identity["run"]) if not is_among(name, may_change)
    ]
    if changed:
        theirs = " ".join(f"--config.{name}={value_at(run, name)}" for name in changed)
        names = ", ".join(changed)
        free = ", ".join(may_change)
        fix = f"give another workdir, or resume with {theirs} (only {free} may change)"
        raise InputError(f"workdir {workdir} belongs to a run with another {names}; {fix}")


def settings_of(workdir: Place, kind: type) -> dict[str, Any]:
    """Returns the settings of the run of a work directory. Raises: InputError as `read_identity`."""
    return _with_defaults(read_identity(workdir, kind)["run"], kind)


def was_packed(workdir: Place) -> bool | None:
    """Returns whether the fine-tuning run of a work directory packs its batches; None if there is no run yet.

    What was chosen once stays, on other devices too. Runs of versions that knew no packing go on without. With several
    processes the first one reads, since others may see the directory late, and all return the same.

    Raises: InputError, on every process, if the directory cannot hold a run, or belongs to another kind of run.
    """
    check_workdir_place(workdir)

    def read() -> bool | None:
        if not (workdir / "config.json").exists():
            return None
        return read_identity(workdir, FinetuneConfig).get("packed") is True

    return this_job().first_does(f"read {workdir / 'config.json'}", read)


def began_before(workdir: Place) -> bool:
    """Returns whether the run of a work directory began with a version that drew other bits of dropout.

    With several processes the first one reads, and all return the same.
    """
    path = workdir / "config.json"
    read = lambda: path.exists() and read_json(path).get("format") != FORMAT  # noqa: E731
    return this_job().first_does(f"read the format of {workdir}", read)


def read_identity(workdir: Place, kind: type) -> dict[str, Any]:
    """Returns the config.json of a work directory.

    Raises: InputError if its "run" does not hold settings of the dataclass `kind`, or one has another type.
    """
    path = workdir / "config.json"
    before = without_secrets(read_json(path))  # versions up to 0.2 left them in
    run = before.get("run") if isinstance(before, dict) else None
    sections = {field.name for field in dataclasses.fields(kind)}
    remedy = "give another workdir, or delete the file if it is damaged: the next run here writes it again"
    if (
        not isinstance(run, dict)
        or not isinstance(run.get("train"), dict)
        or not run.keys() <= sections
    ):
        raise InputError(f"{path} is of another kind of run, or damaged; {remedy}")
    if removed := [
        s
        for name, values in run.items()
        if isinstance(values, dict)
        for s in drop_removed(name, values)
    ]:
        raise InputError(
            f"{path} has {', '.join(removed)}, which this version cannot compute; use an older"
        )
    schema.check(run, kind, f"{path}: run", remedy)
    return before


def _with_defaults(values: dict[str, Any], kind: type) -> dict[str, Any]:
    """Returns `values` with defaults for settings that earlier versions lacked; those behaved like the defaults."""
    hints = typing.get_type_hints(kind)
    merged = to_dict(kind())
    for name, value in values.items():
        merged[name] = (
            _with_defaults(value, hints[name])
            if dataclasses.is_dataclass(hints.get(name))
            else value
        )
    return merged
