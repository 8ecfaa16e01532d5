# SPDX-License-Identifier: Apache-2.0
"""LAMB on stacked layers against ALBERT's own LAMB and against Optax's, both on separate ones."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.devices.sharding import path_name
from bert_jax.settings.pretraining import OptimizerConfig
from bert_jax.training.optim import apply_updates, learning_rate_at, make_optimizer
from tests.model.test_google_goldens import section, to_params

NUM_STEPS, VOCAB_SIZE, PADDED_VOCAB_SIZE = 12, 7, 16  # of tests/reference/make_lamb_goldens.py; the padding is ours
CONFIG = OptimizerConfig(name="lamb", learning_rate=2e-2, warmup_steps=3, weight_decay=0.1, clip_norm=0.0)


@pytest.fixture(scope="module")
def golden(repository: Path):
    with np.load(repository / "tests" / "golden" / "albert_lamb.npz") as file:
        return dict(file)


def at_step(arrays, step):
    """Returns the arrays [steps, ...] at a step."""
    return {name: value[step] for name, value in arrays.items()}


def run(optimizer, params, gradients):
    """Returns the parameters after every step [steps, ...], for gradients [steps, ...]."""

    @jax.jit
    def steps(params, gradients):
        def step(carry, gradient):
            params, state = carry
            updates, state = optimizer.update(gradient, state, params)
            params = apply_updates(params, updates)
            return (params, state), params

        return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[1]

    return jax.device_get(steps(params, gradients))


def trace_of(golden, config):
    """Returns our parameters, layers stacked, after every step, as a list."""
    gradients = [to_params(at_step(section(golden, "gradients"), step), PADDED_VOCAB_SIZE) for step in range(NUM_STEPS)]
    params = to_params(section(golden, "initial"), PADDED_VOCAB_SIZE)
    stacked = jax.tree.map(lambda *values: np.stack(values), *gradients)
    trace = run(make_optimizer(config, NUM_STEPS), params, stacked)
    return [jax.tree.map(lambda values, step=step: values[step], trace) for step in range(NUM_STEPS)]


@pytest.fixture(scope="module")
def our_trace(golden):
    """Returns config -> our trace on the goldens' gradients, each made once."""
    return functools.cache(functools.partial(trace_of, golden))


def assert_same_trace(ours, theirs):
    """Asserts that every step moved the parameters as the separate arrays [steps, ...] of `theirs` say."""
    for step, params in enumerate(ours):
        expected = to_params(at_step(theirs, step), PADDED_VOCAB_SIZE)
        for path, value in jax.tree_util.tree_leaves_with_path(expected):
            ours_there = functools.reduce(lambda node, key: node[key.key], path, params)
            np.testing.assert_allclose(ours_there, value, rtol=2e-6, atol=2e-7, err_msg=f"{path_name(path)}, {step}")


def test_the_goldens_have_the_hard_cases(golden):
    """One layer of a stack starts at 0, another never has a gradient, and both still move as they should."""
    initial, last = section(golden, "initial"), at_step(section(golden, "decayed"), -1)
    gradients = section(golden, "gradients")
    query, kernel = (
        f"bert/encoder/layer_{{}}/{name}/kernel" for name in ("attention/self/query", "intermediate/dense")
    )
    assert [initial[query.format(layer)].any() for layer in range(3)] == [True, False, True]
    assert last[query.format(1)].all()
    assert [gradients[kernel.format(layer)].any() for layer in range(3)] == [True, True, False]
    assert (abs(last[kernel.format(2)]) < abs(initial[kernel.format(2)])).all()
    still = "bert/encoder/layer_0/attention/output/LayerNorm/gamma"
    np.testing.assert_array_equal(golden[f"all/{still}"][-1], initial[still])


def test_the_schedule_is_the_one_of_the_goldens(golden):
    rates = [learning_rate_at(CONFIG, NUM_STEPS)(step) for step in range(NUM_STEPS)]
    np.testing.assert_allclose(rates, golden["learning_rates"], rtol=2e-7)


@pytest.mark.parametrize("trust_ratio_for", ["decayed", "all"])
def test_stacked_layers_and_a_padded_vocabulary_follow_alberts_separate_variables(golden, our_trace, trust_ratio_for):
    ours = our_trace(dataclasses.replace(CONFIG, trust_ratio_for=trust_ratio_for))
    assert_same_trace(ours, section(golden, trust_ratio_for))
    assert len(jax.tree.leaves(ours[-1])) == len(jax.tree.leaves(to_params(section(golden, "initial"), VOCAB_SIZE)))
    assert not ours[-1]["encoder"]["embeddings"]["word"]["embedding"][VOCAB_SIZE:].any()


def optax_trace(golden, config):
    """Returns Optax's parameters [steps, ...]: bias correction, every layer an array of its own.

    Biases and a few others are left out, to compile less: without clipping, no parameter depends on another.
    """
    names = [name for name in section(golden, "initial") if re.search("/layer_.*(kernel|gamma)|word_embeddings", name)]
    params, gradients = ({name: golden[f"{kind}/{name}"] for name in names} for kind in ("initial", "gradients"))
    decays = {name: not re.search("LayerNorm|bias", name) for name in params}
    options = {"b1": config.beta1, "b2": config.beta2, "eps": config.epsilon}
    rates = jnp.asarray(golden["learning_rates"])
    if config.trust_ratio_for == "all":
        optimizer = optax.lamb(rates.__getitem__, **options, weight_decay=config.weight_decay, mask=decays)
    else:
        optimizer = optax.chain(
            optax.scale_by_adam(**options),
            optax.add_decayed_weights(config.weight_decay, decays),
            optax.masked(optax.scale_by_trust_ratio(), decays),
            optax.scale_by_learning_rate(rates.__getitem__),
        )
    return run(optimizer, params, gradients)


@pytest.mark.parametrize("trust_ratio_for", ["decayed", pytest.param("all", marks=pytest.mark.slow)])
def test_stacked_layers_follow_optax_on_separate_ones(golden, our_trace, trust_ratio_for):
    config = dataclasses.replace(CONFIG, trust_ratio_for=trust_ratio_for, bias_correction=True)
    assert_same_trace(our_trace(config), optax_trace(golden, config))


def test_the_switches_make_a_difference(our_trace):
    """Else the traces above could not tell one kind of LAMB from another."""
    plain, everywhere, corrected = (
        our_trace(dataclasses.replace(CONFIG, **changes))[-1]["encoder"]["layers"]["attention"]
        for changes in ({}, {"trust_ratio_for": "all"}, {"bias_correction": True})
    )
    assert np.abs(plain["norm"]["scale"] - everywhere["norm"]["scale"]).max() > 1e-3
    assert np.abs(plain["query"]["kernel"] - corrected["query"]["kernel"]).max() > 1e-3
