# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed by SIGKILL again and again until they are done.

    python kills.py pretrain|finetune DATA START WORKDIR SEED KILLS EVENTS SECONDS

Each attempt is a forked process, killed at a seeded random moment: at the nth time that it opens, renames or removes
something in its work directory, or some time after it first does. EVENTS and SECONDS are those of an undisturbed run
on this machine; a kill comes after at most PART of either, so that several fall before the run is done. Prints as JSON
how often it was killed, and doing what; then the events and seconds of the last attempt, which is not killed.
"""

import collections
import dataclasses
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

# Nothing here starts JAX's backend or a thread: a fork would have neither.
import jax
from builders import tiny_run, topics_run

from bert_jax.finetuning import finetune
from bert_jax.pretraining import pretrain
from bert_jax.settings.finetuning import FinetuneTrainConfig
from bert_jax.settings.pretraining import CheckpointConfig, EvalConfig, MeshConfig, ReportConfig, TrainConfig

PART = 0.25
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.utime", "os.truncate")
REPORT = ReportConfig(every_steps=3, tensorboard=False, progress=False)


def run(kind: str, data: str, start: str, workdir: Path) -> None:
    """Trains 24 steps of pre-training or 20 of fine-tuning, evaluating every 4 or 5 and saving every 2 or 3."""
    if kind == "pretrain":
        config = tiny_run(
            Path(data),
            mesh=MeshConfig(data=1),
            train=TrainConfig(num_steps=24),
            eval=EvalConfig(every_steps=4),
            checkpoint=CheckpointConfig(every_steps=2),
            report=REPORT,
        )
        pretrain(config, workdir, jax.devices()[:1])
    else:
        config = topics_run(
            Path(data), start, train=FinetuneTrainConfig(num_epochs=2.0), eval=EvalConfig(every_steps=5), report=REPORT
        )
        config = dataclasses.replace(config, checkpoint=CheckpointConfig(every_steps=3))
        finetune(config, workdir, jax.devices()[:1])


class Clock:
    """How many events there were below the work directory, and when the first was, in seconds."""

    seen = 0
    start = 0.0

    def read(self) -> str:
        """Returns the events and the seconds since the first, as the words of a message."""
        return f"done {self.seen} {time.monotonic() - self.start}"


def kill_at(workdir: Path, number: int, seconds: float, told: int) -> Clock:
    """Kills this process at the nth event below the work directory, or `seconds` after its first, if not 0."""
    clock = Clock()

    def note(event: str, args: tuple) -> None:
        if event not in EVENTS or not isinstance(args[0], (str, os.PathLike)) or str(workdir) not in str(args[0]):
            return
        clock.seen += 1
        clock.start = clock.start or time.monotonic()
        if clock.seen == 1 and seconds:
            threading.Timer(seconds, lambda: (os.write(told, b"running"), os.kill(os.getpid(), signal.SIGKILL))).start()
        if clock.seen == number:
            os.write(told, f"{event} {Path(str(args[0])).name}".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(note)
    return clock


def attempt(arguments: list[str], number: int, seconds: float) -> tuple[int, str]:
    """Returns how a forked run ended, as `os.waitstatus_to_exitcode` says it, and what it was killed at or "done"."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            clock = kill_at(Path(arguments[3]), number, seconds, writing)
            run(arguments[0], arguments[1], arguments[2], Path(arguments[3]))
            os.write(writing, clock.read().encode())
            status = 0
        except BaseException:  # noqa: BLE001 - whatever it is, the parent reports that this attempt failed
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        what = stream.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), what


def main() -> None:
    *arguments, seed, kills, events, seconds = sys.argv[1:]
    rng = random.Random(int(seed))
    killed: collections.Counter[str] = collections.Counter()
    what = ""
    for number in range(int(kills) + 1):
        last = number == int(kills)
        by_time = not last and rng.random() < 0.4
        at = 0 if last or by_time else rng.randint(1, int(PART * int(events)))
        status, what = attempt(arguments, at, rng.uniform(0.0, PART * float(seconds)) if by_time else 0.0)
        if status not in (0, -signal.SIGKILL):
            sys.exit(f"attempt {number} ended with {status}")
        if status:
            killed[what.partition(" ")[0]] += 1
    _, events, seconds = what.split()
    print(json.dumps({"killed": killed, "events": int(events), "seconds": float(seconds)}))


if __name__ == "__main__":
    main()
