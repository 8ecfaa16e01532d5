# SPDX-License-Identifier: Apache-2.0
"""The metrics of the steps between two reports, and how fast these steps were."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bert_jax.batch import Batch
from bert_jax.training.step import Metrics

# Metrics that are counts: they become rates, and mean nothing by themselves.
COUNTS = ("sequences", "tokens", "words", "squared_lengths", "predictions")
SEEN = ("sequences", "tokens", "words")  # counts that are added up over the whole run


class Window:
    """The metrics of the steps since the last report, and the time that was spent on steps alone."""

    def __init__(self, sums: Mapping[str, Sequence[float]] | None = None) -> None:
        self.sums = {name: list(pair) for name, pair in (sums or {}).items()}  # {metric: [sum, weight]}
        self.seconds = 0.0
        self.waited = 0.0  # of these seconds, at most as many did the device wait for a batch
        self._started: float | None = None

    def start_clock(self) -> None:
        self._started = time.perf_counter()

    def stop_clock(self) -> None:
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
        self._started = None

    def next_batch(self, batches: Iterator[Batch], last: Metrics | None) -> Batch:
        """Returns the next batch. If the step of the metrics `last` is over when it comes, the device may have waited.

        How long is not known, only that it was no longer than the host waited; so it is never called too short.
        """
        asked = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - asked
        if self._started is not None and (last is None or last["loss"][0].is_ready()):  # type: ignore[attr-defined]
            self.waited += waited
        return batch

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


def mean_metrics(sums: dict[str, Any]) -> dict[str, float]:
    """Returns sum / weight of every metric; 0 where nothing was weighed."""
    return {name: float(total) / float(weight) if weight else 0.0 for name, (total, weight) in sums.items()}
