# SPDX-License-Identifier: Apache-2.0
"""Measuring side by side: rounds that alternate, medians with their spread, and where it all was measured.

A machine is never quite the same from minute to minute, so contenders take turns, and two are compared by the ratios
within a round, not by figures of different minutes. CPU seconds are kept too: on a busy machine they say more.
"""

import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.memory import most_memory
from bert_jax import __version__

CHECKOUT = Path(__file__).resolve().parents[1]
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


class Round(NamedTuple):
    """One turn of a contender."""

    seconds: float
    cpu_seconds: float  # of all threads
    counts: dict[str, float]  # of the work done, such as {"steps": 4, "tokens": 16384}


class Contender(NamedTuple):
    """What is measured: a name, and a function that does the work of one round."""

    name: str
    run: Callable[[], Round]
    facts: dict[str, Any]  # about it, beside its rounds; may grow while it runs


class Spread(NamedTuple):
    """The median of some figures, the least and the largest."""

    median: float
    low: float
    high: float


class Clock:
    """Measures wall and CPU seconds of what is done within a `with`; with `children`, of processes that ended too."""

    def __init__(self, children: bool = False) -> None:
        self._children = children
        self.seconds = self.cpu_seconds = 0.0

    def _cpu(self) -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN) if self._children else None
        return time.process_time() + (used.ru_utime + used.ru_stime if used else 0.0)

    def __enter__(self) -> "Clock":
        self._started = time.perf_counter(), self._cpu()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started[0]
        self.cpu_seconds = self._cpu() - self._started[1]

    def round(self, **counts: float) -> Round:
        """Returns the measured round, with its counts."""
        return Round(self.seconds, self.cpu_seconds, counts)


def alternate(
    contenders: Sequence[Contender],
    rounds: int,
    warmup: int,
    tell: Callable[[str], Any] = lambda line: None,
) -> dict[str, list[Round]]:
    """Returns the rounds of each contender after `warmup` turns that do not count; every other turn runs backwards."""
    for contender in contenders:
        for _ in range(warmup):
            first = contender.run()
            contender.facts.setdefault("first_round_seconds", round(first.seconds, 3))
        tell(f"{contender.name}: warm")
    measured: dict[str, list[Round]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            measured[contender.name].append(contender.run())
        tell(f"round {number + 1} of {rounds}")
    return measured


def spread(values: Sequence[float]) -> Spread:
    """Returns the median of some figures and their range."""
    return Spread(statistics.median(values), min(values), max(values))


def rate(rounds: Sequence[Round], count: str) -> Spread:
    """Returns the rate of a count per second."""
    return spread([one.counts[count] / one.seconds for one in rounds])


def per_step(rounds: Sequence[Round], cpu: bool = False) -> Spread:
    """Returns the seconds of a step, or its CPU seconds."""
    return spread(
        [(one.cpu_seconds if cpu else one.seconds) / one.counts["steps"] for one in rounds]
    )


def ratio(ours: Sequence[Round], theirs: Sequence[Round], cpu: bool = False) -> Spread:
    """Returns how many times as fast we are, a step against a step, by the rounds that stood beside each other."""

    def each(one: Round) -> float:
        return (one.cpu_seconds if cpu else one.seconds) / one.counts["steps"]

    return spread([each(their) / each(our) for our, their in zip(ours, theirs)])


def peak_memory(device: Any = None) -> dict[str, Any]:
    """Returns the most bytes that were in use so far: the device's own count, or else the process's resident set."""
    stats = device.memory_stats() if device is not None else None
    if stats and "peak_bytes_in_use" in stats:
        return {"peak_memory_bytes": int(stats["peak_bytes_in_use"]), "peak_memory_of": "device"}
    return {"peak_memory_bytes": most_memory(), "peak_memory_of": "process, resident"}


def environment(devices: Sequence[Any] = ()) -> dict[str, Any]:
    """Returns the context that a figure needs: commit, versions, devices, processor, and how busy it was."""
    versions = {"python": platform.python_version(), "bert_jax": __version__}
    for package in _PACKAGES:
        versions[package] = metadata.version(package)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "HEAD") or os.environ.get("BERT_JAX_COMMIT", ""),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": versions,
        "devices": {"count": len(devices), "kind": devices[0].device_kind if devices else "none"},
        "processor": _processor(),
        "cores": num_cores(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def num_cores() -> int:
    """Returns the cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on a Mac
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _git(*arguments: str) -> str:
    """Returns the output of a git command in the checkout, or "" if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(CHECKOUT), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of cells as lines of columns, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]  # fmt: skip


def figures(contender: Contender, rounds: Sequence[Round], peak: float = 0.0) -> dict[str, Any]:
    """Returns all figures of a contender, for JSON; shares of `peak` FLOP/s where that is known."""
    stats: dict[str, Any] = {
        "name": contender.name,
        **contender.facts,
        "steps_per_round": rounds[0].counts["steps"],
        "rounds": [{"seconds": one.seconds, "cpu_seconds": one.cpu_seconds} for one in rounds],
        "step_seconds": per_step(rounds)._asdict(),
        "step_cpu_seconds": per_step(rounds, cpu=True)._asdict(),
    }
    if (
        "side" in stats and "first_round_seconds" in stats
    ):  # with what it compiles; several programs where rows have several lengths
        usual = spread([one.seconds for one in rounds]).median
        stats.setdefault(
            "compile_seconds", max(0.0, round(stats["first_round_seconds"] - usual, 2))
        )
    for count in rounds[0].counts:
        if count != "steps":
            stats[f"{count}_per_second"] = rate(rounds, count)._asdict()
            stats[f"{count}_per_cpu_second"] = spread(
                [one.counts[count] / one.cpu_seconds for one in rounds]
            )._asdict()
    for kind in ("useful", "padded"):
        if peak and f"{kind}_flops" in rounds[0].counts:
            share = rate(rounds, f"{kind}_flops")
            stats[f"{kind}_mfu"] = {name: value / peak for name, value in share._asdict().items()}
    if "compiled_flops" in contender.facts:
        model_flops = rounds[0].counts["padded_flops"] / rounds[0].counts["steps"]
        stats["compiled_flops_of_padded"] = contender.facts["compiled_flops"] / model_flops
    return stats


def comparisons(
    contenders: Sequence[Contender], found: dict[str, list[Round]]
) -> list[dict[str, Any]]:
    """Returns us against each peer in its own precision, and our best precision against theirs."""
    ours = [contender for contender in contenders if contender.facts.get("side") == "ours"]
    theirs = [contender for contender in contenders if contender.facts.get("side") == "peer"]
    if not ours or not theirs:
        return []

    def compared(kind: str, our: Contender, their: Contender) -> dict[str, Any]:
        rounds = found[our.name], found[their.name]
        return {
            "kind": kind,
            "ours": our.name,
            "theirs": their.name,
            "times_as_fast": ratio(*rounds)._asdict(),
            "times_by_cpu_seconds": ratio(*rounds, cpu=True)._asdict(),
        }

    def fastest(side: Sequence[Contender]) -> Contender:
        return min(side, key=lambda contender: per_step(found[contender.name]).median)

    same = [
        compared("same precision", our, their)
        for their in theirs
        for our in ours
        if our.facts["precision"] == their.facts["precision"]
    ]
    return [*same, compared("best precision", fastest(ours), fastest(theirs))]


def figures_table(measured: Sequence[dict[str, Any]]) -> list[str]:
    """Returns figures as lines for people: medians, and the range of the time."""
    counts = [
        name
        for name in measured[0]
        if name.endswith("_per_second") and name != "padded_flops_per_second"
    ]
    counts += [name for name in measured[0] if name == "bytes_per_cpu_second"]
    shares = [name for name in ("useful_mfu", "padded_mfu") if name in measured[0]]
    heads = {
        "useful_flops_per_second": "GFLOP/s",
        "bytes_per_second": "MB/s",
        "bytes_per_cpu_second": "MB/CPU s",
    }
    rows = [
        ["", "ms a step (range)", "CPU ms", *(heads.get(name, name.replace("_per_second", "/s")) for name in counts),
         *(f"{name.replace('_mfu', '')} MFU" for name in shares), "memory", "compiled"]
    ]  # fmt: skip
    for one in measured:
        step = {name: 1e3 * value for name, value in one["step_seconds"].items()}
        scaled = {
            "useful_flops_per_second": 1e9,
            "bytes_per_second": 1e6,
            "bytes_per_cpu_second": 1e6,
        }
        rows.append(
            [one["name"], f"{step['median']:,.1f} ({step['low']:,.1f} to {step['high']:,.1f})",
             f"{1e3 * one['step_cpu_seconds']['median']:,.1f}",
             *(f"{one[name]['median'] / scaled.get(name, 1):,.1f}" for name in counts),
             *(f"{one[name]['median']:.1%}" for name in shares),
             f"{one['peak_memory_bytes'] / 2**30:.2f} GiB" if "peak_memory_bytes" in one else "",
             f"{one['compile_seconds']:.1f} s" if "compile_seconds" in one else ""]
        )  # fmt: skip
    return table(rows)


def comparison_lines(compared: Sequence[dict[str, Any]]) -> list[str]:
    """Returns comparisons as lines for people."""
    return [
        f"{one['kind']}: {one['ours']} is {_shown(one['times_as_fast'])} times as fast as {one['theirs']}; "
        f"by CPU seconds {_shown(one['times_by_cpu_seconds'])}"
        for one in compared
    ]


def _shown(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"
