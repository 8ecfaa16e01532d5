# SPDX-License-Identifier: Apache-2.0
"""Plans of settings worth running, for docs/pods.md: a queue of compilations. Starting it again resumes it.

    python -m benchmarks.plans --root=plans --only='*v5e*'    # with libtpu installed; hours on two cores
    python -m benchmarks.plans --root=plans --only='*h200*'   # with XLA's GPU compiler installed
    python -m benchmarks.plans --root=plans --commands        # what would run

Every plan is a command of `bert_jax.tools.plan`. Those that are finished are kept in one record, of which
`benchmarks.results draw` makes the tables of docs/pods.md.
"""

import fnmatch
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from benchmarks.jobs import Job, Stop, Unit, run_unit
from bert_jax.devices.chips import GIB, GPUS
from bert_jax.errors import InputError
from bert_jax.storage.writing import write_json
from bert_jax.tools import cli

# The settings of all: what costs no accuracy that anybody reports, and moves and sends less.
COMMON = ("model.compute_dtype=bfloat16", "model.attention=fused", "model.gradient_dtype=bfloat16", "train.zero1=True")
ON_GPU = ("model.residual=fused",)


class Setting(NamedTuple):
    """What is planned: a model on a topology, in a phase of the paper's pre-training."""

    size: str
    phase: int
    topology: str
    rows: int  # of a chip
    changes: tuple[str, ...] = ()  # settings beside those of all

    @property
    def name(self) -> str:
        about = [self.size, f"phase{self.phase}", self.topology.replace(":", "-"), str(self.rows), *self.changes]
        return "_".join(about).replace("=", "-")

    @property
    def command(self) -> tuple[str, ...]:
        """The command, without the file for its figures."""
        changes = (*COMMON, *(ON_GPU if self.topology.partition(":")[0] in GPUS else ()), *self.changes)
        return (
            *(sys.executable, "-m", "bert_jax.tools.plan", f"--topology={self.topology}"),
            *(f"--config=configs/pretrain.py:{self.size},phase={self.phase}", f"--rows_per_chip={self.rows}"),
            *(f"--config.{change}" for change in changes),
        )


UNROLLED = ("model.unroll=24",)
SETTINGS = (
    Setting("large", 1, "v5e:16x16", 64),
    Setting("large", 2, "v5e:16x16", 16),
    Setting("large", 1, "v4:4x4x4", 64),
    Setting("large", 2, "v4:4x4x4", 16),
    Setting("large", 2, "v6e:16x16", 16),
    Setting("base", 1, "v5e:4x4", 128),
    Setting("base", 2, "v5e:4x4", 32),
    Setting("large", 1, "h200:8", 256),
    Setting("large", 2, "h200:8", 64),
    Setting("large", 2, "h100:8", 32),
    Setting("large", 2, "a100:8", 32),
    Setting("base", 1, "h200:8", 256),
    # Layers unrolled where a loop is the default, since it compiles in a tenth of the time.
    Setting("large", 1, "v5e:16x16", 64, UNROLLED),
    Setting("large", 2, "v5e:16x16", 16, UNROLLED),
    Setting("large", 2, "v4:4x4x4", 16, UNROLLED),
)

ROOT = flags.DEFINE_string("root", "", "where plans go; resumes if used")
ONLY = flags.DEFINE_string("only", "*", "a pattern of names, such as '*v5e*'")
RECORD = flags.DEFINE_string("record", "benchmarks/records/plans.json", "where the figures of all plans are kept")
COMMANDS = flags.DEFINE_bool("commands", False, "print the commands that wait, and run nothing")
MINUTES = flags.DEFINE_float("minutes", 0.0, "to stop after; 0 goes on to the end", lower_bound=0)


def unit_of(setting: Setting, root: Path) -> Unit:
    """Returns the unit of a setting: one command, and the file with its figures."""
    output = root / setting.name / "plan.json"
    return Unit(setting.name, 0, output.parent, (Job("plan", (*setting.command, f"--json={output}"), output),))


def make_record(settings: Sequence[Setting], root: Path, before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of the plans that are finished, by name, and of those `before` that are not made anew."""
    plans = dict(before)
    for setting in settings:
        (job,) = unit_of(setting, root).jobs
        if job.is_finished:
            (plan,) = json.loads(job.output.read_text(encoding="utf-8"))["plans"]
            plans[setting.name] = {"command": shlex.join(("python", *setting.command[1:])), **plan}
    return dict(sorted(plans.items()))


def plans_table(record: Mapping[str, Any], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a Markdown table of plans; `rows` are [name, label].

    Raises: InputError if a plan is not in the record.
    """
    titles = (
        *("", "chips", "rows a chip", "held at once, GiB (by arithmetic)", "of", "compiled / model's FLOPs"),
        *("HBM, GB", "sent, MB", "step, ms", "MFU", "compiled in"),
    )
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for name, label in rows:
        if name not in record:
            raise InputError(f"the record has no plan {name!r}; it has {', '.join(record)}")
        plan = record[name]
        held = plan["bytes"].get("held at once") or plan["bytes"]["total"]
        sent = sum(traffic["bytes"] for traffic in plan["collectives"])
        chips = plan["num_chips"]
        cells = [
            label,
            f"{chips}",
            f"{plan['batch_size'] // (plan['mesh']['data'] * plan['mesh']['fsdp'])} x {plan['row_length']}",
            f"{held / GIB:.1f} ({plan['estimate']['total'] / GIB:.1f})",
            f"{plan['hbm_bytes'] / GIB:.0f}",
            f"{plan['compiled_flops'] / plan['model_flops']:.3f}",
            f"{plan['moved_bytes'] / 1e9:.1f}",
            f"{sent / 1e6:,.0f}",
            f"{1e3 * plan['seconds']['step']:.1f}",
            f"{plan['mfu']:.1%}",
            f"{plan['compile_seconds'] / 60:.0f} min",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Runs the plans that wait; returns 1 if one failed."""
    if not ROOT.value:
        raise InputError("--root is needed: a directory for the plans")
    root, stop, failed = Path(ROOT.value), Stop(60 * MINUTES.value), 0
    chosen = [setting for setting in SETTINGS if fnmatch.fnmatch(setting.name, ONLY.value)]
    if not chosen:
        raise InputError(f"--only={ONLY.value} is no plan; plans: {', '.join(each.name for each in SETTINGS)}")
    with stop.on_signals():
        for setting in chosen:
            unit = unit_of(setting, root)
            if COMMANDS.value:
                print("\n".join(shlex.join(job.command) for job in unit.waiting))
            elif unit.waiting and not stop.asked:
                problem = run_unit(unit, stop)
                failed += " failed " in problem
                print(f"{setting.name}: {problem or 'finished'}", flush=True)
    if not COMMANDS.value:
        path = Path(RECORD.value)
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        write_json(path, make_record(SETTINGS, root, before))
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
