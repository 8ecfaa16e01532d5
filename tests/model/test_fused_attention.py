# SPDX-License-Identifier: Apache-2.0
"""The kernel of attention, interpreted, against attention written plainly; and its dropout."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from builders import CLS, MASK, SEP, random_batch, tiny_model

from bert_jax.devices.sharding import make_mesh, row_sharding
from bert_jax.model import fused_attention as fused
from bert_jax.model.attention import attention_mask
from bert_jax.model.objective import pretraining_objective
from bert_jax.settings.pretraining import MaskingConfig, MeshConfig

ROWS, LENGTH = 3, 64
# A row of one sequence, one of three and padding, one that is empty.
IDS = np.zeros((ROWS, LENGTH), np.uint8)
IDS[0], IDS[1, :9], IDS[1, 9:40], IDS[1, 40:57] = 1, 1, 2, 3


def arrays(num_heads, head_size, dtype="float32", seed=0):
    """Returns query, key, value and a gradient."""
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.normal(size=(ROWS, LENGTH, num_heads * head_size)), dtype) for _ in range(4)]


def both_passes(query, key, value, gradient, **options):
    """Returns the result, and the gradients of query, key and value."""

    def attention(query, key, value):
        return fused.fused_attention(query, key, value, jnp.asarray(IDS), dropout_key=jax.random.key(7), **options)

    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        result, pull_back = jax.vjp(attention, query, key, value)
        return [result, *pull_back(gradient)]


def sketch(query, key, value, num_heads, causal, kept=None):
    """Attention in NumPy's float64, head by head; `kept` [B, N, L, L] is what dropout leaves, scaled."""
    sees = np.asarray(attention_mask(jnp.asarray(IDS), causal))
    query, key, value = (np.asarray(array, np.float64) for array in (query, key, value))
    result, size = np.zeros_like(value), query.shape[-1] // num_heads
    for row in range(ROWS):
        for head in range(num_heads):
            own = np.s_[row, :, head * size : (head + 1) * size]
            scores = np.where(sees[row], query[own] @ key[own].T / np.sqrt(size), -1e9)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            result[own] = (weights if kept is None else weights * kept[row, head]) @ value[own]
    return result


# Heads of a tile of 128 columns: two of 64, four of 32; and a model too narrow for one.
@pytest.mark.parametrize("num_heads, head_size", [(4, 64), (8, 32), (3, 24)])
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_computes_what_plain_attention_computes(num_heads, head_size, rate, causal):
    given = arrays(num_heads, head_size)
    options = {"num_heads": num_heads, "rate": rate, "causal": causal}
    kernel, plain = (both_passes(*given, **options, interpret=interpret) for interpret in (True, False))
    for of_kernel, of_plain in zip(kernel, plain):
        np.testing.assert_allclose(of_kernel, of_plain, atol=2e-6)
    if not rate:
        np.testing.assert_allclose(kernel[0], sketch(*given[:3], num_heads, causal), atol=2e-6)


def test_in_bfloat16_the_kernel_is_within_rounding_of_plain_attention():
    given = arrays(4, 64, "bfloat16")
    kernel, plain = (both_passes(*given, num_heads=4, rate=0.1, interpret=interpret) for interpret in (True, False))
    for of_kernel, of_plain in zip(kernel, plain):
        assert of_kernel.dtype == of_plain.dtype == jnp.bfloat16
        scale = float(jnp.abs(of_plain.astype(jnp.float32)).max())
        np.testing.assert_allclose(*(np.asarray(one, np.float32) for one in (of_kernel, of_plain)), atol=scale / 128)


def kept_by(rate, rows=ROWS, size=LENGTH, num_heads=4, key=7):
    """Returns what dropout leaves [B, N, L, L] of probabilities of 1, by reading it off unit values."""
    found = []
    ids = jnp.ones((rows, size), jnp.uint8)
    zeros = jnp.zeros((rows, size, num_heads * 64))
    for start in range(0, size, 64):  # each head reads 64 columns of the identity at a time
        identity = np.zeros((rows, size, num_heads, 64), np.float32)
        identity[:, np.arange(start, start + 64), :, np.arange(64)] = 1
        value = jnp.asarray(identity.reshape(rows, size, -1))
        options = {"num_heads": num_heads, "rate": rate, "dropout_key": jax.random.key(key)}
        read = fused.fused_attention(zeros, zeros, value, ids, **options)
        found.append(np.asarray(read).reshape(rows, size, num_heads, 64).transpose(0, 2, 1, 3) * size)
    return np.concatenate(found, axis=-1)


def test_dropout_is_of_the_rate_and_keeps_the_mean_and_is_no_pattern():
    kept = kept_by(0.1, rows=2, size=128)
    scale = 2**16 / round(0.9 * 2**16)
    np.testing.assert_allclose(np.unique(kept.round(5)), [0, scale], atol=1e-5)
    dropped = (kept == 0).astype(np.float64)
    # 131,072 draws: a standard deviation of the mean is 0.0008, of a row or a column 0.0094.
    assert abs(dropped.mean() - 0.1) < 0.004
    for axes in ((0, 1, 2), (0, 1, 3), (2, 3)):
        draws = kept.size / dropped.mean(axis=axes).size
        assert np.abs(dropped.mean(axis=axes) - 0.1).max() < 5 * 0.3 / draws**0.5
    flat = dropped.reshape(8, -1) - 0.1
    likeness = (flat @ flat.T) / flat.shape[1] / 0.09
    assert np.abs(likeness - np.eye(8)).max() < 0.05  # heads and rows have nothing to do with each other
    halves = flat.reshape(8, 2, -1)  # which share a draw of 32 bits
    assert np.abs((halves[:, 0] * halves[:, 1]).mean()) / 0.09 < 0.02


def test_dropout_multiplies_what_the_sketch_says():
    given = arrays(4, 64)
    kept = kept_by(0.1)
    result = both_passes(*given, num_heads=4, rate=0.1, interpret=True)[0]
    np.testing.assert_allclose(result, sketch(*given[:3], 4, False, kept), atol=1e-5)
    assert np.abs(kept - kept_by(0.1, key=8)).max() > 1  # another key, another mask


def test_the_kernel_over_a_mesh_is_the_kernel():
    """Rows and heads are divided; the last of 4 rows is a copy of the first."""
    given = [jnp.concatenate([array, array[:1]]) for array in arrays(8, 32)]
    ids = jnp.asarray(np.concatenate([IDS, IDS[:1]]))

    def both(query, key, value, gradient):
        def attention(*arrays):
            options = {"num_heads": 8, "rate": 0.1, "dropout_key": jax.random.key(7), "interpret": True}
            return fused.fused_attention(*arrays, ids, **options)

        result, pull_back = jax.vjp(attention, query, key, value)
        return [result, *pull_back(gradient)]

    alone = both(*given)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        divided = jax.jit(both)(*(jax.device_put(array, row_sharding(mesh)) for array in given))
    for ours, theirs in zip(divided, alone):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_model_with_fused_attention_has_the_losses_and_gradients_of_the_plain_one():
    batch = random_batch(num_sequences=2)

    def of(attention):
        objective = pretraining_objective(tiny_model(attention=attention), MaskingConfig(), MASK, (CLS, SEP))
        masked = objective.prepare(batch)

        def loss(params):
            total, weight = objective.losses(params, masked, None)["mlm_loss"]
            return total / weight

        return jax.jit(jax.value_and_grad(loss))(objective.init(jax.random.key(0)))

    (loss, gradients), (expected, theirs) = of("fused"), of("plain")
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    jax.tree.map(lambda ours, plain: np.testing.assert_allclose(ours, plain, atol=1e-6), gradients, theirs)


def test_rows_that_no_kernel_takes_are_computed_plainly():
    query, key, value, _ = arrays(4, 64)
    shape = fused._Shape(4, 64, False, 2**16)
    assert fused._fits(shape, query) and not fused._fits(shape, query[:, :50])
    assert not fused._fits(shape, jnp.zeros((1, 544, 256)))
    assert not fused._fits(shape._replace(num_heads=12, head_size=80), jnp.zeros((1, 64, 960)))  # no 128s but all 960
    short = fused.fused_attention(query[:, :50], key[:, :50], value[:, :50], jnp.asarray(IDS[:, :50]), num_heads=4)
    whole = both_passes(query, key, value, query, num_heads=4)[0]
    np.testing.assert_allclose(short[1, :40], whole[1, :40], atol=2e-6)  # whose sequences end before the cut


def test_rows_that_a_mesh_does_not_divide_are_computed_plainly():
    query, key, value, _ = arrays(4, 64)
    ids = jnp.asarray(IDS)
    expected = fused.fused_attention(query, key, value, ids, num_heads=4)
    with jax.set_mesh(make_mesh(MeshConfig())):
        found = jax.jit(functools.partial(fused.fused_attention, num_heads=4))(query, key, value, ids)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_program_for_rows_of_any_length_can_be_exported():
    rows, size = jax.export.symbolic_shape("b, l")
    shapes = [jax.ShapeDtypeStruct((rows, size, 64), jnp.float32)] * 3 + [jax.ShapeDtypeStruct((rows, size), jnp.int32)]
    program = jax.export.export(jax.jit(functools.partial(fused.fused_attention, num_heads=1)))(*shapes)
    query, key, value, _ = (array[:, :20, :64] for array in arrays(1, 64))
    ids = jnp.asarray(IDS[:, :20], jnp.int32)
    expected = fused.fused_attention(query, key, value, ids, num_heads=1)
    np.testing.assert_allclose(program.call(query, key, value, ids), expected, atol=1e-6)
