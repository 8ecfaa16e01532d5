# SPDX-License-Identifier: Apache-2.0
"""The records of `benchmarks.gpu`: one JSON file a stage, whole after each measurement, and the tables drawn of them.

{"format": 1, "stage": "1", "rehearsal": false, "about": {...}, "rows": {name: a record of benchmarks.bench},
 "tests": {...}, "profile": {...}, "failed": {name: reasons}, "waiting": [names]}
"""

import heapq
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_stages as stages
from benchmarks.jobs import LOG, Unit, commit, machine
from bert_jax.errors import InputError
from bert_jax.storage.writing import write_json

FORMAT = 1
_PACKAGES = """
    jax jaxlib jax-cuda13-plugin jax-cuda13-pjrt jax-cuda12-plugin flax optax orbax-checkpoint numpy torch triton
    transformers nvidia-cudnn-cu13 nvidia-cublas nvidia-cuda-runtime
""".split()
_QUERY = ("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory", "power.limit")
_VARIABLES = ("JAX_", "XLA_", "NVIDIA_TF32", "CUDA_", "NCCL_")


def about(kit: Mapping[str, Any], sources: str, rehearsal: bool) -> dict[str, Any]:
    """Returns what all rows of a record share: device, driver and CUDA, versions, commit, environment, the kit.

    Args:
      kit: the manifest of the kit.
      sources: the digest of the code that runs here.
      rehearsal: whether this is no measurement.
    """
    here = commit()
    return {
        "rehearsal": rehearsal,
        "about": {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": machine(),
            "gpu": gpu_facts(),
            "python": platform.python_version(),
            "versions": versions(),
            "commit": here or kit["commit"] + ("" if kit["sources"] == sources else "+"),
            "sources": sources,
            "environment": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(_VARIABLES) and "/" not in value  # a folder of this machine says nothing
            },
            "kit": {name: kit[name] for name in ("commit", "data", "pretraining", "time")},
        },
    }


def versions() -> dict[str, str]:
    """Returns the versions of the libraries that a figure may depend on, of those that are there."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def gpu_facts() -> dict[str, str]:
    """Returns what nvidia-smi says of the first GPU, with the version of CUDA that the driver has; {} without one."""
    if not shutil.which("nvidia-smi"):
        return {}
    query = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    found: dict[str, str] = dict(zip(_QUERY, values))
    head = subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
    if "CUDA Version:" in head:
        found["cuda"] = head.partition("CUDA Version:")[2].split()[0]
    return found


def write_stage(
    out: Path, stage: str, units: Sequence[Unit], facts: Mapping[str, Any], problems: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Writes the record of stage 1 or 2 and what belongs to it, and returns it."""
    rows, waiting = {}, []
    record: dict[str, Any] = {"format": FORMAT, "stage": stage, **facts}
    for unit in units:
        output = unit.jobs[-1].output
        if not output.exists():
            waiting.append(unit.group)
        elif output.name == stages.BENCH:
            rows[unit.group] = json.loads(output.read_text(encoding="utf-8"))
        elif output.name == stages.TESTS:
            record["tests"] = read_tests(output)
        elif output.name == stages.PROFILE:
            record["profile"] = json.loads(output.read_text(encoding="utf-8"))
            archive = output.with_name(stages.ARCHIVE)
            if archive.exists():
                shutil.copyfile(archive, out / f"gpu_{stages.ARCHIVE}")
    failed = {name: list(problems[name]) for name in problems if name in waiting}
    if "tests" in record and record["tests"]["failed"]:
        failed["tests"] = record["tests"]["failed"]
    record |= {"rows": rows, "failed": failed, "waiting": [name for name in waiting if name not in failed]}
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"gpu_stage{stage}.json", record)
    logs = [(unit.group, unit.directory / LOG) for unit in units if (unit.directory / LOG).exists()]
    text = "".join(f"=== {name}\n{log.read_text(errors='replace')[-20_000:]}\n" for name, log in logs)
    (out / f"gpu_stage{stage}.log").write_text(text, encoding="utf-8")
    return record


def read_stage(folders: Sequence[Path], stage: str) -> dict[str, Any]:
    """Returns the record of a stage from the first folder that has one; an empty one if none has.

    Raises: InputError if it is damaged.
    """
    for folder in folders:
        if (path := folder / f"gpu_stage{stage}.json").is_file():
            return load(path)
    return {"rows": {}, "rehearsal": False}


def load(path: Path) -> dict[str, Any]:
    """Returns the record of a stage in a file. Raises: InputError if it is damaged or something else."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] == FORMAT and isinstance(record["rows"], dict):
            return record
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{path} is damaged, or no record of a GPU's stage of format {FORMAT}; copy it again")


def read_tests(path: Path) -> dict[str, Any]:
    """Returns how many tests passed and were skipped, and the names and first lines of those that failed."""
    counts, failed = {"passed": 0, "skipped": 0}, []
    for case in ElementTree.parse(path).iter("testcase"):
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            words = (problem.get("message") or "").split("\n")[0]
            failed.append(f"{case.get('name')}: {words[:300]}")
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return {**counts, "failed": failed}


def error_words(log: Path) -> str:
    """Returns the line of a log that names an error of XLA or torch, after a colon; "" if none does."""
    text = log.read_text(errors="replace") if log.exists() else ""
    marks = ("RESOURCE_EXHAUSTED", "OutOfMemory", "INTERNAL:", "UNIMPLEMENTED", "Error:")
    lines = [line.strip() for line in text.splitlines() if any(mark in line for mark in marks)]
    return f" ({lines[-1][:300]})" if lines else ""


# Profiles


def summarize(profile: Any, top: int) -> list[dict[str, Any]]:
    """Returns, for each line of each device (of the host where there is none), seconds by the name of its events."""
    planes = list(profile.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:") and "CUSTOM" not in plane.name]
    chosen = devices or [plane for plane in planes if plane.name.startswith("/host:CPU")]
    return [
        {"plane": plane.name, "line": line.name} | found
        for plane in chosen
        for line in plane.lines
        if (found := by_name(((event.name, event.duration_ns) for event in line.events), top))
    ]


def by_name(events: Iterable[tuple[str, float]], top: int) -> dict[str, Any]:
    """Returns the sum of (name, nanoseconds) in all and of the `top` longest kinds; {} without events.

    Numbers at the end of a name tell instances of one kind apart, so they are cut off.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for name, nanoseconds in events:
        kind = re.sub(r"(?:[._-]\d+)+$", "", name) or name
        seconds[kind] += nanoseconds / 1e9
        counts[kind] += 1
    if not seconds:
        return {}
    longest = heapq.nlargest(top, seconds.items(), key=lambda item: item[1])
    rows = [{"name": name, "seconds": value, "count": counts[name]} for name, value in longest]
    return {"seconds": sum(seconds.values()), "kinds": rows}


# Tables


def step_table(record: Mapping[str, Any], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a Markdown table of step times, throughput, MFU and memory; `rows` are [name, label].

    Raises: InputError if a row was not measured.
    """
    lines = [
        "| | ms a step | sequences/s | useful MFU | padded MFU | peak memory, GiB | compiled in, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, label in rows:
        ours = _row(record, name)["figures"][0]
        cells = [
            label,
            _milliseconds(ours["step_seconds"]),
            f"{ours['sequences_per_second']['median']:,.0f}",
            *(f"{ours[kind]['median']:.1%}" if kind in ours else "" for kind in ("useful_mfu", "padded_mfu")),
            f"{ours['peak_memory_bytes'] / 2**30:.1f}" if ours.get("peak_memory_of") == "device" else "",
            f"{ours['compile_seconds']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def peers_table(record: Mapping[str, Any], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a Markdown table of our step beside each peer's; `rows` are [name, label].

    Raises: InputError if a row was not measured.
    """
    lines = ["| | | ms a step | we are times as fast | peak memory, GiB |", "|---|---|---|---|---|"]
    for name, label in rows:
        row = _row(record, name)
        ratios = {one["theirs"]: one["times_as_fast"] for one in row["comparisons"] if one["kind"] == "same precision"}
        for figures in row["figures"]:
            ratio = ratios.get(figures["name"])
            told = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else ""
            memory = f"{figures['peak_memory_bytes'] / 2**30:.1f}" if figures["peak_memory_of"] == "device" else ""
            cells = (label, figures["name"], _milliseconds(figures["step_seconds"]), told, memory)
            lines.append(f"| {' | '.join(cells)} |")
            label = ""
        lines += [f"| | torch {mode} | did not run | | |" for mode in row["failed"]]
    return lines


def _row(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if record.get("rehearsal") is not False:
        raise InputError("the record is of a rehearsal: its figures are no measurements; collect it on a GPU")
    if name not in record.get("rows", {}):
        raise InputError(f"{name} was not measured; there are {', '.join(record.get('rows', {})) or 'no rows'}")
    return record["rows"][name]


def _milliseconds(step: Mapping[str, float]) -> str:
    return f"{1e3 * step['median']:,.1f} ({1e3 * step['low']:,.1f} to {1e3 * step['high']:,.1f})"
