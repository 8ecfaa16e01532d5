# SPDX-License-Identifier: Apache-2.0
"""Metrics are those of scikit-learn, scipy and seqeval, as a golden has them; what they refuse is 0.0."""

import json
import math

import numpy as np
import pytest

from bert_jax.tasks import scores
from bert_jax.tasks.tagging import score_tags


@pytest.fixture(scope="module")
def golden(repository) -> dict:
    return json.loads((repository / "tests" / "golden" / "scores.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("group", ["classes", "numbers"])
def test_metrics_equal_the_golden(golden, group):
    seen = set()
    for labels, said, metrics in golden[group]:
        for name, expected in metrics.items():
            assert getattr(scores, name)(labels, said) == pytest.approx(expected, rel=1e-12, abs=1e-12), (labels, said)
            seen.add(name)
    assert seen == ({"accuracy", "f1", "macro_f1", "mcc"} if group == "classes" else {"pearson", "spearman"})


def test_entity_scores_equal_the_golden(golden):
    types = set()
    for truth, said, metrics in golden["tags"]:
        ours = score_tags(truth, said)
        assert {name: ours[name] for name in metrics} == pytest.approx(metrics, rel=1e-12), (truth, said)
        types |= {name for name in metrics if name.startswith("f1_")}
        assert {name for name in ours if name.startswith("f1_")} == {name for name in metrics if name.startswith("f1_")}
    assert types == {"f1_PER", "f1_LOC", "f1_creative-work"}


SAME, ORDER, NAN = [4, 4, 4], [1, 2, 3], [1, math.nan, 2]


@pytest.mark.parametrize(
    ("metrics", "labels", "said", "expected"),
    [
        ((scores.accuracy, scores.f1, scores.macro_f1, scores.mcc), [], [], 0),
        ((scores.accuracy,), [1, 1], [1, 1], 1),
        ((scores.f1,), [0, 0], [0, 0], 0),
        ((scores.mcc,), [1, 1, 1], [1, 1, 1], 0),  # as scikit-learn has it
        ((scores.pearson, scores.spearman), [], [], 0),
        ((scores.pearson, scores.spearman), [1], [1], 0),
        ((scores.pearson, scores.spearman), ORDER, SAME, 0),
        ((scores.pearson, scores.spearman), [0.1] * 3, ORDER, 0),
        ((scores.pearson, scores.spearman), ORDER, NAN, 0),
        ((scores.pearson,), [1, 2], [3, 5], 1),
        ((scores.pearson,), ORDER, [1, math.inf, 2], 0),
        ((scores.spearman,), ORDER, [1, math.inf, 2], 0.5),  # infinity has a rank only
        ((scores.spearman,), [1, 2, 2, 3], [10, 20, 20, 1000], 1),  # equal numbers share their rank
        ((scores.spearman,), [1, 2, 3, 4], [1, 1, 2, 2], 4 / math.sqrt(20)),
    ],
)
def test_metrics_where_others_warn_or_raise(metrics, labels, said, expected):
    assert [metric(labels, said) for metric in metrics] == pytest.approx([expected] * len(metrics))


@pytest.mark.parametrize(
    ("truth", "shares", "expected"),
    [
        ([0, 0], [0.5, 0.6], 0),
        ([1, 0, 1, 0], [0.9, 0.8, 0.7, 0.1], (1 + 2 / 3) / 2),
        ([0, 1, 1, 0, 1], [0.9, 0.5, 0.5, 0.5, 0.1], (2 * 2 / 4 + 3 / 5) / 3),  # equal ones are taken together
    ],
)
def test_average_precision(truth, shares, expected):
    assert scores.average_precision(np.array(truth, bool), np.array(shares)) == pytest.approx(expected)


def test_many_examples_do_not_overflow():
    labels, said = [0, 1] * 200_000, [0, 1, 1, 1] * 100_000
    assert scores.mcc(labels, said) == pytest.approx(math.sqrt(1 / 3))


def test_precision_recall_f1():
    assert scores.precision_recall_f1(2, 4, 8) == (0.5, 0.25, pytest.approx(1 / 3))
    assert scores.precision_recall_f1(0, 0, 0) == (0.0, 0.0, 0.0)


def test_rankings():
    """Of the first query the second and fourth are relevant, and one is not found; of the second the first."""
    found = scores.ranking_scores([[0, 2, 0, 1], [1, 0], [0, 0]], [[2, 1, 1], [1], []])
    gain = (2 / np.log2(3) + 1 / np.log2(5)) / (2 + 1 / np.log2(3) + 1 / np.log2(4))
    assert found == pytest.approx({
        "ndcg@10": (gain + 1) / 2, "mrr@10": 0.75, "map@100": ((1 / 2 + 2 / 4) / 3 + 1) / 2,
        "recall@1": 0.5, "recall@10": (2 / 3 + 1) / 2, "recall@100": (2 / 3 + 1) / 2,
    })  # fmt: skip
    ideal = sum((11 - place) / np.log2(2 + place) for place in range(10))
    assert scores.ranking_scores([[1]], [range(1, 12)])["ndcg@10"] == pytest.approx(1 / ideal)
    assert scores.ranking_scores([], []) == dict.fromkeys(scores.RANKING_METRICS, 0.0)


@pytest.mark.parametrize(
    ("before", "expected"), [(9, [0.1, 1 / np.log2(11), 1, 1, 0.1]), (10, [0, 0, 0, 1, 1 / 11]), (100, [0] * 5)]
)
def test_rankings_end_somewhere(before, expected):
    late = scores.ranking_scores([[0] * before + [1]], [[1]])
    names = ("mrr@10", "ndcg@10", "recall@10", "recall@100", "map@100")
    assert [late[name] for name in names] == pytest.approx(expected)
