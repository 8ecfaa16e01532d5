# SPDX-License-Identifier: Apache-2.0
"""Decodes answers: the best spans over all windows of a question, as slices of its context.

Source: google-research/bert run_squad.py, write_predictions. There an answer is joined from tokens and then
searched for in the text; here tokens know their positions in it. An example without a valid span gets the answer "".
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.batch import Row
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.squad.read import SquadExample

# The odds of a question without any span, instead of null score - best span's score; JSON has no infinity.
NO_SPAN_ODDS = 1e6
_WINDOWS_AT_ONCE = 256


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


class _Candidates(NamedTuple):
    """Possible spans of a block of windows, grouped by example, best first."""

    starts: list[int]  # code points
    ends: list[int]
    start_logits: list[float]
    end_logits: list[float]
    bounds: list[int]  # those of the block's example i are bounds[i]:bounds[i + 1]


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
    rows_of: list[list[int]] = [[] for _ in examples]
    for number, row in enumerate(rows):
        rows_of[row.example].append(number)
    predictions: list[SpanPrediction] = []
    for block in _blocks(rows_of):
        numbers = [number for row_numbers in block for number in row_numbers]
        logits = [_finite(outputs[number]) for number in numbers]
        candidates = _candidates(
            [len(group) for group in block], [rows[number] for number in numbers], logits, config
        )
        position = 0
        for index, row_numbers in enumerate(block):
            windows, position = (
                logits[position : position + len(row_numbers)],
                position + len(row_numbers),
            )
            null = _null_logits(windows) if config.name == "squad2" else None
            indices = range(candidates.bounds[index], candidates.bounds[index + 1])
            example = examples[len(predictions)]
            spans = _n_best(example.context, candidates, indices, null, config.num_best)
            predictions.append(_predict(example.id, spans, null, config))
    return predictions


def _blocks(rows_of: list[list[int]]) -> Iterator[list[list[int]]]:
    """Yields the rows of blocks of examples; a block bounds the memory for candidates."""
    block: list[list[int]] = []
    for row_numbers in rows_of:
        block.append(row_numbers)
        if sum(map(len, block)) >= _WINDOWS_AT_ONCE or len(block) >= _WINDOWS_AT_ONCE:
            yield block
            block = []
    if block:
        yield block


def _candidates(
    num_windows: Sequence[int],
    rows: Sequence[Row],
    outputs: Sequence[np.ndarray],
    config: TaskConfig,
) -> _Candidates:
    """Returns the valid spans. W windows, K = num_best.

    Args:
      num_windows: the number of windows of each example.
      rows: the windows.
      outputs: [L, 2] float64 for each.
      config: of the task.
    """
    if not rows:
        return _Candidates([], [], [], [], [0] * (len(num_windows) + 1))
    length = max(map(len, outputs))
    logits = np.full((2, len(rows), length), -np.inf)
    offsets = np.zeros((len(rows), length, 2), np.int64)
    in_context, can_start = np.zeros((2, len(rows), length), bool)
    for number, (row, output) in enumerate(zip(rows, outputs)):
        first, spans, is_max_context = row.detail
        context = slice(first, first + len(spans))
        logits[:, number, : len(output)] = output.T
        offsets[number, context] = spans
        in_context[number, context] = True
        can_start[number, context] = is_max_context
    # All positions take part, including [CLS] and the question; ties keep their order.
    best = np.argsort(-logits, axis=-1, kind="stable")[:, :, : config.num_best]
    best_logits = np.take_along_axis(logits, best, axis=-1)
    starts, ends = best[0][:, :, None], best[1][:, None, :]  # [W, K, 1], [W, 1, K]
    is_valid = (
        np.take_along_axis(can_start, best[0], axis=-1)[:, :, None]
        & np.take_along_axis(in_context, best[1], axis=-1)[:, None, :]
        & (starts <= ends)
        & (ends - starts < config.max_answer_length)
    )
    window, rank_start, rank_end = np.nonzero(is_valid)
    start_logits, end_logits = best_logits[0, window, rank_start], best_logits[1, window, rank_end]
    example = np.repeat(np.arange(len(num_windows)), num_windows)[window]
    # stable, so ties keep the order of the windows
    order = np.lexsort((-(start_logits + end_logits), example))
    return _Candidates(
        starts=offsets[window, best[0, window, rank_start], 0][order].tolist(),
        ends=offsets[window, best[1, window, rank_end], 1][order].tolist(),
        start_logits=start_logits[order].tolist(),
        end_logits=end_logits[order].tolist(),
        bounds=np.searchsorted(example, np.arange(len(num_windows) + 1)).tolist(),
    )


def _finite(output: np.ndarray) -> np.ndarray:
    """Returns logits in float64, with nan replaced: a model that has diverged must not stop the evaluation."""
    return np.nan_to_num(np.asarray(output, np.float64), nan=-1e9, posinf=1e9, neginf=-1e9)


def _null_logits(windows: Sequence[np.ndarray]) -> tuple[float, float] | None:
    """Returns the start and end logit of [CLS] in the window with the smallest sum; None without windows."""
    pairs = [(float(window[0, 0]), float(window[0, 1])) for window in windows]
    return min(pairs, key=sum, default=None)


def _n_best(
    context: str,
    candidates: _Candidates,
    indices: range,
    null: tuple[float, float] | None,
    num_best: int,
) -> list[Span]:
    """Returns the best candidates with different texts, and no answer if `null` has its logits.

    No answer is one of the `num_best` if it ranks among them, and is added to them otherwise.
    """
    spans: dict[str, Span] = {}
    no_answer = Span("", 0, 0, *null, 0.0) if null else None
    for index in indices:
        if len(spans) >= num_best:
            break
        logits = candidates.start_logits[index], candidates.end_logits[index]
        if no_answer and "" not in spans and no_answer.score > sum(logits):
            spans[""] = no_answer
            if len(spans) >= num_best:
                break
        start, end = candidates.starts[index], candidates.ends[index]
        text = context[start:end]
        if text != text.strip():  # the blank that SentencePiece gives a token of its own
            start, end = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
            text = text.strip()
        if text and text not in spans:
            spans[text] = Span(text, start, end, *logits, 0.0)
    if no_answer and "" not in spans:
        spans[""] = no_answer
    highest = max((span.score for span in spans.values()), default=0.0)
    weights = [math.exp(span.score - highest) for span in spans.values()]
    total = sum(weights)
    return [
        span._replace(probability=weight / total) for span, weight in zip(spans.values(), weights)
    ]


def _predict(
    id: str, spans: list[Span], null: tuple[float, float] | None, config: TaskConfig
) -> SpanPrediction:
    """Returns the prediction: the best span, or "" if no answer is allowed and exceeds the threshold."""
    best = next((span for span in spans if span.text), None)
    odds = None
    if config.name == "squad2":
        odds = sum(null) - best.score if best and null else NO_SPAN_ODDS
    none = next((span for span in spans if not span.text), Span("", 0, 0, 0.0, 0.0, 0.0))
    answer = none if best is None or (odds is not None and odds > config.null_threshold) else best
    return SpanPrediction(
        id, answer.text, answer.start, answer.end, answer.probability, tuple(spans), odds
    )
