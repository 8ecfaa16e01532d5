# SPDX-License-Identifier: Apache-2.0
"""Blocks and windows compute what whole rows do, both passes, dropout too, and store no scores of a whole row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import drawn_params, random_batch, tiny_model

from bert_jax.model import long_rows
from bert_jax.model.attention import attend, attention_mask
from bert_jax.model.attention_kernels import AttentionShape, keeps, keeps_at
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.long_rows import in_blocks, in_windows, pays_in_windows
from bert_jax.model.objective import forward, init_params
from bert_jax.settings.model import model_size


def random_arrays(rows=2, size=201, heads=2, head_size=8, seed=0):
    """Returns query, key, value, sequence ids of packed rows with padding, and keys of dropout."""
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=(rows, size, heads * head_size)).astype(np.float32) for _ in range(3)]
    ids = np.zeros((rows, size), np.int32)
    ids[0, :120], ids[0, 120:190], ids[1, : size - 3] = 1, 2, 1
    ids[0, 119], ids[1, size - 4] = -1, -1  # which are not seen
    return [jnp.asarray(array) for array in (*arrays, ids, rng.integers(-(2**31), 2**31, (rows, heads, 2), np.int32))]


def whole(shape, query, key, value, ids, keys):
    """Returns the context by all scores at once."""
    size = query.shape[1]
    heads = [array.reshape(*array.shape[:2], shape.num_heads, -1) for array in (query, key, value)]
    kept = keeps(shape, size, keys[:, :, 0, None, None], keys[:, :, 1, None, None])
    drop = lambda probabilities: jnp.where(kept, probabilities * shape.rescale, 0)  # noqa: E731
    return attend(*heads, attention_mask(ids, shape.causal, shape.window), drop)[0].reshape(query.shape)


# All pairs of blocks or windows, dropout and direction; and the narrowest window.
@pytest.mark.parametrize(
    ("window", "rate", "causal"),
    [
        *[(0, 0.0, False), (0, 0.3, True), (7, 0.0, True), (7, 0.3, False)],
        pytest.param(1, 0.0, False, marks=pytest.mark.slow),
    ],
)
def test_both_passes_equal_those_of_whole_rows(monkeypatch, window, rate, causal):
    monkeypatch.setattr(long_rows, "SCORES", 7000)
    shape = AttentionShape(2, 8, causal, round((1 - rate) * 2**16), window=window)
    arrays = random_arrays()
    real = np.asarray(arrays[3] != 0)[..., None]
    compute = in_windows if window else in_blocks

    def loss(compute, *floats):
        context = compute(shape, *floats, *arrays[3:])
        return jnp.sum(jnp.where(real, context, 0) * jnp.cos(jnp.arange(context.size).reshape(context.shape)))

    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, each), argnums=(0, 1, 2)))(*arrays[:3])
        for each in (compute, whole)
    )
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [6, 7])
@pytest.mark.parametrize("x64", [False, True])
def test_dropout_of_any_scores_is_that_of_whole_rows(size, x64):
    shape = AttentionShape(1, 8, False, 2**15)
    first, second = jnp.int32(123), jnp.int32(-77)
    expected = jax.jit(keeps, static_argnums=(0, 1))(shape, size, first, second)
    with jax.enable_x64(x64):
        rows, columns = jnp.arange(size)[:, None], jnp.arange(size)
        found = jax.jit(keeps_at, static_argnums=(0, 1))(shape, size, rows, columns, first, second)
        np.testing.assert_array_equal(found, expected)


def test_windows_are_for_rows_that_are_longer_than_three_blocks():
    shape = AttentionShape(1, 8, False, 2**16, window=64)
    assert [pays_in_windows(shape, size) for size in (64, 192, 193)] == [False, False, True]
    assert not pays_in_windows(shape._replace(window=0), 10_000)


MODERN = dataclasses.replace(
    model_size("modernbert-mini"),
    vocab_size=203,
    hidden_size=32,
    num_heads=4,
    intermediate_size=48,
    num_layers=3,
    global_every=2,
    window=6,
    max_positions=512,
)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: leaf + 0.03 * rng.standard_normal(leaf.shape, np.float32), drawn_params(MODERN, "masked_lm")
    )


def packed_rows():
    return random_batch(num_rows=4, row_length=259, num_sequences=3)


def logits_of(config, params, batch, key=None):
    positions = np.broadcast_to(np.arange(0, batch.token_ids.shape[1], 7), (len(batch.token_ids), 37))
    batch = batch._replace(mlm_positions=positions)
    return np.asarray(compiled(config)(params, batch, dropout_key=key))[..., :203]


@functools.cache
def compiled(config):
    return jax.jit(functools.partial(forward, config, head=MASKED_LM))


@pytest.fixture(scope="module")
def plain_logits():
    """Returns (config, parameters) -> the logits of `packed_rows`, each made once."""
    made = {}

    def of(config, params):
        if config not in made:
            made[config] = logits_of(config, params, packed_rows())
        return made[config]

    return of


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"remat": "dots", "unroll": 2}, marks=pytest.mark.slow),
        {"window": 600, "rotary_theta": 10_000.0},  # every layer is global
    ],
)
def test_how_it_is_computed_changes_nothing(params, plain_logits, changes):
    batch = packed_rows()
    config = dataclasses.replace(MODERN, rotary_theta=10_000.0) if "window" in changes else MODERN
    changed = dataclasses.replace(config, **changes)
    if "window" in changes:
        config = dataclasses.replace(config, window=0)
    real = np.asarray(batch.sequence_ids[:, ::7] > 0)
    found = np.asarray(logits_of(changed, params, batch))[real]
    expected = np.asarray(plain_logits(config, params))[real]
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_dropout_does_not_depend_on_blocks_or_kernels(params, plain_logits):
    batch = packed_rows()
    config = dataclasses.replace(MODERN, attention_dropout_rate=0.2)
    real = np.asarray(batch.sequence_ids[:, ::7] > 0)
    plain, fused = (
        np.asarray(logits_of(dataclasses.replace(config, attention=name), params, batch, jax.random.key(1)))[real]
        for name in ("plain", "fused")
    )
    np.testing.assert_allclose(plain, fused, atol=2e-5)
    assert np.abs(plain - np.asarray(plain_logits(MODERN, params))[real]).max() > 1e-3


def memory_of_a_step(config, rows, length):
    """Returns the bytes of temporaries of a gradient on a CPU."""
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    batch = random_batch(num_rows=1)._replace(
        token_ids=ids, type_ids=ids, sequence_ids=ids, cls_positions=jax.ShapeDtypeStruct((rows, 1), jnp.int32),
        mlm_positions=jax.ShapeDtypeStruct((rows, length * 3 // 20), jnp.int32),
        sequence_weights=None, next_sentence_labels=None, sequence_numbers=None, epochs=None, word_starts=None,
    )  # fmt: skip

    def loss(params, batch):
        return jnp.mean(forward(config, params, batch, MASKED_LM, jax.random.key(0)))

    compiled = jax.jit(jax.grad(loss)).lower(shapes, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("size", ["mini", "modernbert-mini"])
def test_a_row_of_8192_takes_less_than_twice_what_16_of_512_take(size):
    config = dataclasses.replace(model_size(size), vocab_size=8000, max_positions=8192)
    short, long = memory_of_a_step(config, 16, 512), memory_of_a_step(config, 1, 8192)
    print(f"\n{size}: 16 rows of 512 {short / 2**20:.0f} MiB, a row of 8,192 {long / 2**20:.0f} MiB")
    assert long < 2 * short


@pytest.mark.parametrize(("length", "stored"), [(1024, True), (1032, False)])
def test_scores_of_up_to_1024_tokens_are_stored_as_before(length, stored):
    config = tiny_model(max_positions=1032)
    batch = random_batch(num_rows=1, row_length=length)._replace(mlm_positions=np.zeros((1, 3), np.int32))
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    text = str(jax.make_jaxpr(functools.partial(forward, config, head=MASKED_LM))(shapes, batch))
    assert (f"{length},{length}]" in text) == stored
