# SPDX-License-Identifier: Apache-2.0
"""Exact search is a sort of all cosines, in blocks of any size, on any number of devices."""

import numpy as np
import pytest

from bert_jax.tasks.embeddings import search
from bert_jax.tasks.embeddings.search import in_blocks, nearest


@pytest.mark.parametrize(("count", "queries", "k"), [(100, 13, 7), (5, 3, 9), (1, 1, 1)])
def test_the_nearest_are_those_of_a_sort(monkeypatch, count, queries, k):
    monkeypatch.setattr(search, "BLOCK", 16)
    monkeypatch.setattr(search, "_QUERIES", 8)
    rng = np.random.default_rng(0)
    vectors, asked = rng.normal(size=(count, 6)), rng.normal(size=(queries, 6))
    vectors[count // 2 :: 7] = vectors[0]  # equal ones: the first comes first
    unit = lambda a: a / np.linalg.norm(a, axis=1, keepdims=True)  # noqa: E731
    cosines = (unit(asked) @ unit(vectors).T).round(6)
    expected = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    found = nearest(asked.astype(np.float32), in_blocks(vectors.astype(np.float32)), k)
    there = min(k, count)
    np.testing.assert_array_equal(found.numbers[:, :there], expected)
    np.testing.assert_allclose(found.scores[:, :there], np.take_along_axis(cosines, expected, 1), atol=2e-6)
    assert (found.numbers[:, there:] == -1).all() and np.isneginf(found.scores[:, there:]).all()
    assert nearest(np.zeros((0, 6), np.float32), in_blocks(vectors), k).numbers.shape == (0, k)
