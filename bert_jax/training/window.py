# SPDX-License-Identifier: Apache-2.0
"""Metrics and timing of the steps between two reports."""

import time
from collections.abc import Iterator, Mapping, Sequence

from bert_jax.batch import Batch
from bert_jax.model.losses import mean_metrics
from bert_jax.training.step import Metrics

# Metrics that are counts, reported as rates per second.
COUNTS = ("sequences", "tokens", "words", "squared_lengths", "predictions")
SEEN = ("sequences", "tokens", "words")  # counts that are also summed over the whole run


class Window:
    """The metrics of the steps since the last report, and the time that these steps took."""

    def __init__(self, sums: Mapping[str, Sequence[float]] | None = None) -> None:
        # {metric: [sum, weight]}
        self.sums = {name: list(pair) for name, pair in (sums or {}).items()}
        self.seconds = 0.0
        self.waited = 0.0  # an upper bound of the seconds in which the device waited for a batch
        self._started: float | None = None

    def start_clock(self) -> None:
        self._started = time.perf_counter()

    def stop_clock(self) -> None:
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
        self._started = None

    def next_batch(self, batches: Iterator[Batch], last: Metrics | None) -> tuple[Batch, float]:
        """Returns the next batch, and the seconds that the host waited for it if the device may have idled.

        It may have idled if the last dispatched step, of metrics `last`, is finished when the batch arrives. The idle
        time is not known exactly; the time that the host waited is an upper bound.
        """
        asked = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - asked
        if last is not None and not last.is_ready():
            return batch, 0.0
        if self._started is not None:
            self.waited += waited
        return batch, waited

    def add(self, metrics: Metrics) -> None:
        """Adds the metrics of a step; its counts only if it was timed."""
        for name, (total, weight) in metrics.items():
            if name not in COUNTS or self._started is not None:
                pair = self.sums.setdefault(name, [0.0, 0.0])
                pair[0] += float(total)
                pair[1] += float(weight)

    def means(self) -> dict[str, float]:
        return mean_metrics({name: pair for name, pair in self.sums.items() if name not in COUNTS})

    def counts(self) -> dict[str, float]:
        return {name: self.sums[name][0] for name in COUNTS if name in self.sums}
