# SPDX-License-Identifier: Apache-2.0
"""Two ways of training beside each other: means, standard deviations, and two intervals of their paired difference.

Runs are paired by their seed: the same seed gives both the same order of the data and the same random parameters, so
that their difference varies less than either. One interval is a bootstrap's, the other Student's t. Percentiles of few
seeds are too narrow: without a difference, intervals at 95 % exclude 0 in 25 % of cases of three seeds and in 15 % of
five; Student's exclude it in 5 %. A bootstrap over examples knows that the dev set is a sample too. Two ways are told
apart if no interval has 0 in it. Sources: Efron and Tibshirani 1993, chapters 6 and 13; Student 1908.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from bert_jax.errors import InputError

LEVEL = 0.95
RESAMPLES = 10_000
MOST_ENUMERATED = 6  # of so many seeds all 6 ** 6 resamples are taken, and of more a random part
Interval = tuple[float, float]


class Summary(NamedTuple):
    """The scores of the seeds of a group."""

    mean: float
    deviation: float | None  # with the number of seeds - 1 below; None of one seed
    seeds: int


class Difference(NamedTuple):
    """One group less another, over the seeds that both have."""

    mean: float
    bootstrap: Interval | None  # None of one seed, which says nothing of seeds
    student: Interval | None  # over seeds; None of one seed, for which examples may have been resampled
    seeds: int

    @property
    def sign(self) -> int:
        """1 or -1 if all intervals there are exclude 0, on the same side; else 0."""
        found = [interval for interval in (self.bootstrap, self.student) if interval is not None]
        if not found:
            return 0
        return 1 if all(low > 0 for low, _ in found) else -1 if all(high < 0 for _, high in found) else 0


def summarise(scores: Mapping[int, float]) -> Summary | None:
    """Returns mean and standard deviation of {seed: score}; None without a seed."""
    values = list(scores.values())
    if not values:
        return None
    return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def difference(one: Mapping[int, float], other: Mapping[int, float], level: float = LEVEL) -> Difference | None:
    """Returns the mean of one less other over the seeds that both have, with both intervals over these seeds.

    None if there is no such seed. With few seeds the bootstrap is coarse: of three there are 27 resamples, and an
    interval at 95 % reaches from the lowest seed's difference to the highest.
    """
    seeds = sorted(set(one) & set(other))
    if not seeds:
        return None
    apart = np.array([one[seed] - other[seed] for seed in seeds])
    if len(seeds) == 1:
        return Difference(float(apart[0]), None, None, 1)
    means = apart[_resamples(len(seeds))].mean(axis=1)
    return Difference(float(apart.mean()), _percentiles(means, level), _student(apart, level), len(seeds))


def difference_by_examples(
    one: Mapping[int, Sequence[float]], other: Mapping[int, Sequence[float]], level: float = LEVEL
) -> Difference | None:
    """Returns the mean of one less other, with a bootstrap over the seeds that both have and over the examples.

    Each gives a score for each example, such as 1 for right and 0 for wrong, for each seed; the examples are the same
    ones in the same order. Of one seed the bootstrap is over examples alone, which are many enough for its percentiles.
    Student's interval is over the means of seeds, if there are several. None if there is no seed of both.

    Raises: InputError if two seeds have different numbers of examples, or none.
    """
    seeds = sorted(set(one) & set(other))
    if not seeds:
        return None
    if len({len(scores[seed]) for scores in (one, other) for seed in seeds}) != 1 or not len(one[seeds[0]]):
        raise InputError("the seeds have scores of different numbers of examples; fine-tune all on the same data")
    apart = np.array([np.asarray(one[seed], float) - np.asarray(other[seed], float) for seed in seeds])
    rng = np.random.default_rng(0)
    num_seeds, num_examples = apart.shape
    means = np.empty(RESAMPLES)
    for index in range(RESAMPLES):
        chosen = apart[rng.integers(num_seeds, size=num_seeds)].mean(axis=0) if num_seeds > 1 else apart[0]
        means[index] = chosen[rng.integers(num_examples, size=num_examples)].mean()
    student = _student(apart.mean(axis=1), level) if num_seeds > 1 else None
    return Difference(float(apart.mean()), _percentiles(means, level), student, num_seeds)


def _resamples(count: int) -> np.ndarray:
    """Returns the places of resamples with repetition, [number of resamples, count]: all of them if they are few."""
    if count <= MOST_ENUMERATED:
        return np.array(list(itertools.product(range(count), repeat=count)))
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def _percentiles(means: np.ndarray, level: float) -> Interval:
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")  # no value in between
    return float(low), float(high)


def _student(apart: np.ndarray, level: float) -> Interval:
    half = stats.t.ppf((1 + level) / 2, len(apart) - 1) * apart.std(ddof=1) / math.sqrt(len(apart))
    return float(apart.mean() - half), float(apart.mean() + half)


def agreement(ours: Difference | None, paper: float | None) -> str:
    """Returns whether the sign of a difference is the paper's: words for a table."""
    if ours is None or paper is None or not math.isfinite(paper):
        return ""
    if ours.bootstrap is None and ours.student is None:
        return "one seed"
    if ours.sign == 0:
        return "not told apart"
    if paper == 0:
        return "the paper has none"
    word = "agrees" if (paper > 0) == (ours.sign > 0) else "disagrees"
    return word if ours.seeds > 1 else f"{word}, one seed"  # its interval is over examples alone
