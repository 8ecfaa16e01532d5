# SPDX-License-Identifier: Apache-2.0
"""Tables of Markdown from records: scores by group, differences to a baseline, minimal pairs, the runs themselves."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.paired import Difference, Summary, agreement, difference, difference_by_examples, summarise
from bert_jax.errors import InputError
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


def column_of(spec: Mapping[str, Any]) -> Column:
    """Returns a column from what a page says of it. Raises: InputError if it says too much or too little."""
    unknown = set(spec) - set(Column._fields)
    if unknown or not {"metric", "label"} <= set(spec):
        raise InputError(f"a column is {dict(spec)}; it has metric and label, and may have scale, digits and paper")
    return Column(**spec)


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

    Raises: InputError if the metric is not "task:NAME".
    """
    kind, _, name = metric.partition(":")
    if kind != "task" or "." in name:
        raise InputError(f"metric {metric} has no examples to resample; with by = 'examples' give task:NAME")
    found = {}
    for unit in record["units"]:
        digits = unit.get("tasks", {}).get(name, {}).get("right", {}) if unit["group"] == group else {}
        if digits:
            rows = [[float(digit) for digit in each] for each in digits.values()]
            found[unit["seed"]] = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return found


def apart(record: Record, group: str, baseline: str, metric: str, by: str) -> Difference | None:
    """Returns one group less another: over their seeds, or by "examples" over seeds and examples of the accuracy."""
    if by != "examples":
        return difference(scores(record, group, metric, by), scores(record, baseline, metric, by))
    return difference_by_examples(right_answers(record, group, metric), right_answers(record, baseline, metric))


def _score(unit: Mapping[str, Any], kind: str, name: str) -> float | None:
    if kind == "heldout":
        return next((value for value in reversed(unit.get("heldout", {}).get(name, [])) if value is not None), None)
    first, _, rest = name.partition(".")
    if kind == "evaluation":
        return unit.get("evaluations", {}).get(first, {}).get("metrics", {}).get(rest)
    if kind == "pairs":
        table = unit.get("pairs", {}).get(first)
        if table is None:
            return None
        lines = [table["overall"], *table["phenomena"], *table["paradigms"]]
        return next((line["accuracy"] for line in lines if line["name"] == (rest or "overall")), None)
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


def show(summary: Summary | None, column: Column) -> str:
    """Returns "mean ± deviation (seeds)"; without a deviation for one seed, and "" for none."""
    if summary is None:
        return ""
    mean = _number(summary.mean, column)
    return mean if summary.deviation is None else f"{mean} ± {_number(summary.deviation, column)} ({summary.seeds})"


def score_table(
    record: Record, rows: Sequence[Row], columns: Sequence[Column], paper: Mapping[str, Any], by: str
) -> list[str]:
    """Returns the scores of groups, the paper's beside them where it has some."""
    header, lines = [""], []
    for column in columns:
        header += [column.label, *(["paper"] if column.paper else [])]
    for group, label, paper_row in rows:
        line = [label]
        for column in columns:
            line.append(show(summarise(scores(record, group, column.metric, by)), column))
            if column.paper:
                figure = paper.get(paper_row, {}).get(column.paper)
                line.append("" if figure is None else f"{figure:g}")
        lines.append(line)
    for column in columns:
        if not any(scores(record, row.group, column.metric, by) for row in rows):
            print(f"note: no group of the table has {column.metric}; its column is empty", file=sys.stderr)
    return markdown(header, lines)


def difference_table(
    record: Record,
    rows: Sequence[Row],
    baseline: str,
    columns: Sequence[Column],
    paper: Mapping[str, Any],
    by: str,
) -> list[str]:
    """Returns each group less the baseline, with intervals, and whether the paper's difference has the same sign."""
    first = next((row.paper for row in rows if row.group == baseline), baseline)
    lines = []
    for group, label, paper_row in rows:
        if group == baseline:
            continue
        for column in columns:
            ours = apart(record, group, baseline, column.metric, by)
            theirs = _paper_difference(paper, paper_row, first, column)
            if ours is None:
                continue
            interval = (
                ""
                if ours.low is None or ours.high is None
                else (f"{_number(ours.low, column, True)} to {_number(ours.high, column, True)}")
            )
            line = [label, column.label, _number(ours.mean, column, True), interval, str(ours.seeds)]
            if any(each.paper for each in columns):
                line += ["" if theirs is None else f"{theirs:+.{column.digits}f}", agreement(ours, theirs)]
            lines.append(line)
    header = ["less the first", "", "ours", "95 % interval", "seeds"]
    return markdown(header + (["paper", "sign"] if any(each.paper for each in columns) else []), lines)


def _paper_difference(paper: Mapping[str, Any], row: str, first: str, column: Column) -> float | None:
    one, other = (paper.get(name, {}).get(column.paper) for name in (row, first))
    return None if one is None or other is None else one - other


def pairs_table(record: Record, groups: Sequence[Row], pairs: str, paradigms: bool = False) -> list[str]:
    """Returns accuracies by phenomenon, or by paradigm too, of each group; and of others who have published theirs."""
    tables = {
        group: [
            unit["pairs"][pairs]
            for unit in record["units"]
            if unit["group"] == group and pairs in unit.get("pairs", {})
        ]
        for group, _, _ in groups
    }
    first = next((found[0] for found in tables.values() if found), None)
    if first is None:
        raise InputError(f"no unit of {[group for group, _, _ in groups]} has pairs {pairs!r}; collect them first")
    lines_of = [first["overall"], *first["phenomena"], *(first["paradigms"] if paradigms else [])]
    others = list(dict.fromkeys(name for line in lines_of for name in line["baselines"]))
    column = Column("", "")
    body = []
    for line in lines_of:
        cells = [line["name"].replace("_", " "), f"{line['pairs']:,}"]
        for group, _, _ in groups:
            name = "" if line["name"] == "overall" else f".{line['name']}"
            found = scores(record, group, f"pairs:{pairs}{name}")
            cells.append(show(summarise(found), column) + _interval_of_one(tables[group], line["name"], found))
        body.append([*cells, *(_percent(line["baselines"].get(name)) for name in others)])
    return markdown(["", "pairs", *(label for _, label, _ in groups), *others], body)


def _interval_of_one(tables: Sequence[Mapping[str, Any]], name: str, found: Scores) -> str:
    """Returns the interval over pairs of the only seed there is; "" of several."""
    if len(found) != 1 or not tables:
        return ""
    lines = [tables[0]["overall"], *tables[0]["phenomena"], *tables[0]["paradigms"]]
    low, high = next(line["interval"] for line in lines if line["name"] == name)
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
            commits = dict.fromkeys(str(start.get("commit", ""))[:8] for start in starts)
            tokens = f"{trained['tokens'] / 1e6:,.2f}" if trained.get("tokens") else ""
            restarts = str(len(starts) - 1) if starts else ""
            steps = f"{unit['steps']:,}" if "steps" in unit else ""
            hours = f"{unit['seconds'] / 3600:.1f}" if "seconds" in unit else ""
            where = [restarts, ", ".join(commits), "; ".join(machines)]
            body.append([label, str(unit["seed"]), size, steps, tokens, hours, *where])
    header = ["", "seed", "layers x width", "steps", "M tokens", "hours of steps", "restarts", "commit", "machine"]
    return markdown(header, body)
