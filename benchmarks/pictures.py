# SPDX-License-Identifier: Apache-2.0
"""Pictures from records: how a model learns, and held-out metrics of groups over the tokens they have read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.learning import ByTokens, Learning, tokens_at
from bert_jax.errors import InputError
from bert_jax.storage.writing import atomic_path


def draw_learning(found: Learning, spec: Mapping[str, Any], path: Path) -> None:
    """Draws accuracies over the tokens read: minimal pairs by phenomenon, masked words, and a task if one is named."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.5), width_ratios=(3, 2))
    colors = plt.get_cmap("tab20")
    by_last = sorted(found.phenomena.items(), key=lambda each: -each[1][max(each[1])])
    for place, (name, values) in enumerate(by_last):
        left.plot(*_points(values), ".-", color=colors(place % 20), label=name.replace("_", " "))
    left.plot(*_points(found.pairs), "k.-", linewidth=2.5, label="all")
    left.axhline(0.5, color="gray", linestyle=":", linewidth=1)
    left.set_ylabel("pairs of which the good sentence is the likelier")
    left.set_title("minimal pairs by phenomenon")
    left.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    right.plot(*_points(found.words), ".-", label=spec["metric"].replace("_", " "))
    if found.task:
        right.plot(*_points(found.task), "s-", label=f"{spec['task']}, fine-tuned")
    right.legend()
    right.set_title("masked words" + (" and a task" if found.task else ""))
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


def _points(values: ByTokens) -> tuple[list[float], list[float]]:
    tokens = sorted(values)
    return tokens, [values[each] for each in tokens]


def _save(figure: Any, path: Path) -> None:
    """Writes a picture whole or not at all, and without the time, so that the same record gives the same file."""
    figure.tight_layout()
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png", metadata={"Software": None})
    plt.close(figure)
