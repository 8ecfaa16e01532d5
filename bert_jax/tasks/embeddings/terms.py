# SPDX-License-Identifier: Apache-2.0
"""Exact search among sparse vectors: an inverted list has, for each word, the passages that have it and its weights.

Zobel and Moffat 2006, "Inverted files for text search engines", section 4.
"""

from collections.abc import Sequence

import numpy as np

from bert_jax.model.heads.sparse import Terms
from bert_jax.tasks.embeddings.search import Nearest


class Postings:
    """The inverted list of some passages."""

    def __init__(self, passages: Sequence[Terms]) -> None:
        self.num_passages = len(passages)
        ids = [np.zeros(0, np.int32)]
        weights = [np.zeros(0, np.float32)]
        counts = []
        for passage in passages:
            ids.append(passage.ids)
            weights.append(passage.weights)
            counts.append(len(passage.ids))
        words = np.concatenate(ids)
        order = np.argsort(words, kind="stable")
        numbers = np.repeat(np.arange(len(passages)), counts)
        self._numbers = numbers[order]
        self._weights = np.concatenate(weights)[order]
        # of word i the postings from starts[i] to starts[i + 1]
        most = int(words.max(initial=-1)) + 1
        self._starts = np.searchsorted(words[order], np.arange(most + 1))

    def scores(self, query: Terms) -> np.ndarray:
        """Returns the dot products of a query with all passages, [number of passages] float32, summed in float64."""
        known = query.ids < len(self._starts) - 1
        ids = query.ids[known]
        starts = self._starts[ids]
        ends = self._starts[ids + 1]
        # the postings of all words of the query, one word after the other
        places = np.concatenate(
            [
                np.zeros(0, int),
                *map(np.arange, starts, ends),
            ]
        )
        weights = np.repeat(query.weights[known], ends - starts)
        products = self._weights[places] * weights.astype(np.float64)
        scores = np.bincount(
            self._numbers[places],
            weights=products,
            minlength=self.num_passages,
        )
        return scores.astype(np.float32)


def best_of(scores: np.ndarray, k: int) -> np.ndarray:
    """Returns the indices of the k best scores [n], best first; of equals the first come first."""
    k = min(k, len(scores))
    if k < len(scores):
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        places = np.flatnonzero(scores >= least)  # more than k where some are equal
    else:
        places = np.arange(k)
    return places[np.argsort(-scores[places], kind="stable")][:k]


def nearest_terms(queries: Sequence[Terms], passages: Sequence[Terms], k: int) -> Nearest:
    """Returns the k passages of the largest dot product for each query, as `nearest` does by cosine."""
    postings = Postings(passages)
    best_scores = np.full((len(queries), k), -np.inf, np.float32)
    numbers = np.full((len(queries), k), -1, np.int32)
    for line, query in enumerate(queries):
        scores = postings.scores(query)
        best = best_of(scores, k)
        count = len(best)
        best_scores[line, :count] = scores[best]
        numbers[line, :count] = best
    return Nearest(best_scores, numbers)
