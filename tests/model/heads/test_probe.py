# SPDX-License-Identifier: Apache-2.0
"""Probes: which features they read, and that padding and the encoder are left alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import drawn_like, tiny_model

from bert_jax.batch import Batch
from bert_jax.model.heads.probe import Probe, probed
from bert_jax.model.heads.spans import SPANS
from bert_jax.model.objective import forward, init_params
from bert_jax.settings.finetuning import ProbeConfig

MODEL = tiny_model(num_layers=5)
LAYERS = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2, 7, 32)), jnp.float32)  # [num_layers + 1, B, L, H]
INSIDE = jnp.asarray([[1] * 7, [1] * 4 + [0] * 3])


@functools.cache
def make(features="last", kind="linear", pool=False):
    """Returns the probe as a compiled function (params, layers) -> outputs, and random parameters."""
    probe = Probe(MODEL, ProbeConfig(features=features, kind=kind, num_layers=2, hidden_size=6), 3, pool)
    params = drawn_like(jax.eval_shape(lambda: probe.init(jax.random.key(1), LAYERS, INSIDE, True)), 0.3)
    return jax.jit(lambda params, layers: probe.apply(params, layers, INSIDE, True)), params


@pytest.mark.parametrize(
    ("features", "read"),
    [
        ("embeddings", [0]),
        ("last", [5]),
        ("second_to_last", [4]),
        ("concat_last4", [2, 3, 4, 5]),
        ("weighted_last4", [2, 3, 4, 5]),
        ("weighted_all", [1, 2, 3, 4, 5]),
    ],
)
def test_each_kind_reads_its_layers_alone(features, read):
    probe, params = make(features)
    base = probe(params, LAYERS)
    assert base.shape == (2, 7, 3)
    changed = [number for number in range(6) if not np.array_equal(probe(params, LAYERS.at[number].add(1.0)), base)]
    assert changed == read


def test_weights_begin_equal_and_are_a_softmax():
    probe, params = make("weighted_all")
    mean = jnp.concatenate([LAYERS[:1]] + [jnp.mean(LAYERS[1:], 0, keepdims=True)] * 5)
    np.testing.assert_allclose(probe(params, LAYERS), probe(params, mean), atol=1e-5)


@pytest.mark.parametrize("pool", [False, True])
def test_padding_changes_nothing(pool):
    probe, params = make("last", "bilstm", pool) if pool else make("last", "bilstm")
    base = probe(params, LAYERS)
    other = probe(params, LAYERS.at[:, 1, 4:].set(9.0))
    np.testing.assert_array_equal(base[0], other[0])
    np.testing.assert_array_equal(base[1, :4] if not pool else base[1], other[1, :4] if not pool else other[1])
    assert base.shape == (2, 1 if pool else 7, 3)


@pytest.mark.slow
def test_the_encoder_has_no_gradient():
    probe, params = make("last", "bilstm")
    total = lambda layers, params: jnp.sum(jnp.square(probe(params, layers)))  # noqa: E731
    of_layers, of_params = jax.jit(jax.grad(total, argnums=(0, 1)))(LAYERS, params)
    assert not np.any(of_layers)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(of_params["params"]["classifier"]))


def test_an_encoder_that_is_trained_with_it_has_a_gradient():
    config = ProbeConfig(features="last", kind="bilstm", num_layers=1, hidden_size=6, train_encoder=True)
    probe = Probe(MODEL, config, 3, False)
    params = drawn_like(jax.eval_shape(lambda: probe.init(jax.random.key(1), LAYERS, INSIDE, True)), 0.3)
    total = lambda layers: jnp.sum(jnp.square(probe.apply(params, layers, INSIDE, True)[1, :4]))  # noqa: E731
    gradient = np.asarray(jax.jit(jax.grad(total))(LAYERS))
    assert np.any(gradient[5, 1, :4]) and not np.any(gradient[:5]) and not np.any(gradient[5, 1, 4:])


@pytest.mark.parametrize("train_encoder", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_spans_are_found_by_a_bilstm(train_encoder):
    """The dropout of the encoder is on if it is trained."""
    model = tiny_model(hidden_dropout_rate=0.5)
    config = ProbeConfig(features="last", num_layers=1, hidden_size=6, train_encoder=train_encoder)
    row = np.arange(14, dtype=np.int32).reshape(2, 7)
    batch = Batch(row, row * 0, np.asarray(INSIDE), np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32))
    head = probed(SPANS, config)
    params = drawn_like(jax.eval_shape(lambda: init_params(model, jax.random.key(0), head)), 0.3)
    assert set(params) == {"encoder", "probe"}

    def loss(params, key):
        logits = forward(model, params, batch, head, key)
        return jnp.sum(jnp.square(logits)), logits

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params, jax.random.key(1))
    assert logits.shape == (2, 7, 2)
    gradient = gradients["encoder"]["layers"]["mlp"]["output"]["kernel"]
    assert np.any(gradient) == train_encoder
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients["probe"]["classifier"]))
