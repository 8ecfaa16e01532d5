# SPDX-License-Identifier: Apache-2.0
"""Decodes answers: the best spans over all windows of a question, as slices of its context.

Source: google-research/bert run_squad.py, write_predictions. There an answer is joined from tokens and then
searched for in the text; here tokens know their positions in it. An example without a valid span gets the answer "".
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.batch import Row
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.squad.read import SquadExample

# The odds of a question without any span, instead of null score - best span's score; JSON has no infinity.
NO_SPAN_ODDS = 1e6


class Window(NamedTuple):
    """The part of a context that a row holds."""

    first: int  # the position in the row of its first token of the context
    offsets: np.ndarray  # [n, 2] int32, start and end in the context of its n context tokens
    is_max_context: np.ndarray  # [n] bool, whether no other window has more context of the token


class Span(NamedTuple):
    """A possible answer."""

    text: str  # "" for no answer
    start: int  # code points of the context before it; 0 for no answer
    end: int
    start_logit: float
    end_logit: float
    probability: float  # among the n-best

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


class SpanPrediction(NamedTuple):
    """The answer to a question, and the n-best list."""

    id: str
    text: str  # "" for no answer
    start: int
    end: int
    probability: float
    # with different texts, best first; "" among them if no answer is possible (squad2)
    n_best: tuple[Span, ...]
    null_odds: float | None  # squad2: the score of no answer - the best span's

    @property
    def best_span(self) -> Span | None:
        """Returns the best span that is not empty; None if there is none."""
        return next((span for span in self.n_best if span.text), None)

    @property
    def found(self) -> bool:
        """Returns whether any window offered a span."""
        return self.best_span is not None


def decode_spans(
    examples: Sequence[SquadExample],
    rows: Sequence[Row],
    outputs: Sequence[np.ndarray],
    config: TaskConfig,
) -> list[SpanPrediction]:
    """Returns the prediction of each example.

    In each window the `num_best` best starts are combined with as many ends; a span counts if both are in the
    context, in order, no more than `max_answer_length` tokens apart, and the start has its most context in this window.
    Spans of different windows are compared by the sum of their logits.

    Args:
      examples: the questions.
      rows: of these examples, in any order.
      outputs: for each row [L, 2] float32, start and end logits of its tokens.
      config: of the task; its `name` decides whether no answer is possible.
    """
    windows: list[list[tuple[Window, np.ndarray]]] = [[] for _ in examples]
    for row, output in zip(rows, outputs):
        # a model that has diverged must not stop the evaluation
        logits = np.nan_to_num(np.asarray(output, np.float64), nan=-1e9, posinf=1e9, neginf=-1e9)
        windows[row.example].append((row.detail, logits))
    predictions = []
    for example, found in zip(examples, windows):
        candidates = [_candidates(window, logits, config) for window, logits in found]
        spans = np.concatenate(candidates) if candidates else np.zeros((0, 4))
        spans = spans[np.argsort(-(spans[:, 2] + spans[:, 3]), kind="stable")]
        null = None
        if config.name == "squad2":  # [CLS] in the window with the smallest sum
            pairs = [(float(logits[0, 0]), float(logits[0, 1])) for _, logits in found]
            null = min(pairs, key=sum, default=None)
        n_best = _n_best(example.context, spans.tolist(), null, config.num_best)
        predictions.append(_predict(example.id, n_best, null, config))
    return predictions


def _candidates(window: Window, logits: np.ndarray, config: TaskConfig) -> np.ndarray:
    """Returns the valid spans of a window, [n, 4]: start and end in code points, and their logits."""
    # All positions take part, including [CLS] and the question; ties keep their order.
    best = np.argsort(-logits, axis=0, kind="stable")[: config.num_best]
    starts, ends = (best - window.first).T  # among the tokens of the context
    last = len(window.offsets) - 1
    can_start = (starts >= 0) & (starts <= last)
    can_start &= window.is_max_context[np.clip(starts, 0, last)]
    can_end = (ends >= 0) & (ends <= last)
    lengths = ends - starts[:, None]
    is_valid = can_start[:, None] & can_end & (lengths >= 0) & (lengths < config.max_answer_length)
    start, end = np.nonzero(is_valid)
    texts = window.offsets[starts[start], 0], window.offsets[ends[end], 1]
    return np.stack([*texts, logits[best[start, 0], 0], logits[best[end, 1], 1]], axis=1)


def _n_best(
    context: str,
    candidates: list[list[float]],
    null: tuple[float, float] | None,
    num_best: int,
) -> list[Span]:
    """Returns the best candidates with different texts, and no answer if `null` has its logits.

    No answer is one of the `num_best` if it ranks among them, and is added to them otherwise.
    """
    spans: dict[str, Span] = {}
    no_answer = Span("", 0, 0, *null, 0.0) if null else None
    for *place, start_logit, end_logit in candidates:
        if no_answer and no_answer.score > start_logit + end_logit:
            spans.setdefault("", no_answer)
        # after no answer has had its chance, which is one of the n-best like any other
        if len(spans) >= num_best:
            break
        start, end = map(int, place)
        text = context[start:end]
        start += len(text) - len(
            text.lstrip()
        )  # the blank that SentencePiece gives a token of its own
        text = text.strip()
        if text and text not in spans:
            spans[text] = Span(
                text=text,
                start=start,
                end=start + len(text),
                start_logit=start_logit,
                end_logit=end_logit,
                probability=0.0,
            )
    if no_answer:
        spans.setdefault("", no_answer)
    highest = max((span.score for span in spans.values()), default=0.0)
    weights = [math.exp(span.score - highest) for span in spans.values()]
    total = sum(weights)
    return [
        span._replace(probability=weight / total) for span, weight in zip(spans.values(), weights)
    ]


def _predict(
    id: str,
    spans: list[Span],
    null: tuple[float, float] | None,
    config: TaskConfig,
) -> SpanPrediction:
    """Returns the prediction: the best span, or "" if no answer is allowed and exceeds the threshold."""
    best = next((span for span in spans if span.text), None)
    odds = None
    if config.name == "squad2":
        odds = sum(null) - best.score if best and null else NO_SPAN_ODDS
    answer = best
    if best is None or (odds is not None and odds > config.null_threshold):
        answer = next((span for span in spans if not span.text), None)
    answer = answer or Span(
        text="",
        start=0,
        end=0,
        start_logit=0.0,
        end_logit=0.0,
        probability=0.0,
    )
    return SpanPrediction(
        id=id,
        text=answer.text,
        start=answer.start,
        end=answer.end,
        probability=answer.probability,
        n_best=tuple(spans),
        null_odds=odds,
    )
