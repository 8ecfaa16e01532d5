# SPDX-License-Identifier: Apache-2.0
"""Metrics and those of scikit-learn, scipy and seqeval, live, on random, degenerate and real-looking predictions."""

import importlib.util
import random

import numpy as np
import pytest

from bert_jax.tasks import scores
from bert_jax.tasks.tagging import entities, read_conll, score_tags, to_tags

pytest.importorskip("sklearn")
pytest.importorskip("scipy")
pytest.importorskip("seqeval")

pytestmark = [pytest.mark.reference, pytest.mark.slow]

NUM_SEEDS = 30


@pytest.fixture(scope="module")
def reference(repository):
    """Returns the script that makes the golden, which has cases and references."""
    path = repository / "tests" / "reference" / "make_score_goldens.py"
    spec = importlib.util.spec_from_file_location("make_score_goldens", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(cases, metrics, ours):
    for first, second in cases:
        for name, expected in metrics(first, second).items():
            assert ours(name, first, second) == pytest.approx(expected, rel=1e-9, abs=1e-9), (name, first, second)


def test_classes(reference):
    for seed in range(NUM_SEEDS):
        size = int(np.random.default_rng(seed).integers(1, 200))
        cases = reference.class_cases(seed, size)
        compare(cases, reference.class_metrics, lambda name, *case: getattr(scores, name)(*case))


def test_numbers(reference):
    for seed in range(NUM_SEEDS):
        size = int(np.random.default_rng(seed).integers(2, 200))
        cases = reference.number_cases(seed, size)
        compare(cases, reference.number_metrics, lambda name, *case: getattr(scores, name)(*case))


def test_tags(reference):
    for seed in range(NUM_SEEDS):
        size = int(np.random.default_rng(seed).integers(1, 60))
        cases = reference.tag_cases(seed, size)
        compare(cases, reference.tag_metrics, lambda name, *case: score_tags(*case)[name])


def test_entities_of_random_tags(reference):
    from seqeval.metrics.sequence_labeling import get_entities

    rng = random.Random(0)
    for _ in range(3000):
        tags = rng.choices([*reference.BIOES, "B-creative-work", "E-creative-work"], k=rng.randint(0, 12))
        theirs = [(kind, start, end + 1) for kind, start, end in get_entities(tags)]
        assert [tuple(each) for each in entities(tags)] == theirs, tags


def test_real_tags_with_mistakes(reference, shared_data):
    sentences = read_conll(str(shared_data / "wnut17" / "emerging.dev.conll"))
    rng = random.Random(0)
    truth = [sentence.tags for sentence in sentences]
    labels = sorted({tag for tags in truth for tag in tags})
    said = [[rng.choice(labels) if rng.random() < 0.1 else tag for tag in tags] for tags in truth]
    ours = score_tags(truth, said)
    expected = reference.tag_metrics(truth, said)
    assert {name: ours[name] for name in expected} == pytest.approx(expected)
    for tags in truth:
        assert to_tags(entities(tags), len(tags)) == tags
