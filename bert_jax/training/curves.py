# SPDX-License-Identifier: Apache-2.0
"""The curves of a run, drawn from its metrics."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bert_jax.errors import package_needed
from bert_jax.storage.places import AnyPath, to_place
from bert_jax.storage.writing import atomic_path
from bert_jax.training.report import MetricsRecord, read_metrics
from bert_jax.training.shown import BASELINES, describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_curves(
    metrics_path: AnyPath, png_path: AnyPath, scores: Sequence[tuple[str, str, float]] = ()
) -> None:
    """Draws the curves of a run as a PNG; nothing if there are no metrics yet.

    `scores` are the first panels, as (metric, title, factor); the default is pre-training's. Panels without data
    are left out. Baselines are dashed lines.
    """
    with package_needed("matplotlib", f"drawing {png_path}", "'bert_jax[train]'"):
        from matplotlib.figure import Figure  # not pyplot: no global state, and no display

    series = _series(read_metrics(metrics_path)) if to_place(metrics_path).exists() else {}
    panels = [
        panel
        for panel in (*(scores or _PRETRAINING), *_COURSE)
        if any((kind, panel[0]) in series for kind in _KINDS)
    ]
    if not panels:
        return
    figure = Figure(figsize=(11, 6.4 if len(panels) > 2 else 3.6), dpi=120, layout="constrained")
    top = panels[:2]
    bottom = panels[2:]
    grid = figure.add_gridspec(2 if bottom else 1, 6, height_ratios=[1.5, 1] if bottom else [1])
    for row, chosen in enumerate((top, bottom)):
        for column, (name, title, scale) in enumerate(chosen):
            width = 6 // len(chosen)
            axes = figure.add_subplot(grid[row, column * width : (column + 1) * width])
            _draw_panel(axes, series, name, title, scale)
    figure.suptitle(
        _final_scores(series, [name for name, _, _ in scores] or _HEADLINE), fontsize=12
    )
    with atomic_path(png_path) as temporary:
        figure.savefig(temporary, format="png")


_KINDS = {"train": ("training", "#4c78a8"), "eval": ("held out", "#e45756")}


_PRETRAINING = (  # metric, title, factor
    ("mlm_loss", "Masked language model: loss (nats per prediction)", 1),
    ("mlm_accuracy", "Masked language model: accuracy (%)", 100),
    ("clm_loss", "Rows from left to right: loss (nats per prediction)", 1),
    ("nsp_accuracy", "Next sentence: accuracy (%)", 100),
    ("replaced_recall", "Replaced tokens: found (%)", 100),
)


_HEADLINE = ("mlm_loss", "mlm_accuracy", "nsp_accuracy")


_COURSE = (
    ("learning_rate", "Learning rate", 1),
    ("tokens_per_second", "Thousands of tokens per second", 1e-3),
)


_Series = dict[tuple[str, str], tuple[list[float], list[float]]]


def _series(records: list[MetricsRecord]) -> _Series:
    """Returns (steps, values) of every (kind, metric)."""
    series: _Series = {}
    for record in records:
        for name, value in record.items():
            if name not in ("step", "kind", "time"):
                steps, values = series.setdefault((record["kind"], name), ([], []))
                steps.append(record["step"])
                values.append(value)
    return series


def _draw_panel(axes: "Axes", series: _Series, name: str, title: str, scale: float) -> None:
    """Draws one metric: training as a thin line, held-out scores as a line with points, the baseline dashed."""
    from matplotlib.ticker import MaxNLocator

    for kind, (label, color) in _KINDS.items():
        if (kind, name) in series:
            steps, values = series[kind, name]
            values = [scale * value for value in values]
            if kind == "train":
                axes.plot(steps, values, color=color, linewidth=1.1, alpha=0.85, label=label)
            else:
                marker = {"marker": "o", "markersize": 3.5} if len(steps) <= 60 else {}
                axes.plot(steps, values, color=color, linewidth=1.6, label=label, **marker)
    baseline = next((baseline for baseline, metric in BASELINES.items() if metric == name), "")
    if ("eval", baseline) in series:
        score = scale * series["eval", baseline][1][-1]
        label = (
            "token frequencies alone"
            if baseline.startswith("unigram")
            else "the more frequent answer"
        )
        axes.axhline(score, color="#777777", linestyle="--", linewidth=1.1, label=label)
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(labelsize=8, color="#999999")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("step", fontsize=8)
    if name == "learning_rate":
        axes.yaxis.set_major_formatter("{x:g}")
    if name not in ("learning_rate", "tokens_per_second"):
        axes.legend(fontsize=8, frameon=False)
    else:
        axes.set_ylim(bottom=0)


def _final_scores(series: _Series, names: Sequence[str]) -> str:
    """Returns the heading: the last step, and the last held-out scores if there are any."""
    last = {name: values[-1] for (kind, name), (_, values) in series.items() if kind == "eval"}
    step = max(steps[-1] for steps, _ in series.values())
    scores = {name: last[name] for name in names if name in last}
    baselines = {
        name: last[name] for name, metric in BASELINES.items() if name in last and metric in scores
    }
    return f"Step {step:,}" + (f", held out: {describe(scores | baselines)}" if scores else "")
