# SPDX-License-Identifier: Apache-2.0
"""Metrics of classification and regression, equal to those of scikit-learn and scipy.

Where those return nan, warn or raise (no examples, a single class, constant numbers), the metric is 0.0. A model with
constant predictions has learnt nothing, and 0.0 can be compared when the best checkpoint is chosen.
"""

import operator
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Metrics: TypeAlias = dict[str, float]


def accuracy(labels: Sequence[int], predictions: Sequence[int]) -> float:
    """Returns the share of correct predictions."""
    return _ratio(_matches(labels, predictions), len(labels))


def f1(labels: Sequence[int], predictions: Sequence[int], positive: int = 1) -> float:
    """Returns the harmonic mean of precision and recall of a class; 0.0 if it is never true and never predicted."""
    truth = np.equal(labels, positive)
    predicted = np.equal(predictions, positive)
    return precision_recall_f1(
        *(int(np.sum(each)) for each in (truth & predicted, predicted, truth))
    )[2]


def macro_f1(labels: Sequence[int], predictions: Sequence[int]) -> float:
    """Returns the mean of `f1` over the classes that occur among labels or predictions."""
    values = [f1(labels, predictions, label) for label in sorted({*labels, *predictions})]
    return float(np.mean(values)) if values else 0.0


def mcc(labels: Sequence[int], predictions: Sequence[int]) -> float:
    """Returns Matthews' correlation coefficient; 0.0 if labels or predictions have a single class.

    Source: for more than two classes the R_K of Gorodkin (2004), which with two is Matthews' phi.
    """
    true = Counter(labels)
    predicted = Counter(predictions)
    total = len(labels)
    # of integers, so that nothing is rounded before the root
    by_chance = sum(count * predicted[label] for label, count in true.items())
    covariance = _matches(labels, predictions) * total - by_chance
    variance = 1
    for counts in (true, predicted):
        variance *= total * total - sum(count * count for count in counts.values())
    return float(covariance / np.sqrt(float(variance))) if variance else 0.0


def pearson(labels: Sequence[float], predictions: Sequence[float]) -> float:
    """Returns the linear correlation; 0.0 if the numbers are constant, fewer than two, or not finite."""
    return _correlation(np.asarray(labels, np.float64), np.asarray(predictions, np.float64))


def spearman(labels: Sequence[float], predictions: Sequence[float]) -> float:
    """Returns the correlation of the ranks; equal numbers get the mean of their ranks.

    0.0 if the numbers are constant, fewer than two, or one is nan.
    """
    ranks = []
    for numbers in (labels, predictions):
        values = np.asarray(numbers, np.float64)
        if np.any(np.isnan(values)):
            return 0.0
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    return _correlation(*ranks)


RANKING_METRICS = ("ndcg@10", "mrr@10", "recall@1", "recall@10", "recall@100", "map@100")


def ranking_scores(
    rankings: Sequence[Sequence[float]], relevant: Sequence[Sequence[float]]
) -> Metrics:
    """Returns `RANKING_METRICS`, means over the queries for which something is relevant.

    Args:
      rankings: for each query the grades of the retrieved items, best first; 0 is not relevant.
      relevant: for each query the grades above 0 of all relevant items, retrieved or not.

    Source: as trec_eval computes them, gains being the grades and discounts log2(1 + rank).
    """
    per_query: dict[str, list[float]] = {name: [] for name in RANKING_METRICS}
    for grades, truth in zip(rankings, relevant):
        if not len(truth):
            continue
        hits = np.asarray(grades[:100], np.float64) > 0
        ranks = np.flatnonzero(hits) + 1
        ideal = _gain(sorted(truth, reverse=True)[:10])
        per_query["ndcg@10"].append(_gain(grades[:10]) / ideal)
        per_query["mrr@10"].append(1 / ranks[0] if len(ranks) and ranks[0] <= 10 else 0.0)
        for most in (1, 10, 100):
            per_query[f"recall@{most}"].append(np.sum(hits[:most]) / len(truth))
        per_query["map@100"].append(np.sum(np.arange(1, len(ranks) + 1) / ranks) / len(truth))
    return {name: float(np.mean(values)) if values else 0.0 for name, values in per_query.items()}


def _gain(grades: Sequence[float]) -> float:
    return float(np.sum(np.asarray(grades, np.float64) / np.log2(np.arange(2, len(grades) + 2))))


def precision_recall_f1(num_right: int, num_said: int, num_true: int) -> tuple[float, float, float]:
    """Returns precision, recall and F1 from counts; each is 0.0 where it would be 0 / 0."""
    return (
        _ratio(num_right, num_said),
        _ratio(num_right, num_true),
        _ratio(2 * num_right, num_said + num_true),
    )


def average_precision(truth: np.ndarray, shares: np.ndarray) -> float:
    """Returns the mean of the precisions at each true example, in order of falling probability; 0.0 if none is true.

    truth [N] bool, shares [N] float. Equal probabilities are taken together, as in scikit-learn.
    """
    if not truth.any():
        return 0.0
    order = np.argsort(-shares, kind="stable")
    values = shares[order]
    right = np.cumsum(truth[order])
    ends = np.flatnonzero(np.append(values[1:] < values[:-1], True))
    precisions = right[ends] / (ends + 1)
    return float(np.sum(np.diff(right[ends], prepend=0) * precisions) / right[-1])


def _matches(labels: Sequence[int], predictions: Sequence[int]) -> int:
    return sum(map(operator.eq, labels, predictions))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Returns Pearson's r. Deviations are scaled to about 1 before they are squared, to avoid overflow."""
    if len(first) < 2 or not (np.all(np.isfinite(first)) and np.all(np.isfinite(second))):
        return 0.0
    deviations = []
    for values in (first, second):
        # the mean of equal numbers may be rounded, and look like a deviation
        if np.all(values == values[0]):
            return 0.0
        values = values / np.max(np.abs(values))
        deviation = values - np.mean(values)
        deviations.append(deviation / np.max(np.abs(deviation)))
    first, second = (deviation / np.linalg.norm(deviation) for deviation in deviations)
    return float(np.clip(np.dot(first, second), -1.0, 1.0))
