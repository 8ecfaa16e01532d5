# SPDX-License-Identifier: Apache-2.0
"""What inference prepares once and keeps: its parameters."""

import dataclasses

import jax
import numpy as np
import pytest
from builders import drawn_params, tiny_model

import bert_jax
from bert_jax.inference.predict import Predictor


@pytest.fixture(scope="module")
def bert(repository):
    tokenizer = bert_jax.load_tokenizer(repository / "tests" / "fixtures" / "tokenizer")
    model = tiny_model(vocab_size=tokenizer.vocab_size, hidden_size=64)
    return bert_jax.Pretrained(model, jax.device_put(drawn_params(model)), tokenizer)


def test_parameters_are_prepared_once_and_share_their_memory(bert):
    prepared = bert.prepared
    assert prepared is bert.prepared
    stack = bert.params["encoder"]["layers"]["mlp"]["output"]["kernel"]
    apart = prepared["encoder"]["layer_1"]["mlp"]["output"]["kernel"]
    np.testing.assert_array_equal(stack[1], apart)
    begins = np.asarray(stack).__array_interface__["data"][0]
    assert begins <= apart.unsafe_buffer_pointer() < begins + stack.nbytes
    assert jax.tree.leaves(bert.params["mlm"])[0] is jax.tree.leaves(prepared["mlm"])[0]


def answers(bert):
    """Returns what every function that answers says of a text."""
    texts = ["the [MASK]"]
    (guesses,), (score,) = bert_jax.fill_masks(bert, texts)[0], bert_jax.score_sentences(bert, texts)
    vectors = bert_jax.sentence_embeddings(bert, texts), bert.encode(texts).hidden
    return [np.asarray(each) for each in (*vectors, [guess.probability for guess in guesses], score)]


def test_parameters_that_are_replaced_after_a_first_use_are_seen(bert):
    bert = dataclasses.replace(bert, params=jax.tree.map(lambda leaf: leaf, bert.params))
    before, part = answers(bert), bert.params["encoder"]["layers"]["mlp"]["output"]
    part["kernel"] = part["kernel"] * -50
    after = answers(bert)
    assert all(np.abs(one - other).max() > 1e-6 for one, other in zip(before, after))
    new = dataclasses.replace(bert, params=bert.params)
    jax.tree.map(np.testing.assert_array_equal, after, answers(new))


def test_a_predictor_sees_parameters_that_are_replaced(bert):
    params = jax.device_put(drawn_params(bert.config, "sequence_classification", 2))
    predictor = Predictor(dataclasses.replace(bert, params=params, task="sequence_classification", labels=("a", "b")))
    before = predictor(["the"])[0].probabilities
    predictor.bert.params["classifier"]["bias"] = params["classifier"]["bias"] + np.array([0.0, 3.0], np.float32)
    assert predictor(["the"])[0].probabilities["b"] > before["b"] + 0.1


def test_arrays_of_numpy_cannot_change_after_a_first_use(bert):
    """The answers would follow some of them and not others."""
    host = dataclasses.replace(bert, params=jax.tree.map(np.array, bert.params))
    host.params["encoder"]["embeddings"]["word"]["embedding"][0] = 0.0
    host.encode(["the"])
    for leaf in jax.tree.leaves(host.params):
        with pytest.raises(ValueError, match="read-only"):
            leaf[...] = 0
