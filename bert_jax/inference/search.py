# SPDX-License-Identifier: Apache-2.0
"""Search: the passages of a corpus that are nearest to each query, exact, however large the corpus is."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.data.vectors import Vectors
from bert_jax.devices.work import beat
from bert_jax.errors import InputError
from bert_jax.inference.features import sentence_embeddings
from bert_jax.inference.late_interaction import is_of_tokens, maxsim, multi_vectors
from bert_jax.inference.negatives import JUDGED_AT_ONCE, Judge
from bert_jax.inference.sparse import terms_of_texts
from bert_jax.inference.vectors import digest_of
from bert_jax.tasks.embeddings.search import (
    BLOCK,
    TEXTS,
    Nearest,
    check_k,
    nearest,
    nearest_texts,
    nearest_vectors,
)
from bert_jax.tasks.embeddings.terms import nearest_terms


class Passage(NamedTuple):
    """A passage of a corpus."""

    id: Any  # as given
    text: str


class Hit(NamedTuple):
    """A passage near a query."""

    passage: Passage
    score: float  # the cosine; `maxsim` of vectors of tokens, the dot product of sparse ones


def search(
    bert: Pretrained,
    queries: Sequence[str],
    corpus: Iterable[Passage] | Vectors,
    k: int = 10,
    max_seq_length: int = 0,
    long_texts: str = "cut",
    candidates: int = 100,
) -> list[list[Hit]]:
    """Returns the k passages that are nearest to each query by cosine, best first; of equals the first come first.

    A model with vectors of tokens finds those with the largest `maxsim`, one with sparse vectors those with the largest
    dot product, by an inverted list. The corpus is read once, and a few thousand of its vectors are in memory at a
    time; or it is a directory that `open_vectors` opens, searched by `nearest_vectors` with as many `candidates`. See
    `sentence_embeddings`, `multi_vectors` and `sparse_embeddings` for the vectors of texts, `max_seq_length` and
    `long_texts`.

    Raises: InputError as `sentence_embeddings`; also if the directory has vectors of another model.
    """
    check_k(k)
    options: dict[str, Any] = {"max_seq_length": max_seq_length, "long_texts": long_texts}
    of_tokens = is_of_tokens(bert)
    kind = bert.embedding and bert.embedding.embedding.kind
    embed: Any = multi_vectors if of_tokens else sentence_embeddings
    if kind == "sparse":
        embed = terms_of_texts
    if isinstance(corpus, Vectors):
        made = corpus.manifest["identity"].get("model", "")
        own = digest_of(bert)
        if made != own:
            raise InputError(
                f"{corpus.place} has vectors of another model ({made[:12]}, not {own[:12]}); give that model, or make "
                "the vectors with this one"
            )
    query_vectors = embed(bert, queries, kind="query", **options)
    if isinstance(corpus, Vectors):
        near = nearest_vectors(query_vectors, corpus, k, candidates)
        texts_of = corpus.passages(near.numbers[near.numbers >= 0])
        return [
            [Hit(Passage(*texts_of[n]), s) for n, s in zip(*of_query) if n >= 0]
            for of_query in zip(near.numbers.tolist(), near.scores.tolist())
        ]
    best: list[list[Hit]] = [[] for _ in queries]
    corpus = iter(corpus)
    while passages := list(itertools.islice(corpus, TEXTS if of_tokens else BLOCK)):
        texts = [passage.text for passage in passages]
        vectors = embed(bert, texts, kind="passage", **options)
        few = min(k, len(passages))
        if of_tokens:
            near = nearest_texts(query_vectors, vectors, few)
        elif kind == "sparse":
            near = nearest_terms(query_vectors, vectors, few)
        else:
            near = nearest(query_vectors, [vectors], few)
        _keep_best(best, near, passages, k)
        beat()
    return best


def _keep_best(best: list[list[Hit]], near: Nearest, passages: Sequence[Passage], k: int) -> None:
    """Puts what was found among some passages into the best so far."""
    for hits, scores, numbers in zip(best, near.scores, near.numbers):
        hits += [Hit(passages[number], float(score)) for score, number in zip(scores, numbers)]
        hits.sort(key=lambda hit: -hit.score)  # stable: of equals those before stay first
        del hits[k:]


def rerank_by_maxsim(
    bert: Pretrained,
    queries: Sequence[str],
    found: Sequence[Sequence[Hit]],
    k: int = 10,
    long_texts: str = "cut",
) -> list[list[Hit]]:
    """Returns the k best of the passages that were found for each query, by the `maxsim` of a model, best first.

    Passages that were found for several of some dozen queries are encoded once. Raises: InputError as `multi_vectors`.
    """
    best = []
    asked = zip(queries, found)
    while part := list(itertools.islice(asked, JUDGED_AT_ONCE)):
        queried = multi_vectors(bert, [query for query, _ in part], "query", 0, long_texts)
        texts = list(dict.fromkeys(hit.passage.text for _, hits in part for hit in hits))
        vectors = dict(zip(texts, multi_vectors(bert, texts, "passage", 0, long_texts)))
        for query, (_, hits) in zip(queried, part):
            (scores,) = maxsim([query], [vectors[hit.passage.text] for hit in hits])
            best.append(_ordered(hits, scores, k))
        beat()
    return best


def rerank_by_pairs(
    judge: Judge, queries: Sequence[str], found: Sequence[Sequence[Hit]], k: int = 10
) -> list[list[Hit]]:
    """Returns the k best of the passages that were found for each query, by the scores of a reranker, best first."""
    best = []
    asked = zip(queries, found)
    while part := list(itertools.islice(asked, JUDGED_AT_ONCE)):
        scores = iter(judge([(query, hit.passage.text) for query, hits in part for hit in hits]))
        best += [_ordered(hits, list(itertools.islice(scores, len(hits))), k) for _, hits in part]
        beat()
    return best


def _ordered(hits: Sequence[Hit], scores: Iterable[float], k: int) -> list[Hit]:
    """Returns the k best by other scores; of equals those before stay first."""
    scored = [Hit(hit.passage, float(score)) for hit, score in zip(hits, scores)]
    return sorted(scored, key=lambda hit: -hit.score)[:k]
