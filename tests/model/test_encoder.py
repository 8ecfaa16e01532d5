# SPDX-License-Identifier: Apache-2.0
"""Which token of a sequence is pooled; derivatives of second order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import random_batch, tiny_model

from bert_jax.batch import Batch
from bert_jax.model.encoder import last_positions
from bert_jax.model.objective import encode, init_params

IDS = np.asarray([[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]], np.int32)
FIRST = np.asarray([[0, 3, 5], [0, 0, 0]])  # the second row has one sequence; its other places are empty


def test_the_last_token_of_each_sequence_is_found():
    np.testing.assert_array_equal(last_positions(jnp.asarray(IDS), jnp.asarray(FIRST)), [[2, 4, 5], [1, 1, 1]])


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_model_pools_the_token_that_has_seen_the_sequence(causal):
    model = tiny_model(causal=causal, initializer_stddev=0.2)
    params = init_params(model, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(5, 99, IDS.shape).astype(np.int32)

    def pooled(tokens):
        return np.asarray(
            encode(model, params, Batch(tokens, tokens * 0, IDS, FIRST, np.ones(FIRST.shape, np.float32))).pooled
        )

    base = pooled(tokens)
    for row, place, sequence in ((0, 1, 0), (0, 2, 0), (0, 3, 1), (0, 5, 2), (1, 0, 0)):
        changed = tokens.copy()
        changed[row, place] += 1
        differs = np.any(pooled(changed) != base, axis=-1)
        assert differs[row, sequence] and differs[0].sum() == (row == 0)
    changed = tokens.copy()
    changed[0, 6:] += 1  # padding
    np.testing.assert_array_equal(pooled(changed), base)


def test_gradients_of_gradients_are_those_of_differences():
    """A product of the Hessian and a vector, as of gradient penalties, by `jax.grad` of `jax.grad`."""
    config, batch = tiny_model(), random_batch(num_rows=2, row_length=16)
    params = {"encoder": init_params(config, jax.random.key(0))["encoder"]}
    away = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(1), leaf.shape) * leaf.std(), params)
    dot = lambda one, other: sum(map(jnp.vdot, jax.tree.leaves(one), jax.tree.leaves(other)))  # noqa: E731

    @jax.jit
    @jax.grad
    def gradient(params):
        return jnp.mean(encode(config, params, batch).hidden ** 2 * jnp.arange(32))

    product = jax.jit(jax.grad(lambda params: dot(gradient(params), away)))(params)
    moved = lambda size: jax.tree.map(lambda leaf, far: leaf + size * far, params, away)  # noqa: E731
    above, below = gradient(moved(1e-3)), gradient(moved(-1e-3))
    expected = jax.tree.map(lambda one, other: (one - other) / 2e-3, above, below)
    difference = jax.tree.map(jnp.subtract, product, expected)
    assert dot(difference, difference) < 1e-4 * dot(expected, expected)
