# SPDX-License-Identifier: Apache-2.0
"""What the queues of `plans` and `speed` share: their flags, and one record of all that is finished."""

import fnmatch
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks.jobs import Stop, Unit, run_units
from bert_jax.errors import InputError
from bert_jax.storage.writing import write_json

ROOT = flags.DEFINE_string("root", "", "where jobs, their outputs and logs go; resumes if used")
ONLY = flags.DEFINE_string("only", "*", "a pattern of names, such as '*base*'")
RECORD = flags.DEFINE_string("record", "", "the record of all that is finished; in benchmarks/records if not given")
COMMANDS = flags.DEFINE_bool("commands", False, "print the commands that wait, and run nothing")
MINUTES = flags.DEFINE_float("minutes", 0.0, "to stop after; 0 goes on to the end", lower_bound=0)


def run_queue(units: Sequence[Unit], read: Callable[[str, Path], dict[str, Any]], name: str) -> int:
    """Runs the units that wait, and writes the record: of each finished unit what `read` returns of (name, output).

    What the record has and is not made anew stays in it.

    Args:
      units: with the output that counts last.
      read: makes the record of one unit.
      name: of the record.

    Returns: the exit status, 1 if a unit failed.
    Raises: InputError if --root is not given, or --only fits no unit.
    """
    if not ROOT.value:
        raise InputError("--root is needed: a directory for jobs, their outputs and logs")
    chosen = [unit for unit in units if fnmatch.fnmatch(unit.group, ONLY.value)]
    if not chosen:
        raise InputError(f"--only={ONLY.value} fits none of {', '.join(unit.group for unit in units)}")
    if COMMANDS.value:
        print("\n".join(shlex.join(job.command) for unit in chosen for job in unit.waiting))
        return 0
    failed = run_units(chosen, Stop(60 * MINUTES.value))
    path = Path(RECORD.value or f"benchmarks/records/{name}.json")
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, make_record(units, read, before))
    return 1 if failed else 0


def make_record(
    units: Sequence[Unit], read: Callable[[str, Path], dict[str, Any]], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a record sorted by name: what was there `before`, and the finished units."""
    outputs = {unit.group: unit.jobs[-1].output for unit in units if unit.jobs[-1].is_finished}
    return dict(sorted({**before, **{name: read(name, output) for name, output in outputs.items()}}.items()))
