# SPDX-License-Identifier: Apache-2.0
"""Pictures from records: how a model learns, and held-out metrics of groups over the tokens they have read."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bert_jax.errors import InputError
from bert_jax.storage.writing import atomic_path

_AT = re.compile(r"(.*)@(\d+)")  # the name of a measurement, and the step of the revision that was measured


def revisions(measured: Mapping[str, Any], name: str) -> dict[int, Any]:
    """Returns {step: measurement} of those that are called NAME@STEP, by step."""
    found = {
        int(match[2]): value for key, value in measured.items() if (match := _AT.fullmatch(key)) and match[1] == name
    }
    return dict(sorted(found.items()))


def tokens_at(unit: Mapping[str, Any], step: int) -> float:
    """Returns how many tokens a unit had been trained on at a step.

    As the revision's own measurements say, or else the same share of all tokens as the step is of all steps.

    Raises: InputError if neither is known.
    """
    for kind in ("evaluations", "pairs"):
        for measurement in unit.get(kind, {}).values():
            trained = measurement.get("trained") or {}
            if trained.get("step") == step and trained.get("tokens"):
                return float(trained["tokens"])
    trained = unit.get("trained") or {}
    if not trained.get("tokens") or not trained.get("step"):
        raise InputError(f"group {unit['group']}, seed {unit['seed']}: nothing says how many tokens step {step} is")
    return trained["tokens"] * step / trained["step"]


def draw_learning(record: Mapping[str, Any], spec: Mapping[str, Any], path: Path) -> None:
    """Draws accuracies over the tokens read: minimal pairs by phenomenon, masked words, and a task if one is named.

    Raises: InputError if the unit has no measurement of a revision.
    """
    units = [unit for unit in record["units"] if unit["group"] == spec["group"]]
    unit = next((each for each in units if each["seed"] == spec.get("seed", units[0]["seed"])), None)
    if unit is None:
        raise InputError(f"group {spec['group']} has no seed {spec['seed']}; it has {[each['seed'] for each in units]}")
    by_step = revisions(unit.get("pairs", {}), spec["pairs"])
    evaluations = revisions(unit.get("evaluations", {}), spec["evaluation"])
    if not by_step or not evaluations:
        raise InputError(
            f"group {spec['group']} has no {spec['pairs']}@STEP or no {spec['evaluation']}@STEP; measure its revisions"
        )
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.5), width_ratios=(3, 2))
    tokens = {step: tokens_at(unit, step) for step in {*by_step, *evaluations} if step > 0}
    steps = [step for step in by_step if step in tokens]
    names = [line["name"] for line in next(iter(by_step.values()))["phenomena"]]
    last = by_step[max(by_step)]["phenomena"]
    order = sorted(names, key=lambda name: -next(line["accuracy"] for line in last if line["name"] == name))
    colors = plt.get_cmap("tab20")
    for place, name in enumerate(order):
        values = [_accuracy(by_step[step]["phenomena"], name) for step in steps]
        left.plot(
            [tokens[step] for step in steps], values, ".-", color=colors(place % 20), label=name.replace("_", " ")
        )
    overall = [by_step[step]["overall"]["accuracy"] for step in steps]
    left.plot([tokens[step] for step in steps], overall, "k.-", linewidth=2.5, label="all")
    left.axhline(0.5, color="gray", linestyle=":", linewidth=1)
    left.set_ylabel("pairs of which the good sentence is the likelier")
    left.set_title("minimal pairs by phenomenon")
    left.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    steps = [step for step in evaluations if step in tokens]
    values = [evaluations[step]["metrics"].get(spec["metric"]) for step in steps]
    right.plot([tokens[step] for step in steps], values, ".-", label=spec["metric"].replace("_", " "))
    if task := spec.get("task"):
        runs = revisions(unit.get("tasks", {}), task)
        steps = [step for step in runs if step > 0]
        means = [_mean(runs[step]) for step in steps]
        right.plot([tokens_at(unit, step) for step in steps], means, "s-", label=f"{task}, fine-tuned")
    right.legend()
    right.set_title("masked words" + (" and a task" if spec.get("task") else ""))
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("tokens read")
        axes.grid(alpha=0.3)
    _save(figure, path)


def draw_curves(record: Mapping[str, Any], spec: Mapping[str, Any], path: Path) -> None:
    """Draws a held-out metric of each group over the tokens read: every seed, those of a group in one color.

    Raises: InputError if a group has no such metric.
    """
    figure, axes = plt.subplots(figsize=(8, 5))
    for place, (group, label) in enumerate((row[0], row[min(1, len(row) - 1)]) for row in spec["rows"]):
        found = False
        for unit in (each for each in record["units"] if each["group"] == group):
            heldout = unit.get("heldout", {})
            points = [
                (tokens_at(unit, step), value)
                for step, value in zip(heldout.get("step", []), heldout.get(spec["metric"], []))
                if step > 0 and value is not None
            ]
            if points:
                axes.plot(*zip(*points), ".-", color=f"C{place}", alpha=0.8, label=None if found else label)
                found = True
        if not found:
            raise InputError(f"group {group} has no held-out {spec['metric']}; choose another metric")
    axes.set_xscale("log")
    axes.set_xlabel("tokens read")
    axes.set_ylabel(spec["metric"].replace("_", " "))
    axes.legend()
    axes.grid(alpha=0.3)
    _save(figure, path)


def _accuracy(lines: list[dict[str, Any]], name: str) -> float:
    return next((line["accuracy"] for line in lines if line["name"] == name), float("nan"))


def _mean(task: Mapping[str, Any]) -> float:
    scores = [metrics[task["metric"]] for metrics in task["runs"].values()]
    return sum(scores) / len(scores)


def _save(figure: Any, path: Path) -> None:
    """Writes a picture whole or not at all, and without the time, so that the same record gives the same file."""
    figure.tight_layout()
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png", metadata={"Software": None})
    plt.close(figure)
