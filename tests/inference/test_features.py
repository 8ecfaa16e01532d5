# SPDX-License-Identifier: Apache-2.0
"""Features of texts are the encoder's outputs of each text on its own, in the order of the texts."""

import functools

import jax
import numpy as np
import pytest
from builders import drawn_params, message, tiny_model

from bert_jax.batch import pad_rows
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.inference import features as module
from bert_jax.inference.features import sentence_embeddings, token_features
from bert_jax.inference.predict import load_predictor
from bert_jax.inference.pretrained import load_pretrained
from bert_jax.model.objective import encode
from bert_jax.text.fitting import CutWarning
from bert_jax.tokenizing import load_tokenizer

TEXTS = ["a small house", "two", "the old man and the sea " * 9, "words of a language", ""]
TEXTS += [f"text {number} " * (number % 7) for number in range(40)]


@pytest.fixture(scope="module")
def bert(repository):
    tokenizer = load_tokenizer(repository / "tests" / "fixtures" / "tokenizer")
    model = tiny_model(vocab_size=tokenizer.vocab_size, initializer_stddev=0.2)
    return Pretrained(model, drawn_params(model), tokenizer)


@functools.cache
def compiled_layers(config):
    return jax.jit(lambda params, batch: encode(config, params, batch, layers=True).layers)


def outputs(bert, token_ids):
    """Returns all layers [num_layers + 1, L, H] of a text in a batch of its own, padded to one length for all."""
    batch = pad_rows([token_ids], 64)
    return np.asarray(compiled_layers(bert.config)(bert.params, batch))[:, 0, : len(token_ids)]


@pytest.fixture(scope="module")
def of_tokens(bert):
    """Returns the features of three layers; the third is the last but one of all."""
    with pytest.warns(CutWarning):
        return list(token_features(bert, TEXTS, layers=(0, -1, 1)))


def test_vectors_are_those_of_each_text_alone(bert, of_tokens):
    assert len(of_tokens) == len(TEXTS)
    for text, features in zip(TEXTS, of_tokens):
        assert features.tokens[0] == "[CLS]" and features.tokens[-1] == "[SEP]"
        if features.truncated:
            assert len(features.tokens) == 64
            continue
        pieces = bert.tokenizer.encode(text)
        ids = [bert.tokenizer.cls_id, *pieces, bert.tokenizer.sep_id]
        layers = outputs(bert, ids)
        np.testing.assert_allclose(features.layers, layers[[0, -1, 1]], atol=2e-5)
    assert any(features.truncated for features in of_tokens)


def test_many_short_texts_fill_rows_of_one_length(bert, monkeypatch):
    """In parts, in the order of the texts, so that the vectors of a few thousand tokens are in memory at a time."""
    shapes, sizes = [], []
    outputs = module.outputs_of

    def noted_layers(config, chosen, params, batch):
        """In place of the encoder: the vector of a token is its id."""
        shapes.append(batch.token_ids.shape)
        return np.repeat(batch.token_ids[:, None, :, None], config.hidden_size, axis=3).astype(np.float32)

    def noted_outputs(bert, rows, compute):
        sizes.append(sum(len(row.token_ids) for row in rows))
        return outputs(bert, rows, compute)

    monkeypatch.setattr(module, "_layers", noted_layers)
    monkeypatch.setattr(module, "outputs_of", noted_outputs)
    monkeypatch.setattr(module, "_TOKENS_AT_ONCE", 600)
    monkeypatch.setattr(module, "_TEXTS_AT_ONCE", 500)
    texts = [f"text {number} " * (number % 5) for number in range(900)]
    found = list(token_features(bert, texts, layers=(-1,)))
    assert [features.tokens[1:-1] for features in found] == [bert.tokenizer.tokenize(text) for text in texts]
    assert len(sizes) > 4 and max(sizes) <= 600
    assert len({length for _, length in shapes}) <= 2 and len(set(shapes)) <= 6
    assert sum(rows * length for rows, length in shapes) < 1.25 * sum(sizes)
    for text, features in zip(texts, found, strict=True):
        ids = [bert.tokenizer.cls_id, *bert.tokenizer.encode(text), bert.tokenizer.sep_id]
        np.testing.assert_array_equal(features.layers[0], np.repeat(np.asarray(ids)[:, None], 32, axis=1))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_an_embedding_is_pooled_over_the_tokens_of_its_text(bert, of_tokens, pooling):
    with pytest.warns(CutWarning):
        vectors = sentence_embeddings(bert, TEXTS, pooling, layer=-2)
    assert vectors.shape == (len(TEXTS), 32)
    for vector, features in zip(vectors, of_tokens):
        expected = features.layers[2].mean(0) if pooling == "mean" else features.layers[2, 0]
        np.testing.assert_allclose(vector, expected, atol=2e-5)


def test_pairs_have_a_second_segment(bert):
    (pair,) = token_features(bert, [("a small", "house")], layers=(-1,))
    assert pair.tokens.count("[SEP]") == 2
    assert not np.allclose(pair.layers[0, 0], next(token_features(bert, ["a small house"], layers=(-1,))).layers[0, 0])


def test_what_cannot_be_had_is_said(bert):
    def features(layers, length=0):
        return list(token_features(bert, ["a"], layers, length))

    assert "are not some of the model's; use 0" in message(features, (3,))
    assert "are not some of the model's" in message(features, ())
    assert "max_seq_length 65 is not from 5 to" in message(features, (-1,), 65)
    assert "this is a single text; give a list" in message(sentence_embeddings, bert, "a")
    assert "pooling 'max' is unknown; use mean or cls" in message(sentence_embeddings, bert, ["a"], "max")
    for text in (("a", "b", "c"), None, b"abc", ("a", 5)):
        told = message(sentence_embeddings, bert, ["ban", text])
        assert told.startswith("text 2 is ") and "not a text and not a pair of them" in told


def test_a_model_answers_in_the_dtype_that_is_asked_for(pretrained):
    """In bfloat16 within its rounding; the parameters stay float32, and a name that is no dtype is refused."""
    texts = ["ban dar bis", "bas ."]
    exact, narrow = (load_pretrained(pretrained, dtype=dtype) for dtype in ("", "bfloat16"))
    assert (exact.config.compute_dtype, narrow.config.compute_dtype) == ("float32", "bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(narrow.params)} == {"float32"}
    first, second = (sentence_embeddings(bert, texts) for bert in (exact, narrow))
    assert 0 < np.abs(first - second).max() < 0.05
    assert load_predictor(pretrained, dtype="bfloat16").bert.config.compute_dtype == "bfloat16"
    assert 'dtype "float16" is none of float32, bfloat16' in message(load_pretrained, pretrained, dtype="float16")


def test_many_texts_are_divided_over_the_devices(bert, monkeypatch):
    texts, meshes = TEXTS[5:18], []
    alone = sentence_embeddings(bert, texts)
    batch_of_layout = module.batch_of_layout

    def seen(*arguments):
        batch = batch_of_layout(*arguments)
        meshes.append(len(batch.token_ids.sharding.device_set))
        return batch

    monkeypatch.setattr(module, "batch_of_layout", seen)
    monkeypatch.setattr(module, "_MANY", len(texts))
    np.testing.assert_allclose(sentence_embeddings(bert, texts), alone, atol=1e-5)
    assert set(meshes) == {8}
