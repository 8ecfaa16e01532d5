# SPDX-License-Identifier: Apache-2.0
"""The inverted list finds what dot products of all vectors find."""

import numpy as np

from bert_jax.model.heads.sparse import terms_of
from bert_jax.tasks.embeddings.terms import Postings, best_of, nearest_terms

RNG = np.random.default_rng(0)


def sparse_vectors(count, size):
    return (np.maximum(RNG.normal(size=(count, size)), 0) * (RNG.random((count, size)) < 0.2)).astype(np.float32)


def test_the_inverted_list_gives_the_products_of_all_vectors():
    """Also of passages without a word, and of queries whose words no passage has."""
    queries, passages = sparse_vectors(7, 50), sparse_vectors(90, 40)
    passages[3], passages[11] = 0, passages[12]
    queries[0, :40] = 0
    products = queries[:, :40].astype(np.float64) @ passages.T
    terms = [list(map(terms_of, vectors)) for vectors in (queries, passages)]
    postings = Postings(terms[1])
    np.testing.assert_allclose([postings.scores(query) for query in terms[0]], products, atol=1e-6)
    found = nearest_terms(*terms, 20)
    expected = np.argsort(-products.astype(np.float32), axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(found.numbers, expected)
    np.testing.assert_allclose(found.scores, np.take_along_axis(products, expected, 1), atol=1e-6)
    few = nearest_terms(terms[0], terms[1][:2], 3)
    assert (few.numbers[:, 2] == -1).all() and np.isneginf(few.scores[:, 2]).all()
    assert nearest_terms(terms[0][:1], [terms_of(np.zeros(4, np.float32))], 1).numbers.tolist() == [[0]]


def test_of_equal_scores_the_first_come_first():
    scores = np.array([1, 3, 2, 3, 2, 2], np.float32)
    assert [best_of(scores, k).tolist() for k in (1, 3, 4, 9)] == [[1], [1, 3, 2], [1, 3, 2, 4], [1, 3, 2, 4, 5, 0]]
