# SPDX-License-Identifier: Apache-2.0
"""Metrics for people: short names, units, baselines beside the metrics compared with them; and in TensorBoard."""

from collections.abc import Callable, Mapping
from typing import Any

from bert_jax.errors import one_line


def describe(metrics: Mapping[str, float]) -> str:
    """Returns metrics as one line of text: short names, baselines in parentheses, quantities with their units."""
    parts = []
    for name, value in metrics.items():
        if (
            name in BASELINES
            or name == "mlm_perplexity"
            or (name == "flops_per_second" and "mfu" in metrics)
        ):
            continue
        label, show = _SHOWN.get(name, (name.replace("_", " "), _plain))
        part = f"{label} {show(value)}" if label else show(value)
        baseline = next(
            (baseline for baseline, of in BASELINES.items() if of == name and baseline in metrics),
            None,
        )
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
    "clm_loss": ("clm", _loss),
    "clm_accuracy": ("clm acc", _percent),
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
# the bar has little room
ON_THE_BAR = ("loss", "sequences_per_second", "tokens_per_second", "mfu", "flops_per_second")
# Baseline -> the metric to compare it with: the score of a model without context.
BASELINES = {
    "unigram_loss": "mlm_loss",
    "unigram_accuracy": "mlm_accuracy",
    "nsp_base_rate": "nsp_accuracy",
}


def forgive(events: Any, say: Callable[[str], object]) -> None:
    """Makes TensorBoard's writer warn once that it cannot write, and then write no more.

    Its thread would end with a traceback, and whoever writes to its queue would wait for it for ever.
    """
    failed = False

    def forgiving(method: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            nonlocal failed
            try:
                return None if failed else method(*arguments)
            except (OSError, ValueError) as error:
                failed = True
                say(
                    f"warning: TensorBoard's records end here ({one_line(error)}); metrics.jsonl has all"
                )
                return None

        return call

    for name in ("write_event", "flush", "close"):
        setattr(events, name, forgiving(getattr(events, name)))
