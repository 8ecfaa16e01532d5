# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/pods.md and docs/benchmarks.md: compiled and modelled (`plans`), and measured (`speed`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.timing import spread
from bert_jax.devices.chips import GIB
from bert_jax.errors import InputError


def plans_table(record: Mapping[str, Any], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a Markdown table of plans; `rows` are [name, label].

    Raises: InputError if a plan is not in the record.
    """
    titles = (
        *("", "chips", "rows a chip", "held at once, GiB (by arithmetic)", "of", "compiled / model's FLOPs"),
        *("HBM, GB", "sent, MB", "step, ms", "MFU", "compiled in"),
    )
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for name, label in rows:
        if name not in record:
            raise InputError(f"the record has no plan {name!r}; it has {', '.join(record)}")
        plan = record[name]
        held = plan["bytes"].get("held at once") or plan["bytes"]["total"]
        sent = sum(traffic["bytes"] for traffic in plan["collectives"])
        chips = plan["num_chips"]
        cells = [
            label,
            f"{chips}",
            f"{plan['batch_size'] // (plan['mesh']['data'] * plan['mesh']['fsdp'])} x {plan['row_length']}",
            f"{held / GIB:.1f} ({plan['estimate']['total'] / GIB:.1f})",
            f"{plan['hbm_bytes'] / GIB:.0f}",
            f"{plan['compiled_flops'] / plan['model_flops']:.3f}",
            f"{plan['moved_bytes'] / 1e9:.1f}",
            f"{sent / 1e6:,.0f}",
            f"{1e3 * plan['seconds']['step']:.1f}",
            f"{plan['mfu']:.1%}",
            f"{plan['compile_seconds'] / 60:.0f} min",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def speed_table(
    record: Mapping[str, Any],
    rows: Sequence[Sequence[str]],
    contenders: Sequence[Sequence[str]],
    against: Sequence[Sequence[str]],
    metric: str,
) -> list[str]:
    """Returns a Markdown table: medians of contenders, and how many times as fast the best of some is as of others.

    Args:
      record: measurements by name.
      rows: [name, label].
      contenders: [name, title]; a cell is empty where a row has no such contender.
      against: [ours, others, title] with the beginnings of names, such as ["ours", "torch", "times torch's best"]:
        medians of the ratios of rounds that stood beside each other, with their range.
      metric: what cells have: a rate, such as "tokens_per_second", or "step_seconds", which is shown in milliseconds.

    Raises: InputError if a row was not measured.
    """
    titles = ["", *(title for _, title in contenders), *(title for _, _, title in against)]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for name, label in rows:
        if name not in record:
            raise InputError(f"{name!r} was not measured; there are {', '.join(record) or 'no records'}")
        figures = {one["name"]: one for one in record[name]["figures"]}
        cells = [_cell(figures[one], metric) if one in figures else "" for one, _ in contenders]
        cells += [times_as_fast(figures, ours, others) for ours, others, _ in against]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return [*lines, "", *_about([record[name] for name, _ in rows])]


def times_as_fast(figures: Mapping[str, Mapping[str, Any]], ours: str, others: str) -> str:
    """Returns the ratio of the fastest of `others` to the fastest of `ours`, by round; "" if one side is missing."""

    def fastest(beginning: str) -> Mapping[str, Any] | None:
        side = [one for name, one in figures.items() if name.startswith(beginning)]
        return min(side, key=lambda one: one["step_seconds"]["median"]) if side else None

    our, their = fastest(ours), fastest(others)
    if not our or not their:
        return ""
    steps = their["steps_per_round"] / our["steps_per_round"]
    found = spread([two["seconds"] / one["seconds"] / steps for one, two in zip(our["rounds"], their["rounds"])])
    return f"**{found.median:.2f}** ({found.low:.2f} to {found.high:.2f})"


def _cell(figures: Mapping[str, Any], metric: str) -> str:
    if metric == "step_seconds":
        return f"{1e3 * figures[metric]['median']:,.1f}"
    value = figures[metric]["median"]
    return f"{value / 1e6:,.1f} M" if value >= 1e6 else f"{value:,.0f}"


def _about(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns where and with what the rows were measured; each combination once."""
    found = []
    for record in records:
        theirs = next((one["versions"] for one in record["figures"] if "versions" in one), {})
        versions = {"jax": record["versions"]["jax"], **{name: theirs[name] for name in theirs if name != "python"}}
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        modified = ", with changes" if record["modified"] else ""
        found.append(
            f"{record['cores']} cores of {record['processor']}; {listed}; commit {record['commit'][:7]}{modified}; "
            f"{record['time'][:10]}"
        )
    return [f"{line}." for line in dict.fromkeys(found)]
