# SPDX-License-Identifier: Apache-2.0
"""Tables of Markdown from records of runs: a record is one small file that can be committed.

    python -m benchmarks.tables --collect='runs/recipe/*' --record=recipe.json.gz
    python -m benchmarks.tables --record=recipe.json.gz --columns=evaluation:heldout.mlm_loss,pairs:blimp,task:sst2
    python -m benchmarks.tables --record=recipe.json.gz --columns=pairs:blimp --baseline=short_rows_first

A record is {"format": 1, "units": [unit, ...]}. A unit is a model of one seed and what was measured with it, read from
a directory GROUP/seedN, or GROUP for seed 0. There are, as far as they exist: the settings and the last evaluation of
pretrain/ (or of the directory itself), tasks/NAME/results.json, tasks/NAME/runs/*_seedN/results.json, and the JSON that
`evaluate` and `score_sentences --pairs` wrote with --output to evaluations/NAME.json and pairs/NAME.json.

A cell is the mean over the seeds of pre-training, with the standard deviation and their number. A difference to the
baseline is over the seeds that both have, in pairs, with the interval of Student's t at 95 %.
"""

import glob
import gzip
import json
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from bert_jax.errors import InputError, shown
from bert_jax.settings.rules import suggest
from bert_jax.storage.files import read_json
from bert_jax.storage.writing import atomic_path
from bert_jax.tools import cli
from bert_jax.training.report import METRICS_FILE, read_metrics

Record = dict[str, Any]

COLLECT = flags.DEFINE_string(
    "collect", "", "directories of units, as a pattern, to add to --record"
)
RECORD = flags.DEFINE_string("record", "", "the record, a .json.gz file")
COLUMNS = flags.DEFINE_list(
    "columns", [], "evaluation:NAME.METRIC, pairs:NAME, task:NAME[.METRIC] or heldout:METRIC"
)
ROWS = flags.DEFINE_list(
    "rows", [], "groups in the order of the table; all, in the record's order, if not given"
)
BASELINE = flags.DEFINE_string(
    "baseline", "", "a group: shows the differences of the others to it instead"
)

# Directories of an absolute path, within a flag or a pattern too: a record says what was read, not where it lay.
_DIRECTORIES = re.compile(r"(?<![\w.~/-])/(?:[^\s/,=:]+/)*(?=[^\s/])")

# Student's t at 97.5 %, by degrees of freedom from 1 on; beyond, the normal distribution is used.
_STUDENT = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)


def read_record(path: Path) -> Record:
    """Returns a record. Raises: InputError if it is missing or damaged."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"{path} is not a record ({type(error).__name__}); make one with --collect"
        ) from None
    if (
        not isinstance(record, dict)
        or record.get("format") != 1
        or not isinstance(record.get("units"), list)
    ):
        raise InputError(f"{path} is not a record of format 1; make one with --collect")
    return record


def collect(directories: Sequence[Path], record: Record) -> Record:
    """Returns a record with the units of some directories in place of those of the same group and seed.

    Raises: InputError if a directory has nothing to collect.
    """
    units = {(unit["group"], unit["seed"]): unit for unit in record["units"]}
    for directory in directories:
        unit = collect_unit(directory)
        units[unit["group"], unit["seed"]] = unit
    return {"format": 1, "units": [units[key] for key in sorted(units)]}


def collect_unit(directory: Path) -> dict[str, Any]:
    """Returns the measurements in a directory. Raises: InputError if there are none."""
    seed = re.fullmatch(r"seed(\d+)", directory.name)
    group = directory.parent.name if seed else directory.name
    unit: dict[str, Any] = {"group": group, "seed": int(seed[1]) if seed else 0}
    pretrain = directory / "pretrain" if (directory / "pretrain").is_dir() else directory
    if (pretrain / METRICS_FILE).is_file():
        records = read_metrics(pretrain / METRICS_FILE)
        evaluations = [record for record in records if record["kind"] == "eval"]
        unit["settings"] = read_json(pretrain / "config.json")["run"]
        unit["heldout"] = {
            name: [record.get(name) for record in evaluations] for name in (evaluations or [{}])[-1]
        }
    for kind in ("evaluations", "pairs"):
        if files := sorted((directory / kind).glob("*.json")):
            unit[kind] = {path.stem: read_json(path) for path in files}
    tasks = {
        path.name: scores
        for path in sorted((directory / "tasks").glob("*/"))
        if (scores := _task(path))
    }
    if tasks:
        unit["tasks"] = tasks
    if not unit.keys() - {"group", "seed"}:
        raise InputError(
            f"{directory} has nothing to collect: no {METRICS_FILE}, evaluations/, pairs/ or tasks/"
        )
    return _without_directories(unit)


def _without_directories(value: Any) -> Any:
    """Returns JSON values with the last parts of paths alone."""
    if isinstance(value, dict):
        return {name: _without_directories(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_directories(item) for item in value]
    return _DIRECTORIES.sub("", value) if isinstance(value, str) else value


def _task(directory: Path) -> dict[str, Any]:
    """Returns {"metric": name, "runs": {seed: metrics}} of a fine-tuning run or of a grid; {} without results."""
    results = {}
    for path in (*sorted(directory.glob("runs/*/results.json")), directory / "results.json"):
        if path.is_file():
            seed = re.search(r"_seed(\d+)$", path.parent.name)
            results[seed[1] if seed else "0"] = read_json(path)
    if not results:
        return {}
    metric = next(iter(results.values()))["metric"]
    return {"metric": metric, "runs": {seed: result["metrics"] for seed, result in results.items()}}


def value_of(unit: Mapping[str, Any], column: str) -> float | None:
    """Returns a metric of a unit, None if it was not measured; of a task the mean over the seeds of fine-tuning.

    Raises: InputError if the column is misspelled, or the measurements lack the metric.
    """
    kind, _, name = column.partition(":")
    name, _, metric = name.partition(".")
    if kind == "heldout":
        values = unit.get("heldout", {}).get(name)
        return values[-1] if values else None
    if kind == "pairs":
        return unit["pairs"][name]["overall"]["accuracy"] if name in unit.get("pairs", {}) else None
    if kind not in ("evaluation", "task"):
        raise InputError(
            f"column {shown(column)} is not evaluation:NAME.METRIC, pairs:NAME, task:NAME, heldout:METRIC"
        )
    entry = unit.get("evaluations" if kind == "evaluation" else "tasks", {}).get(name)
    if entry is None:
        return None
    runs = [entry["metrics"]] if kind == "evaluation" else list(entry["runs"].values())
    metric = metric or entry.get("metric", "")
    if missing := [run for run in runs if metric not in run]:
        raise InputError(
            f"column {shown(column)}: {name} has no metric {metric!r}{suggest(metric, missing[0])}"
        )
    return statistics.mean(run[metric] for run in runs)


def values_of(record: Record, group: str, column: str) -> dict[int, float]:
    """Returns the values of a group by seed."""
    values = {
        unit["seed"]: value_of(unit, column) for unit in record["units"] if unit["group"] == group
    }
    return {seed: value for seed, value in values.items() if value is not None}


def table(
    record: Record, columns: Sequence[str], rows: Sequence[str] = (), baseline: str = ""
) -> list[str]:
    """Returns the lines of a table. Raises: InputError if a group or a metric is unknown."""
    groups = list(dict.fromkeys(unit["group"] for unit in record["units"]))
    for name in (*rows, *([baseline] if baseline else [])):
        if name not in groups:
            raise InputError(
                f"the record has no group {name!r}{suggest(name, groups)}; it has {', '.join(groups)}"
            )
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    for group in rows or groups:
        values = [values_of(record, group, column) for column in columns]
        if baseline and group != baseline:
            lines.append(
                [
                    group,
                    *(
                        difference(own, values_of(record, baseline, c))
                        for own, c in zip(values, columns)
                    ),
                ]
            )
        elif not baseline:
            lines.append([group, *map(cell, values)])
    return [f"| {' | '.join(line)} |" for line in lines]


def cell(values: Mapping[int, float]) -> str:
    """Returns a mean, with the standard deviation and the number of seeds if there are several."""
    if not values:
        return ""
    mean = f"{statistics.mean(values.values()):.4g}"
    return (
        f"{mean} ± {statistics.stdev(values.values()):.2g} ({len(values)})"
        if len(values) > 1
        else mean
    )


def difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> str:
    """Returns the mean difference over the seeds that both have, with its interval if these are two or more."""
    return told_apart(values, baseline)[0]


def told_apart(values: Mapping[int, float], baseline: Mapping[int, float]) -> tuple[str, str]:
    """Returns `difference`, and its verdict: "higher", "lower" or "not told apart"; "" without interval."""
    seeds = values.keys() & baseline.keys()
    if not seeds:
        return "", ""
    differences = [values[seed] - baseline[seed] for seed in seeds]
    mean = statistics.mean(differences)
    if len(seeds) == 1:
        return f"{mean:+.4g} (one seed)", ""
    student = _STUDENT[len(seeds) - 2] if len(seeds) - 2 < len(_STUDENT) else 1.96
    half = student * statistics.stdev(differences) / math.sqrt(len(seeds))
    verdict = "higher" if mean > half else "lower" if mean < -half else "not told apart"
    return f"{mean:+.4g} [{mean - half:+.4g}, {mean + half:+.4g}] ({len(seeds)})", verdict


def main() -> None:
    """Collects, or prints a table."""
    if not RECORD.value or not (COLLECT.value or COLUMNS.value):
        raise InputError("--record is needed, with --collect=PATTERN or --columns=NAME,...")
    path = Path(RECORD.value)
    if COLLECT.value:
        directories = [
            Path(folder) for folder in sorted(glob.glob(COLLECT.value)) if Path(folder).is_dir()
        ]
        if not directories:
            raise InputError(
                f"--collect={COLLECT.value} names no directory; quote a pattern of units"
            )
        record = collect(
            directories, read_record(path) if path.exists() else {"format": 1, "units": []}
        )
        with atomic_path(path) as temporary:
            temporary.write_bytes(
                gzip.compress(json.dumps(record, sort_keys=True).encode(), mtime=0)
            )
        print(f"{len(record['units'])} units in {path}", file=sys.stderr)
    if COLUMNS.value:
        print("\n".join(table(read_record(path), COLUMNS.value, ROWS.value, BASELINE.value)))


if __name__ == "__main__":
    cli.run(main)
