# SPDX-License-Identifier: Apache-2.0
"""The library's kernels for long rows and windows on TPUs, interpreted, against attention written plainly."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import computed

from bert_jax.devices.sharding import make_mesh, row_sharding
from bert_jax.model import fused_attention as fused
from bert_jax.model import splash_attention_tpu as on_tpu
from bert_jax.model.attention import attention_mask
from bert_jax.model.attention_kernels import AttentionShape
from bert_jax.settings.pretraining import MeshConfig


def random_arrays(size, dtype="float32", rows=2, hidden=128):
    """Returns query, key, value, a gradient of real tokens alone, and sequence ids: a row of one, others packed.

    Some tokens are not seen.
    """
    random = np.random.default_rng(size)
    arrays = [np.asarray(random.normal(size=(rows, size, hidden)), dtype) for _ in range(4)]
    ids = np.ones((rows, size), np.int32)
    ids[1:, size // 3 :], ids[1:, size // 2 :], ids[1:, -7:] = 2, 3, 0
    ids[1:, size // 2 - 5 : size // 2] *= -1
    arrays[3] *= ids[..., None] != 0
    return arrays, ids


def both_passes(attention, query, key, value, gradient):
    """Returns the result of attention, and the gradients of query, key and value."""

    @jax.jit
    def both(query, key, value, gradient):
        result, pull_back = jax.vjp(attention, query, key, value)
        return [result, *pull_back(gradient)]

    return jax.device_get(both(query, key, value, gradient))


def sketch(query, key, value, ids, causal, window):
    """Attention in NumPy's float64, of one head of 64 after the other."""
    sees = computed(lambda ids: attention_mask(ids, causal, window), ids)
    query, key, value = (np.asarray(array, np.float64) for array in (query, key, value))
    result = np.zeros_like(value)
    for start in range(0, value.shape[2], 64):
        own = np.s_[:, :, start : start + 64]
        scores = np.where(sees, np.einsum("bqd,bkd->bqk", query[own], key[own]) / 8, -1e9)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        result[own] = np.einsum("bqk,bkd->bqd", weights / weights.sum(axis=2, keepdims=True), value[own])
    return result


@pytest.mark.parametrize(
    ("size", "window", "causal", "dtype"),
    [
        pytest.param(256, 64, False, "float32", marks=pytest.mark.slow),
        (384, 200, True, "bfloat16"),
        (640, 0, False, "float32"),
        pytest.param(640, 0, True, "float32", marks=pytest.mark.slow),
        pytest.param(1024, 64, False, "bfloat16", marks=pytest.mark.slow),
        pytest.param(8192, 64, False, "float32", marks=pytest.mark.slow),
        pytest.param(4096, 0, False, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_both_passes_are_those_of_plain_attention_in_float32(size, window, causal, dtype):
    """In bfloat16, plain attention in blocks adds up gradients of keys in it, and is three times as far off."""
    arrays, ids = random_arrays(size, dtype)
    options = {"sequence_ids": ids, "num_heads": 2, "window": window, "causal": causal}
    found, expected = (
        both_passes(functools.partial(fused.fused_attention, interpret=each, **options), *given)
        for each, given in (("splash", arrays), ("", [array.astype(np.float32) for array in arrays]))
    )
    assert all(np.isfinite(np.asarray(array, np.float32)).all() for array in found)
    real = ids[..., None] != 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == jnp.dtype(dtype)
        ours, theirs = (np.asarray(array, np.float32) * real for array in (ours, theirs))
        relative = 2e-6 if dtype == "float32" else 1 / 128
        np.testing.assert_allclose(ours, theirs, atol=relative * np.abs(theirs).max())
    if dtype == "float32" and size < 1024:
        exact = sketch(*arrays[:3], ids, causal, window)
        np.testing.assert_allclose(found[0] * real, exact * real, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "window", "beside"),
    [(256, 64, ""), pytest.param(640, 0, "splash", marks=pytest.mark.slow)],
)
def test_over_a_mesh_rows_and_heads_are_divided(size, window, beside):
    """Against plain attention on one device, and against the kernel there, which it is within 1e-6."""
    arrays, ids = random_arrays(size, rows=4)

    def attention(*arrays, interpret):
        return fused.fused_attention(*arrays, ids, num_heads=2, window=window, interpret=interpret)

    alone = both_passes(functools.partial(attention, interpret=beside), *arrays)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        compute = functools.partial(attention, interpret="splash")
        divided = both_passes(compute, *(jax.device_put(array, row_sharding(mesh)) for array in arrays))
    real = np.asarray(ids)[..., None] > 0
    for ours, theirs in zip(divided, alone, strict=True):
        if beside:
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
        else:  # padding has no meaning, and plain attention rounds otherwise
            ours, theirs = np.asarray(ours) * real, np.asarray(theirs) * real
            np.testing.assert_allclose(ours, theirs, atol=2e-6 * np.abs(theirs).max())


def test_long_rows_and_windows_without_dropout_are_for_these_kernels_and_short_rows_are_not():
    shape, long = AttentionShape(2, 64, False, 2**16), np.zeros((1, 640, 128), np.float32)
    assert on_tpu.fits(shape, long) and on_tpu.fits(shape._replace(causal=True), long)
    assert on_tpu.fits(shape._replace(window=64), long[:, :256])
    for other, array in (
        (shape._replace(kept=60000), long),
        (shape._replace(precision="highest"), long),
        (shape._replace(num_heads=4, head_size=32), long),
        (shape, long[:, :600]),
        (shape, long[:, :512]),  # the kernel with dropout takes it
    ):
        assert not on_tpu.fits(other, array)
    for window, size in ((0, 512), (0, 640), (64, 512)):
        names = fused._fitting(shape._replace(window=window), long[:, :size].astype(jnp.bfloat16))
        assert len({"tpu", "splash"} & set(names)) == 1


@pytest.mark.parametrize(("window", "kernels"), [(64, 3), (0, 2)])
def test_for_tpus_both_passes_are_kernels_that_tell_their_flops_and_no_scores(window, kernels):
    rows, size = 3, 1024
    array = jax.ShapeDtypeStruct((rows, size, 128), jnp.bfloat16)

    def both(query, key, value, gradient):
        ids = jnp.ones((rows, size), jnp.int32)
        attention = functools.partial(fused.fused_attention, sequence_ids=ids, num_heads=2, window=window)
        result, pull_back = jax.vjp(attention, query, key, value)
        return result, pull_back(gradient)

    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        lowered = jax.jit(both).trace(*[array] * 4).lower(lowering_platforms=("tpu",))
    text = lowered.as_text()
    assert text.count("custom_call @tpu_custom_call") == kernels
    assert f"{size}x{size}x" not in text  # no scores
    # A block of queries sees that of its keys and one to each side, but at the ends; or 2 of 2 blocks.
    scores = (8 * 3 - 2) * 128**2 if window else size**2
    named = {int(flops) for flops in re.findall(r"kernel_flops_(\d+)", lowered.as_text(debug_info=True))}
    assert named == {2 * 2 * rows * 128 * scores, (7 if window else 10) * rows * 128 * scores}
