# SPDX-License-Identifier: Apache-2.0
"""A queue of commands that can be stopped and resumed at any moment. Finished jobs are not repeated.

A unit is a directory with jobs that run in order. A job is finished when its output exists: every command of this
project writes it last and atomically. A job that was stopped is started again and resumes.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.collecting import STARTS, UNIT
from bert_jax.storage.locks import lock_file
from bert_jax.storage.writing import write_json

LOG = "log.txt"
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_GRACE_SECONDS = 240  # after SIGTERM: training saves its state within it


class Job(NamedTuple):
    """A command, and the output that exists when it has finished."""

    name: str
    command: tuple[str, ...]
    output: Path

    @property
    def is_finished(self) -> bool:
        return self.output.exists()


class Unit(NamedTuple):
    """A model from one seed, and the jobs that measure it."""

    group: str
    seed: int
    directory: Path
    jobs: tuple[Job, ...]
    needs: Path | None = None  # an output of another unit, before which no job can start

    @property
    def waiting(self) -> list[Job]:
        return [job for job in self.jobs if not job.is_finished]

    @property
    def lacks(self) -> str:
        """What it waits for, as "waits for PATH"; "" if nothing keeps its jobs from starting."""
        return f"waits for {self.needs}" if self.needs and self.waiting and not self.needs.exists() else ""


class Stop:
    """Decides when to stop: after some time or at a signal, which is passed on to the running job."""

    def __init__(self, seconds: float, grace: float = _GRACE_SECONDS) -> None:
        self._until = time.monotonic() + seconds if seconds else float("inf")
        self._grace = grace
        self._asked = False

    @property
    def asked(self) -> bool:
        return self._asked or time.monotonic() >= self._until

    @property
    def seconds_left(self) -> float:
        return self._until - time.monotonic()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Makes SIGINT and SIGTERM ask to stop until the block ends."""

        def handle(*_: object) -> None:
            self._asked = True

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self, process: subprocess.Popen) -> int:
        """Returns the exit status of a process, which gets SIGTERM when it is time, and SIGKILL if it stays."""
        while (status := process.poll()) is None:
            if self.asked:
                process.terminate()
                try:
                    return process.wait(self._grace)
                except subprocess.TimeoutExpired:
                    process.kill()
                    return process.wait()
            time.sleep(0.2)
        return status


def run_unit(unit: Unit, stop: Stop) -> str:
    """Runs the waiting jobs of a unit. Returns "" if all are finished, or else a short reason.

    If another queue works on the unit, it is left to that one. If it lacks what it needs, nothing is started.
    """
    if unit.lacks:
        return unit.lacks
    unit.directory.mkdir(parents=True, exist_ok=True)
    with lock_file(unit.directory / ".lock", keep=True) as holder:
        if holder:
            return f"left to another queue ({holder})"
        write_json(unit.directory / UNIT, {"group": unit.group, "seed": unit.seed})
        for job in unit.waiting:
            if stop.asked:
                return f"stopped before {job.name}"
            print(f"{unit.group} seed {unit.seed}: {job.name}", flush=True)
            status = _run(unit.directory, job, stop)
            if stop.asked and not job.is_finished:
                return f"stopped in {job.name}"
            if status or not job.is_finished:
                return f"{job.name} failed with exit status {status}: {_last_line(unit.directory / LOG)}"
    return ""


def run_units(units: Sequence[Unit], stop: Stop) -> int:
    """Runs what waits of the units, and prints what came of each. Returns how many failed."""
    failed = 0
    with stop.on_signals():
        for unit in units:
            if unit.waiting and not stop.asked:
                problem = run_unit(unit, stop)
                failed += " failed " in problem
                print(f"{unit.group}: {problem or 'finished'}", flush=True)
    return failed


def _run(directory: Path, job: Job, stop: Stop) -> int:
    with open(directory / STARTS, "a", encoding="utf-8") as starts:
        starts.write(json.dumps({"job": job.name} | about_this_machine() | {"command": job.command}) + "\n")
    job.output.parent.mkdir(parents=True, exist_ok=True)
    with open(directory / LOG, "ab") as log:
        # In a session of its own: Ctrl-C reaches this process alone, which then stops the job once.
        process = subprocess.Popen(
            tied(job.command), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        return stop.wait(process)


def tied(command: Sequence[str]) -> list[str]:
    """Returns a command that gets SIGTERM when the process that starts it is killed; as it was where there is no prctl.

    Else a job outlives a queue that was killed, and keeps its work directory and the device.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    code = (
        "import ctypes, os, sys; "
        f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)}); "
        f"os.getppid() == {os.getpid()} or sys.exit(1); "  # it was killed before that
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", code, *command]


def _last_line(path: Path) -> str:
    lines = path.read_bytes()[-4000:].decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no output")


def about_this_machine() -> dict[str, Any]:
    """Returns when and where something is started: the time, the commit, the machine and the versions."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "machine": machine(),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
    }


def commit() -> str:
    """Returns the commit of this checkout, with "+" if files were changed since; without git, BERT_JAX_COMMIT or ""."""
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, text=True, capture_output=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD") if shutil.which("git") else ""
    if not head:
        return os.environ.get("BERT_JAX_COMMIT", "")
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def machine() -> str:
    """Returns the processor, its cores that may be used, and the GPUs."""
    name = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus: Sequence[str] = ()
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpus = subprocess.run(query, text=True, capture_output=True).stdout.split("\n")
    counted = "1 core" if cores == 1 else f"{cores} cores"
    return ", ".join([f"{counted} of {name}", *(gpu.strip() for gpu in gpus if gpu.strip())])
