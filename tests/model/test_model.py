# SPDX-License-Identifier: Apache-2.0
"""The model against a plain numpy sketch of the paper, and the properties that packing and padding rest on."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import CLS, MASK, SEP, computed, drawn_params, pretraining_params, random_batch, task_params, tiny_model
from stablehlo import stablehlo_products

from bert_jax.batch import pad_rows
from bert_jax.model import objective as objectives
from bert_jax.model.attention import attention_mask
from bert_jax.model.heads.pretraining import PRETRAINING, next_sentence_weights
from bert_jax.model.heads.table import HEADS
from bert_jax.model.masking import mask_rows
from bert_jax.model.objective import (
    PretrainingObjective,
    count_parameters,
    encode,
    init_params,
)
from bert_jax.model.on_cpu import unstack
from bert_jax.model.parts import ACTIVATIONS, Dropout, activate
from bert_jax.model.product import product
from bert_jax.model.sequences import positions_in_sequence
from bert_jax.settings.pretraining import MaskingConfig

compiled = jax.jit(functools.partial(objectives.forward, head=PRETRAINING), static_argnums=0)


def forward(*arguments):
    return jax.device_get(compiled(*arguments))


def mask(batch):
    return mask_rows(batch, MaskingConfig(), 203, MASK, (CLS, SEP))


@functools.cache
def masked_batch(**options):
    return computed(mask, random_batch(**options))


@functools.lru_cache
def noisy_params():
    """Returns parameters of `tiny_model()` with every entry random, biases and norms included; shared."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: x + 0.05 * rng.standard_normal(x.shape).astype(np.float32), drawn_params(tiny_model())
    )


def numpy_bert(model, params, batch):
    """Returns (hidden, pooled, mlm_logits, nsp_logits) in float64, one row and one head at a time."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    erf = np.vectorize(math.erf)

    def gelu(x):
        if model.activation == "gelu_exact":
            return 0.5 * x * (1 + erf(x / np.sqrt(2)))
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def norm(x, weights):
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-12) * weights["scale"] + weights["bias"]

    def linear(x, weights):
        return x @ weights["kernel"] + weights["bias"]

    encoder, outputs = params["encoder"], []
    tables = encoder["embeddings"]
    for row in range(len(batch.token_ids)):
        length = int((np.asarray(batch.sequence_ids[row]) > 0).sum())
        ids = np.asarray(batch.token_ids[row][:length], int)
        x = tables["word"]["embedding"][ids] + tables["position"]["embedding"][:length]
        x = norm(x + tables["type"]["embedding"][np.asarray(batch.type_ids[row][:length], int)], tables["norm"])
        for number in range(model.num_layers):
            layer = jax.tree.map(lambda w, number=number: w[number], encoder["layers"])
            attention, size = layer["attention"], model.head_size
            context = np.zeros_like(x)
            for head in range(model.num_heads):
                part = slice(head * size, (head + 1) * size)
                query, key, value = (linear(x, attention[name])[:, part] for name in ("query", "key", "value"))
                scores = query @ key.T / np.sqrt(size)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                context[:, part] = weights / weights.sum(-1, keepdims=True) @ value
            x = norm(x + linear(context, attention["output"]), attention["norm"])
            x = norm(
                x + linear(gelu(linear(x, layer["mlp"]["intermediate"])), layer["mlp"]["output"]), layer["mlp"]["norm"]
            )
        pooled = np.tanh(linear(x[0], encoder["pooler"]))
        predicted = x[np.asarray(batch.mlm_positions[row])]
        transformed = norm(gelu(linear(predicted, params["mlm"]["transform"])), params["mlm"]["norm"])
        logits = transformed @ tables["word"]["embedding"].T + params["mlm"]["output_bias"]
        outputs.append((x, pooled, logits[:, : model.vocab_size], linear(pooled, params["next_sentence"])))
    return outputs


@pytest.mark.parametrize("activation", ["gelu_tanh", pytest.param("gelu_exact", marks=pytest.mark.slow)])
def test_forward_equals_a_numpy_sketch(activation):
    model = tiny_model(activation=activation)
    params, batch = noisy_params(), masked_batch(num_rows=4)
    output = forward(model, params, batch)
    for row, (hidden, pooled, mlm_logits, nsp_logits) in enumerate(numpy_bert(model, params, batch)):
        np.testing.assert_allclose(output.encoded.hidden[row, : len(hidden)], hidden, atol=1e-5)
        np.testing.assert_allclose(output.encoded.pooled[row, 0], pooled, atol=1e-5)
        np.testing.assert_allclose(output.mlm_logits[row, :, :203], mlm_logits, atol=2e-5)
        np.testing.assert_allclose(output.next_sentence_logits[row, 0], nsp_logits, atol=1e-5)


def test_padding_changes_no_logits():
    model = tiny_model()
    params, batch = noisy_params(), masked_batch(num_rows=4)
    padding = ((0, 0), (0, 17))
    longer = batch._replace(
        token_ids=np.pad(batch.token_ids, padding, constant_values=77),  # whatever stands there
        type_ids=np.pad(batch.type_ids, padding, constant_values=1),
        sequence_ids=np.pad(batch.sequence_ids, padding),
        word_starts=None,  # of masking
    )
    short, long = (forward(model, params, each) for each in (batch, longer))
    np.testing.assert_allclose(short.mlm_logits, long.mlm_logits, atol=1e-5)
    np.testing.assert_allclose(short.next_sentence_logits, long.next_sentence_logits, atol=1e-5)


def test_vocabulary_padding_changes_no_logits():
    """That it stays zero is told by its gradient, in the tests of Google's numbers."""
    batch = masked_batch(num_rows=4)
    padded, exact = tiny_model(), tiny_model(vocab_multiple=1)
    params = drawn_params(tiny_model())
    table = params["encoder"]["embeddings"]["word"]["embedding"]
    assert table.shape == (256, 32) and not np.asarray(table[203:]).any()
    cut = jax.tree.map(lambda x: x[:203] if x.shape[:1] == (256,) else x, params)
    ours = forward(padded, params, batch).mlm_logits
    np.testing.assert_allclose(ours[..., :203], forward(exact, cut, batch).mlm_logits, atol=1e-6)
    assert (np.exp(ours[..., 203:] - ours.max(-1, keepdims=True)) == 0).all()


def test_initial_distribution():
    for name, leaf in (
        (jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(pretraining_params())
    ):
        values = np.asarray(leaf)
        if "scale" in name:
            assert (values == 1).all()
        elif "bias" in name:
            assert (values == 0).all()
        else:
            values = values[:203] if "word" in name else values
            assert abs(values).max() <= 0.04 + 1e-7, name  # cut at two deviations
            # 0.02 x 0.8796, the deviation of a normal cut at two; not rescaled to 0.02
            assert abs(values.std() - 0.01759) < 4 * 0.01759 / np.sqrt(2 * values.size), name


def test_parameters_of_base_and_large():
    for size, expected in (("base", 110_106_428), ("large", 336_226_108)):
        from bert_jax.settings.model import model_size

        model = dataclasses.replace(model_size(size), vocab_size=30522, vocab_multiple=1)
        shapes = jax.eval_shape(lambda key, model=model: init_params(model, key), jax.random.key(0))
        assert count_parameters(shapes) == expected


def gradient_with_dropout(**changes):
    model, batch = tiny_model(hidden_dropout_rate=0.1, **changes), random_batch(num_rows=4)

    def loss(params):
        hidden = encode(model, params, batch, jax.random.key(3)).hidden
        return jnp.sum(jnp.cos(hidden) * (batch.sequence_ids > 0)[..., None])

    return jax.jit(jax.grad(loss))(noisy_params())


@pytest.mark.parametrize(("shape", "rate"), [((3, 4, 7, 5), 0.1), ((4000, 1, 30), 0.5)])
def test_dropout_keeps_its_share_and_the_mean(shape, rate):
    """Rows that do not come in pairs too. Every place is drawn by itself: halves of a word are not alike."""
    inputs = np.ones((100, *shape) if shape[0] == 3 else shape, np.float32)
    drop = jax.jit(lambda key: Dropout(rate).apply({}, inputs, False, rngs={"dropout": key}))
    dropped, other = np.asarray(drop(jax.random.key(0))), np.asarray(drop(jax.random.key(1)))
    kept = dropped != 0
    assert kept.mean() == pytest.approx(1 - rate, abs=5 * math.sqrt(rate * (1 - rate) / kept.size))
    np.testing.assert_allclose(dropped[kept], 1 / (1 - rate), rtol=2e-5)
    assert (kept == (other != 0)).mean() == pytest.approx(rate**2 + (1 - rate) ** 2, abs=0.02)
    if shape[-2] > 1:
        assert (kept[..., 0, :] == kept[..., (shape[-2] + 1) // 2, :]).mean() < 0.95
    assert Dropout(rate).apply({}, inputs, True) is inputs and Dropout(0.0).apply({}, inputs, False) is inputs


def test_dropout_of_bfloat16_scales_by_what_is_not_rounded():
    """1 / 0.9 in bfloat16 would be 1.109375, and the mean 0.9984 of what it was."""
    rate = 0.1
    inputs = np.linspace(1, 2, 4096).astype("bfloat16").reshape(16, 256)
    kept = round((1 - rate) * 2**16) / 2**16

    def drop(inputs):
        return Dropout(rate).apply({}, inputs, False, rngs={"dropout": jax.random.key(0)})

    @jax.jit
    def both(inputs):
        out, pull_back = jax.vjp(drop, inputs)
        return out, pull_back(inputs)[0]

    for found in jax.device_get(both(inputs)):
        assert found.dtype == jnp.bfloat16
        found, exact = np.asarray(found, np.float64), np.asarray(inputs, np.float64) / kept
        passed = found != 0
        assert found[passed].sum() / exact[passed].sum() == pytest.approx(1, abs=2e-4)
        np.testing.assert_allclose(found[passed], exact[passed], rtol=2**-8)  # half of the last bit


@pytest.mark.parametrize(
    ("task", "num_classes"),
    # Of tokens, alone, and of sequences.
    [
        *[("question_answering", 0), ("next_sentence", 0)],
        pytest.param("sequence_classification", 3, marks=pytest.mark.slow),
    ],
)
def test_logits_of_bfloat16_are_not_rounded(task, num_classes):
    """They are ranked: of 4,096 spans that differ, no two are to tie for a lack of bits."""
    model = tiny_model(compute_dtype="bfloat16")
    params = task_params(task, num_classes)
    logits = jax.jit(objectives.forward, static_argnums=(0, 3))(model, params, random_batch(num_rows=16), HEADS[task])
    assert logits.dtype == jnp.float32
    logits = np.asarray(logits)
    assert np.mean(logits != logits.astype("bfloat16").astype(np.float32)) > 0.9


@pytest.fixture(scope="module")
def plain_gradient():
    return gradient_with_dropout()


@pytest.mark.parametrize(
    "change",
    [{"unroll": 2, "remat": "full"}, pytest.param({"remat": "dots"}, marks=pytest.mark.slow)],
)
def test_scan_and_remat_change_nothing(plain_gradient, change):
    other = gradient_with_dropout(**change)
    for ours, theirs in zip(jax.tree.leaves(plain_gradient), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)


def test_bfloat16_is_close_and_keeps_float32_parameters():
    batch, params = masked_batch(num_rows=4), noisy_params()
    exact = forward(tiny_model(), params, batch)
    rough = forward(tiny_model(compute_dtype="bfloat16"), params, batch)
    assert rough.encoded.hidden.dtype == jnp.bfloat16 and rough.mlm_logits.dtype == jnp.float32
    words = exact.mlm_logits[..., :203]
    assert 0 < abs(words - rough.mlm_logits[..., :203]).max() < 0.05 * abs(words).max()


def test_in_bfloat16_no_matrix_product_is_float32_in_either_pass():
    """On accelerators; a vector is: the bias of the vocabulary is summed over predictions in float32."""
    model = tiny_model(
        compute_dtype="bfloat16", hidden_dropout_rate=0.1, unroll=1
    )  # a loop has the products of one layer
    objective = PretrainingObjective(model, MaskingConfig(), MASK, (CLS, SEP))
    key, batch = jax.random.key(0), masked_batch()
    params = jax.eval_shape(objective.init, key)

    def loss(params):
        return sum(total for total, _ in objective.losses(params, batch, key).values())

    traced = jax.jit(jax.grad(loss)).trace(params)
    found = stablehlo_products(traced.lower(lowering_platforms=("tpu",)).as_text())
    matrices = [product for product in found if product.is_matrix]
    # A layer's, those of pooler, both heads and the word table; and the gradients of positions and types.
    assert len(matrices) == 3 * (8 + 4) + 2
    assert {(product.lhs, product.rhs, product.result) for product in matrices} == {("bf16", "bf16", "f32")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_products_gradients_are_those_of_its_rounded_inputs(dtype):
    rng = np.random.default_rng(0)
    x, weight, scale = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 8), (8, 5), (2, 3, 5)))
    x = x.astype(dtype)
    ours = computed(jax.grad(lambda x, w: jnp.sum(product("BLI,IO->BLO", x, w) * scale), (0, 1)), x, weight)
    rounded = [array.astype(dtype).astype(np.float64) for array in (x, weight, scale)]
    exact = np.einsum("blo,io->bli", rounded[2], rounded[1]), np.einsum("bli,blo->io", rounded[0], rounded[2])
    assert ours[0].dtype == dtype and ours[1].dtype == jnp.float32  # a parameter's gradient is not rounded
    np.testing.assert_allclose(np.asarray(ours[0], np.float64), exact[0], rtol=1e-5 if dtype == "float32" else 8e-3)
    np.testing.assert_allclose(ours[1], exact[1], rtol=1e-5, atol=1e-5)


def test_an_empty_row_is_finite_and_weighs_nothing():
    batch = random_batch(num_rows=4)
    empty = batch._replace(
        sequence_ids=np.zeros_like(batch.sequence_ids), sequence_weights=np.zeros_like(batch.sequence_weights)
    )
    model = tiny_model()
    objective = PretrainingObjective(model, MaskingConfig(), MASK, (CLS, SEP))

    def loss(params):
        prepared = objective.prepare(empty)
        metrics, denominators = objective.losses(params, prepared, None), objective.denominators(prepared)
        total = sum(metrics[name][0] / denominators[name] for name in denominators)
        return total, next_sentence_weights(prepared)

    (value, weights), gradient = computed(jax.value_and_grad(loss, has_aux=True), noisy_params())
    assert float(value) == 0.0
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))
    assert not weights.any()


def test_positions_and_attention_of_packed_rows():
    sequence_ids = np.array([[1, 1, 2, 2, 2, 0]])
    assert computed(positions_in_sequence, sequence_ids).tolist() == [[0, 1, 0, 1, 2, 0]]
    attends = computed(attention_mask, sequence_ids)[0]
    assert attends[:2, :2].all() and attends[2:5, 2:5].all()
    assert attends.sum() == 4 + 9


def test_padding_may_be_longer_than_the_positions():
    """As beside a row of four choices, each of which fits: there is no position for the last tokens of padding."""
    model = tiny_model(max_positions=8)
    params = drawn_params(model)
    ids = np.arange(5, 11)
    hidden = jax.jit(lambda params, batch: encode(model, params, batch).hidden)
    short, long = (
        np.asarray(hidden(params, pad_rows([ids, np.arange(5, 13)], size, num_sequences=4)))[0, :6] for size in (8, 30)
    )
    assert np.isfinite(long).all()
    np.testing.assert_allclose(long, short, atol=1e-6)


@functools.cache
def all_kept(model):
    """Returns what gives all that the encoder can keep, of parameters and a batch."""
    return jax.jit(functools.partial(encode, model, layers=True, attentions=True))


@pytest.fixture(scope="module")
def of_the_stack():
    return all_kept(tiny_model())(drawn_params(tiny_model()), random_batch(num_rows=3))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_layers_by_themselves_are_those_of_the_stack(dtype, of_the_stack):
    """What predictions on a CPU are made with."""
    model = tiny_model(compute_dtype=dtype)
    params = drawn_params(tiny_model())
    separate = params | {"encoder": unstack(model, params["encoder"])}
    assert "layers" not in separate["encoder"] and "layers" in params["encoder"]
    batch = random_batch(num_rows=3)
    expected = of_the_stack if dtype == "float32" else all_kept(model)(params, batch)
    kept = all_kept(model)(separate, batch)
    np.testing.assert_allclose(kept.attentions, expected.attentions, atol=1e-6)
    for ours, theirs in ((kept.layers, expected.layers), (kept.hidden, expected.hidden)):
        np.testing.assert_allclose(*(np.asarray(each, np.float32) for each in (ours, theirs)), rtol=1e-6, atol=1e-6)


def test_attention_maps_are_probabilities_within_each_sequence(of_the_stack):
    model = tiny_model(attention="fused")
    params, batch = drawn_params(tiny_model()), random_batch(num_rows=3)
    fused = jax.jit(functools.partial(encode, model, attentions=True))(params, batch)
    maps, real = fused.attentions, np.asarray(batch.sequence_ids) > 0
    np.testing.assert_allclose(np.asarray(of_the_stack.hidden)[real], np.asarray(fused.hidden)[real], atol=1e-5)
    np.testing.assert_allclose(of_the_stack.attentions, maps, atol=1e-6)
    rows, length = batch.token_ids.shape
    assert maps.shape == (model.num_layers, rows, model.num_heads, length, length)
    ids = np.asarray(batch.sequence_ids)
    real, same = ids > 0, ids[:, :, None] == ids[:, None, :]
    np.testing.assert_allclose(np.asarray(maps).sum(-1), 1, rtol=1e-5)
    others = np.broadcast_to((real[:, :, None] & ~same)[:, None], maps.shape[1:])
    assert not np.asarray(maps)[:, others].any()


def test_dropout_of_the_encoder_needs_a_key():
    model = tiny_model(hidden_dropout_rate=0.5)
    params, batch = drawn_params(tiny_model()), random_batch(num_rows=2)
    without, given = (functools.partial(encode, each) for each in (tiny_model(), model))
    assert str(jax.make_jaxpr(given)(params, batch)) == str(jax.make_jaxpr(without)(params, batch))
    key, other = jax.random.split(jax.random.key(1))
    apart = lambda *keys: jnp.abs(given(params, batch, keys[0]).hidden - given(params, batch, keys[1]).hidden)  # noqa: E731
    assert computed(apart, key, other).max() > 0.1


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activations_of_bfloat16_are_rounded_once(activation):
    inputs, gradient = np.random.default_rng(0).normal(size=(2, 1000)).astype("bfloat16")

    def wide(inputs):
        return ACTIVATIONS[activation](jnp.asarray(inputs, jnp.float32))

    def both(inputs, gradient):
        ours, of_ours = jax.vjp(lambda each: activate(activation, each), inputs)
        exact, of_exact = jax.vjp(wide, inputs)
        return (ours, of_ours(gradient)[0]), (exact, of_exact(gradient.astype(jnp.float32))[0])

    for ours, exact in zip(*computed(both, inputs, gradient)):
        np.testing.assert_array_equal(ours, exact.astype("bfloat16"))
