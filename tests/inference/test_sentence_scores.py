# SPDX-License-Identifier: Apache-2.0
"""Scores of sentences, beside a slow and plain computation: one token masked, one sentence at a time."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from builders import growing_bert, message

import bert_jax
from bert_jax.batch import pad_rows
from bert_jax.batches import infer
from bert_jax.inference.minimal_pairs import Pair, accuracies
from bert_jax.inference.sentence_scores import LOG_LIKELIHOOD, METHODS, score_sentences, token_scores
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.objective import forward

# corona is co ##ro ##na, banana ban ##a ##na, and zebra [UNK]; the first sentence and the last have the same tokens.
SENTENCES = ["the corona .", "the zebra banana .", "dar", "banana corona", "the  CORONA."]


@pytest.fixture(scope="module")
def bert():
    return growing_bert()


@pytest.fixture(scope="module")
def causal(bert):
    return dataclasses.replace(bert, config=dataclasses.replace(bert.config, causal=True))


@functools.cache
def compiled(config):
    return jax.jit(lambda params, batch: forward(config, params, batch, MASKED_LM))


def log_probabilities(bert, token_ids):
    """Returns those [L, V] of one row of tokens, without any padding."""
    batch = pad_rows([token_ids], len(token_ids))._replace(
        mlm_positions=np.arange(len(token_ids), dtype=np.int32)[None]
    )
    logits = np.asarray(compiled(bert.config)(bert.params, batch), np.float64)[0, :, : bert.config.vocab_size]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def plain_scores(bert, sentence, method):
    """Returns the scores of the tokens of a sentence, with a forward pass for each."""
    tokenizer = bert.tokenizer
    ids = [tokenizer.cls_id, *tokenizer.encode(sentence), tokenizer.sep_id]
    tokens = tokenizer.tokens(ids)
    scores = []
    for place in range(1, len(ids) - 1):
        if method == LOG_LIKELIHOOD:
            scores.append(log_probabilities(bert, ids)[place - 1, ids[place]])
            continue
        masked = list(ids)
        masked[place] = tokenizer.mask_id
        rest = place + 1
        while method == "within_word_l2r" and tokens[rest].startswith("##"):
            masked[rest] = tokenizer.mask_id
            rest += 1
        scores.append(log_probabilities(bert, masked)[place, ids[place]])
    return scores


@pytest.mark.parametrize("method", [*METHODS, LOG_LIKELIHOOD])
def test_scores_are_those_of_one_forward_pass_a_token(bert, causal, method):
    model = causal if method == LOG_LIKELIHOOD else bert
    assert bert.tokenizer.tokenize(SENTENCES[0]) == ["the", "co", "##ro", "##na", "."]
    found = token_scores(model, SENTENCES, "" if method == LOG_LIKELIHOOD else method)
    for sentence, scores in list(zip(SENTENCES, found, strict=True))[: 1 if model is causal else 2]:
        np.testing.assert_allclose(scores, plain_scores(model, sentence, method), atol=2e-5)
    np.testing.assert_array_equal(found[0], found[4])
    sums = bert_jax.score_sentences(model, SENTENCES, "" if method == LOG_LIKELIHOOD else method)
    assert sums.dtype == np.float64
    np.testing.assert_allclose(sums, [scores.sum() for scores in found], rtol=1e-6)


def test_methods_differ_in_words_of_several_pieces_only(bert):
    original, l2r = (token_scores(bert, ["the corona .", "the bas ."], method) for method in METHODS)
    np.testing.assert_array_equal(original[1], l2r[1])
    differs = np.abs(original[0] - l2r[0]) > 1e-4
    assert differs.tolist() == [False, True, True, False, False]  # co and ##ro; with ##na nothing of its word is hidden


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_batching_changes_no_score(bert, monkeypatch, method):
    sentences = [SENTENCES[0], "the ban the ban .", SENTENCES[2], "the ban the bas banana ."]
    together = score_sentences(bert, sentences, method)
    monkeypatch.setattr(infer, "_TOKENS_ON_CPU", 8)
    monkeypatch.setattr(infer, "_COMPILATION", 0)  # rows of a length are as long as the longest of them
    np.testing.assert_allclose(together, score_sentences(bert, sentences[::-1], method)[::-1], atol=2e-5)
    np.testing.assert_allclose(together[2:3], score_sentences(bert, sentences[2:3], method), atol=2e-5)


def test_identical_sentences_are_computed_once_and_tie(bert):
    calls = []
    scores = score_sentences(bert, ["the corona .", "the  Corona ."] * 3, progress=lambda *done: calls.append(done))
    assert len(set(scores.tolist())) == 1 and calls[-1] == (5, 5)
    pairs = [Pair("zebra", "yak", "a", "one", "x:1"), Pair("the", "the", "a", "one", "x:2")]  # unknown words are alike
    scores = score_sentences(bert, [text for pair in pairs for text in pair[:2]])
    table = accuracies(pairs, scores[::2], scores[1::2])
    assert (table.overall.right, table.overall.ties) == (0, 2)


@pytest.mark.parametrize("method", [*METHODS, LOG_LIKELIHOOD])
def test_the_end_of_a_sentence_is_scored_alone(bert, causal, method):
    """Tokens before it are read; one sentence may have several ends."""
    model, calls = (causal if method == LOG_LIKELIHOOD else bert), []
    begins = [2, 0, 0, 1, 1]
    ends = token_scores(model, SENTENCES, method, progress=lambda *done: calls.append(done), begins=begins)
    for end, whole, begin in zip(ends, token_scores(model, SENTENCES, method), begins, strict=True):
        np.testing.assert_allclose(end, whole[begin:], atol=1e-5)
    if method != LOG_LIKELIHOOD:
        assert calls[-1] == (sum(map(len, ends)),) * 2
    assert "sentence 1 has 1 tokens, so none is left to score after 1" in message(
        token_scores, model, ["the"], begins=[1]
    )


def test_what_cannot_be_scored_is_named(bert, causal):
    headless = dataclasses.replace(bert, params={"encoder": bert.params["encoder"]}, task="encoder")
    broken = dataclasses.replace(bert, params=jax.tree.map(lambda leaf: leaf * np.nan, bert.params))
    names = ["in.txt:1", "in.txt:2"]
    for model, sentences, options, told in (
        (
            bert,
            ["the", "the " * 15],
            {"long_texts": "refuse"},
            "in.txt:2 has 17 tokens with [CLS] and [SEP], and there",
        ),
        (bert, ["the", " "], {"names": None}, "sentence 2 has no token"),
        (bert, ["the", "\u200b"], {}, "in.txt:2 has no token"),
        (bert, "the", {}, "single text"),
        (bert, ["the"], {"method": "l2r"}, "method 'l2r' is unknown"),
        (causal, ["the"], {"method": "original"}, "that reads from left to right; use log_likelihood"),
        (headless, ["the"], {}, "no head that predicts words"),
        (broken, ["the"], {}, "in.txt:1: a score is not finite; the model's parameters"),
    ):
        assert told in message(score_sentences, model, sentences, **{"names": names} | options)
    assert score_sentences(bert, []).shape == (0,)
    assert len(token_scores(bert, ["the " * 14])[0]) == 14  # as long as it may be
