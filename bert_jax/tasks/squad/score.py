# SPDX-License-Identifier: Apache-2.0
"""The official scores of SQuAD, v1.1 and v2.0.

Source: the evaluation scripts of the data sets, evaluate-v1.1.py and evaluate-v2.0.py. Data of other languages are
scored in the same way, as XQuAD's authors did: blanks part words and English articles are left out, whatever the
language. A prediction that is missing scores 0 in both (v2.0's script leaves it out of the mean).
"""

import collections
import re
import string
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.errors import InputError
from bert_jax.tasks.readers import read_json_value
from bert_jax.tasks.records import to_record
from bert_jax.tasks.scores import Metrics
from bert_jax.tasks.squad.read import SquadExample, read_squad_file

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Threshold(NamedTuple):
    """The best score that a threshold gives, and the threshold."""

    score: float  # percent
    value: float  # no answer where the odds are above it


def normalize_answer(text: str) -> str:
    """Returns an answer for comparison: lower case, no ASCII punctuation or English articles, single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def score_squad1(examples: Sequence[SquadExample], texts: Mapping[str, str]) -> Metrics:
    """Returns exact match and F1 in percent, and the number of questions. Raises: InputError as `check_answered`."""
    check_answered(examples)
    exact, f1 = _raw_scores(examples, texts, no_answers=False)
    return {"exact_match": _percent(exact), "f1": _percent(f1), "total": len(examples)}


def check_answered(examples: Sequence[SquadExample]) -> None:
    """Raises: InputError if a question has no answer, as in v2.0: its v1.1 F1 would be 0 whatever is predicted."""
    without = [example.id for example in examples if not example.answers]
    if without:
        count = f"{len(without)} of {len(examples)} questions have no answer, the first {without[0]!r:.60}"
        raise InputError(f"{count}; squad1 cannot score them, so use squad2")


def score_squad2(
    examples: Sequence[SquadExample],
    texts: Mapping[str, str],
    odds: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> Metrics:
    """Returns exact match and F1 in percent, over all questions and over those with and without an answer.

    Args:
      examples: the questions; one has an answer if any annotator gave one.
      texts: by the id of the question; "" for no answer.
      odds: by the id of the question, a score for no answer: a probability or a difference of logits. With odds, the
        best scores over all thresholds and these thresholds are returned too. Then every question needs one.
      threshold: an answer with odds above it counts as no answer.
    """
    exact, f1 = _raw_scores(examples, texts, no_answers=True)
    answered = np.array([bool(example.answers) for example in examples], bool)
    all_odds = np.array([0.0 if odds is None else odds[example.id] for example in examples], float)
    kinds = {"": answered | True, "HasAns_": answered, "NoAns_": ~answered}
    scores: Metrics = {}
    for kind, chosen in kinds.items():
        if kind and not chosen.any():
            continue
        for name, values in (("exact", exact), ("f1", f1)):
            shown = np.where(all_odds > threshold, ~answered, values)
            scores[f"{kind}{name}"] = _percent(shown[chosen])
        scores[f"{kind}total"] = int(chosen.sum())
    if odds is not None:
        silent = np.array([not texts.get(example.id) for example in examples], bool)
        for name, values in (("exact", exact), ("f1", f1)):
            best = find_threshold(values, all_odds, answered, silent)
            scores[f"best_{name}"], scores[f"best_{name}_thresh"] = best
    return scores


def find_threshold(
    scores: np.ndarray,
    odds: np.ndarray,
    answered: np.ndarray,
    silent: np.ndarray,
) -> Threshold:
    """Returns the best score in percent over all thresholds on the odds.

    Args:
      scores: of each question's answer, 0..1.
      odds: of no answer.
      answered: whether the question has an answer.
      silent: whether the answer is "" at any threshold.
    """
    # An answer to a question that has none loses the point that silence had.
    gains = np.where(answered, scores, np.where(silent, 0.0, -1.0))
    return _best_threshold(odds, ~answered, gains, np.ones(len(odds) + 1, bool), 0.0)


def _best_threshold(
    odds: np.ndarray,
    silent_scores: np.ndarray,
    gains: np.ndarray,
    can_end: np.ndarray,
    below_all: float,
) -> Threshold:
    """Returns the best score in percent, and its threshold; `below_all` is the one where no question is answered.

    It starts there, and answers one question at a time, lowest odds first; each adds its gain.
    """
    order = np.argsort(odds, kind="stable")
    # Every threshold at once: answering the questions with odds up to the n-th changes the sum by
    # the gains of the first n.
    totals = np.cumsum(np.concatenate([[float(np.sum(silent_scores))], gains[order]]))
    best = int(np.argmax(np.where(can_end, totals, -np.inf)))
    value = float(odds[order[best - 1]]) if best else below_all
    return Threshold(100.0 * float(totals[best]) / len(odds) if len(odds) else 0.0, value)


def find_usable_threshold(
    examples: Sequence[SquadExample], texts: Mapping[str, str], odds: Mapping[str, float]
) -> Threshold:
    """Returns the best F1 in percent over all thresholds, and the threshold to predict with.

    These are the official best_f1 and its threshold, except where no threshold achieves it. The script may count one of
    two answers with equal odds; and if giving no answer at all is best it returns 0.0, while this is below all odds.

    Args:
      examples: the questions.
      texts: the answer to each question, by its id, if it is answered at all.
      odds: of no answer, by the id of the question.
    """
    if not examples:
        return Threshold(0.0, 0.0)
    f1 = _raw_scores(examples, texts, no_answers=True)[1]
    null_f1 = _raw_scores(examples, dict.fromkeys(texts, ""), no_answers=True)[1]
    all_odds = np.array([odds[example.id] for example in examples], float)
    ordered = np.sort(all_odds)
    can_end = np.concatenate([[True], ordered[1:] > ordered[:-1], [True]])  # equal odds go together
    return _best_threshold(all_odds, null_f1, f1 - null_f1, can_end, float(ordered[0]) - 1.0)


def score_files(
    name: str,
    data: str,
    predictions: str,
    odds: str = "",
    threshold: float = 1.0,
) -> tuple[Metrics, int]:
    """Returns the official scores of files, and the number of questions without a prediction, which score 0.

    Args:
      name: "squad1" or "squad2".
      data: a file of the data set, or a range of its articles.
      predictions: a file with a JSON object, id -> text.
      odds: squad2: a file with a JSON object, id -> number, or "".
      threshold: squad2: see `score_squad2`.
    Raises: InputError if a file has another format.
    """
    examples = read_squad_file(data)
    ids = [example.id for example in examples]
    texts = to_record(read_json_value(predictions), predictions)
    missing = sum(id_ not in texts for id_ in ids)
    for id_ in {*ids} & texts.keys():
        texts.get_as(id_, str)
    if name == "squad1":
        return score_squad1(examples, texts), missing
    numbers = None
    if odds:
        numbers = to_record(read_json_value(odds), odds)
        for id_ in ids:
            value = numbers.get(id_, "")
            if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
                raise numbers.wrong(id_, "a finite number, the odds of no answer")
    return score_squad2(examples, texts, numbers, threshold), missing


def _raw_scores(
    examples: Sequence[SquadExample], texts: Mapping[str, str], no_answers: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns exact match and F1 of each question, 0..1, each the maximum over its answers."""
    exact, f1 = np.zeros((2, len(examples)))
    for index, example in enumerate(examples):
        if example.id not in texts:
            continue
        answers = [normalize_answer(answer.text) for answer in example.answers]
        if no_answers:
            answers = [answer for answer in answers if answer]
        predicted = normalize_answer(texts[example.id])
        answers = answers or [""]
        exact[index] = predicted in answers
        f1[index] = max(_f1(predicted.split(), each.split(), no_answers) for each in answers)
    return exact, f1


def _f1(predicted: list[str], answer: list[str], no_answers: bool) -> float:
    """Returns the F1 of two bags of words. Two empty bags have F1 1 if no answer is allowed, otherwise 0."""
    if not predicted or not answer:
        return float(no_answers and predicted == answer)
    common = (collections.Counter(predicted) & collections.Counter(answer)).total()
    precision = common / len(predicted)
    recall = common / len(answer)
    return 2 * precision * recall / (precision + recall) if common else 0.0


def _percent(values: np.ndarray) -> float:
    return 100.0 * float(values.sum()) / len(values) if len(values) else 0.0
