# SPDX-License-Identifier: Apache-2.0
"""Compares a run of several processes that is stopped, killed and resumed with fewer to an undisturbed run.

python benchmarks/interrupted.py --data=data --workdir=DIR --config=configs/pretrain.py:small --num_steps=48

It is stopped by SIGTERM to one process, then killed by SIGKILL, and resumed with as many processes; then stopped by
SIGTERM again and resumed with half of them. Draws both losses and their difference in DIR/interrupted.png.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
from absl import flags

from bert_jax.errors import InputError
from bert_jax.tools import cli
from bert_jax.training.report import read_metrics

_DATA = flags.DEFINE_string("data", "", "a prepared data set")
_WORKDIR = flags.DEFINE_string("workdir", "", "where both runs, their output and the picture go")
_CONFIG = flags.DEFINE_string("config", "configs/pretrain.py:small", "what train.py trains")
_PROCESSES = flags.DEFINE_integer("num_processes", 4, "of the job, a device each", lower_bound=2)
_STEPS = flags.DEFINE_integer("num_steps", 48, "of the run", lower_bound=16)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "rows of the global batch", lower_bound=2)
_MORE = flags.DEFINE_multi_string("set", [], "a flag more for train.py, such as --set=--config.mesh.fsdp=2")


def main() -> None:
    """Runs both, prints where they differ, and draws them."""
    if not _DATA.value or not _WORKDIR.value:
        raise InputError("--data and --workdir are needed: a data set of prepare_corpus, and a new directory")
    workdir = Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    many, few, steps = _PROCESSES.value, _PROCESSES.value // 2, _STEPS.value
    run(workdir / "whole", many)
    stops = [
        (f"SIGTERM to one, resumed by {many}", many, steps // 4, signal.SIGTERM),
        (f"SIGKILL, resumed by {many}", many, steps // 2, signal.SIGKILL),
        (f"SIGTERM to one, resumed by {few}", many, 3 * steps // 4, signal.SIGTERM),
    ]
    seen = []
    for what, count, step, number in stops:
        run(workdir / "interrupted", count, step, number)
        seen.append((what, max(losses(workdir / "interrupted"))))
    run(workdir / "interrupted", few)
    whole, interrupted = losses(workdir / "whole"), losses(workdir / "interrupted")
    same = [step for step in whole if whole[step] == interrupted[step]]
    worst = max(abs(whole[step] - interrupted[step]) for step in whole)
    for what, step in seen:
        print(f"step {step}: {what}")
    print(f"{len(same)} of {len(whole)} losses are the same bits, the first {leading(whole, same)} among them")
    print(f"the others differ by {worst:.2e} at most")
    draw(workdir / "interrupted.png", whole, interrupted, seen)


def run(workdir: Path, count: int, stop_at: int = 0, number: int = 0) -> None:
    """Runs `count` processes to the end, or sends one of them a signal after a step (SIGKILL to all, one by one)."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "train.py", f"--config={_CONFIG.value}", f"--workdir={workdir}"),
        f"--config.data.path={_DATA.value}",
        f"--config.data.batch_size={_BATCH_SIZE.value}",
        f"--config.train.num_steps={_STEPS.value}",
        f"--config.checkpoint.every_steps={max(1, _STEPS.value // 6)}",
        *("--config.report.every_steps=1", "--config.eval.every_steps=0"),
        *("--config.report.progress=False", "--config.report.tensorboard=False"),
        *_MORE.value,
    ]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    processes = []
    for process in range(count):
        joining = [f"--coordinator=localhost:{port}", f"--num_processes={count}", f"--process_id={process}"]
        with Path(f"{workdir}-{process}.log").open("a") as log:
            arguments = command + (joining if count > 1 else ["--distributed=off"])
            processes.append(subprocess.Popen(arguments, env=environment, stdout=log, stderr=log))
    while stop_at and max(losses(workdir), default=0) < stop_at:
        time.sleep(0.2)
        if any(process.poll() is not None for process in processes):
            break
    if stop_at:
        for process in reversed(processes) if number == signal.SIGKILL else processes[-1:]:
            process.send_signal(number)
    codes = [process.wait() for process in processes]
    expected = -number if number == signal.SIGKILL else 128 + number if number else 0
    if any(code != expected for code in codes):
        raise InputError(f"processes ended with {codes}, not {expected}; see {workdir}-*.log")


def losses(workdir: Path) -> dict[int, float]:
    """Returns the loss of each step that has been reported."""
    path = workdir / "metrics.jsonl"
    return (
        {line["step"]: line["loss"] for line in read_metrics(path) if line["kind"] == "train"} if path.exists() else {}
    )


def leading(whole: dict[int, float], same: list[int]) -> int:
    """Returns how many of the first steps are the same."""
    return next((place for place, step in enumerate(sorted(whole)) if step not in same), len(whole))


def draw(path: Path, whole: dict[int, float], interrupted: dict[int, float], seen: list[tuple[str, int]]) -> None:
    """Draws both losses over each other, and the difference below."""
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1))
    steps = sorted(whole)
    above.plot(steps, [whole[step] for step in steps], linewidth=5, alpha=0.3, label="left alone")
    above.plot(steps, [interrupted[step] for step in steps], linewidth=1.2, label="stopped, killed, resumed")
    below.plot(steps, [abs(whole[step] - interrupted[step]) for step in steps], ".-")
    below.set_yscale("symlog", linthresh=1e-8)
    below.set_ylim(bottom=0)
    for axes in (above, below):
        for _, step in seen:
            axes.axvline(step + 0.5, color="gray", linestyle=":", linewidth=1)
        axes.grid(alpha=0.3)
    for what, step in seen:
        place = {"transform": above.get_xaxis_transform(), "rotation": 90, "va": "top", "ha": "right"}
        above.text(step + 0.4, 0.98, what, fontsize=8, **place)
    above.set_ylabel("training loss")
    above.legend(loc="lower left")
    below.set_ylabel("difference")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    cli.run(main)
