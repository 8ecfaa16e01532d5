# SPDX-License-Identifier: Apache-2.0
"""The model, its losses and gradients, and the optimizer against numbers that Google's own code computed.

`tests/reference/make_google_goldens.py` made them with google-research/bert on TensorFlow, dropout off. Nothing of
either is needed here. Tolerances are a few times the differences measured, which are those of float32.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bert_jax.batch import Batch
from bert_jax.devices.sharding import path_name
from bert_jax.model.bert import Encoder
from bert_jax.model.heads.pretraining import PRETRAINING
from bert_jax.model.objective import PretrainingObjective, forward, init_params
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import MaskingConfig, OptimizerConfig
from bert_jax.training import optim
from bert_jax.training.optim import apply_updates, decay_mask, learning_rate_at, make_optimizer

MODEL = ModelConfig(
    vocab_size=53,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    intermediate_size=32,
    max_positions=24,
    hidden_dropout_rate=0.0,
    attention_dropout_rate=0.0,
    unroll=1,
    vocab_multiple=8,  # 53 words in a table of 56: padding must change nothing
)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=6)
NUM_STEPS = 30
GELUS = ("gelu_tanh", "gelu_exact")

# Google's name, its layer's number taken out -> our path.
PATHS = (
    (r"bert/embeddings/(word|position|token_type)_embeddings", r"encoder/embeddings/\1/embedding"),
    (r"bert/embeddings/LayerNorm/(\w+)", r"encoder/embeddings/norm/\1"),
    (r"bert/encoder/layer/attention/self/(\w+)/(\w+)", r"encoder/layers/attention/\1/\2"),
    (r"bert/encoder/layer/attention/output/dense/(\w+)", r"encoder/layers/attention/output/\1"),
    (r"bert/encoder/layer/attention/output/LayerNorm/(\w+)", r"encoder/layers/attention/norm/\1"),
    (r"bert/encoder/layer/(intermediate|output)/dense/(\w+)", r"encoder/layers/mlp/\1/\2"),
    (r"bert/encoder/layer/output/LayerNorm/(\w+)", r"encoder/layers/mlp/norm/\1"),
    (r"bert/pooler/dense/(\w+)", r"encoder/pooler/\1"),
    (r"cls/predictions/transform/dense/(\w+)", r"mlm/transform/\1"),
    (r"cls/predictions/transform/LayerNorm/(\w+)", r"mlm/norm/\1"),
    (r"cls/predictions/output_bias", r"mlm/output_bias"),
    (r"cls/seq_relationship/output_weights", r"next_sentence/kernel"),
    (r"cls/seq_relationship/output_bias", r"next_sentence/bias"),
)
LAST_NAMES = {"gamma": "scale", "beta": "bias"}


def our_path(name):
    """Returns our parameter's path for Google's variable `name`, and the number of its layer or None."""
    number = re.search(r"/layer_(\d+)/", name)
    bare = re.sub(r"/layer_\d+/", "/layer/", name)
    (path,) = [re.sub(pattern, ours, bare) for pattern, ours in PATHS if re.fullmatch(pattern, bare)]
    *parents, last = path.replace("token_type", "type").split("/")
    return "/".join([*parents, LAST_NAMES.get(last, last)]), number and int(number[1])


def to_params(variables, padded_vocab_size):
    """Returns Google's variables, or what is shaped like them, as our parameters.

    Layers are stacked, the next sentence matrix is transposed, what has an entry per word is padded with zeros.
    """
    leaves = {}
    for name in sorted(variables, key=lambda name: our_path(name)[1] or 0):
        value, (path, number) = variables[name], our_path(name)
        if path == "next_sentence/kernel":
            value = value.T
        if path in ("encoder/embeddings/word/embedding", "mlm/output_bias"):
            value = np.pad(value, [(0, padded_vocab_size - len(value))] + [(0, 0)] * (value.ndim - 1))
        leaves.setdefault(path, []).append(value)
        assert number is None or number == len(leaves[path]) - 1
    tree: dict = {}
    for path, values in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = np.asarray(np.stack(values) if path.startswith("encoder/layers/") else values[0])
    return tree


def section(golden, prefix):
    """Returns the arrays whose names start with `prefix`/, by the rest of the name."""
    return {name.removeprefix(prefix + "/"): golden[name] for name in golden if name.startswith(prefix + "/")}


def close(ours, theirs, rtol, atol):
    """Asserts that two trees are equal in structure, and in every entry up to the tolerances."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for path, value in jax.tree_util.tree_leaves_with_path(ours):
        expected = theirs
        for key in path:
            expected = expected[key.key]
        np.testing.assert_allclose(value, expected, rtol, atol, err_msg=path_name(path))


@pytest.fixture(scope="module")
def golden(repository: Path):
    with np.load(repository / "tests" / "golden" / "google_model.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def trace(repository: Path):
    with np.load(repository / "tests" / "golden" / "google_optimizer.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def params(golden):
    return to_params(section(golden, "variables"), MODEL.padded_vocab_size)


@pytest.fixture(scope="module")
def batch(golden):
    inputs = section(golden, "inputs")
    rows = len(inputs["input_ids"])
    return Batch(
        token_ids=inputs["input_ids"],
        type_ids=inputs["segment_ids"],
        sequence_ids=inputs["input_mask"],
        cls_positions=np.zeros((rows, 1), np.int32),
        sequence_weights=np.ones((rows, 1), np.float32),
        next_sentence_labels=inputs["next_sentence_labels"],
        mlm_positions=inputs["masked_lm_positions"],
        mlm_labels=inputs["masked_lm_ids"],
        mlm_weights=inputs["masked_lm_weights"],
    )


def loss_and_metrics(model, params, batch):
    """Returns (total loss, every loss and metric by its name), the losses divided as in training."""
    objective = PretrainingObjective(model, MaskingConfig(), 4, ())
    pairs, denominators = objective.losses(params, batch, None), objective.denominators(batch)
    values = {name: total / denominators.get(name, weight) for name, (total, weight) in pairs.items()}
    return sum(values[name] for name in denominators), values


@pytest.fixture(scope="module")
def computed(params, batch):
    """Returns what our model makes of the batch for each GELU, named as in the goldens."""

    def compute(activation):
        model = dataclasses.replace(MODEL, activation=activation)

        @jax.jit
        def run(params):
            (loss, values), gradients = jax.value_and_grad(
                lambda params: loss_and_metrics(model, params, batch), has_aux=True
            )(params)
            encoded: Any = Encoder(model).apply({"params": params["encoder"]}, batch, keep_layers=True)
            output = forward(model, params, batch, PRETRAINING)
            return {
                "layers": encoded.layers,
                "sequence_output": output.encoded.hidden,
                "pooled_output": output.encoded.pooled[:, 0],
                "masked_lm_log_probs": jax.nn.log_softmax(output.mlm_logits)[..., : MODEL.vocab_size].reshape(-1, 53),
                "next_sentence_log_probs": jax.nn.log_softmax(output.next_sentence_logits)[:, 0],
                "total_loss": loss,
                "masked_lm_loss": values["mlm_loss"],
                "next_sentence_loss": values["nsp_loss"],
                "metrics/masked_lm_accuracy": values["mlm_accuracy"],
                "metrics/next_sentence_accuracy": values["nsp_accuracy"],
                "gradients": gradients,
            }

        return jax.device_get(run(params))

    return {activation: compute(activation) for activation in GELUS}


def check_hidden(ours, theirs, batch):
    """Compares real positions only.

    Padding has other positions in ours and attends to other tokens, but no real token and no output ever sees it.
    """
    real = batch.sequence_ids > 0
    layers = np.concatenate([theirs["embedding_output"][None], theirs["all_encoder_layers"]])
    np.testing.assert_allclose(np.asarray(ours["layers"])[:, real], layers[:, real], rtol=0, atol=5e-6)
    np.testing.assert_allclose(
        np.asarray(ours["sequence_output"])[real], theirs["sequence_output"][real], rtol=0, atol=5e-6
    )


def check_outputs(ours, theirs):
    for name in set(ours) - {"layers", "sequence_output", "gradients"}:
        atol = 5e-6 if np.ndim(ours[name]) else 2e-6
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=atol, err_msg=name)


def check_gradients(ours, theirs):
    expected = to_params(section(theirs, "gradients"), MODEL.padded_vocab_size)
    close(ours["gradients"], expected, rtol=5e-5, atol=1e-6)


def test_every_parameter_has_its_variable(params, golden):
    shapes = jax.eval_shape(lambda key: init_params(MODEL, key), jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), params)
    assert sum(x.size for x in section(golden, "variables").values()) + 3 * 17 == sum(
        x.size for x in jax.tree.leaves(params)
    )


@pytest.mark.parametrize("activation", GELUS)
def test_every_layer_is_googles(activation, computed, golden, batch):
    check_hidden(computed[activation], section(golden, activation), batch)


@pytest.mark.parametrize("activation", GELUS)
def test_heads_losses_and_accuracies_are_googles(activation, computed, golden):
    theirs = section(golden, activation)
    check_outputs(computed[activation], theirs)
    assert 0 < theirs["metrics/masked_lm_accuracy"] < 1 and 0 < theirs["metrics/next_sentence_accuracy"] < 1


@pytest.mark.parametrize("activation", GELUS)
def test_gradients_are_googles(activation, computed, golden):
    check_gradients(computed[activation], section(golden, activation))


def test_the_loss_is_divided_with_googles_1e_5(computed, golden):
    for activation, ours in computed.items():  # the metric is the plain mean
        plain = golden[f"{activation}/metrics/masked_lm_loss"]
        assert (
            plain - ours["masked_lm_loss"] == pytest.approx(plain * 1e-5 / 12, abs=1.5e-6) and plain * 1e-5 / 12 > 3e-6
        )


def test_padding_rows_of_the_vocabulary_get_no_gradient(computed):
    for output in computed.values():
        assert not np.asarray(output["gradients"]["encoder"]["embeddings"]["word"]["embedding"][53:]).any()
        assert not np.asarray(output["gradients"]["mlm"]["output_bias"][53:]).any()


def test_the_other_gelu_is_out_of_every_tolerance(computed, golden, batch):
    theirs = section(golden, "gelu_exact")
    for check in (lambda ours: check_hidden(ours, theirs, batch), lambda ours: check_outputs(ours, theirs)):
        with pytest.raises(AssertionError):
            check(computed["gelu_tanh"])
    with pytest.raises(AssertionError):
        check_gradients(computed["gelu_tanh"], theirs)


def check_trace(config, trace, schedule):
    """Runs our optimizer over the recorded gradients and compares every step, and the moments at the end."""
    optimizer = make_optimizer(config, NUM_STEPS)
    theirs = section(trace, schedule)
    gradients = section(trace, "gradients")
    params = to_params(section(trace, "initial"), 7)
    state: Any = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state, gradients) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return apply_updates(params, updates), state

    def at(step, variables):
        return to_params({name: value[step] for name, value in variables.items()}, 7)

    rates = theirs["learning_rate"]
    ours = jax.jit(learning_rate_at(config, NUM_STEPS))(np.arange(len(rates)))
    np.testing.assert_allclose(ours, rates, rtol=1e-6, atol=0)
    for number in range(len(rates)):
        params, state = step(params, state, at(number, gradients))
        close(params, at(number, section(theirs, "parameters")), rtol=1e-6, atol=1e-6)
    (moments,) = [part for part in state if isinstance(part, optim.Moments)]
    close(moments.mean, to_params(section(theirs, "adam_m"), 7), rtol=1e-5, atol=5e-8)
    close(moments.square, to_params(section(theirs, "adam_v"), 7), rtol=1e-5, atol=1e-11)


@pytest.mark.parametrize(("schedule", "warmup_steps"), [("warm", 6), ("cold", 0)])
def test_optimizer_trace_is_googles(schedule, warmup_steps, trace):
    norms = np.sqrt(sum((g**2).sum(axis=tuple(range(1, g.ndim))) for g in section(trace, "gradients").values()))
    assert (norms > 1).any() and ((norms > 0) & (norms < 1)).any() and (norms == 0).any()  # clipped and not
    check_trace(dataclasses.replace(OPTIMIZER, warmup_steps=warmup_steps), trace, schedule)


@pytest.mark.parametrize(
    "change",
    [
        {"bias_correction": True},
        {"clip_norm": 1.001},
        {"weight_decay": 0.0101},
        {"epsilon": 1.1e-6},
        {"beta1": 0.9001},
        {"beta2": 0.9991},
        {"warmup_steps": 5},
    ],
    ids=lambda change: "_".join(change),
)
def test_the_trace_tells_every_setting(change, trace):
    with pytest.raises(AssertionError):
        check_trace(dataclasses.replace(OPTIMIZER, **change), trace, "warm")


@pytest.mark.parametrize(
    ("name", "decays"), [("mlm/output_bias", True), ("(.*/)?norm/scale", True), ("next_sentence/kernel", False)]
)
def test_the_trace_tells_what_is_decayed(name, decays, trace, monkeypatch):
    monkeypatch.setattr(optim, "DECAY_RULES", ((name, decays), *optim.DECAY_RULES))
    with pytest.raises(AssertionError):
        check_trace(OPTIMIZER, trace, "warm")


def test_google_decays_what_we_decay(params, trace):
    theirs = {our_path(name)[0]: bool(decays) for name, decays in zip(trace["decay/names"], trace["decay/decays"])}
    ours = {path_name(path): value for path, value in jax.tree_util.tree_leaves_with_path(decay_mask(params))}
    assert ours == theirs


def test_whole_training_steps_are_googles(params, batch, trace):
    losses, num_steps = [], len(trace["training/losses"])
    optimizer = make_optimizer(dataclasses.replace(OPTIMIZER, learning_rate=1e-3, warmup_steps=2), num_steps)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state):
        (loss, _), gradients = jax.value_and_grad(lambda p: loss_and_metrics(MODEL, p, batch), has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return apply_updates(params, updates), state, loss

    for _ in range(num_steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    np.testing.assert_allclose(losses, trace["training/losses"], rtol=1e-5)
    close(params, to_params(section(trace, "training/variables"), MODEL.padded_vocab_size), rtol=1e-5, atol=1e-5)
