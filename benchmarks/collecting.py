# SPDX-License-Identifier: Apache-2.0
"""Collects what result pages need from work directories into a record: one small file that can be committed.

A record is {"format": 1, "units": [unit, ...]}. A unit is a model that was trained from one seed and everything that
was measured with it; it is read from a directory of `benchmarks.ablations`:

    unit.json        {"group": "no_nsp", "seed": 1}; without it the names of the directory's parent and of itself
    starts.jsonl     a line for each time a job was started: time, commit, machine, versions, command; those of
                     "pretrain" are kept
    pretrain/        the work directory of train.py
    tasks/NAME/      work directories of finetune.py, of one run or of a sweep
    evaluations/*.json, pairs/*.json     what `evaluate --output` and `score_sentences --pairs --output` wrote

A work directory of train.py or finetune.py alone is a unit too, of the group that its directory is named.
"""

import gzip
import json
import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.errors import InputError, one_line, shown
from bert_jax.storage.writing import atomic_path
from bert_jax.training.report import METRICS_FILE, read_metrics

FORMAT = 1
UNIT, STARTS, PRETRAIN, TASKS, EVALUATIONS, PAIRS = (
    "unit.json",
    "starts.jsonl",
    "pretrain",
    "tasks",
    "evaluations",
    "pairs",
)
# Directories of an absolute path, within a flag or a glob too: a record says what was read, not where it lay.
_DIRECTORIES = re.compile(r"(?<![\w.~/-])/(?:[^\s/,=:]+/)*(?=[^\s/])")
_DIGITS = 6  # of a metric: what rounding in float32 leaves to be told apart

Unit = dict[str, Any]


def collect(directories: Sequence[Path]) -> dict[str, Any]:
    """Returns the record of some directories, sorted by group and seed.

    Raises: InputError if one of them holds nothing to collect, a file is damaged, or two have one group and seed.
    """
    units = [collect_unit(directory) for directory in directories]
    places: dict[tuple[str, int], Path] = {}
    for unit, directory in zip(units, directories, strict=True):
        other = places.setdefault((unit["group"], unit["seed"]), directory)
        if other != directory:
            raise InputError(
                f"{other} and {directory} are both group {unit['group']!r}, seed {unit['seed']}; name them differently "
                f"in {UNIT}, or give one of them"
            )
    return merged(units, [])


def merged(new: Sequence[Unit], old: Sequence[Unit]) -> dict[str, Any]:
    """Returns the record of new units and of those old ones that are none of them, sorted by group and seed."""
    units = {(unit["group"], unit["seed"]): unit for unit in (*old, *new)}
    return {"format": FORMAT, "units": [units[key] for key in sorted(units)]}


def collect_unit(directory: Path) -> Unit:
    """Returns the results of a unit. Raises: InputError if it has none, or a file is damaged."""
    try:
        return _collect_unit(directory)
    except (AttributeError, IndexError, KeyError, TypeError) as error:  # JSON without what a command wrote there
        what = f"{type(error).__name__}: {one_line(error)[:100]}"
        raise InputError(f"a file in {directory} is damaged ({what}); remove it, and make it again") from None


def _collect_unit(directory: Path) -> Unit:
    about = read_json(directory / UNIT) if (directory / UNIT).is_file() else {}
    if (
        not isinstance(about, dict)
        or not isinstance(about.get("group", ""), str)
        or type(about.get("seed", 0)) is not int
    ):
        raise InputError(f'{directory / UNIT} is {shown(about)}; it has a name and a whole number: "group" and "seed"')
    group = about.get("group") or (
        directory.parent.name if re.fullmatch(r"seed\d+", directory.name) else directory.name
    )
    unit: Unit = {"group": group, "seed": about["seed"] if "seed" in about else _seed_of(directory)}
    if (directory / STARTS).is_file():
        starts = [line for line in read_lines(directory / STARTS) if isinstance(line, dict)]
        unit["starts"] = [line for line in starts if line.get("job", PRETRAIN) == PRETRAIN]
    pretrain = directory / PRETRAIN
    if not pretrain.is_dir() and (directory / METRICS_FILE).is_file() and not _is_finetuning(directory):
        pretrain = directory
    if (pretrain / METRICS_FILE).is_file():
        unit |= _pretraining(pretrain)
    tasks = {path.name: path for path in sorted((directory / TASKS).glob("*/"))}
    if not tasks and (_is_finetuning(directory) or (directory / "runs").is_dir()):
        tasks = {"": directory}
    found = [(name, scores) for name, path in tasks.items() if (scores := _task(path))]
    if found:
        unit["tasks"] = {name or scores["name"]: scores for name, scores in found}
    for kind in (EVALUATIONS, PAIRS):
        if files := sorted((directory / kind).glob("*.json")):
            unit[kind] = {path.stem: _score(path) for path in files}
    if not set(unit) - {"group", "seed", "starts"}:
        raise InputError(f"{directory} has nothing to collect: no {METRICS_FILE}, {TASKS}/, {EVALUATIONS}/ or {PAIRS}/")
    return _without_directories(unit)


def _seed_of(directory: Path) -> int:
    """Returns the seed in the name of a directory, such as "seed1"; or that of its settings, or 0."""
    if name := re.search(r"seed(\d+)$", directory.name):
        return int(name[1])
    config = next((path for place in (".", PRETRAIN) if (path := directory / place / "config.json").is_file()), None)
    return read_json(config).get("run", {}).get("train", {}).get("seed", 0) if config else 0


def _without_directories(value: Any) -> Any:
    """Returns JSON values with absolute paths cut to their last part."""
    if isinstance(value, dict):
        return {key: _without_directories(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_directories(each) for each in value]
    return _DIRECTORIES.sub("", value) if isinstance(value, str) else value


def _is_finetuning(directory: Path) -> bool:
    config = directory / "config.json"
    return config.is_file() and "task_settings" in read_json(config)


def _pretraining(workdir: Path) -> Unit:
    """Returns settings and held-out metrics by step, in columns; and how much was trained on, if that is known."""
    config = read_json(workdir / "config.json")
    records = read_metrics(workdir / METRICS_FILE)
    heldout = [record for record in records if record["kind"] == "eval"]
    names = sorted({name for record in heldout for name in record} - {"kind", "time", "step"})
    columns = {name: [_short(record.get(name)) for record in heldout] for name in names}
    unit = {"model": config.get("model"), "settings": config.get("run")}
    unit["heldout"] = {"step": [record["step"] for record in heldout]} | columns
    unit["steps"] = max((record["step"] for record in records), default=0)
    if goodput := read_metrics(workdir / METRICS_FILE, ["goodput"]):
        unit["seconds"] = round(goodput[-1]["steps"])  # of training alone, those of all starts
    if (workdir / "pretrained" / "config.json").is_file():
        unit["trained"] = read_json(workdir / "pretrained" / "config.json").get("trained", {})
    return unit


def _task(workdir: Path) -> dict[str, Any] | None:
    """Returns the metrics of each run of a fine-tuning, by its seed; of a grid of rates those of the best by its mean.

    The best of those that have most seeds: runs that diverged or have not finished have no score, and means over fewer
    runs are not comparable. `missing` is how many the best has not. None if no run has finished.
    """
    from benchmarks.examples import right_answers
    from bert_jax.tasks.results import read_results  # which imports jax; drawing pages needs none

    grid = sorted(workdir.glob("runs/*/"))
    planned = {int(found[1]) for place in grid if (found := re.search(r"seed(\d+)$", place.name))}
    if (workdir / "sweep.json").is_file():
        planned |= {run["seed"] for run in read_json(workdir / "sweep.json")["runs"]}
    runs: dict[float, dict[int, dict[str, float]]] = {}
    right: dict[float, dict[str, str]] = {}
    chosen_by, name, constant, seconds = "", "", {}, 0.0
    for place in grid or [workdir]:
        result = read_results(place)
        if result is None or _short(result.metrics.get(result.metric)) is None:
            continue
        config = read_json(place / "config.json")["run"]
        rate, seed = config["optimizer"]["learning_rate"], config["train"]["seed"]
        runs.setdefault(rate, {})[seed] = {key: _short(value) for key, value in result.metrics.items()}
        if digits := right_answers(place, config):
            right.setdefault(rate, {})[str(seed)] = digits
        chosen_by, constant = result.metric, result.constant
        name, seconds = config["task"]["name"], seconds + result.seconds
    if not runs:
        return None

    def mean(rate: float) -> float:
        scores = [metrics[chosen_by] for metrics in runs[rate].values()]
        return sum(scores) / len(scores)

    most = max(len(scores) for scores in runs.values())
    best = max((rate for rate in runs if len(runs[rate]) == most), key=mean)
    return {
        "name": name,
        "metric": chosen_by,
        "learning_rate": best,
        "rates_tried": sorted(runs),
        "missing": len(planned - set(runs[best])),
        "runs": {str(seed): metrics for seed, metrics in sorted(runs[best].items())},
        "right": right.get(best, {}),  # a digit for each example of the development set, where that is known
        "constant": {key: _short(value) for key, value in constant.items()},
        "seconds": round(seconds, 1),
    }


def _score(path: Path) -> dict[str, Any]:
    """Returns what a score file says, without what is the same in each and with numbers cut short."""
    score = read_json(path)
    if not isinstance(score, dict):
        raise InputError(f"{path} does not hold an object of JSON; write it again with --output")
    return {key: _cut(value) for key, value in score.items()}


def _cut(value: Any) -> Any:
    if isinstance(value, float):
        return _short(value)
    if isinstance(value, dict):
        return {key: _cut(each) for key, each in value.items()}
    return [_cut(each) for each in value] if isinstance(value, list) else value


def _short(value: Any) -> Any:
    """Returns a number with a few digits; None where there is none, or one that is not finite."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def read_json(path: Path) -> Any:
    """Returns what a file of JSON holds; with gzip if the name ends in .gz.

    Raises: InputError, in one line, if it cannot be read or is damaged.
    """
    try:
        content = path.read_bytes()
        return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except (EOFError, ValueError, RecursionError, zlib.error) as error:
        raise InputError(f"{path} is damaged ({one_line(error)[:100]}); make it again") from None


def read_lines(path: Path) -> list[Any]:
    """Returns the objects of a file of JSON lines; a last line that is not whole, as a kill leaves it, is left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line, parse_constant=lambda _: None))
        except ValueError as error:
            if number < len(lines):
                raise InputError(f"{path}:{number} is damaged ({str(error)[:80]}); delete this line") from None
    return records


def write_record(record: dict[str, Any], path: Path) -> None:
    """Writes a record, compact, whole or not at all; with gzip if the name ends in .gz, the same bytes each time."""
    content = json.dumps(record, separators=(",", ":"), sort_keys=True, allow_nan=False).encode() + b"\n"
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def read_record(path: Path) -> dict[str, Any]:
    """Returns a record. Raises: InputError, in one line, if it is missing, damaged or of another format."""
    if not path.exists():
        raise InputError(f"there is no record {path}; make it with python -m benchmarks.results collect")
    record = read_json(path)
    units = record.get("units") if isinstance(record, dict) else None
    if not isinstance(units, list) or record.get("format") != FORMAT:
        raise InputError(f"{path} is no record of format {FORMAT}; collect it again")
    for number, unit in enumerate(units):
        if (
            not isinstance(unit, dict)
            or not isinstance(unit.get("group"), str)
            or not isinstance(unit.get("seed"), int)
        ):
            raise InputError(f"record {path} is damaged: unit {number} has no group or seed; collect it again")
        for kind in (TASKS, EVALUATIONS, PAIRS):
            if not isinstance(unit.get(kind, {}), dict):
                raise InputError(f"record {path} is damaged: unit {number} has no names in {kind}; collect it again")
    return record
