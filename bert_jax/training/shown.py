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
        if name in _UNITS:
            sizes = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
            prefix, size = next((each for each in sizes if value >= each[1]), ("", 1.0))
            parts.append(f"{value / size:.3g} {prefix}{_UNITS[name]}")
            continue
        label, form = _SHOWN.get(name, (name.replace("_", " "), "{:.4g}"))
        part = f"{label} {form.format(value)}"
        for baseline, of in BASELINES.items():
            if of == name and baseline in metrics:
                part += f" (baseline {form.format(metrics[baseline])})"
        parts.append(part)
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Returns "M:SS", or "H:MM:SS" from an hour on."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


# what metrics are called, and how they are written
_SHOWN = {
    "loss": ("loss", "{:.3f}"),
    "mlm_loss": ("mlm", "{:.3f}"),
    "mlm_accuracy": ("mlm acc", "{:.1%}"),
    "clm_loss": ("clm", "{:.3f}"),
    "clm_accuracy": ("clm acc", "{:.1%}"),
    "nsp_loss": ("nsp", "{:.3f}"),
    "nsp_accuracy": ("nsp acc", "{:.1%}"),
    "replaced_loss": ("replaced", "{:.3f}"),
    "replaced_accuracy": ("replaced acc", "{:.1%}"),
    "replaced_recall": ("replaced found", "{:.1%}"),
    "grad_norm": ("grad", "{:.4g}"),
    "learning_rate": ("lr", "{:.2e}"),
    "mfu": ("MFU", "{:.1%}"),
    "data_wait": ("waiting for data", "{:.2%}"),
}
_UNITS = {
    "sequences_per_second": "seq/s",
    "tokens_per_second": "tok/s",
    "flops_per_second": "FLOP/s",
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
