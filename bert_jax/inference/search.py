# SPDX-License-Identifier: Apache-2.0
"""Search: the passages of a corpus that are nearest to each query, exact, however large the corpus is."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.devices.work import beat
from bert_jax.errors import InputError
from bert_jax.inference.features import sentence_embeddings
from bert_jax.tasks.embeddings.search import BLOCK, nearest


class Passage(NamedTuple):
    """A passage of a corpus."""

    id: Any  # as given
    text: str


class Hit(NamedTuple):
    """A passage near a query."""

    passage: Passage
    cosine: float


def search(
    bert: Pretrained,
    queries: Sequence[str],
    corpus: Iterable[Passage],
    k: int = 10,
    max_seq_length: int = 0,
    long_texts: str = "cut",
) -> list[list[Hit]]:
    """Returns the k passages that are nearest to each query by cosine, best first; of equals the first come first.

    The corpus is read once, and a few thousand of its vectors are in memory at a time. See `sentence_embeddings` for
    the vectors of texts, `max_seq_length` and `long_texts`.

    Raises: InputError as `sentence_embeddings`, or if there is no query or no passage.
    """
    if not len(queries) or k < 1:
        raise InputError(
            "there is nothing to search for; give one query or more, and a k of 1 or more"
        )
    options: dict[str, Any] = {"max_seq_length": max_seq_length, "long_texts": long_texts}
    query_vectors = sentence_embeddings(bert, queries, kind="query", **options)
    kept: dict[int, Passage] = {}
    best = np.zeros((len(queries), 0), np.float32), np.zeros((len(queries), 0), np.int64)
    before = 0
    for passages in _chunks(corpus):
        vectors = sentence_embeddings(
            bert, [passage.text for passage in passages], kind="passage", **options
        )
        near = nearest(query_vectors, [vectors], min(k, len(passages)))
        cosines, numbers = (
            np.concatenate(both, axis=1)
            for both in zip(best, (near.cosines, near.numbers.astype(np.int64) + before))
        )
        order = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
        best = np.take_along_axis(cosines, order, 1), np.take_along_axis(numbers, order, 1)
        chosen = set(best[1].ravel().tolist())
        kept = {number: passage for number, passage in kept.items() if number in chosen}
        kept |= {
            before + index: passage
            for index, passage in enumerate(passages)
            if before + index in chosen
        }
        before += len(passages)
        beat()
    if not before:
        raise InputError("the corpus is empty; give one passage or more")
    return [
        [Hit(kept[n], float(c)) for c, n in zip(cosines, numbers)]
        for cosines, numbers in zip(*best)
    ]


def _chunks(corpus: Iterable[Passage]) -> Iterator[list[Passage]]:
    corpus = iter(corpus)
    while chunk := list(itertools.islice(corpus, BLOCK)):
        yield chunk
