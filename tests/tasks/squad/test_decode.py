# SPDX-License-Identifier: Apache-2.0
"""Answers from logits: the best span that is one, over all windows, and never a crash."""

import math

import numpy as np
import pytest

from bert_jax.batch import Row
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.squad.decode import NO_SPAN_ODDS, Window, decode_spans
from bert_jax.tasks.squad.read import SquadExample

CONTEXT = "aa bb cc dd ee"
OFFSETS = np.array([[0, 2], [3, 5], [6, 8], [9, 11], [12, 14]], np.int32)
FIRST = 3  # [CLS] ? [SEP] aa bb cc dd ee [SEP]
NOTHING = np.zeros((9, 2), np.float32)


def window(example=0, first=FIRST, offsets=OFFSETS, is_max_context=None):
    length = first + len(offsets) + 1
    is_max_context = np.ones(len(offsets), bool) if is_max_context is None else is_max_context
    return Row(example, np.zeros(0), np.zeros(0), (length,), None, Window(first, offsets, is_max_context))


def logits(length=9, start=(), end=()):
    """Returns [L, 2] logits, 0 but where `start` and `end` say otherwise: {position: value}."""
    values = np.zeros((length, 2), np.float32)
    for column, peaks in enumerate((start, end)):
        for position, value in dict(peaks).items():
            values[position, column] = value
    return values


def decode(rows, outputs, examples=None, name="squad1", **settings):
    examples = examples or [SquadExample("q", "?", CONTEXT)]
    return decode_spans(examples, rows, outputs, TaskConfig(name=name, **settings))


def test_an_answer_is_a_slice_of_the_context():
    [prediction] = decode([window()], [logits(start={4: 5}, end={5: 5})])
    assert (prediction.id, prediction.text, prediction.start, prediction.end) == ("q", "bb cc", 3, 8)
    assert prediction.found and prediction.null_odds is None
    scores = np.array([span.score for span in prediction.n_best])
    assert scores.tolist() == sorted(scores, reverse=True) and scores[0] == 10
    shares = [span.probability for span in prediction.n_best]
    assert shares == pytest.approx(np.exp(scores) / np.exp(scores).sum()) and prediction.probability == shares[0]


@pytest.mark.parametrize(
    ("start", "end", "answer"),
    [
        ({6: 9}, {4: 9}, "dd"),  # the end is before the start, so 9 + 0
        ({1: 9, 5: 2}, {5: 5}, "cc"),  # a start in the question
        ({0: 9, 5: 2}, {0: 9, 5: 5}, "cc"),  # [CLS]
        ({5: 5}, {8: 9, 5: 2}, "cc"),  # the last [SEP]
    ],
)
def test_what_is_no_span(start, end, answer):
    [prediction] = decode([window()], [logits(start=start, end=end)])
    assert prediction.text == answer


def test_equals_go_to_the_earlier_window_and_position():
    [prediction] = decode([window(), window()], [NOTHING, NOTHING])
    assert prediction.text == "aa"
    assert [span.text for span in prediction.n_best[:3]] == ["aa", "aa bb", "aa bb cc"]


@pytest.mark.parametrize(
    ("offsets", "start", "end", "text", "place"),
    [
        ([[0, 2], [3, 3], [3, 5]], 1, 2, "aa", (0, 2)),
        ([[0, 2], [3, 3], [3, 5]], 2, 2, "bb", (3, 5)),  # a blank alone is none
        ([[0, 2], [2, 5]], 2, 2, "bb", (3, 5)),
    ],
)
def test_blanks_of_pieces_are_cut_off(offsets, start, end, text, place):
    row = window(first=1, offsets=np.array(offsets, np.int32))
    example = SquadExample("q", "?", "aa bb")
    [prediction] = decode([row], [logits(len(offsets) + 2, {start: 9}, {end: 9})], [example])
    assert prediction.text == text and (prediction.start, prediction.end) == place


def test_no_row_and_no_span():
    examples = [SquadExample(name, "?", CONTEXT) for name in "abc"]
    rows = [window(2), window(1, is_max_context=np.zeros(5, bool))]
    outputs = [logits(start={3: 5}, end={3: 5}), NOTHING]
    for name, odds in (("squad1", [None, None, None]), ("squad2", [NO_SPAN_ODDS, NO_SPAN_ODDS, -10])):
        predictions = decode(rows, outputs, examples, name=name)
        assert [each.null_odds for each in predictions] == odds
        assert [(each.id, each.text) for each in predictions] == [("a", ""), ("b", ""), ("c", "aa")]
    predictions = decode(rows, outputs, examples)
    assert [each.found for each in predictions] == [False, False, True]
    assert predictions[0].n_best == () and predictions[0].probability == predictions[0].start == predictions[0].end == 0
    assert decode_spans([], [], [], TaskConfig(name="squad1")) == []


@pytest.mark.parametrize(
    ("threshold", "answer", "score"), [(0.0, "", 11), (0.99, "", 11), (1.0, "aa", 10), (5.0, "aa", 10)]
)
def test_no_answer_by_the_threshold(threshold, answer, score):
    output = logits(start={0: 6, 3: 5}, end={0: 5, 3: 5})
    [prediction] = decode([window()], [output], name="squad2", null_threshold=threshold)
    assert prediction.null_odds == 1 and prediction.text == answer
    assert prediction.n_best[0][:3] == ("", 0, 0) and prediction.n_best[1].text == "aa"
    total = sum(math.exp(span.score) for span in prediction.n_best)
    assert prediction.probability == pytest.approx(math.exp(score) / total)
    assert decode([window()], [output])[0].text == "aa"  # squad1 knows no such answer


def test_the_score_of_no_answer_is_the_least_of_the_windows():
    outputs = [logits(start={0: 6, 3: 1}), logits(start={0: -2})]
    [prediction] = decode([window(), window()], outputs, name="squad2")
    assert prediction.null_odds == -2 - 1
    assert prediction.n_best[-1].text == "" and prediction.n_best[-1].start_logit == -2


def test_no_answer_is_always_among_the_best():
    [prediction] = decode([window()], [logits(start={0: -9, 3: 1}, end={3: 3, 4: 2, 5: 1})], name="squad2", num_best=3)
    assert [span.text for span in prediction.n_best] == ["aa", "aa bb", "aa bb cc", ""]


def test_an_answer_is_before_no_answer_of_the_same_score():
    [prediction] = decode([window()], [NOTHING], name="squad2")
    assert prediction.n_best[0].text == prediction.text == "aa" and prediction.n_best[-1].text == ""
    [prediction] = decode([window()], [logits(start={0: 1}, end={3: 5})], name="squad2")
    assert prediction.n_best[0].text == "aa" and prediction.null_odds == 1 - 5


@pytest.mark.parametrize("name", ["squad1", "squad2"])
def test_logits_that_are_no_numbers(name):
    mixed = logits(start={3: np.nan, 4: np.inf}, end={4: 1, 5: -np.inf})
    for output in (np.full((9, 2), np.nan, np.float32), mixed):
        [prediction] = decode([window()], [output], name=name)
        assert all(math.isfinite(span.probability) for span in prediction.n_best)


def test_the_settings_and_the_context_limit_spans():
    is_max_context = np.array([False, True, True, True, True])
    output = logits(start={3: 9, 4: 5}, end={3: 9, 4: 5})
    assert decode([window(is_max_context=is_max_context)], [output])[0].text == "bb"
    output = logits(start={3: 9, 4: 8}, end={4: 3, 5: 2})
    assert decode([window()], [output], max_answer_length=1)[0].text == "bb"
    assert [span.text for span in decode([window()], [output], num_best=2)[0].n_best] == ["aa bb", "aa bb cc"]
