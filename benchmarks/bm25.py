# SPDX-License-Identifier: Apache-2.0
"""BM25, which search models are compared with. Nothing is stemmed, and no word is left out."""

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np


def bm25(
    questions: Sequence[str], passages: Sequence[str], k1: float = 1.2, b: float = 0.75
) -> np.ndarray:
    """Returns the scores [questions, passages] of BM25 with Lucene's weights, over lower-cased words.

    Source: Robertson and Zaragoza 2009; the weight of a word is log(1 + (N - n + 0.5) / (n + 0.5)).
    """
    words = [re.findall(r"\w+", text.lower()) for text in passages]
    holding: dict[str, list[tuple[int, int]]] = {}
    for number, own in enumerate(words):
        for word, count in Counter(own).items():
            holding.setdefault(word, []).append((number, count))
    lengths = np.array([len(own) for own in words])
    penalty = k1 * (1 - b + b * lengths / lengths.mean())
    scores = np.zeros((len(questions), len(passages)))
    for place, question in enumerate(questions):
        for word in re.findall(r"\w+", question.lower()):
            if places := holding.get(word):
                numbers, counts = np.array(places).T
                rarity = math.log(1 + (len(passages) - len(places) + 0.5) / (len(places) + 0.5))
                scores[place, numbers] += rarity * counts / (counts + penalty[numbers])
    return scores
