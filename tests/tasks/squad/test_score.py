# SPDX-License-Identifier: Apache-2.0
"""Scores are SQuAD's official ones."""

import numpy as np
import pytest
from builders import message, write

from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.squad.read import Answer, SquadExample
from bert_jax.tasks.squad.score import (
    find_usable_threshold,
    normalize_answer,
    score_files,
    score_squad1,
    score_squad2,
)
from bert_jax.tasks.squad.task import SquadTask


def question(id, *answers):
    return SquadExample(id, "?", "", tuple(Answer(answer, 0) for answer in answers))


@pytest.mark.parametrize(
    ("name", "data", "predictions", "expected"),
    [
        (
            "squad1",
            "dev-v1.1.json",
            "bert_ensemble.dev-v1.1.predictions.json",
            {"exact_match": 86.3668, "f1": 92.2394, "total": 8582},
        ),
        (
            "squad2",
            "dev-v2.0.json",
            "bert_single.dev-v2.0.predictions.json",
            {"exact": 78.4734, "f1": 81.4957, "total": 8961}
            | {"HasAns_exact": 75.4623, "HasAns_f1": 81.5703, "HasAns_total": 4434}
            | {"NoAns_exact": 81.4226, "NoAns_f1": 81.4226, "NoAns_total": 4527},
        ),
    ],
)
def test_the_published_predictions(shared_data, name, data, predictions, expected):
    folder = shared_data / "squad"
    scores, missing = score_files(name, str(folder / data), str(folder / predictions))
    assert scores == pytest.approx(expected, abs=5e-5) and missing == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Beatles.", "beatles"),
        ("an answer, a THE", "answer"),
        ("U.S.A.", "usa"),
        ("die Straße – 1954–55", "die straße – 1954–55"),  # only ASCII punctuation, as in the official script
        ("語、言", "語、言"),
    ],
)
def test_normalized_answers(text, expected):
    assert normalize_answer(text) == expected


def test_the_best_of_several_answers_counts():
    scores = score_squad1([question("1", "Rome", "the city of Rome")], {"1": "city of Rome!"})
    assert scores == {"exact_match": 100, "f1": 100, "total": 1}
    scores = score_squad1([question("1", "Rome"), question("2", "Paris")], {"1": "in Rome", "2": "x"})
    assert scores == {"exact_match": 0, "f1": pytest.approx(100 * (2 * 0.5 / 1.5) / 2), "total": 2}


def test_no_answer_is_right_or_wrong():
    examples = [question("1"), question("2"), question("3", "Rome"), question("4", "a")]
    scores = score_squad2(examples, {"1": "", "2": "x", "3": "", "4": ""})
    assert scores["NoAns_f1"] == scores["NoAns_exact"] == 50
    assert scores["HasAns_exact"] == 50  # "a" is an article, so there is nothing to find
    # v1.1 has no such rule: two empty texts are the same, but have no word in common.
    assert score_squad1([question("4", "a")], {"4": ""}) == {"exact_match": 100, "f1": 0, "total": 1}


def test_a_question_without_an_answer_is_not_of_v1(tmp_path):
    problem = "1 of 2 questions have no answer, the first 'b'; squad1 cannot score them"
    assert problem in message(score_squad1, [question("a", "x"), question("b")], {"a": "x", "b": ""})
    qas = '[{"id": "b", "question": "what", "answers": [], "is_impossible": true}]'
    path = write(tmp_path / "dev.json", f'{{"data": [{{"paragraphs": [{{"context": "red box", "qas": {qas}}}]}}]}}')
    task = SquadTask(TaskConfig(name="squad1", max_seq_length=128))
    assert "squad1 cannot score them, so use squad2" in message(task.read, f"dev={path}", "dev")


def test_a_missing_prediction_scores_nothing():
    examples = [question("1", "x"), question("2", "y"), question("3")]
    assert score_squad1(examples[:2], {"1": "x"})["f1"] == 50
    scores = score_squad2(examples, {"1": "x"})
    assert (scores["exact"], scores["NoAns_exact"], scores["HasAns_f1"]) == (pytest.approx(100 / 3), 0, 50)


def test_only_questions_of_one_kind():
    assert "NoAns_f1" not in score_squad2([question("1", "x")], {"1": "x"})
    assert score_squad2([], {}) == {"exact": 0, "f1": 0, "total": 0}


def test_a_usable_threshold_gives_what_it_says():
    rng = np.random.default_rng(0)
    words, kinds = ["x", "x y", "z", "the", ""], [(), ("x",), ("x y", "z"), ("a",)]
    for trial in range(100):
        most = 2 + 2 * (trial % 2)  # the official number counts articles and empty answers otherwise
        examples = [question(str(place), *kinds[kind]) for place, kind in enumerate(rng.integers(3, size=8))]
        texts = {example.id: words[rng.integers(1 + most)] for example in examples}
        # with equal odds, which that number cannot tell apart, and without
        drawn = rng.integers(-4, 4, size=8) if trial % 2 else rng.normal(size=8)
        odds = {example.id: float(value) for example, value in zip(examples, drawn)}
        found = find_usable_threshold(examples, texts, odds)
        at = {}
        for threshold in (found.value, min(drawn) - 1, *drawn):
            said = {id: "" if odds[id] > threshold else text for id, text in texts.items()}
            at[threshold] = score_squad2(examples, said)["f1"]
        assert found.score == pytest.approx(at[found.value]) == pytest.approx(max(at.values()))
        if not trial % 2:
            assert found.score == pytest.approx(score_squad2(examples, texts, odds)["best_f1"])
    assert find_usable_threshold([], {}, {}) == (0, 0)


def test_odds_above_the_threshold_are_no_answer():
    examples = [question("1", "x"), question("2")]
    texts, odds = {"1": "x", "2": "y"}, {"1": -3.0, "2": 2.0}
    assert score_squad2(examples, texts, odds)["exact"] == 100  # 2.0 is above 1.0
    assert score_squad2(examples, texts, odds, threshold=2.0)["exact"] == 50


@pytest.fixture
def files(tmp_path):
    """Returns a file of one question, one of predictions and one of odds."""
    qas = '[{"id": "1", "question": "?", "answers": [{"text": "x", "answer_start": 0}]}]'
    data = write(tmp_path / "data.json", f'{{"data": [{{"paragraphs": [{{"context": "x", "qas": {qas}}}]}}]}}')
    return data, write(tmp_path / "said.json", '{"1": "x"}'), write(tmp_path / "odds.json", '{"1": -1}')


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("said.json", "[]", "said.json is [], not an object"),
        ("said.json", '{"1": null}', "said.json: '1' is null, not a text"),
        ("odds.json", '{"1": NaN}', "odds.json: '1' is NaN, not a finite number"),
        ("odds.json", '{"1": 1%s}' % ("0" * 400), "odds.json: '1' is 10000"),
        ("odds.json", '{"2": 0}', "odds.json has no '1', a finite number, the odds of no answer"),
    ],
)
def test_files_that_are_none(tmp_path, files, name, text, problem):
    assert score_files("squad2", *files)[0]["exact"] == 100
    write(tmp_path / name, text)
    assert problem in message(score_files, "squad2", *files)
