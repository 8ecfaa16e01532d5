# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed by SIGKILL again and again until they are done.

    python kills.py pretrain|finetune DATA START WORKDIR SEED KILLS

Each attempt is a forked process, killed at a seeded random moment: at the nth time that it opens, renames or removes
something in its work directory, or some time after it first does. Prints how often it was killed, and doing what.
"""

import collections
import dataclasses
import json
import os
import random
import signal
import sys
import threading
import traceback
from pathlib import Path

# Nothing here starts JAX's backend or a thread: a fork would have neither.
import jax
from builders import tiny_run, topics_run

from bert_jax.finetuning import finetune
from bert_jax.pretraining import pretrain
from bert_jax.settings.finetuning import FinetuneTrainConfig
from bert_jax.settings.pretraining import CheckpointConfig, EvalConfig, MeshConfig, ReportConfig, TrainConfig

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


def kill_at(workdir: Path, number: int, seconds: float, told: int) -> None:
    """Kills this process at the nth event below the work directory, or `seconds` after its first, if not 0."""
    seen = 0

    def note(event: str, args: tuple) -> None:
        nonlocal seen
        if event not in EVENTS or not isinstance(args[0], (str, os.PathLike)) or str(workdir) not in str(args[0]):
            return
        seen += 1
        if seen == 1 and seconds:
            threading.Timer(seconds, lambda: (os.write(told, b"running"), os.kill(os.getpid(), signal.SIGKILL))).start()
        if seen == number:
            os.write(told, f"{event} {Path(str(args[0])).name}".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(note)


def attempt(arguments: list[str], number: int, seconds: float) -> tuple[int, str]:
    """Returns how a forked run ended, as `os.waitstatus_to_exitcode` says it, and what it was killed at."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            kill_at(Path(arguments[3]), number, seconds, writing)
            run(arguments[0], arguments[1], arguments[2], Path(arguments[3]))
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
    *arguments, seed, kills = sys.argv[1:]
    rng = random.Random(int(seed))
    killed: collections.Counter[str] = collections.Counter()
    for number in range(int(kills) + 1):
        last = number == int(kills)
        by_time = not last and rng.random() < 0.4
        at = 0 if last or by_time else rng.randint(1, 250)
        status, what = attempt(arguments, at, rng.uniform(0.0, 4.0) if by_time else 0.0)
        if status not in (0, -signal.SIGKILL):
            sys.exit(f"attempt {number} ended with {status}")
        if status:
            killed[what.partition(" ")[0]] += 1
    print(json.dumps(killed))


if __name__ == "__main__":
    main()
