# SPDX-License-Identifier: Apache-2.0
"""Tables of Markdown from records: scores by group, differences to a baseline, minimal pairs, the runs themselves."""

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.paired import Difference, Interval, Summary, agreement, difference, difference_by_examples, summarise
from bert_jax.errors import InputError, shown
from bert_jax.settings.rules import suggest

Record = dict[str, Any]
Scores = dict[Any, float]  # by seed


class Column(NamedTuple):
    """A metric of a table."""

    metric: str  # see `scores`
    label: str
    scale: float = 100.0
    digits: int = 1
    paper: str = ""  # what the paper's table calls it


class Row(NamedTuple):
    """A group of a table."""

    group: str
    label: str
    paper: str  # what the paper's table calls it


def row_of(spec: Sequence[str]) -> Row:
    """Returns a row from [group], [group, label] or [group, label, the paper's name]."""
    group = spec[0]
    return Row(group, spec[1] if len(spec) > 1 else group, spec[2] if len(spec) > 2 else group)


def column_of(spec: object, paper: Mapping[str, Any]) -> Column:
    """Returns a column from what a page says of it. Raises: InputError if it says too much, too little or what is not.

    `paper` is the paper's table, which has to have what the column wants of it.
    """
    if not isinstance(spec, dict) or set(spec) - set(Column._fields) or not {"metric", "label"} <= set(spec):
        raise InputError(f"a column is {shown(spec)}; it has metric and label, and may have scale, digits and paper")
    for name, value in spec.items():
        kinds = {"scale": (int, float), "digits": (int,)}.get(name, (str,))
        if type(value) not in kinds or (name == "digits" and not 0 <= value <= 9):
            wanted = {"scale": "a number", "digits": "a whole number from 0 to 9"}.get(name, "a string")
            raise InputError(f"a column has {name} = {shown(value)}; give {wanted}")
    column = Column(**spec)
    known = {name for row in paper.values() if isinstance(row, dict) for name in row}
    if column.paper and column.paper not in known:
        there = f"it has {', '.join(sorted(known))}" if known else "name the paper's table: paper = ..."
        raise InputError(f"the paper's table has no {column.paper!r}{suggest(column.paper, known)}; {there}")
    return column


def _figure(paper: Mapping[str, Any], row: str, column: Column) -> float | None:
    """Returns the paper's figure; None if it has none."""
    return paper.get(row, {}).get(column.paper)


def scores(record: Record, group: str, metric: str, by: str = "pretraining") -> Scores:
    """Returns {seed: score} of the units of a group that have a metric.

    Metrics: "task:NAME", the one by which the task chooses, or "task:NAME.METRIC"; "heldout:METRIC", of the run's last
    evaluation; "evaluation:NAME.METRIC"; "pairs:NAME", the accuracy of all, or "pairs:NAME.PHENOMENON". Of a task that
    was fine-tuned from several seeds the mean counts; or with `by` "finetuning" each of them, and its seed pairs it.
    """
    found: Scores = {}
    for unit in record["units"]:
        if unit["group"] != group:
            continue
        kind, _, name = metric.partition(":")
        if kind == "task":
            name, _, wanted = name.partition(".")
            task = unit.get("tasks", {}).get(name)
            runs = {
                int(seed): values[wanted or task["metric"]]
                for seed, values in (task["runs"] if task else {}).items()
                if values.get(wanted or task["metric"]) is not None
            }
            if by == "finetuning":
                found |= {(unit["seed"], seed): value for seed, value in runs.items()}
            elif runs:
                found[unit["seed"]] = sum(runs.values()) / len(runs)
        elif (value := _score(unit, kind, name)) is not None:
            found[unit["seed"]] = value
    return found


def right_answers(record: Record, group: str, metric: str) -> dict[int, list[float]]:
    """Returns {seed: [how often each example was right]} of the units of a group, the mean over fine-tunings of each.

    Raises: InputError if the metric is not the accuracy of a task: "task:NAME" if it chooses by that, or
      "task:NAME.accuracy".
    """
    kind, _, name = metric.partition(":")
    name, _, wanted = name.partition(".")
    found = {}
    for unit in record["units"]:
        task = unit.get("tasks", {}).get(name, {}) if unit["group"] == group else {}
        if kind != "task" or (wanted or task.get("metric", "accuracy")) != "accuracy":
            raise InputError(f"by = 'examples' resamples right answers, which {metric} is not; give task:NAME.accuracy")
        if task.get("right"):
            rows = [[float(digit) for digit in each] for each in task["right"].values()]
            found[unit["seed"]] = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return found


def apart(record: Record, group: str, baseline: str, metric: str, by: str) -> Difference | None:
    """Returns one group less another: over their seeds, or by "examples" over seeds and examples of the accuracy."""
    if by == "examples":
        return difference_by_examples(right_answers(record, group, metric), right_answers(record, baseline, metric))
    one, other = scores(record, group, metric, by), scores(record, baseline, metric, by)
    shared = sorted(set(one) & set(other))
    return difference(
        independent({seed: one[seed] for seed in shared}), independent({seed: other[seed] for seed in shared})
    )


def independent(found: Scores) -> Scores:
    """Returns the mean over the fine-tunings of each pre-training, if there are several of these.

    Fine-tunings of one pre-training share its luck, so they say nothing of another one. Those of a single one count.
    """
    models: dict[Any, list[float]] = {}
    for seed, value in found.items():
        models.setdefault(seed[0] if isinstance(seed, tuple) else seed, []).append(value)
    return {seed: statistics.fmean(values) for seed, values in models.items()} if len(models) > 1 else found


def _score(unit: Mapping[str, Any], kind: str, name: str) -> float | None:
    if kind == "heldout":
        return next(reversed(unit.get("heldout", {}).get(name, [])), None)
    first, _, rest = name.partition(".")
    if kind == "evaluation":
        return unit.get("evaluations", {}).get(first, {}).get("metrics", {}).get(rest)
    if kind == "pairs":
        table = unit.get("pairs", {}).get(first)
        if table is None:
            return None
        return next((line["accuracy"] for line in _lines(table) if line["name"] == (rest or "overall")), None)
    raise InputError(f"metric {kind}:{name} is of no kind there is; they are task, heldout, evaluation and pairs")


def check_groups(record: Record, groups: Sequence[str], where: str) -> None:
    """Raises: InputError if a record has no unit of a group that a page wants."""
    known = {unit["group"] for unit in record["units"]}
    for group in groups:
        if group not in known:
            raise InputError(
                f"{where}: the record has no group {group!r}{suggest(group, known)}; it has {sorted(known)}"
            )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def _number(value: float, column: Column, sign: bool = False) -> str:
    return f"{value * column.scale:{'+' if sign else ''}.{column.digits}f}"


def show(summary: Summary | None, column: Column, missing: int = 0) -> str:
    """Returns "mean ± deviation (seeds)"; without a deviation for one seed, and "" for none.

    Of `missing` runs, which diverged or have not finished, it tells the number: "mean ± deviation (seeds, 1 missing)".
    """
    if summary is None:
        return ""
    mean, absent = _number(summary.mean, column), [f"{missing} missing"] if missing else []
    if summary.deviation is None:
        return f"{mean} ({absent[0]})" if absent else mean
    return f"{mean} ± {_number(summary.deviation, column)} ({', '.join([str(summary.seeds), *absent])})"


def missing_runs(record: Record, group: str, metric: str) -> int:
    """Returns how many units of a group have no score, and how many fine-tunings of the others have none."""
    found = scores(record, group, metric)
    units = [unit for unit in record["units"] if unit["group"] == group]
    task = metric.removeprefix("task:").partition(".")[0] if metric.startswith("task:") else None
    finetunings = sum(unit.get("tasks", {}).get(task, {}).get("missing", 0) for unit in units)
    return sum(unit["seed"] not in found for unit in units) + finetunings


def score_table(
    record: Record, rows: Sequence[Row], columns: Sequence[Column], paper: Mapping[str, Any], by: str
) -> list[str]:
    """Returns the scores of groups, and the paper's beside them with their source where it has some."""
    header, lines, figures = [""], [], []
    for column in columns:
        header += [column.label, *(["paper"] if column.paper else [])]
    for group, label, paper_row in rows:
        line = [label]
        for column in columns:
            found = summarise(independent(scores(record, group, column.metric, by)))
            line.append(show(found, column, missing_runs(record, group, column.metric)))
            if column.paper:
                figure = _figure(paper, paper_row, column)
                line.append("" if figure is None else f"{figure:g}")
                figures += [] if figure is None else [figure]
        lines.append(line)
    for column in columns:
        if not any(scores(record, row.group, column.metric, by) for row in rows):
            print(f"note: no group of the table has {column.metric}; its column is empty", file=sys.stderr)
    return markdown(header, lines) + (["", f"Paper: {paper['source']}."] if figures else [])


def difference_table(
    record: Record,
    rows: Sequence[Row],
    baseline: str,
    columns: Sequence[Column],
    paper: Mapping[str, Any],
    by: str,
) -> list[str]:
    """Returns each group less the baseline, with intervals, and whether the paper's difference has the same sign.

    By all intervals: see `paired`.
    """
    first = next((row.paper for row in rows if row.group == baseline), baseline)
    lines = []
    for group, label, paper_row in rows:
        if group == baseline:
            continue
        for column in columns:
            ours = apart(record, group, baseline, column.metric, by)
            theirs = _paper_difference(paper, paper_row, first, column)
            if ours is None:
                print(
                    f"note: {group} and {baseline} share no seed of {column.metric}; no row is drawn", file=sys.stderr
                )
                continue
            intervals = [_range(interval, column) for interval in (ours.bootstrap, ours.student)]
            line = [label, column.label, _number(ours.mean, column, True), *intervals, str(ours.seeds)]
            if any(each.paper for each in columns):
                line += ["" if theirs is None else f"{theirs:+.{column.digits}f}", agreement(ours, theirs)]
            lines.append(line)
    resampled = "seeds and examples" if by == "examples" else "seeds"
    header = ["less the first", "", "ours", f"95 %, bootstrap of {resampled}", "95 %, Student's t", "seeds"]
    return markdown(header + (["paper", "sign"] if any(each.paper for each in columns) else []), lines)


def _range(interval: Interval | None, column: Column) -> str:
    return " to ".join(_number(value, column, True) for value in interval or ())


def _paper_difference(paper: Mapping[str, Any], row: str, first: str, column: Column) -> float | None:
    one, other = (_figure(paper, name, column) for name in (row, first))
    return None if one is None or other is None else one - other


def pairs_table(record: Record, groups: Sequence[Row], pairs: str, paradigms: bool = False) -> list[str]:
    """Returns accuracies by phenomenon, or by paradigm too, of each group; and of others who have published theirs.

    Raises: InputError if no unit has these pairs, or two were scored on different numbers of them.
    """
    units = [
        unit
        for group, _, _ in groups
        for unit in record["units"]
        if unit["group"] == group and pairs in unit.get("pairs", {})
    ]
    if not units:
        raise InputError(f"no unit of {[group for group, _, _ in groups]} has pairs {pairs!r}; collect them first")
    first, counts = units[0], _counts(units[0], pairs)
    for unit in units[1:]:
        other = _counts(unit, pairs)
        for name in (name for name in {**counts, **other} if counts.get(name) != other.get(name)):
            told = [f"{each.get(name, 0):,} pairs of {pairs} {name}" for each in (counts, other)]
            raise InputError(
                f"{first['group']} seed {first['seed']} has {told[0]} and {unit['group']} seed {unit['seed']} has "
                f"{told[1]}; score both with the same file and --limit"
            )
    baselines: dict[str, dict[str, float]] = {}
    for line in (line for unit in units for line in _lines(unit["pairs"][pairs])):
        baselines[line["name"]] = line["baselines"] | baselines.get(line["name"], {})
    table = first["pairs"][pairs]
    lines_of = [table["overall"], *table["phenomena"], *(table["paradigms"] if paradigms else [])]
    others = list(dict.fromkeys(name for line in lines_of for name in baselines[line["name"]]))
    column = Column("", "")
    body = []
    for line in lines_of:
        cells = [line["name"].replace("_", " "), f"{line['pairs']:,}"]
        for group, _, _ in groups:
            name = "" if line["name"] == "overall" else f".{line['name']}"
            found = scores(record, group, f"pairs:{pairs}{name}")
            tables = [unit["pairs"][pairs] for unit in units if unit["group"] == group]
            cells.append(show(summarise(found), column) + _interval_of_one(tables, line["name"], found))
        body.append([*cells, *(_percent(baselines[line["name"]].get(name)) for name in others)])
    return markdown(["", "pairs", *(label for _, label, _ in groups), *others], body)


def _lines(table: Mapping[str, Any]) -> list[Any]:
    return [table["overall"], *table["phenomena"], *table["paradigms"]]


def _counts(unit: Mapping[str, Any], pairs: str) -> dict[str, int]:
    return {line["name"]: line["pairs"] for line in _lines(unit["pairs"][pairs])}


def _interval_of_one(tables: Sequence[Mapping[str, Any]], name: str, found: Scores) -> str:
    """Returns the interval over pairs of the only seed there is; "" of several."""
    if len(found) != 1 or not tables:
        return ""
    low, high = next(line["interval"] for line in _lines(tables[0]) if line["name"] == name)
    return f" [{100 * low:.1f}, {100 * high:.1f}]"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def runs_table(record: Record, groups: Sequence[Row]) -> list[str]:
    """Returns each unit: how much it was trained on, where, by which commit, and how often it was started again."""
    body = []
    for group, label, _ in groups:
        for unit in (each for each in record["units"] if each["group"] == group):
            starts = unit.get("starts", [])
            trained = unit.get("trained") or {}
            model = unit.get("model") or {}
            size = f"{model['num_layers']} x {model['hidden_size']}" if model else ""
            machines = dict.fromkeys(str(start.get("machine", "")) for start in starts)
            commits = dict.fromkeys(_short(str(start.get("commit", ""))) for start in starts)
            tokens = f"{trained['tokens'] / 1e6:,.2f}" if trained.get("tokens") else ""
            restarts = str(len(starts) - 1) if starts else ""
            steps = f"{unit['steps']:,}" if "steps" in unit else ""
            hours = f"{unit['seconds'] / 3600:.1f}" if "seconds" in unit else ""
            where = [restarts, ", ".join(commits), "; ".join(machines)]
            body.append([label, str(unit["seed"]), size, steps, tokens, hours, *where])
    header = ["", "seed", "layers x width", "steps", "M tokens", "hours of steps", "restarts", "commit", "machine"]
    return markdown(header, body)


def _short(commit: str) -> str:
    """Returns the first digits of a commit, and the "+" that says that files were changed since."""
    return commit[:8] + "+" * commit.endswith("+")
