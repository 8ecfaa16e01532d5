# SPDX-License-Identifier: Apache-2.0
"""Hard negatives: passages that a model finds near a query, and that do not belong to it.

Source: Karpukhin et al. 2020 for negatives from a search; Moreira et al. 2024, "NV-Retriever", for limits that follow
the score of the positive. Names and order of the limits are those of sentence-transformers' mine_hard_negatives.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.data.vectors import unit
from bert_jax.devices.work import beat
from bert_jax.errors import InputError
from bert_jax.inference.features import sentence_embeddings
from bert_jax.inference.predict import Predictor, task_of
from bert_jax.tasks.classify import NumbersTask
from bert_jax.tasks.embeddings.search import BLOCK, nearest
from bert_jax.tasks.texts import Scored

# pairs of a query and a passage -> a score for each, the higher the better they fit
Judge: TypeAlias = Callable[[list[tuple[str, str]]], Sequence[float]]
JUDGED_AT_ONCE = 64  # queries


class Mined(NamedTuple):
    """A pair, and passages that do not belong to its query, the most similar first."""

    query: str
    positive: str
    negatives: list[str]
    scores: list[float]  # of the positive, then of each negative


class Limits(NamedTuple):
    """Which of the passages that were found may be negatives. `None` and 0 set no limit."""

    range_min: int = 0  # passages that are left out, of those nearest that may be negatives
    # passages, after that, among which negatives are looked for; 0 is a few more than are asked for
    range_max: int = 0
    # how far below the score of the query's weakest positive a negative has to be
    absolute_margin: float | None = None
    # the same, as a share of that score
    relative_margin: float | None = None
    max_score: float | None = None
    min_score: float | None = None

    def check(self, num_negatives: int) -> None:
        """Raises: InputError if there is no room for the negatives."""
        if num_negatives < 1:
            raise InputError(f"num_negatives {num_negatives} is below 1; give how many a pair has")
        for name, limit in zip(self._fields[2:], self[2:]):
            if limit is not None and not math.isfinite(limit):
                raise InputError(f"{name} {limit} is no number; leave it out for no limit")
        if self.range_min < 0 or self.range_max < 0:
            least = min(self.range_min, self.range_max)
            raise InputError(f"range_min and range_max count passages, and one is {least}; use 0")
        if self.range_max and self.range_max - self.range_min < num_negatives:
            raise InputError(
                f"from range_min {self.range_min} to range_max {self.range_max} there is no room for num_negatives "
                f"{num_negatives}; raise range_max"
            )

    def depth(self, num_negatives: int, most_positives: int, is_judged: bool) -> int:
        """Returns how many passages that are not positives are looked at, `range_max` or what is usual."""
        drop = (self.absolute_margin, self.relative_margin, self.max_score)
        drops = is_judged or any(limit is not None for limit in drop)
        wanted = num_negatives * (10 if drops else 1)
        return self.range_max or self.range_min + most_positives + wanted

    def allow(self, scores: np.ndarray, weakest: float) -> np.ndarray:
        """Returns which passages [n] may be negatives by their scores; `weakest` is that of the weakest positive."""
        allowed = np.ones(len(scores), bool)
        if self.absolute_margin is not None:
            allowed &= scores + self.absolute_margin <= weakest
        if self.relative_margin is not None:
            allowed &= scores <= weakest - abs(weakest) * self.relative_margin
        if self.max_score is not None:
            allowed &= scores <= self.max_score
        if self.min_score is not None:
            allowed &= scores >= self.min_score
        return allowed


NO_LIMITS = Limits()


def mine_negatives(
    bert: Pretrained,
    pairs: Iterable[tuple[str, str]],
    corpus: Iterable[str] = (),
    num_negatives: int = 3,
    limits: Limits = NO_LIMITS,
    sampling: str = "top",
    seed: int = 0,
    judge: Judge | None = None,
) -> list[Mined]:
    """Returns every distinct pair of a query and a passage with up to `num_negatives` hard negatives.

    Pairs stand in the order in which their queries come first. Negatives are looked for among the texts of `corpus`
    and all positives. They are neither a positive of the query nor its own text, and `limits` leave out others, by the
    cosine of the vectors, or by a `judge`, which then also orders them. `sampling` is "top", the most similar, or
    "random": drawn with `seed` from those within the limits. A pair has fewer negatives where there are no more.

    Raises: InputError if there is no pair, or the limits leave no room.

    Examples:
      >>> bert = bert_jax.load_pretrained("models/bert-mini-en")
      >>> corpus = ["the door is shut", "a cat sat on the mat"]
      >>> [mined] = bert_jax.mine_negatives(bert, [("open the door", "the door is open")], corpus, num_negatives=1)
      >>> mined.negatives
      ['the door is shut']
    """
    limits.check(num_negatives)
    if sampling not in ("top", "random"):
        raise InputError(f"sampling {sampling!r} is unknown; use top or random")
    pairs = list(pairs)
    for number, pair in enumerate(pairs, 1):
        if isinstance(pair, str) or [*map(type, pair)] != [str, str]:
            raise InputError(
                f"pair {number} is {pair!r:.60}, not a query and a passage; give two texts"
            )
    if not pairs:
        raise InputError(
            "there is no pair to find negatives for; give pairs of a query and a passage"
        )
    forms: dict[str, str] = {}  # by the text without blanks around it, as a corpus has it
    for text in itertools.chain(corpus, (positive for _, positive in pairs)):
        forms.setdefault(text.strip(), text)
    passages = list(forms.values())
    number_of = {form: number for number, form in enumerate(forms)}
    positives: dict[str, dict[int, None]] = {}  # of each query, in their order
    for query, positive in pairs:
        positives.setdefault(query, {})[number_of[positive.strip()]] = None
    most = max(Counter(query for query, _ in pairs).values())
    depth = limits.depth(num_negatives, most, judge is not None)
    found = _found(bert, passages, positives, number_of, depth + most)
    if judge is not None:
        found = _judged(judge, passages, found)
    mined = []
    for place, (query, of_positives, candidates) in enumerate(found):
        scores = np.array(list(candidates.values()))
        allowed = limits.allow(scores, min(of_positives.values()))
        allowed &= [number not in of_positives for number in candidates]
        # stable, so that of equals the nearer stays first
        order = [n for n in np.argsort(-scores, kind="stable") if allowed[n]]
        order = order[limits.range_min : depth]
        if sampling == "random" and len(order) > num_negatives:
            draw = np.random.default_rng((seed, place))
            order = [order[n] for n in sorted(draw.permutation(len(order))[:num_negatives])]
        order = order[:num_negatives]
        numbers = list(candidates)
        negatives = [passages[numbers[n]] for n in order]
        for number, score in of_positives.items():
            mined.append(
                Mined(
                    query=query,
                    positive=passages[number],
                    negatives=negatives,
                    scores=[float(score), *(float(scores[n]) for n in order)],
                )
            )
    return mined


class _Found(NamedTuple):
    """What was found for a query: numbers of passages, with their scores."""

    query: str
    positives: dict[int, float]
    candidates: dict[int, float]  # the nearest first; positives are among them


def _found(
    bert: Pretrained,
    passages: Sequence[str],
    positives: dict[str, dict[int, None]],
    number_of: dict[str, int],
    depth: int,
) -> Iterator[_Found]:
    """Yields the `depth` passages nearest to each query by cosine, without its own text, and its positives."""
    queries = unit(sentence_embeddings(bert, list(positives), kind="query"))
    needed = np.unique([number for numbers in positives.values() for number in numbers])
    # Of all vectors only those of positives are kept.
    kept = np.zeros((len(needed), queries.shape[1]), np.float32)

    def blocks() -> Iterator[np.ndarray]:
        for first in range(0, len(passages), BLOCK):
            block = sentence_embeddings(bert, passages[first : first + BLOCK], kind="passage")
            inside = (needed >= first) & (needed < first + len(block))
            kept[inside] = unit(block[needed[inside] - first])
            yield block
            beat()

    # one more than are asked for: the query's own text may be among them
    results = nearest(queries, blocks(), min(depth + 1, len(passages)))
    for place, (query, own) in enumerate(positives.items()):
        itself = number_of.get(query.strip(), -1)
        near = zip(results.numbers[place].tolist(), results.scores[place].tolist())
        candidates = [(number, cosine) for number, cosine in near if number != itself]
        cosines = kept[np.searchsorted(needed, list(own))] @ queries[place]
        yield _Found(
            query=query,
            positives=dict(zip(own, cosines.tolist())),
            candidates=dict(candidates[:depth]),
        )


def _judged(judge: Judge, passages: Sequence[str], found: Iterator[_Found]) -> Iterator[_Found]:
    """Yields what was found with the scores of a judge in place of cosines."""
    while part := list(itertools.islice(found, JUDGED_AT_ONCE)):
        # a positive may be among the candidates: each pair is judged once
        numbers = [dict.fromkeys((*each.positives, *each.candidates)) for each in part]
        pairs = [
            (each.query, passages[number]) for each, own in zip(part, numbers) for number in own
        ]
        scores = iter(judge(pairs))
        for each, own in zip(part, numbers):
            said = {number: float(next(scores)) for number in own}
            yield _Found(
                query=each.query,
                positives={number: said[number] for number in each.positives},
                candidates={number: said[number] for number in each.candidates},
            )
        beat()


def load_judge(bert: Pretrained, place: str, long_texts: str = "cut") -> Judge:
    """Returns the judge that a model from `place` makes. Raises: InputError if it gives a pair of texts no number."""
    task = task_of(bert)
    if not isinstance(task, NumbersTask) or task.config.num_texts == 1:
        does = task.config.name if task is not None else bert.task
        raise InputError(
            f"{place} does not give a pair of texts a number (its task is {does}); give a reranker, as "
            "finetune:reranking trains it, a CrossEncoder of one output, or a regression of pairs"
        )
    return judge_of(Predictor(bert, long_texts))


def judge_of(predictor: Predictor) -> Judge:
    """Returns the judge that a model makes which gives a pair a number.

    Raises: InputError, when it is first asked, if the model predicts something else.
    """

    def judge(pairs: list[tuple[str, str]]) -> list[float]:
        said = predictor(pairs)
        if not all(isinstance(prediction, Scored) for prediction in said):
            raise InputError(
                "the judge does not give a pair a number; use a reranker, or a model of a regression"
            )
        return [prediction.value for prediction in said]

    return judge
