# SPDX-License-Identifier: Apache-2.0
"""A loop over groups of layers computes what layers one after the other do, and decides nothing in it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import random_batch

from bert_jax.model.bert import Encoder
from bert_jax.model.objective import init_params
from bert_jax.model.on_cpu import unstack
from bert_jax.settings.model import model_size

SMALL = dataclasses.replace(
    model_size("modernbert-mini"),
    vocab_size=203,
    hidden_size=32,
    num_heads=4,
    intermediate_size=48,
    window=6,
    unroll=1,
)


def encoder_of(config):
    """Returns random parameters of the encoder alone."""
    params = jax.jit(functools.partial(init_params, config))(jax.random.key(0))["encoder"]
    return jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params)


def encoded(config, params, key=None, **options):
    rngs = {} if key is None else {"dropout": key}
    encoder = Encoder(config, pool=False)
    batch = random_batch(num_rows=2, row_length=40, num_sequences=2)
    return encoder.apply({"params": params}, batch, key is None, rngs=rngs, **options)


def hidden_and_gradients(config, params, key=None):
    def loss(params):
        hidden = encoded(config, params, key).hidden
        return jnp.sum(jnp.cos(hidden)), hidden

    gradients, hidden = jax.jit(jax.grad(loss, has_aux=True))(params)
    return [hidden, *jax.tree.leaves(gradients)]


@pytest.mark.parametrize(
    ("layers", "every", "remat"),
    [(7, 3, "none"), (4, 2, "full"), pytest.param(2, 3, "dots", marks=pytest.mark.slow)],
)
def test_groups_are_layers_one_after_the_other(layers, every, remat):
    config = dataclasses.replace(SMALL, num_layers=layers, global_every=every, remat=remat)
    params = encoder_of(config)
    hidden, *of_stacks = hidden_and_gradients(config, params)
    expected, *of_layers = hidden_and_gradients(config, unstack(config, params))
    np.testing.assert_allclose(hidden, expected, atol=1e-5)
    assert sum(leaf.size for leaf in of_stacks) == sum(leaf.size for leaf in of_layers)
    apart = jax.tree.map(np.shape, of_stacks)
    assert [shape[0] for shape in apart].count(layers) >= 8  # parameters are stacked as ever

    kept = jax.jit(functools.partial(encoded, config, keep_layers=True, keep_attentions=True))
    ours, theirs = kept(params), kept(unstack(config, params))
    np.testing.assert_allclose(ours.layers, theirs.layers, atol=1e-4)
    np.testing.assert_allclose(ours.attentions, theirs.attentions, atol=1e-5)
    assert ours.layers.shape[0] == layers + 1 and ours.attentions.shape[0] == layers


def test_dropout_does_not_depend_on_the_loop():
    config = dataclasses.replace(
        SMALL, num_layers=7, global_every=3, hidden_dropout_rate=0.2, attention_dropout_rate=0.2
    )
    params, key = encoder_of(config), jax.random.key(1)
    found = hidden_and_gradients(config, params, key)
    for changes in ({"unroll": 7}, {"remat": "full"}):
        changed = hidden_and_gradients(dataclasses.replace(config, **changes), params, key)
        for ours, theirs in zip(found, changed, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
    assert np.abs(found[0] - hidden_and_gradients(config, params)[0]).max() > 0.1


@pytest.mark.parametrize("attention", ["plain", "fused"])
def test_no_layer_decides_what_it_sees(attention):
    config = dataclasses.replace(SMALL, num_layers=7, attention=attention)
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))["encoder"]
    text = str(jax.make_jaxpr(jax.grad(lambda params: jnp.sum(encoded(config, params).hidden)))(shapes))
    assert text.count("scan[") >= 2
    assert text.count("cond[") == text.count("branches_platforms=((")  # what a platform decides, none remains of it
