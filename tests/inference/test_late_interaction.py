# SPDX-License-Identifier: Apache-2.0
"""Vectors of tokens are those of the head, with what counts; search and reranking by them; as a command too."""

import dataclasses
import json

import numpy as np
import pytest
from builders import message
from commands import run_python

import bert_jax
from bert_jax import InputError
from bert_jax.inference.search import Hit, Passage, rerank_by_maxsim, search
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.rules import to_dict

SETTINGS = EmbeddingConfig(
    kind="multi_vector",
    projection_size=8,
    projection_activation="none",
    query_length=8,
    query_expansion=8,
    query_prompt="the ",
    passage_prompt="dar ",
    other_prompts='{"x": "mot "}',
)
TEXTS = [f"{one} . {two}" for one in ("ban", "dar", "lin") for two in ("bes", "kut", "gen mot bas")]


@pytest.fixture(scope="module")
def model(bert, tmp_path_factory):
    kernel = np.random.default_rng(0).normal(size=(bert.config.hidden_size, 8)).astype(np.float32)
    task = TaskConfig(name="embeddings", max_seq_length=16, embedding=SETTINGS)
    params = {"encoder": bert.params["encoder"], "projection": {"kernel": kernel}}
    bert = dataclasses.replace(bert, params=params, task="token_embeddings", task_settings=to_dict(task))
    path = tmp_path_factory.mktemp("model") / "model"
    bert_jax.save_pretrained(bert, path)
    return path


def test_vectors_are_those_of_the_tokens_that_count(model):
    bert = bert_jax.load_pretrained(model)
    passages = bert_jax.multi_vectors(bert, TEXTS, kind="passage")
    with_prompt = [f"dar {text}" for text in TEXTS]
    hidden = bert_jax.Pretrained.encode(bert, with_prompt)
    for text, found, vectors in zip(with_prompt, passages, hidden.hidden):
        tokens = ["[CLS]", *text.split(), "[SEP]"]
        expected = vectors[: len(tokens)] @ np.asarray(bert.params["projection"]["kernel"])
        expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
        np.testing.assert_allclose(found, expected[[token != "." for token in tokens]], atol=2e-6)
    query, long = bert_jax.multi_vectors(bert, ["ban .", "ban " * 5], kind="query")
    assert query.shape == long.shape == (8, 8) and query.dtype == np.float32
    with pytest.warns(bert_jax.CutWarning, match="1 text has more than 8 tokens"):
        bert_jax.multi_vectors(bert, ["ban " * 6], kind="query")
    plain = bert_jax.multi_vectors(bert, ["mot ban"])[0]
    np.testing.assert_array_equal(bert_jax.multi_vectors(bert, ["ban"], kind="x")[0], plain)
    assert bert_jax.multi_vectors(bert, []) == []
    predicted = bert_jax.load_predictor(model)([{"passage": TEXTS[0]}, "ban ."])
    np.testing.assert_allclose(predicted[0].vectors[0], passages[0], atol=2e-6)
    np.testing.assert_allclose(predicted[1].vectors[0], query, atol=2e-6)


def test_scores_are_sums_of_the_largest_products():
    rng = np.random.default_rng(1)
    texts = [rng.normal(size=(count, 4)).astype(np.float32) for count in (3, 1, 5, 2)]
    expected = [[sum(max(float(one @ other) for other in text) for one in query) for text in texts] for query in texts]
    np.testing.assert_allclose(bert_jax.maxsim(texts, texts), expected, rtol=1e-5, atol=1e-6)
    empty = bert_jax.maxsim(texts[:1], [texts[0], np.zeros((0, 4))])
    assert empty.tolist() == [[pytest.approx(expected[0][0], rel=1e-5), -1e9]] and empty.dtype == np.float32
    assert bert_jax.maxsim([], texts).shape == (0, 4) and bert_jax.maxsim(texts, []).shape == (4, 0)
    with pytest.raises(InputError, match=r"have the sizes \[\[3\], \[4\]\]; give \[tokens, D\]"):
        bert_jax.maxsim(texts, [np.zeros((2, 3))])


def test_a_search_finds_the_best_scores_and_a_first_search_is_ordered_anew(model):
    bert, queries = bert_jax.load_pretrained(model), ["ban bes", "lin"]
    corpus = [Passage(number, text) for number, text in enumerate(TEXTS)]
    asked, searched = (bert_jax.multi_vectors(bert, texts, kind=kind)
                       for texts, kind in ((queries, "query"), (TEXTS, "passage")))  # fmt: skip
    scores = bert_jax.maxsim(asked, searched)
    order = np.argsort(-scores, axis=1)
    found = search(bert, queries, corpus, 4)
    assert [[hit.passage.id for hit in hits] for hits in found] == order[:, :4].tolist()
    np.testing.assert_allclose([hit.score for hit in found[0]], scores[0][order[0, :4]], rtol=1e-5)
    first = [[Hit(corpus[number], 0.0) for number in (3, 1, 8)], []]
    again = rerank_by_maxsim(bert, queries, first, 2)
    assert [hit.passage.id for hit in again[0]] == [n for n in order[0] if n in (1, 3, 8)][:2] and again[1] == []
    assert search(bert, [], corpus) == []


def test_what_cannot_be_asked_is_named(model, bert):
    trained = bert_jax.load_pretrained(model)
    for texts, options, told in (
        (["a"], {"kind": "y"}, "kind 'y' is unknown; use x, query, passage"),
        ([("a", "b")], {}, "text 1 is ('a', 'b'), not a text"),
        (["ban " * 20], {"long_texts": "refuse"}, "text 1 has more than 16"),
        (["a"], {"max_seq_length": 99}, "max_seq_length 99 is not from 5 to the"),
    ):
        assert told in message(bert_jax.multi_vectors, trained, texts, **options)
    assert "a vector for each token; take multi_vectors" in message(bert_jax.sentence_embeddings, trained, ["a"])
    told = "was not trained for vectors of tokens; train one with task.embedding.kind"
    assert told in message(bert_jax.multi_vectors, bert, ["a"])


@pytest.mark.slow
def test_the_command_orders_what_another_model_found(model, pretrained, tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS) + "\n")
    command = [
        "-m",
        "bert_jax",
        "search",
        f"--corpus={tmp_path}/corpus.txt",
        f"--checkpoint={pretrained}",
        "--format=json",
    ]
    done = run_python([*command, "--rerank=maxsim", f"--rerank_model={model}", "--k=2"], text="ban bes\n\n")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    alone = run_python([*command[:-2], f"--checkpoint={model}", "--format=json", "--k=2"], text="ban bes\n\n")
    assert lines == [json.loads(line) for line in alone.stdout.splitlines()]  # all are candidates
    assert list(lines[0]["found"][0]) == ["id", "score", "text"] and lines[1]["found"] == []
    done = run_python([*command, "--rerank=maxsim"], text="ban\n")
    assert done.returncode == 1 and "--rerank and --rerank_model go together" in done.stderr
    done = run_python([*command, "--rerank=maxsim", f"--rerank_model={pretrained}"], text="ban\n")
    assert done.returncode == 1 and "has no vectors of tokens; give a multi_vector model" in done.stderr
