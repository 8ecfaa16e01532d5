# SPDX-License-Identifier: Apache-2.0
"""Plans of settings worth running, for docs/pods.md: a queue of compilations. Starting it again resumes it.

    python -m benchmarks.plans --root=plans --only='*v5e*'    # with libtpu installed; hours on two cores
    python -m benchmarks.plans --root=plans --only='*h200*'   # with XLA's GPU compiler installed
    python -m benchmarks.plans --root=plans --commands        # what would run

Every plan is a command of `bert_jax.tools.plan`. Those that are finished are kept in one record, of which
`benchmarks.results draw` makes the tables of docs/pods.md.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.jobs import Job, Unit
from benchmarks.queues import ROOT, run_queue
from bert_jax.devices.chips import GPUS
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
NO_DROPOUT = ("model.hidden_dropout_rate=0", "model.attention_dropout_rate=0")
SETTINGS = (
    Setting("large", 1, "v5e:16x16", 64),
    Setting("large", 2, "v5e:16x16", 16),
    Setting("large", 1, "v4:4x4x4", 128),
    Setting("large", 2, "v4:4x4x4", 32),
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
    Setting("large", 1, "v4:4x4x4", 128, UNROLLED),
    Setting("large", 2, "v4:4x4x4", 32, UNROLLED),
    # Half the rows, for what a larger batch gains.
    Setting("large", 1, "v4:4x4x4", 64, UNROLLED),
    Setting("large", 2, "v4:4x4x4", 16, UNROLLED),
    # What dropout costs in bytes.
    Setting("large", 1, "v5e:16x16", 64, NO_DROPOUT),
    Setting("large", 2, "v5e:16x16", 16, NO_DROPOUT),
    Setting("large", 2, "h200:8", 64, NO_DROPOUT),
)


def unit_of(setting: Setting, root: Path) -> Unit:
    """Returns the unit of a setting: one command, and the file with its figures."""
    output = root / setting.name / "plan.json"
    return Unit(setting.name, 0, output.parent, (Job("plan", (*setting.command, f"--json={output}"), output),))


def read_plan(name: str, output: Path) -> dict[str, Any]:
    """Returns the figures of a plan, with the command."""
    (plan,) = json.loads(output.read_text(encoding="utf-8"))["plans"]
    (setting,) = [each for each in SETTINGS if each.name == name]
    return {"command": shlex.join(("python", *setting.command[1:])), **plan}


def main() -> int:
    """Runs the plans that wait; returns 1 if one failed."""
    return run_queue([unit_of(setting, Path(ROOT.value)) for setting in SETTINGS], read_plan, "plans")


if __name__ == "__main__":
    cli.run(main)
