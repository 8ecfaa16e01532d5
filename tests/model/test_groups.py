# SPDX-License-Identifier: Apache-2.0
"""A loop over groups of layers computes what layers one after the other do, and decides nothing in it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import random_batch
from hf_models import random_params

from bert_jax.batch import pad_rows
from bert_jax.devices.sharding import make_mesh, row_sharding, tree_shardings
from bert_jax.model.bert import Encoder
from bert_jax.model.objective import encode, init_params
from bert_jax.model.on_cpu import unstack
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import MeshConfig

SMALL = dataclasses.replace(
    model_size("modernbert-mini"),
    vocab_size=203,
    hidden_size=32,
    num_heads=4,
    intermediate_size=48,
    window=6,
    unroll=1,
)


def encoded(config, params, key=None, **options):
    rngs = {} if key is None else {"dropout": key}
    encoder = Encoder(config, pool=False)
    batch = random_batch(num_rows=2, row_length=40, num_sequences=2)
    return encoder.apply({"params": params}, batch, key is None, rngs=rngs, **options)


@pytest.mark.parametrize(
    ("every", "first", "expected"),
    [
        (2, 0, [True, False, True, False, True]),
        (3, 2, [False, False, True, False, False]),
        pytest.param(2, 1, [False, True, False, True, False], marks=pytest.mark.slow),
    ],
)
def test_one_layer_of_each_group_sees_whole_sequences(every, first, expected):
    """Each layer alone: the others have no attention. Source: transformers, `global_attn_every_n_layers`."""
    config = dataclasses.replace(SMALL, num_layers=5, global_every=every, global_first=first)
    assert config.num_local == expected.count(False)
    params = random_params(config, parts=())["encoder"]
    near, far = pad_rows([np.arange(5, 25)], 20), pad_rows([np.arange(5, 25)], 20)
    far.token_ids[0, -1] = 99

    @jax.jit
    def first_tokens(params):
        return [Encoder(config, pool=False).apply({"params": params}, batch).hidden[0, 0] for batch in (near, far)]

    kernel = params["layers"]["attention"]["output"]["kernel"]
    sees = []
    for layer in range(5):
        alone = np.zeros_like(kernel)
        alone[layer] = kernel[layer]
        params["layers"]["attention"]["output"]["kernel"] = alone
        one, other = first_tokens(params)
        sees.append(bool(np.abs(one - other).max() > 1e-4))
    assert sees == expected


@pytest.mark.parametrize(
    ("layers", "every", "changes", "order"),
    [
        (5, 2, {}, 0),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (5, 2, {"remat": "full"}, 1),
                (4, 2, {"unroll": 4}, 1),
                (7, 3, {"remat": "dots"}, 1),
                (2, 3, {}, 1),
            )
        ),
    ],
)
def test_groups_are_layers_one_after_the_other(layers, every, changes, order):
    """With the same dropout, whatever is computed again and however many groups stand in a turn of the loop: outputs,
    or gradients too.
    """
    config = dataclasses.replace(
        SMALL, num_layers=layers, global_every=every, hidden_dropout_rate=0.2, attention_dropout_rate=0.2 * order
    )
    params = random_params(config, parts=())["encoder"]

    def both(config, split):
        def loss(params, key):
            kept = encoded(config, split(params), key, keep_layers=True, keep_attentions=True)
            return jnp.sum(jnp.cos(kept.hidden)), (kept.hidden, kept.layers, kept.attentions)

        return jax.jit(jax.grad(loss, has_aux=True) if order else loss)

    in_groups = both(dataclasses.replace(config, **changes), lambda params: params)
    found, expected = (
        compute(params, jax.random.key(1)) for compute in (in_groups, both(config, functools.partial(unstack, config)))
    )
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(1, np.abs(theirs).max()))
    hidden, kept_layers, attentions = found[1]
    assert kept_layers.shape[0] == layers + 1 and attentions.shape[0] == layers
    assert np.abs(hidden - in_groups(params, jax.random.key(2))[1][0]).max() > 0.1  # dropout is on


@pytest.mark.parametrize("attention", [pytest.param("plain", marks=pytest.mark.slow), "fused"])
def test_no_layer_decides_what_it_sees(attention):
    config = dataclasses.replace(SMALL, num_layers=3, attention=attention)
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))["encoder"]
    text = str(jax.make_jaxpr(jax.grad(lambda params: jnp.sum(encoded(config, params).hidden)))(shapes))
    assert text.count("scan[") >= 2
    assert text.count("cond[") == text.count("branches_platforms=((")  # what a platform decides, none remains of it


def loss_and_layers(config, params, batch):
    found = encode(config, params, batch, layers=True)
    return jnp.sum(jnp.cos(found.hidden)), found.layers


of_one_device = jax.jit(jax.value_and_grad(loss_and_layers, argnums=1, has_aux=True), static_argnums=0)


@pytest.mark.parametrize("groups", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_shared_layers_are_layers_with_the_same_parameters(groups):
    """Hidden states, of each layer too, and gradients, whose sum is that of what is shared; also over eight devices."""
    apart = dataclasses.replace(model_size("tiny"), vocab_size=203, num_layers=4, unroll=1)
    shared = dataclasses.replace(apart, layer_groups=groups)
    params = random_params(shared, parts=())
    stack = params["encoder"]["layers"]
    repeated = jax.tree.map(lambda leaf: np.repeat(leaf, 4 // groups, axis=0), stack)
    batch = random_batch(num_rows=8, row_length=40, num_sequences=2)

    (_, layers), gradient = jax.device_get(
        of_one_device(apart, {"encoder": params["encoder"] | {"layers": repeated}}, batch)
    )
    summed = jax.tree.map(lambda leaf: leaf.reshape(groups, -1, *leaf.shape[1:]).sum(1), gradient["encoder"]["layers"])
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    (_, alone), of_one = of_one_device(shared, params, batch)
    with jax.set_mesh(mesh):
        shardings = tree_shardings(mesh, params)
        value_and_grad = jax.value_and_grad(functools.partial(loss_and_layers, shared), has_aux=True)
        divided = jax.jit(value_and_grad, out_shardings=(None, shardings))
        found = divided(jax.device_put(params, shardings), jax.device_put(batch, row_sharding(mesh)))
    for (_, states), grads in (((0, alone), of_one), found):
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), states, layers)
        for ours, theirs in zip(jax.tree.leaves(grads["encoder"]["layers"]), jax.tree.leaves(summed), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4 * max(1, np.abs(theirs).max()))
