# SPDX-License-Identifier: Apache-2.0
"""What records know of a queue's units. What was measured on another machine is not run again, and nothing is lost.

A unit of a record says in "commands" by which command each of its finished jobs was started.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.collecting import (
    EVALUATIONS,
    FORMAT,
    PAIRS,
    PRETRAIN,
    STARTS,
    TASKS,
    collect,
    read_lines,
    read_record,
    write_record,
)
from benchmarks.jobs import Unit
from bert_jax.errors import InputError
from bert_jax.settings.pretraining import RESUMABLE_CHANGES
from bert_jax.storage.locks import lock_file

Recorded = dict[tuple[str, int], dict[str, Any]]  # by group and seed
_COMMANDS = "commands"
_DIRECTORIES = re.compile(r"[^\s,=:]*/")  # machines differ in them
# Settings that change how a run is worked off, and not what comes out.
_FREE = tuple(f"--config.{name}" for name in RESUMABLE_CHANGES if name not in ("data.path", "train.num_steps"))


def read_recorded(paths: Iterable[Path], units: Sequence[Unit]) -> Recorded:
    """Returns what records have of some units; of one that several have, the most complete.

    Raises: InputError if a record is damaged, or if a record or the directory of a unit has it from other commands.
    """
    planned = {(unit.group, unit.seed): unit for unit in units}
    for unit in planned.values():
        _check_commands(unit, _finished(unit), str(unit.directory), "another --root")
    recorded: list[dict[str, Any]] = []
    for path in (path for path in paths if path.exists()):
        for found in read_record(path)["units"]:
            if unit := planned.get((found["group"], found["seed"])):
                _check_commands(unit, _commands(found), f"{path}: {unit.group} seed {unit.seed}", "another --records")
                recorded.append(found)
    return _fullest(recorded)


def is_recorded(unit: Unit, recorded: Recorded, units: Sequence[Unit]) -> bool:
    """Returns whether all jobs of a unit are recorded, and none of their outputs is needed by another of the units."""
    found = recorded.get((unit.group, unit.seed), {})
    needed = {other.needs for other in units if other.lacks and not _has_all(recorded, other)}
    return _has_all(recorded, unit) and bool(found) and not needed & {job.output for job in unit.jobs}


def keep_record(path: Path, units: Sequence[Unit], recorded: Recorded) -> None:
    """Writes the record of some units: those of this machine, and those that were recorded before.

    A unit that was recorded before stays until this machine has measured all that it has. So do units of other seeds
    and groups that the record had.

    Raises: InputError if a work directory, or the record as it is, is damaged.
    """
    ready = [unit for unit in units if any(job.is_finished for job in unit.jobs)]
    new = {(unit["group"], unit["seed"]): unit for unit in collect([unit.directory for unit in ready])["units"]}
    for unit in ready:
        new[unit.group, unit.seed][_COMMANDS] = _finished(unit)
    before = [recorded[key] for unit in units if (key := (unit.group, unit.seed)) in recorded]
    with lock_file(path.with_name(f".{path.name}.lock"), wait=True):  # another queue may write it too
        there = read_record(path)["units"] if path.exists() else []
        kept = _fullest([*there, *before, *new.values()])
        if kept:
            write_record({"format": FORMAT, "units": [kept[key] for key in sorted(kept)]}, path)


def _fullest(units: Iterable[dict[str, Any]]) -> Recorded:
    """Returns the units by group and seed; of two that are the same, the second if it has all that the first has.

    If both have the same, it gets the commands of both: each table knows those of its own jobs.
    """
    found: Recorded = {}
    for unit in units:
        key = unit["group"], unit["seed"]
        first = found.setdefault(key, unit)
        if _parts(unit) == _parts(first) and _COMMANDS in first:
            found[key] = unit | {_COMMANDS: first[_COMMANDS] | unit.get(_COMMANDS, {})}
        elif _parts(unit) > _parts(first):
            found[key] = unit
    return found


def _parts(unit: Mapping[str, Any]) -> set[str]:
    """Returns the names of what was measured of a unit."""
    parts = {f"{kind}/{name}" for kind in (TASKS, EVALUATIONS, PAIRS) for name in unit.get(kind, {})}
    return parts | ({PRETRAIN} if "trained" in unit else set())


def _has_all(recorded: Recorded, unit: Unit) -> bool:
    commands = recorded.get((unit.group, unit.seed), {}).get(_COMMANDS, {})
    return all(job.name in commands for job in unit.jobs)


def _commands(unit: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns {job: command} of a unit of a record. Raises: InputError if it is damaged."""
    commands = unit.get(_COMMANDS, {})
    whole = isinstance(commands, dict) and all(
        isinstance(command, list) and all(isinstance(each, str) for each in command) for command in commands.values()
    )
    if not whole:
        raise InputError(f"a record has no commands that can be read of {unit['group']} seed {unit['seed']}; remove it")
    return commands


def _finished(unit: Unit) -> dict[str, list[str]]:
    """Returns the command by which each finished job was last started on this machine."""
    path = unit.directory / STARTS
    lines = read_lines(path) if path.is_file() else []
    known = {line.get("job"): line["command"] for line in lines if isinstance(line.get("command"), list)}
    return {job.name: _portable(known[job.name]) for job in unit.jobs if job.is_finished and job.name in known}


def _portable(command: Sequence[object]) -> list[str]:
    """Returns a command without its interpreter and without directories."""
    return [_DIRECTORIES.sub("", str(each)) for each in command[1:]]


def _check_commands(unit: Unit, known: Mapping[str, Sequence[str]], where: str, other: str) -> None:
    """Raises: InputError if a job of the unit was started by another command."""
    for job in unit.jobs:
        if job.name in known:
            planned, before = (
                [each for each in command if not each.startswith(_FREE)]
                for command in (_portable(job.command), known[job.name])
            )
            if planned != before:
                differing = next((each for each in before if each not in planned), "fewer settings")
                raise InputError(
                    f"{where} has {job.name} from another command, with {differing}; give the same settings, or {other}"
                )
