# SPDX-License-Identifier: Apache-2.0
"""Products and biases: in which dtype they are multiplied and summed, and what layers keep for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import CLS, MASK, SEP, random_batch, tiny_model
from stablehlo import stablehlo_products

from bert_jax.errors import InputError
from bert_jax.model.attention import Sight, attention_mask
from bert_jax.model.bert import Layer, Stream
from bert_jax.model.heads.probe import probed
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.model.objective import PretrainingObjective, TaskObjective
from bert_jax.model.product import add_bias, product
from bert_jax.settings.finetuning import ProbeConfig
from bert_jax.settings.pretraining import MaskingConfig


@pytest.mark.parametrize(
    "equation, left, right", [("ri,io->ro", (6, 4), (4, 5)), ("BQND,BKND->BNQK", *[(2, 6, 3, 4)] * 2)]
)
def test_gradients_in_bfloat16_are_products_of_bfloat16(equation, left, right):
    """Those over rows too, on one CPU device; and they are the gradients of float32, rounded."""
    random = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in (left, right))

    def loss(lhs, rhs):
        return jnp.sum(jnp.tanh(product(equation, lhs, rhs)))

    with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])):
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
        lowered = gradients.lower(lhs.astype(jnp.bfloat16), rhs)
        found = gradients(lhs.astype(jnp.bfloat16), rhs)
    products = stablehlo_products(lowered.as_text())
    assert [(one.lhs, one.rhs, one.result) for one in products] == [("bf16", "bf16", "f32")] * 3
    for ours, exact in zip(found, jax.jit(jax.grad(loss, argnums=(0, 1)))(lhs, rhs)):
        np.testing.assert_allclose(ours.astype(jnp.float32), exact, atol=0.05 * float(jnp.abs(exact).max()))


@pytest.mark.parametrize("platform, result", [("cpu", "f32"), ("tpu", "f32"), ("cuda", "bf16")])
def test_on_gpus_a_product_is_written_in_the_dtype_of_its_result(platform, result):
    """In both passes. The gradient of a float32 parameter stays a float32 sum."""
    lhs, rhs = jnp.ones((6, 4), jnp.bfloat16), jnp.ones((4, 5))

    def loss(lhs, rhs):
        return jnp.sum(jnp.tanh(product("ri,io->ro", lhs, rhs, result="bfloat16")), dtype=jnp.float32)

    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(lhs, rhs)
    products = stablehlo_products(traced.lower(lowering_platforms=(platform,)).as_text())
    assert sorted(one.result for one in products) == sorted([result, result, "f32"])


def test_the_gradient_of_a_bias_is_summed_in_float32():
    """4,096 ones: bfloat16 would stop at 256."""
    gradient = jax.grad(lambda bias: jnp.sum(add_bias(jnp.zeros((64, 64, 3), jnp.bfloat16), bias)))(jnp.zeros(3))
    assert gradient.dtype == jnp.float32 and gradient.tolist() == [4096.0] * 3


def test_a_layer_keeps_inputs_alone_of_activation_and_norms():
    model = tiny_model(intermediate_size=96)
    stream = Stream(jnp.ones((2, 8, 32)), None)
    sight = Sight(attention_mask(jnp.ones((2, 8), jnp.uint8)), None, jnp.zeros((2, 8), jnp.int32))
    layer = Layer(model)
    params = jax.eval_shape(lambda: layer.init(jax.random.key(0), stream, sight, None, True))
    apply = lambda params, stream: layer.apply(params, stream, sight, None, True)  # noqa: E731
    pull_back = jax.eval_shape(lambda *given: jax.vjp(apply, *given)[1], params, stream)
    shapes = [leaf.shape for leaf in jax.tree.leaves(pull_back)]
    assert sum(shape in ((2, 8, 96), (16, 96)) for shape in shapes) == 2  # before and after the activation
    assert sum(shape == (2, 8, 1) for shape in shapes) == 0  # no means and deviations


def precisions(objective, batch):
    """Returns the precisions of the matrix products of a step's gradients, as a TPU is asked for them."""
    key = jax.random.key(0)
    params, batch = jax.eval_shape(objective.init, key), jax.eval_shape(objective.prepare, batch)

    def loss(params, batch):
        return sum(total for total, _ in objective.losses(params, batch, key).values())

    text = jax.jit(jax.grad(loss)).trace(params, batch).lower(lowering_platforms=("tpu",)).as_text()
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    return {word for line in lines for word in ("DEFAULT", "HIGHEST") if word in line} if lines else None


@pytest.mark.parametrize(
    ("attention", "precision"),
    [("plain", "highest"), ("fused", "highest"), pytest.param("plain", "default", marks=pytest.mark.slow)],
)
def test_the_precision_is_that_of_every_product(attention, precision):
    model = tiny_model(matmul_precision=precision, attention=attention, hidden_dropout_rate=0.1)
    objective = PretrainingObjective(model, MaskingConfig(), MASK, (CLS, SEP))
    assert precisions(objective, random_batch()) == {precision.upper()}


def test_the_precision_is_that_of_a_probe_too():
    batch = random_batch()._replace(labels=np.zeros((16, 1), np.int32))
    probe = ProbeConfig(features="weighted_all", num_layers=1, hidden_size=8)
    objective = TaskObjective(tiny_model(matmul_precision="highest"), probed(SEQUENCES, probe), 3)
    assert precisions(objective, batch) == {"HIGHEST"}


def test_the_highest_precision_is_for_float32():
    with pytest.raises(InputError, match="matmul_precision highest needs"):
        tiny_model(matmul_precision="highest", compute_dtype="bfloat16").validate()
