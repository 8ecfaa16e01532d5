# SPDX-License-Identifier: Apache-2.0
"""Goodput: how many of a run's seconds went into steps that count, over all its restarts.

Every second belongs to one phase, so the phases add up to the wall time. The totals are a record of kind "goodput" in
`metrics.jsonl`, from which the next attempt continues. That is all that is left of an attempt that was killed.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bert_jax.devices.work import under_way

KIND = "goodput"
EVERY_SECONDS = 60  # the longest time between two records while steps are taken

# Seconds of a run, in the order in which they are shown.
PHASES = (
    "steps",  # training steps that count
    "start",  # from the start of the command to the first step, without compilation
    "compilation",
    "data",  # waiting for batches while the device may be idle
    "evaluation",
    "saving",  # checkpoints, revisions and the model, as far as training waits for them
    "lost",  # steps after the checkpoint that a later attempt resumed from
    "between",  # between two attempts, with what a killed attempt did after its last record
)


def _steady() -> float:
    """Returns seconds since the epoch, by a clock that nobody sets while this process runs."""
    return _EPOCH + time.clock_gettime(_CLOCK)


# the first goes on while a machine is suspended
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_EPOCH = time.time() - time.clock_gettime(_CLOCK)


class Clock:
    """The seconds of a run in each phase. It begins in the phase "start".

    With several processes each has a clock, and only that of the first is recorded. All times are `now()`, seconds
    since the epoch, because attempts may run on different hosts.
    """

    def __init__(self, started: float = 0.0, now: Callable[[], float] = _steady) -> None:
        """`started` is when this attempt began, in seconds since the epoch; 0 is now."""
        self._now = now
        self._since = started or now()
        self._wall = 0.0
        self._recorded = 0.0
        self._phase = "start"
        self._thread = threading.get_ident()
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.attempts = 1

    def resume(self, record: Mapping[str, Any]) -> None:
        """Adds the attempts before this one, from the record that `carried` returned. Call it before anything else."""
        for phase in PHASES:
            self.seconds[phase] += record.get(phase, 0.0)
        self.attempts += int(record["attempts"])
        # An attempt may begin before the last one has ended. A record of the future is of a clock that was set back, or
        # of another host.
        between = self._since - record["time"] if record["time"] <= self._now() else 0.0
        self.seconds["between"] += between
        self._wall += record["wall"] + between

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Registers the block as work under way, and counts its time for a phase, without the phases inside it."""
        before = self._switch(name)
        try:
            with under_way(name):
                yield
        finally:
            self._switch(before)

    def move(self, name: str, seconds: float) -> None:
        """Counts the last `seconds` for another phase than the current one."""
        current = self._switch(self._phase)
        moved = min(seconds, self.seconds[current])
        self.seconds[current] -= moved
        self.seconds[name] += moved

    def compiled(self, seconds: float) -> None:
        """Counts a compilation, wherever it was needed; for `work.on_compiled`."""
        if threading.get_ident() == self._thread:
            self.move("compilation", seconds)

    def is_due(self) -> bool:
        """Returns whether the last record is older than `EVERY_SECONDS`."""
        return self._now() - self._recorded > EVERY_SECONDS

    def record(self) -> dict[str, float]:
        """Returns the totals: seconds of all phases, "wall", "attempts", and the share of "steps" as "goodput"."""
        self._switch(self._phase)
        self._recorded = self._since
        wall = self._wall
        goodput = self.seconds["steps"] / wall if wall > 0 else 0.0
        seconds = {name: round(value, 3) for name, value in self.seconds.items()}
        return {
            "goodput": round(goodput, 5),
            "wall": round(wall, 3),
            **seconds,
            "attempts": self.attempts,
        }

    def _switch(self, name: str) -> str:
        """Begins a phase, and returns the previous one."""
        now = self._now()
        before = self._phase
        elapsed = max(0.0, now - self._since)
        self.seconds[before] += elapsed
        self._wall += elapsed
        self._since = now
        self._phase = name
        return before


def carried(records: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any] | None:
    """Returns the last goodput record as one of `step`, from which the run resumes; None if there is no record.

    Records that lack a number are passed over. The steps that were recorded after `step` count as lost. It may be
    applied to its own result.
    """
    complete = []
    for record in records:
        numbers = [value for name, value in record.items() if name != "kind"]
        has_all = {"time", "wall", "steps", "lost", "attempts"} <= record.keys()
        if record["kind"] == KIND and has_all and all(map(math.isfinite, numbers)):
            complete.append(record)
    if not complete:
        return None
    last = complete[-1]
    useful = [record["steps"] for record in complete if record["step"] <= step]
    lost = max(0.0, last["steps"] - (useful[-1] if useful else 0.0))
    return {**last, "step": step, "steps": last["steps"] - lost, "lost": last["lost"] + lost}


def describe(record: Mapping[str, float]) -> str:
    """Returns a record as one line of text, without phases that took no time."""
    parts = [f"{name} {record[name]:.1f}" for name in PHASES if record[name] >= 0.05]
    attempts = int(record["attempts"])
    return (
        f"goodput {record['goodput']:.1%} of {record['wall']:.1f} s in {attempts} attempt{'s' * (attempts > 1)}: "
        f"{', '.join(parts)}"
    )


def process_started() -> float:
    """Returns when this process started, in seconds since the epoch; now where the system does not tell."""
    now = time.time()
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    # a namespace of time may hide the start of the machine
    return now - age if 0 <= age < 3600 else now
