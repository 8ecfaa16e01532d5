# SPDX-License-Identifier: Apache-2.0
"""Metrics as people read them: short names, units, baselines beside what they are compared with."""

from collections.abc import Callable, Mapping


def describe(metrics: Mapping[str, float]) -> str:
    """Returns metrics as one line of text: short names, baselines in parentheses, quantities with their units."""
    parts = []
    for name, value in metrics.items():
        if name in BASELINES or name == "mlm_perplexity" or (name == "flops_per_second" and "mfu" in metrics):
            continue
        label, show = _SHOWN.get(name, (name.replace("_", " "), _plain))
        part = f"{label} {show(value)}" if label else show(value)
        baseline = next((baseline for baseline, of in BASELINES.items() if of == name and baseline in metrics), None)
        parts.append(part + (f" (baseline {show(metrics[baseline])})" if baseline else ""))
    return "  ".join(parts)


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _loss(value: float) -> str:
    return f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _quantity(unit: str) -> Callable[[float], str]:
    def show(value: float) -> str:
        for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if value >= size:
                return f"{value / size:.3g} {prefix}{unit}"
        return f"{value:.3g} {unit}"

    return show


def duration(seconds: float) -> str:
    """Returns "M:SS", or "H:MM:SS" from an hour on."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


_SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", _loss),
    "mlm_loss": ("mlm", _loss),
    "mlm_accuracy": ("mlm acc", _percent),
    "nsp_loss": ("nsp", _loss),
    "nsp_accuracy": ("nsp acc", _percent),
    "grad_norm": ("grad", _plain),
    "learning_rate": ("lr", "{:.2e}".format),
    "sequences_per_second": ("", _quantity("seq/s")),
    "tokens_per_second": ("", _quantity("tok/s")),
    "flops_per_second": ("", _quantity("FLOP/s")),
    "mfu": ("MFU", _percent),
    "data_wait": ("waiting for data", "{:.2%}".format),
}
ON_THE_BAR = (
    "loss",
    "sequences_per_second",
    "tokens_per_second",
    "mfu",
    "flops_per_second",
)  # the bar has little room
# Baseline -> the metric to compare it with: the score of a model without context.
BASELINES = {"unigram_loss": "mlm_loss", "unigram_accuracy": "mlm_accuracy", "nsp_base_rate": "nsp_accuracy"}
