# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention, interpreted, against attention written plainly; and their dropout."""

import functools
import re
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from builders import computed, random_batch, task_params, tiny_model

from bert_jax.devices.sharding import make_mesh, row_sharding
from bert_jax.model import fused_attention as fused
from bert_jax.model import fused_attention_gpu as on_gpu
from bert_jax.model import fused_attention_tpu as on_tpu
from bert_jax.model.attention import attend, attention_mask
from bert_jax.model.attention_kernels import PRODUCTS_OF_KERNELS, AttentionShape
from bert_jax.model.objective import encode
from bert_jax.settings.pretraining import MeshConfig

ROWS, LENGTH = 3, 64
# A row of one sequence, one of three and padding, one that is empty.
IDS = np.zeros((ROWS, LENGTH), np.uint8)
IDS[0], IDS[1, :9], IDS[1, 9:40], IDS[1, 40:57] = 1, 1, 2, 3


def arrays(num_heads, head_size, dtype="float32", seed=0):
    """Returns query, key, value and a gradient."""
    random = np.random.default_rng(seed)
    return [np.asarray(random.normal(size=(ROWS, LENGTH, num_heads * head_size)), dtype) for _ in range(4)]


def both_passes(query, key, value, gradient, **options):
    """Returns the result, and the gradients of query, key and value."""

    def attention(query, key, value):
        return fused.fused_attention(query, key, value, IDS, dropout_key=jax.random.key(7), **options)

    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        return passes(attention, query, key, value, gradient)


def sketch(query, key, value, num_heads, causal, kept=None):
    """Attention in NumPy's float64, head by head; `kept` [B, N, L, L] is what dropout leaves, scaled."""
    sees = computed(lambda ids: attention_mask(ids, causal), IDS)
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


WITH_DROPOUT = [name for name in fused.kernels() if name != "splash"]


# Heads of a TPU's tile of 128 columns: two of 64, four of 32; and a model too narrow for one.
# What is slow here has fast tests over a mesh, in bfloat16, through windows and through blocks.
@pytest.mark.parametrize(
    "platform, num_heads, head_size, rate, causal",
    [
        ("tpu", 3, 24, 0.0, True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("tpu", 4, 64, 0.1, False),
                ("tpu", 8, 32, 0.1, True),
                ("cuda", 2, 64, 0.0, False),
                ("cuda", 4, 16, 0.1, True),
            )
        ),
    ],
)
def test_a_kernel_computes_what_plain_attention_computes(platform, num_heads, head_size, rate, causal):
    given = arrays(num_heads, head_size)
    # Without dropout a kernel for GPUs goes through other keys where a query is padding.
    real = np.ones_like(IDS)[..., None] if rate or platform == "tpu" else (IDS > 0)[..., None]
    given[3] *= real
    options = {"num_heads": num_heads, "rate": rate, "causal": causal}
    kernel, plain = (both_passes(*given, **options, interpret=interpret) for interpret in (platform, ""))
    for of_kernel, of_plain in zip(kernel, plain):
        np.testing.assert_allclose(of_kernel * real, of_plain * real, atol=2e-6)
    assert all(np.isfinite(array).all() for array in kernel)
    if not rate:
        np.testing.assert_allclose(kernel[0] * real, sketch(*given[:3], num_heads, causal) * real, atol=2e-6)


@pytest.mark.parametrize(
    ("size", "window", "causal"),
    [
        (256, 70, False),
        pytest.param(96, 95, True, marks=pytest.mark.slow),
    ],
)
def test_with_windows_a_kernel_for_gpus_computes_what_plain_attention_computes(size, window, causal):
    random = np.random.default_rng(0)
    query, key, value, gradient = np.float32(random.normal(size=(4, 2, size, 32)))
    ids = np.ones((2, size), np.uint8)
    ids[1, size // 3 :], ids[1, -7:] = 2, 0
    gradient = gradient * (ids > 0)[..., None]  # nobody reads what padding sees

    def attention(window, interpret):
        options = {"num_heads": 2, "window": window, "causal": causal, "interpret": interpret}
        compute = functools.partial(fused.fused_attention, sequence_ids=ids, **options)
        return jax.jit(lambda *arrays: compute(*arrays) * (ids > 0)[..., None])

    of_kernel, of_plain = (passes(attention(window, each), query, key, value, gradient) for each in ("cuda", ""))
    for one, other in zip(of_kernel, of_plain):
        np.testing.assert_allclose(one, other, atol=2e-6)
    wide = attention(0, "")(query, key, value)
    assert np.abs(of_plain[0] - wide).max() > (0.1 if window < size - 1 else -1)  # the window is seen


def passes(attention, query, key, value, gradient):
    """Returns the result of attention, and the gradients of query, key and value."""

    @jax.jit
    def both(query, key, value, gradient):
        result, pull_back = jax.vjp(attention, query, key, value)
        return [result, *pull_back(gradient)]

    return jax.device_get(both(query, key, value, gradient))


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_kernel_for_gpus_goes_through_the_blocks_of_its_sequences_alone(causal):
    """NaN in a sequence of its own spoils what goes through it; and ids in no order are read right."""
    random = np.random.default_rng(1)
    query, key, value, gradient = np.float32(random.normal(size=(4, 3, 512, 32)))
    ids = np.zeros((3, 512), np.uint8)
    ids[0] = np.repeat([1, 2, 3, 4], 128)
    ids[1, :500] = np.repeat([3, 1, 2, 3, 1], 100)  # no packing of ours: one sequence in two places
    ids[2, 32:64] = 1
    poisoned = value.copy()
    poisoned[0, ids[0] == 3] = np.nan

    def attention(interpret):
        compute = functools.partial(fused.fused_attention, sequence_ids=ids, num_heads=2, causal=causal)
        return jax.jit(lambda *arrays: compute(*arrays, interpret=interpret) * (ids > 0)[..., None])

    by_kernel = attention("cuda")
    for one, other in zip(*(passes(each, query, key, value, gradient) for each in (by_kernel, attention("")))):
        np.testing.assert_allclose(one, other, atol=2e-6)
    of_first = np.asarray(by_kernel(query, key, poisoned))[0]
    np.testing.assert_array_equal(np.isnan(of_first).any(axis=1), ids[0] == 3)


@pytest.mark.parametrize("platform", ["", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tpu", "cuda"))])
def test_tokens_with_negative_ids_see_their_sequence_and_are_not_seen(platform):
    ids = IDS.astype(np.int32)
    for row, first, last in ((0, 50, 64), (1, 30, 40), (1, 48, 57)):
        ids[row, first:last] *= -1
    of_query, of_key = abs(ids)[:, :, None], ids[:, None, :]
    real = (of_query != 0).astype(np.float32)
    query, key, value, gradient = arrays(4, 16)

    def plain(query, key, value):
        heads = [array.reshape(ROWS, LENGTH, 4, 16) for array in (query, key, value)]
        sees = jnp.asarray((of_query == of_key) & (of_key > 0))
        return attend(*heads, sees, lambda kept: kept)[0].reshape(ROWS, LENGTH, -1) * real

    def by_ids(query, key, value):
        options = {"sequence_ids": ids, "num_heads": 4, "interpret": platform}
        return fused.fused_attention(query, key, value, **options) * real

    found, expected = (passes(function, query, key, value, gradient) for function in (by_ids, plain))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.parametrize("platform, causal", [("tpu", False), ("cuda", True)])
def test_in_bfloat16_a_kernel_is_within_rounding_of_plain_attention(platform, causal):
    given, options = arrays(4, 64, "bfloat16"), {"num_heads": 4, "rate": 0.1, "causal": causal}
    kernel, plain = (both_passes(*given, **options, interpret=interpret) for interpret in (platform, ""))
    for of_kernel, of_plain in zip(kernel, plain):
        assert of_kernel.dtype == of_plain.dtype == jnp.bfloat16
        scale = float(np.abs(np.float32(of_plain)).max())
        np.testing.assert_allclose(*(np.asarray(one, np.float32) for one in (of_kernel, of_plain)), atol=scale / 128)


def kept_by(rate, rows=ROWS, size=LENGTH, num_heads=4, key=7, interpret=""):
    """Returns what dropout leaves [B, N, L, L] of probabilities of 1, by reading it off unit values."""
    found = []
    ids = np.ones((rows, size), np.uint8)
    zeros = np.zeros((rows, size, num_heads * 64), np.float32)
    options = {"num_heads": num_heads, "rate": rate, "dropout_key": jax.random.key(key), "interpret": interpret}
    # An argument, not a constant: on CPUs XLA 0.10.2 multiplies two constant arrays to NaN in one compilation of six.
    read = jax.jit(lambda zeros, value: fused.fused_attention(zeros, zeros, value, ids, **options))
    for start in range(0, size, 64):  # each head reads 64 columns of the identity at a time
        identity = np.zeros((rows, size, num_heads, 64), np.float32)
        identity[:, np.arange(start, start + 64), :, np.arange(64)] = 1
        value = identity.reshape(rows, size, -1)
        found.append(np.asarray(read(zeros, value)).reshape(rows, size, num_heads, 64).transpose(0, 2, 1, 3) * size)
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
    """Plain attention; the kernels compute what it does."""
    given, kept = arrays(4, 64)[:3], kept_by(0.1)
    options = {"num_heads": 4, "rate": 0.1, "dropout_key": jax.random.key(7)}
    result = jax.jit(lambda *arrays: fused.fused_attention(*arrays, IDS, **options))(*given)
    np.testing.assert_allclose(result, sketch(*given, 4, False, kept), atol=1e-5)
    assert np.abs(kept - kept_by(0.1, key=8)).max() > 1  # another key, another mask


# Blocks of 64 and of 32 queries.
@pytest.mark.parametrize("size", [pytest.param(128, marks=pytest.mark.slow), 192])
def test_every_kernel_drops_the_same_probabilities(size):
    options = {"rate": 0.3, "rows": 1, "size": size, "num_heads": 2}
    dropped = [kept_by(**options, interpret=platform) == 0 for platform in ("", *WITH_DROPOUT)]
    assert 0.2 < dropped[0].mean() < 0.4
    for of_kernel in dropped[1:]:
        np.testing.assert_array_equal(of_kernel, dropped[0])


# Plain attention rounds otherwise than a kernel, which over a mesh is itself.
@pytest.mark.parametrize(
    "platform, heads, beside, atol",
    [
        ("tpu", (8, 32), "", 2e-6),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("cuda", (4, 16), "", 2e-6), ("tpu", (8, 32), "tpu", 1e-6), ("cuda", (4, 16), "cuda", 1e-6))
        ),
    ],
)
def test_a_kernel_over_a_mesh_computes_what_one_device_does(platform, heads, beside, atol):
    """Rows and heads are divided; the last of 4 rows is a copy of the first."""
    given = [np.concatenate([array, array[:1]]) for array in arrays(*heads)]
    ids = np.concatenate([IDS, IDS[:1]])

    def attention(*arrays, interpret):
        options = {"num_heads": heads[0], "rate": 0.1, "dropout_key": jax.random.key(7), "interpret": interpret}
        return fused.fused_attention(*arrays, ids, **options)

    alone = passes(functools.partial(attention, interpret=beside), *given)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        compute = functools.partial(attention, interpret=platform)
        divided = passes(compute, *(jax.device_put(array, row_sharding(mesh)) for array in given))
    for ours, theirs in zip(divided, alone):
        np.testing.assert_allclose(ours, theirs, atol=atol)


@pytest.mark.parametrize(
    "rows, size, width, itemsize, expected",
    [
        (64, 128, 128, 2, 8),
        (64, 128, 128, 4, 8),
        (64, 128, 256, 4, 4),  # blocks of 8 rows would take 15 MiB
        (12, 128, 128, 2, 6),  # the largest divisor of 12
        (13, 128, 128, 2, 1),
        (16, 256, 128, 2, 4),
        (8, 512, 128, 2, 1),
        (8, 512, 256, 4, 1),  # its bound is over the limit, as it is for any number of rows
        (96, 32, 72, 4, 32),
    ],
)
def test_a_program_for_tpus_takes_as_many_rows_as_fit(rows, size, width, itemsize, expected):
    assert on_tpu.rows_of_a_program(rows, size, width, itemsize) == expected


@functools.cache
def passes_of_a_tpu(shape):
    """Returns both passes of the kernel as one compiled function."""
    compiled = jax.jit(
        lambda gradient, *given: (on_tpu.forward(shape, True, *given), *on_tpu.backward(shape, True, gradient, *given))
    )
    return lambda *given: jax.device_get(compiled(*given))


@pytest.mark.parametrize("rows", [2, 3])  # two in a step of the kernel's loop, and one after the other
def test_rows_of_a_tpu_program_are_those_of_programs_of_their_own_bit_for_bit(rows):
    shape = AttentionShape(2, 64, False, 59000)
    query, key, value, gradient = (array[:rows].astype(jnp.bfloat16) for array in arrays(2, 64))
    random = np.random.default_rng(1)
    keys = np.int32(random.integers(-(2**31), 2**31, (rows, 2, 2)))
    ids = np.int32(IDS[:rows])
    assert on_tpu.rows_of_a_program(rows, LENGTH, 128, 2) == rows
    given = (query, key, value, ids, keys)
    both = passes_of_a_tpu(shape)
    together = both(gradient, *given)
    for row in range(rows):
        own = [array[row : row + 1] for array in given]
        for ours, theirs in zip(together, both(gradient[row : row + 1], *own)):
            np.testing.assert_array_equal(ours[row : row + 1], theirs)


@pytest.mark.slow
def test_a_model_with_fused_attention_has_the_outputs_and_gradients_of_the_plain_one():
    (loss, gradients), (expected, theirs) = (
        jax.jit(jax.value_and_grad(functools.partial(loss_of, attention)))(task_params("pretraining"))
        for attention in ("fused", "plain")
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    jax.tree.map(lambda ours, plain: np.testing.assert_allclose(ours, plain, atol=1e-6), gradients, theirs)


def loss_of(attention, params, **changes):
    """Returns a number that depends on the hidden states of packed rows by a model with this attention."""
    batch = random_batch(num_sequences=2)
    hidden = encode(tiny_model(attention=attention, **changes), params, batch).hidden
    return jnp.sum(jnp.cos(hidden) * (batch.sequence_ids > 0)[..., None]) / batch.token_ids.size


def test_rows_that_no_kernel_takes_are_computed_plainly():
    query, key, value, _ = arrays(4, 64)
    shape = AttentionShape(4, 64, False, 2**16)
    for kernel in (fused.kernels()[name] for name in WITH_DROPOUT):
        narrow = query.astype(jnp.bfloat16)
        assert kernel.fits(shape, narrow) and not kernel.fits(shape, narrow[:, :50])
        assert not kernel.fits(shape._replace(num_heads=12, head_size=80), np.zeros((1, 64, 960), np.float32))
    long = np.zeros((1, 544, 256), jnp.bfloat16)
    assert on_gpu.fits(shape, long) and not on_tpu.fits(shape, long)
    assert not on_gpu.fits(shape, query.astype(jnp.float32))  # a head has 256 bytes
    assert not on_gpu.fits(shape, query.astype(jnp.float16))
    given = query, key, value, IDS
    attention = functools.partial(fused.fused_attention, num_heads=4)
    short, whole = (computed(attention, *(array[:, :size] for array in given)) for size in (50, LENGTH))
    np.testing.assert_allclose(short[1, :40], whole[1, :40], atol=2e-6)  # whose sequences end before the cut


def test_rows_that_a_mesh_does_not_divide_are_computed_plainly():
    given = *arrays(4, 64)[:3], IDS
    attention = functools.partial(fused.fused_attention, num_heads=4)
    expected = computed(attention, *given)
    with jax.set_mesh(make_mesh(MeshConfig())):
        found = computed(attention, *given)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_program_for_rows_of_any_length_can_be_exported():
    rows, size = jax.export.symbolic_shape("b, l")
    shapes = [jax.ShapeDtypeStruct((rows, size, 64), jnp.float32)] * 3 + [jax.ShapeDtypeStruct((rows, size), jnp.int32)]
    attention = jax.jit(functools.partial(fused.fused_attention, num_heads=1))
    program = jax.export.export(attention)(*shapes)
    query, key, value, _ = (array[:, :20, :64] for array in arrays(1, 64))
    ids = np.int32(IDS[:, :20])
    expected = attention(query, key, value, ids)
    np.testing.assert_allclose(program.call(query, key, value, ids), expected, atol=1e-6)


def lowered_for_cuda(platforms, rows=2, size=128, num_heads=2, head_size=64, dtype=jnp.bfloat16, kept=59000):
    """Returns the text of both passes, lowered for platforms of which this machine has no device."""
    shape = AttentionShape(num_heads, head_size, False, kept)
    array = jax.ShapeDtypeStruct((rows, size, num_heads * head_size), dtype)
    ids = jax.ShapeDtypeStruct((rows, size), jnp.int32)
    keys = jax.ShapeDtypeStruct((rows, num_heads, 2), jnp.int32)

    def both(query, key, value, gradient, ids, keys):
        attention = functools.partial(fused._attention, shape, "")
        result, pull_back = jax.vjp(lambda *floats: attention(*floats, ids, keys), query, key, value)
        return result, pull_back(gradient)

    return jax.jit(both).trace(array, array, array, array, ids, keys).lower(lowering_platforms=platforms).as_text()


def calls_of_kernels(text):
    return re.findall(r"custom_call @(__gpu\$xla\.gpu\.triton|triton_kernel_call\w*|tpu_custom_call)", text)


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="Triton compiles kernels when they are lowered, by the plugin"
)
@pytest.mark.parametrize(
    "size, head_size, dtype",
    [(512, 32, "float32"), (96, 16, "bfloat16")],
)
def test_for_cuda_both_passes_are_the_three_kernels_and_no_product(size, head_size, dtype):
    text = lowered_for_cuda(("cuda",), size=size, head_size=head_size, dtype=jnp.dtype(dtype))
    assert len(calls_of_kernels(text)) == 3
    assert "stablehlo.dot_general" not in text
    for name in PRODUCTS_OF_KERNELS:
        assert f'name = "{name}"' in text


@pytest.mark.parametrize("platform", ["cpu", "rocm"])
def test_elsewhere_both_passes_are_plain(platform):
    text = lowered_for_cuda((platform,))
    assert not calls_of_kernels(text) and "stablehlo.dot_general" in text


@pytest.mark.parametrize("remat, runs", [("dots", 3), pytest.param("full", 4, marks=pytest.mark.slow)])
@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="Triton compiles kernels when they are lowered, by the plugin"
)
def test_rematerialization_runs_the_forward_kernel_again_only_if_full(remat, runs):
    """The loop over the layers has each kernel once, in the forward or in the backward pass."""
    loss = functools.partial(loss_of, "fused", remat=remat, num_heads=2)
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        gradient = jax.jit(jax.grad(loss)).trace(task_params("pretraining"))
    text = gradient.lower(lowering_platforms=("cuda",)).as_text()
    assert len(calls_of_kernels(text)) == runs


def test_without_pallas_s_part_for_triton_gpus_compute_plainly(monkeypatch):
    pallas = sys.modules["jax.experimental.pallas"]
    monkeypatch.delattr(pallas, "triton")
    monkeypatch.setitem(sys.modules, f"{pallas.__name__}.triton", None)
    monkeypatch.delitem(sys.modules, on_gpu.__name__)
    with pytest.warns(UserWarning, match="no kernel 'cuda' with this JAX .*; use plain"):
        there = fused.kernels.__wrapped__()
    assert list(there) == ["tpu", "splash"]
    monkeypatch.setattr(fused, "kernels", lambda: there)
    text = lowered_for_cuda(("cuda",))
    assert not calls_of_kernels(text) and "stablehlo.dot_general" in text
