# SPDX-License-Identifier: Apache-2.0
"""Sparse vectors of texts: dense and as words, of queries and passages, and what is refused."""

import dataclasses

import numpy as np
import pytest
from builders import computed, message

from bert_jax import make_batch, sentence_embeddings, sparse_embeddings
from bert_jax.inference import search as module
from bert_jax.inference.search import Passage, search
from bert_jax.model.heads.sparse import SPARSE
from bert_jax.model.objective import forward
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.rules import to_dict

TEXTS = [f"{one} {two} {end}" for one in ("ban", "dar", "lin") for two in ("bes", "kut") for end in ("the", "gen")]


def trained(bert, **settings):
    """Returns the model as one that was trained with these settings."""
    task = TaskConfig(name="embeddings", max_seq_length=16, embedding=EmbeddingConfig(kind="sparse", **settings))
    weight = np.linspace(0, 2, bert.config.vocab_size, dtype=np.float32)
    params = bert.params | {"query_table": {"weight": weight}}
    return dataclasses.replace(bert, params=params, task=SPARSE.name, task_settings=to_dict(task))


def test_vectors_are_the_heads_dense_or_as_words(bert):
    vectors, batch = sparse_embeddings(bert, TEXTS), make_batch(bert, TEXTS)
    expected = computed(lambda params: forward(bert.config, params, batch, SPARSE), bert.params)
    np.testing.assert_allclose(vectors, expected[:, 0], atol=1e-5)
    for vector, (ids, weights) in zip(vectors, sparse_embeddings(bert, TEXTS, sparse=True), strict=True):
        np.testing.assert_array_equal(vector[ids], weights)
        assert len(ids) == np.count_nonzero(vector) and (np.diff(weights) <= 0).all()
    few = sparse_embeddings(bert, TEXTS, top_k=3)
    assert (np.count_nonzero(few, axis=1) == 3).all() and few.max() == vectors.max()
    of_files = sparse_embeddings(trained(bert, max_terms=4), TEXTS)
    assert (np.count_nonzero(of_files, axis=1) == 4).all()


def test_the_kind_of_a_text_chooses_prompt_and_table(bert):
    prompted = trained(bert, query_prompt="the ", passage_prompt="dar ")
    for kind, before in (("query", "the "), ("passage", "dar "), ("", "")):
        np.testing.assert_allclose(
            sparse_embeddings(prompted, ["ban"], kind), sparse_embeddings(bert, [before + "ban"]), atol=1e-5
        )
    of_table = trained(bert, query_table=True, query_prompt="the ")
    (query,) = sparse_embeddings(of_table, ["ban bes ban"], "query")
    ids = bert.tokenizer.encode("the ban bes")
    assert sorted(ids) == np.flatnonzero(query).tolist()
    np.testing.assert_array_equal(query[ids], of_table.params["query_table"]["weight"][ids])
    np.testing.assert_array_equal(
        sparse_embeddings(of_table, ["ban bes"], "passage"), sparse_embeddings(bert, ["ban bes"])
    )


@pytest.mark.parametrize("size", [100, 5])
def test_search_finds_the_largest_dot_products(bert, monkeypatch, size):
    """The same in chunks of the corpus."""
    model, queries = trained(bert, query_table=True, max_terms=9), ["ban bes", "lin kut the"]
    products = sparse_embeddings(model, queries, "query") @ sparse_embeddings(model, TEXTS, "passage").T
    monkeypatch.setattr(module, "BLOCK", size)
    for hits, row in zip(search(model, queries, (Passage(n, text) for n, text in enumerate(TEXTS)), 5), products):
        np.testing.assert_allclose([row[hit.passage.id] for hit in hits], np.sort(row)[::-1][:5], rtol=1e-5)
        np.testing.assert_allclose([hit.score for hit in hits], [row[hit.passage.id] for hit in hits], rtol=1e-5)


def test_what_makes_no_sparse_vectors_is_told(bert):
    encoder = dataclasses.replace(bert, params={"encoder": bert.params["encoder"]})
    dense = dataclasses.replace(bert, task="sentence_embedding")
    assert "makes no words: it is not a masked language model" in message(sparse_embeddings, encoder, TEXTS)
    assert "makes dense vectors; train one with" in message(sparse_embeddings, dense, TEXTS)
    found = message(sentence_embeddings, trained(bert), TEXTS)
    assert "makes sparse vectors; take sparse_embeddings, or give a pooling" in found
    assert "kind 'other' is unknown; use query" in message(sparse_embeddings, trained(bert), TEXTS, "other")
    assert "top_k -1 is below 0" in message(sparse_embeddings, bert, TEXTS, top_k=-1)
