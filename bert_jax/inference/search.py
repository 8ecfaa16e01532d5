# SPDX-License-Identifier: Apache-2.0
"""Search: the passages of a corpus that are nearest to each query, exact, however large the corpus is."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.devices.work import beat
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

    Raises: InputError as `sentence_embeddings`.
    """
    options: dict[str, Any] = {"max_seq_length": max_seq_length, "long_texts": long_texts}
    query_vectors = sentence_embeddings(bert, queries, kind="query", **options)
    best: list[list[Hit]] = [[] for _ in queries]
    corpus = iter(corpus)
    while passages := list(itertools.islice(corpus, BLOCK)):
        texts = [passage.text for passage in passages]
        vectors = sentence_embeddings(bert, texts, kind="passage", **options)
        near = nearest(query_vectors, [vectors], min(k, len(passages)))
        for hits, cosines, numbers in zip(best, near.cosines, near.numbers):
            hits += [Hit(passages[number], float(c)) for c, number in zip(cosines, numbers)]
            hits.sort(key=lambda hit: -hit.cosine)  # stable: of equals those before stay first
            del hits[k:]
        beat()
    return best
