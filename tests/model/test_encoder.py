# SPDX-License-Identifier: Apache-2.0
"""Which token of a sequence is pooled; derivatives of second order; a batch of no rows; what cannot be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import computed, drawn_params, random_batch, tiny_model

from bert_jax.batch import Batch
from bert_jax.errors import InputError
from bert_jax.model.heads.table import HEADS
from bert_jax.model.objective import encode, forward, init_params
from bert_jax.model.sequences import last_positions

IDS = np.asarray([[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]], np.int32)
FIRST = np.asarray([[0, 3, 5], [0, 0, 0]])  # the second row has one sequence; its other places are empty


def test_the_last_token_of_each_sequence_is_found():
    np.testing.assert_array_equal(last_positions(jnp.asarray(IDS), jnp.asarray(FIRST)), [[2, 4, 5], [1, 1, 1]])


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_model_pools_the_token_that_has_seen_the_sequence(causal):
    model, rng = tiny_model(causal=causal), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: 10 * leaf, drawn_params(tiny_model()))
    tokens = rng.integers(5, 99, IDS.shape).astype(np.int32)

    @jax.jit
    def encoded(tokens):
        return encode(model, params, Batch(tokens, tokens * 0, IDS, FIRST, np.ones(FIRST.shape, np.float32))).pooled

    pooled = lambda tokens: np.asarray(encoded(tokens))  # noqa: E731

    base = pooled(tokens)
    for row, place, sequence in ((0, 1, 0), (0, 2, 0), (0, 3, 1), (0, 5, 2), (1, 0, 0)):
        changed = tokens.copy()
        changed[row, place] += 1
        differs = np.any(pooled(changed) != base, axis=-1)
        assert differs[row, sequence] and differs[0].sum() == (row == 0)
    changed = tokens.copy()
    changed[0, 6:] += 1  # padding
    np.testing.assert_array_equal(pooled(changed), base)


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 8),
        ({"attention": "fused"}, 8),
        ({"window": 3, "global_every": 2}, 8),
        ({"window": 3, "global_every": 2}, 300),
        ({"positions": "rotary"}, 1100),
    ],
)
def test_a_batch_of_no_rows_has_outputs_of_no_rows(changes, length):
    """As of a shard or a filter that left none; rows are short, long, and long in windows."""
    config = tiny_model(hidden_dropout_rate=0.1, attention_dropout_rate=0.1, max_positions=length, **changes)
    params = drawn_params(config)
    batch = random_batch(num_rows=1, row_length=length)._replace(mlm_positions=np.zeros((1, 2), np.int32))
    none = jax.tree.map(lambda leaf: leaf[:0], batch)

    def total(params, batch, key):
        encoded = encode(config, params, batch, key, layers=True, attentions=not changes)
        return encoded.hidden.sum(), encoded._replace(word_table=None)

    gradients, encoded = jax.eval_shape(jax.grad(total, has_aux=True), params, none, jax.random.key(0))
    assert encoded.hidden.shape == (0, length, 32)
    if not changes:
        logits = jax.eval_shape(functools.partial(forward, config, head=HEADS["masked_lm"]), params, none)
        assert logits.shape == (0, 2, 256)
    assert encoded.layers.shape == (3, 0, length, 32) and (encoded.attentions is None) == bool(changes)
    assert not any(leaf.size for leaf in jax.tree.leaves(encoded))
    assert jax.tree.structure(gradients) == jax.tree.structure(params)


def test_gradients_of_no_rows_are_zero():
    config, none = tiny_model(), jax.tree.map(lambda leaf: leaf[:0], random_batch(num_rows=1, row_length=8))
    params = drawn_params(tiny_model())
    gradients = computed(jax.grad(lambda params: encode(config, params, none).hidden.sum()), params)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("changes", "head", "problem"),
    [
        ({"positions": "rope"}, "masked_lm", "model.positions .rope. is not one of learned"),
        ({"num_heads": 5}, "masked_lm", "model.hidden_size 32 is not divisible by model.num_heads 5"),
        ({"vocab_size": 0}, "masked_lm", "model.vocab_size is 0, and a model has words"),
        ({}, "token_classification", "num_outputs is 0, so the classifier has no outputs"),
    ],
)
def test_a_model_that_cannot_be_has_no_parameters(changes, head, problem):
    with pytest.raises(InputError, match=problem):
        init_params(tiny_model(**changes), jax.random.key(0), HEADS[head])


def test_places_to_predict_that_are_missing_are_named():
    config, params = tiny_model(), drawn_params(tiny_model())
    batch = random_batch(num_rows=1)._replace(mlm_positions=None)
    with pytest.raises(AssertionError, match="the batch has no mlm_positions"):
        jax.eval_shape(lambda params: forward(config, params, batch, HEADS["masked_lm"]), params)
