# SPDX-License-Identifier: Apache-2.0
"""The kernels of the residual connection, interpreted, against the plain form and against autodiff; their dropout."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import CLS, MASK, SEP, random_batch, tiny_model

from bert_jax.devices.sharding import make_mesh, row_sharding
from bert_jax.errors import InputError
from bert_jax.model import fused_residual as fused
from bert_jax.model import fused_residual_gpu as on_gpu
from bert_jax.model.fused_residual import ResidualShape, fused_residual
from bert_jax.model.objective import pretraining_objective
from bert_jax.settings.pretraining import MaskingConfig, MeshConfig

EPSILON = 1e-6


def arrays(rows, size, hidden, dtype="float32", seed=0):
    """Returns hidden, product, the bias, layer norm's scale and bias, and a gradient."""
    random = np.random.default_rng(seed)
    wide = [jnp.asarray(random.normal(size=(rows, size, hidden)), dtype) for _ in range(3)]
    parameters = [jnp.asarray(random.normal(size=hidden), jnp.float32) for _ in range(3)]
    return [*wide[:2], *parameters, wide[2]]


def both_passes(given, **options):
    """Returns the result and the gradients of the first five arrays."""
    options = {"epsilon": EPSILON, "dropout_key": jax.random.key(7)} | options
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        result, pull_back = jax.vjp(functools.partial(fused_residual, **options), *given[:5])
        return [result, *pull_back(given[5])]


def kept_of(shape, like, keys, interpret):
    """Returns what dropout leaves of ones, [B, L, H]: the sum in front of layer norm, of ones and zeros."""
    hidden = like.shape[-1]
    given = (jnp.zeros_like(like), jnp.ones_like(like), jnp.zeros(hidden), jnp.ones(hidden), jnp.zeros(hidden), keys)
    return np.asarray(fused._forward(shape, interpret, *given)[1][0])


# Whole tokens of Large, of Base in three blocks of columns, and others; tokens of a half in pairs and alone.
@pytest.mark.parametrize("rows, size, hidden", [(2, 16, 1024), (1, 12, 768), (3, 10, 128), (2, 64, 384)])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_the_kernel_computes_what_the_plain_form_computes(rows, size, hidden, rate):
    given = arrays(rows, size, hidden)
    assert on_gpu.fits(given[0])
    kernel, plain = (both_passes(given, rate=rate, interpret=interpret) for interpret in (True, False))
    for of_kernel, of_plain in zip(kernel, plain):
        np.testing.assert_allclose(of_kernel, of_plain, rtol=1e-5, atol=5e-6)


def test_in_bfloat16_the_kernel_is_within_rounding_of_the_plain_form():
    given = arrays(2, 16, 256, "bfloat16")
    kernel, plain = (both_passes(given, rate=0.1, interpret=interpret) for interpret in (True, False))
    for of_kernel, of_plain in zip(kernel, plain):
        assert of_kernel.dtype == of_plain.dtype
        ours, theirs = (np.asarray(each, np.float32) for each in (of_kernel, of_plain))
        np.testing.assert_allclose(ours, theirs, atol=np.abs(theirs).max() / 128)


@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_values_and_gradients_are_those_of_autodiff(interpret, rate):
    given = arrays(2, 16, 128)
    shape = ResidualShape(EPSILON, round((1 - rate) * 2**16))
    keys = jax.lax.bitcast_convert_type(jax.random.bits(jax.random.key(7), (2, 2)), jnp.int32)
    kept = kept_of(shape, given[0], keys, interpret)

    def sketch(hidden, product, bias, scale, shift):
        summed = hidden + (product + bias) * kept
        mean, variance = jnp.mean(summed, -1, keepdims=True), jnp.var(summed, -1, keepdims=True)
        return (summed - mean) / jnp.sqrt(variance + EPSILON) * scale + shift

    result, pull_back = jax.vjp(sketch, *given[:5])
    found = both_passes(given, rate=rate, interpret=interpret)
    for ours, theirs in zip(found, [result, *pull_back(given[5])]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_dropout_is_of_the_rate_and_keeps_the_mean_and_is_no_pattern():
    shape = ResidualShape(EPSILON, round(0.9 * 2**16))
    keys = jnp.asarray(np.random.default_rng(0).integers(-(2**31), 2**31, (4, 2)), jnp.int32)
    kept = kept_of(shape, jnp.zeros((4, 64, 512)), keys, False)
    np.testing.assert_allclose(np.unique(kept), [0, shape.rescale], rtol=1e-6)
    dropped = kept == 0
    # 131,072 draws: a standard deviation of the mean is 0.0008, of a token's 0.013, of a column's 0.019.
    assert abs(dropped.mean() - 0.1) < 0.004
    assert np.abs(dropped.mean(axis=-1) - 0.1).max() < 5 * 0.0133
    assert np.abs(dropped.mean(axis=(0, 1)) - 0.1).max() < 5 * 0.0188
    flat = dropped.reshape(8, -1) - 0.1  # halves of rows, of which two share a draw of 32 bits
    likeness = flat @ flat.T / flat.shape[1] / 0.09
    assert np.abs(likeness - np.eye(8)).max() < 0.05


@pytest.mark.parametrize("size, hidden", [(32, 256), (18, 384)])
def test_the_kernel_drops_the_same_numbers(size, hidden):
    shape = ResidualShape(EPSILON, round(0.7 * 2**16))
    keys = jnp.asarray([[5, -9], [77, 123456789]], jnp.int32)
    plain, kernel = (kept_of(shape, jnp.zeros((2, size, hidden)), keys, interpret) for interpret in (False, True))
    assert 0.25 < (plain == 0).mean() < 0.35
    np.testing.assert_array_equal(kernel, plain)


@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize("mesh", [MeshConfig(data=4, fsdp=2), MeshConfig(data=2, fsdp=2, tensor=2)])
def test_over_a_mesh_the_numbers_are_the_same(mesh, interpret):
    given = arrays(8, 16, 128)
    alone = both_passes(given, rate=0.1)
    mesh = make_mesh(mesh)

    def both(*given):
        options = {"epsilon": EPSILON, "rate": 0.1, "dropout_key": jax.random.key(7), "interpret": interpret}
        result, pull_back = jax.vjp(functools.partial(fused_residual, **options), *given[:5])
        return [result, *pull_back(given[5])]

    with jax.set_mesh(mesh):
        divided = [jax.device_put(each, row_sharding(mesh)) if each.ndim == 3 else each for each in given]
        found = jax.jit(both)(*divided)
    for ours, theirs in zip(found, alone):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-6)


def test_a_model_has_the_parameters_losses_and_gradients_of_the_plain_one():
    batch = random_batch(num_sequences=2)

    def of(residual):
        model = tiny_model(residual=residual, hidden_dropout_rate=0.1)
        objective = pretraining_objective(model, MaskingConfig(), MASK, (CLS, SEP))
        params, masked = objective.init(jax.random.key(0)), objective.prepare(batch)

        def loss(params, key):
            total, weight = objective.losses(params, masked, key)["mlm_loss"]
            return total / weight

        return params, *jax.jit(jax.value_and_grad(loss))(params, None), loss

    (params, loss, gradients, compute), (expected_params, expected, theirs, _) = of("fused"), of("plain")
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    jax.tree.map(lambda ours, plain: np.testing.assert_allclose(ours, plain, atol=2e-6), gradients, theirs)
    compute = jax.jit(compute)
    dropped = [float(compute(params, jax.random.key(key))) for key in (1, 1, 2)]
    assert dropped[0] == dropped[1] != dropped[2]
    assert abs(dropped[0] - float(loss)) > 1e-6


def lowered(platform, size=16, hidden=256, dtype=jnp.bfloat16):
    """Returns the text of both passes, lowered for a platform of which this machine has no device."""
    wide, narrow = jax.ShapeDtypeStruct((2, size, hidden), dtype), jax.ShapeDtypeStruct((hidden,), jnp.float32)

    def both(hidden, product, bias, scale, shift, gradient, keys):
        function = functools.partial(fused._residual, ResidualShape(EPSILON, 59000), False)
        result, pull_back = jax.vjp(lambda *floats: function(*floats, keys), hidden, product, bias, scale, shift)
        return result, pull_back(gradient)

    keys = jax.ShapeDtypeStruct((2, 2), jnp.int32)
    traced = jax.jit(both).trace(wide, wide, narrow, narrow, narrow, wide, keys)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def names_of_kernels(text):
    return re.findall(r'name = "(residual_\w+)"', text)


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="Triton compiles kernels when they are lowered, by the plugin"
)
def test_for_cuda_each_pass_is_one_kernel():
    assert sorted(names_of_kernels(lowered("cuda"))) == ["residual_backward", "residual_forward"]


@pytest.mark.parametrize(
    "platform, size, hidden", [("cpu", 16, 256), ("tpu", 16, 256), ("cuda", 16, 200), ("cuda", 15, 256)]
)
def test_elsewhere_and_for_other_shapes_both_passes_are_plain(platform, size, hidden):
    assert not names_of_kernels(lowered(platform, size, hidden))


def test_an_unknown_kind_is_an_error():
    with pytest.raises(InputError, match=r"model\.residual"):
        tiny_model(residual="fast").validate()
