# SPDX-License-Identifier: Apache-2.0
"""BERT's AdamW and Google's schedule against an independent float64 sketch."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import computed, drawn_params, task_params, tiny_model

from bert_jax.devices.sharding import path_name
from bert_jax.errors import InputError
from bert_jax.model.shapes import abstract_params
from bert_jax.settings.pretraining import OptimizerConfig
from bert_jax.training.optim import (
    apply_updates,
    clip_by_global_norm,
    decay_mask,
    learning_rate_at,
    make_optimizer,
    reset_moments,
    scale_by_depth,
    scale_by_muon,
)

CONFIG = OptimizerConfig(learning_rate=1e-2, warmup_steps=4)


def rate_of(*arguments):
    """Returns a compiled schedule."""
    return jax.jit(learning_rate_at(*arguments))


def google_rate(step, config, num_steps):
    """Returns the rate as optimization.py computes it: the decay runs from step 0, warm-up overrides it."""
    if step < config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    return config.learning_rate * (1 - min(step, num_steps) / num_steps)


@pytest.mark.parametrize(("warmup_steps", "num_steps"), [(4, 20), (0, 7), (10_000, 1_000_000)])
def test_schedule_is_googles(warmup_steps, num_steps):
    config = OptimizerConfig(learning_rate=1e-4, warmup_steps=warmup_steps)
    rate = rate_of(config, num_steps)
    for step in {
        0,
        1,
        warmup_steps - 1,
        warmup_steps,
        warmup_steps + 1,
        num_steps // 2,
        num_steps - 1,
        num_steps,
        10**7,
    }:
        if step >= 0:
            np.testing.assert_allclose(rate(step), google_rate(step, config, num_steps), rtol=2e-6, atol=1e-12)


def test_the_first_rate_is_0_and_the_rate_drops_at_the_end_of_warm_up():
    rate = rate_of(OptimizerConfig(learning_rate=1.0, warmup_steps=10), 20)
    assert float(rate(0)) == 0.0
    assert (float(rate(9)), float(rate(10))) == pytest.approx((0.9, 0.5))
    assert float(rate_of(OptimizerConfig(learning_rate=1.0, warmup_steps=0), 20)(0)) == 1.0
    root = OptimizerConfig(learning_rate=1.0, warmup_steps=0, decay_power=0.5)
    assert float(rate_of(root, 16)(12)) == pytest.approx(0.5)


def test_cosine_falls_from_the_end_of_warm_up_to_0():
    rate = rate_of(OptimizerConfig(learning_rate=2.0, warmup_steps=10, schedule="cosine"), 110)
    assert [float(rate(step)) for step in (0, 5, 10, 60, 110, 200)] == pytest.approx([0, 1, 2, 1, 0, 0], abs=1e-6)


def test_stable_stays_and_falls_in_the_last_steps():
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=10, schedule="stable", decay_rate=0.2)
    rate = rate_of(config, 100, 1000)
    steps = (1005, 1010, 1079, 1080, 1085, 1100, 1200)
    assert [float(rate(step)) for step in steps] == pytest.approx([1, 2, 2, 2, 1, 0, 0], abs=1e-6)
    flat = rate_of(dataclasses.replace(config, decay_rate=0.0), 100)
    assert float(flat(99)) == float(flat(10**6)) == 2.0


def google_adamw(params, gradients, config, num_steps, decayed):
    """Yields float64 parameters after each step, by the formulas of AdamWeightDecayOptimizer."""
    mean = dict.fromkeys(params, 0.0)
    square = dict.fromkeys(params, 0.0)
    for step, gradient in enumerate(gradients):
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        gradient = {name: g * config.clip_norm / max(norm, config.clip_norm) for name, g in gradient.items()}
        for name in params:
            mean[name] = config.beta1 * mean[name] + (1 - config.beta1) * gradient[name]
            square[name] = config.beta2 * square[name] + (1 - config.beta2) * gradient[name] ** 2
            update = mean[name] / (np.sqrt(square[name]) + config.epsilon)
            if name in decayed:
                update = update + config.weight_decay * params[name]
            params[name] = params[name] - google_rate(step, config, num_steps) * update
        yield dict(params)


def test_adamw_follows_googles_formulas():
    rng = np.random.default_rng(0)
    shapes = {"kernel": (5, 3), "bias": (3,), "scale": (3,)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    gradients = [
        {name: rng.normal(size=s) * scale for name, s in shapes.items()} for scale in (0.01, 10, 1, 0.1, 0, 3, 1, 1)
    ]
    config = dataclasses.replace(CONFIG, weight_decay=0.1)
    optimizer = make_optimizer(config, 8)
    tree = {"norm": {"scale": params["scale"]}, "dense": {"kernel": params["kernel"], "bias": params["bias"]}}
    ours = jax.tree.map(np.float32, tree)
    state, step = optimizer.init(ours), step_of(optimizer)
    for gradient, expected in zip(gradients, google_adamw(params, gradients, config, 8, {"kernel"}), strict=True):
        tree = {"norm": {"scale": gradient["scale"]}, "dense": {"kernel": gradient["kernel"], "bias": gradient["bias"]}}
        ours, state = step(jax.tree.map(np.float32, tree), state, ours)
        np.testing.assert_allclose(ours["dense"]["kernel"], expected["kernel"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(ours["dense"]["bias"], expected["bias"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(ours["norm"]["scale"], expected["scale"], rtol=1e-5, atol=1e-6)


def test_bias_correction_is_a_switch():
    params = {"dense": {"kernel": np.ones((2, 2), np.float32)}}
    gradient = {"dense": {"kernel": np.full((2, 2), 0.1, np.float32)}}
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, weight_decay=0.0, clip_norm=0.0)

    def first_update(config):
        optimizer = make_optimizer(config, 10)
        first = computed(lambda params: optimizer.update(gradient, optimizer.init(params), params)[0], params)
        return float(first["dense"]["kernel"][0, 0])

    assert first_update(dataclasses.replace(config, bias_correction=True)) == pytest.approx(-1.0, rel=1e-4)
    # (1 - beta1) / sqrt(1 - beta2): what the correction would undo
    assert first_update(config) == pytest.approx(-0.1 / np.sqrt(0.001), rel=1e-3)


def stable_adamw(value, gradients, config, decay):
    """Returns one tensor after each step, in float64, and the RMS of each, by Wortsman et al. 2023, algorithm 2."""
    mean, square, values, roots = 0.0, 0.0, [], []
    for count, gradient in enumerate(gradients, 1):
        mean = config.beta1 * mean + (1 - config.beta1) * gradient
        square = config.beta2 * square + (1 - config.beta2) * gradient**2
        corrected = square / (1 - config.beta2**count)
        roots.append(np.sqrt(np.mean(gradient**2 / np.maximum(corrected, config.epsilon**2))))
        rate = google_rate(count - 1, config, len(gradients)) / max(1, roots[-1])
        ratio = mean / (1 - config.beta1**count) / (np.sqrt(corrected) + config.epsilon)
        value = value - rate * decay * value - rate * ratio
        values.append(value)
    return values, roots


@pytest.mark.parametrize("state_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_stable_adamw_clips_the_update_of_each_tensor_of_each_layer(state_dtype):
    """A classifier's parameters, with layers stacked; those of the last layer have a gradient that jumps."""
    config = dataclasses.replace(
        CONFIG, name="stable_adamw", beta2=0.98, bias_correction=True, clip_norm=0.0, weight_decay=0.1
    )
    optimizer = make_optimizer(dataclasses.replace(config, state_dtype=state_dtype), 8)
    rng = np.random.default_rng(0)
    params = jax.tree.map(np.asarray, task_params("sequence_classification", 3))
    gradients = []
    for step in range(8):

        def gradient(path, value, step=step):
            drawn = rng.normal(size=value.shape).astype(np.float32)
            if path_name(path).startswith("encoder/layers/"):
                drawn[0] *= step != 3  # one without a gradient
                drawn[-1] *= 100 if step >= 5 else 1
            return drawn * (0 if "type" in path_name(path) else 1e-2)

        gradients.append(jax.tree_util.tree_map_with_path(gradient, params))
    ours, state, step = params, jax.jit(optimizer.init)(params), step_of(optimizer)
    trace = []
    for gradient in gradients:
        ours, state = step(gradient, state, ours)
        trace.append(jax.device_get(ours))
    clipped = set()
    flat = [[np.float64(leaf) for leaf in jax.tree.leaves(tree)] for tree in gradients]
    for index, (path, value) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        name = path_name(path)
        decay = 0.0 if re.search("norm|bias", name) else config.weight_decay
        for layer in range(len(value)) if name.startswith("encoder/layers/") else [...]:
            of_layer = [each[index][layer] for each in flat]
            expected, roots = stable_adamw(np.float64(value[layer]), of_layer, config, decay)
            found = [jax.tree.leaves(params)[index][layer] for params in trace]
            close = {"rtol": 1e-5, "atol": 2e-6} if state_dtype == "float32" else {"rtol": 0, "atol": 5e-4}
            np.testing.assert_allclose(found, expected, **close, err_msg=f"{name}, {layer}")
            clipped |= {layer} if max(roots) > 2 else set()
    assert clipped == {1}  # the jump of one layer lowers its own rate, and no other's


def step_of(optimizer):
    """Returns a compiled step: parameters and the state of the optimizer after a gradient."""

    @jax.jit
    def step(gradient, state, params):
        updates, state = optimizer.update(gradient, state, params)
        return apply_updates(params, updates), state

    return step


@pytest.mark.parametrize(("first", "last"), [(0, 3), (3, 6)])
def test_stable_adamw_without_a_jump_is_adamw(first, last):
    """While gradients do not grow, or are below epsilon, no update is clipped: the same bits."""
    config = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, bias_correction=True, clip_norm=0.0)
    params = {"dense": {"kernel": np.ones((3, 2), np.float32)}}
    found = []
    for name in ("adamw", "stable_adamw"):
        optimizer = make_optimizer(dataclasses.replace(config, name=name), 10)
        state, ours, step = optimizer.init(params), params, step_of(optimizer)
        for size in (1e-9, 1e-8, 1e-7, 1.0, 0.5, 0.25)[first:last]:
            ours, state = step(jax.tree.map(lambda x, size=size: np.float32(size) * x, params), state, ours)
        found.append(ours["dense"]["kernel"])
    np.testing.assert_array_equal(*found)


def test_stable_adamw_needs_corrected_moments():
    with pytest.raises(InputError, match=r"set optimizer\.bias_correction=True"):
        OptimizerConfig(name="stable_adamw").validate()
    OptimizerConfig(name="stable_adamw", bias_correction=True).validate()


def newton_schulz(matrix):
    """Returns a matrix after the published five steps, in float64: Jordan et al. 2024."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix / (np.sqrt((matrix**2).sum()) + 1e-7)
    if tall := wide.shape[0] > wide.shape[1]:
        wide = wide.T
    for _ in range(5):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if tall else wide


def muon(value, gradients, config):
    """Returns one matrix after each step, in float64: Liu et al. 2025, equation 4, with Nesterov's momentum."""
    buffer, values = 0.0, []
    for step, gradient in enumerate(gradients):
        buffer = 0.95 * buffer + gradient
        update = 0.2 * np.sqrt(max(value.shape)) * newton_schulz(gradient + 0.95 * buffer)
        value = value - google_rate(step, config, 8) * (update + config.weight_decay * value)
        values.append(value)
    return values


@pytest.mark.parametrize(("gated", "state_dtype"), [(False, "float32"), (True, "bfloat16")])
def test_muon_follows_its_formulas_for_each_kernel_of_each_layer_and_adamw_has_the_rest(gated, state_dtype):
    model = tiny_model(feed_forward="gated" if gated else "plain", score_bias="buckets" if gated else "none")
    params = jax.tree.map(np.asarray, drawn_params(model, "sequence_classification", 3))
    config = dataclasses.replace(CONFIG, name="muon", warmup_steps=1, weight_decay=0.1, clip_norm=0.0)
    rng = np.random.default_rng(0)
    gradients = [jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), params) for _ in range(3)]
    traces = []
    for name in ("muon", "adamw"):
        optimizer = make_optimizer(dataclasses.replace(config, name=name, state_dtype=state_dtype), 8)
        ours, state, step = params, jax.jit(optimizer.init)(params), step_of(optimizer)
        traces.append([])
        for gradient in gradients:
            ours, state = step(gradient, state, ours)
            traces[-1].append(jax.device_get(ours))
    kernels = set()
    found, others = ([jax.tree.leaves(tree) for tree in trace] for trace in traces)
    flat = [[np.float64(leaf) for leaf in jax.tree.leaves(tree)] for tree in gradients]
    for index, (path, value) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        name = path_name(path)
        if not re.fullmatch("encoder/layers/.*/kernel", name):
            np.testing.assert_array_equal([each[index] for each in found], [each[index] for each in others])
            continue
        kernels.add(name.removeprefix("encoder/layers/").removesuffix("/kernel"))
        for layer in range(len(value)):
            expected = muon(np.float64(value[layer]), [each[index][layer] for each in flat], config)
            close = 3e-6 if state_dtype == "float32" else 1e-4
            np.testing.assert_allclose([each[index][layer] for each in found], expected, rtol=0, atol=close)
    blocks = {f"attention/{part}" for part in ("query", "key", "value", "output")}
    assert kernels == blocks | {"mlp/intermediate", "mlp/output", *["mlp/gate"] * gated}


def test_an_update_of_muon_is_as_large_as_adamws_whatever_the_shape_and_zero_without_a_gradient():
    rng = np.random.default_rng(0)
    stacks = [np.float32(rng.normal(size=shape)) for shape in ((2, 24, 32), (2, 16, 64), (2, 64, 16), (1, 8, 8))]
    stacks[-1][:] = 0
    *updates, nothing = computed(lambda given: scale_by_muon().update(given, scale_by_muon().init(given))[0], stacks)
    for update in updates:
        values = np.linalg.svd(update / (0.2 * max(update.shape[1:]) ** 0.5), compute_uv=False)
        assert 0.67 < values.min() and values.max() < 1.21
        assert np.sqrt((update**2).mean()) == pytest.approx(0.2, rel=0.2)
    assert (nothing == 0).all()


@jax.jit
def clipped(gradients):
    """Returns gradients that are clipped by ours and by Optax."""
    clips = clip_by_global_norm(1.0), optax.clip_by_global_norm(1.0)
    return [clip.update(gradients, clip.init(gradients))[0] for clip in clips]


@pytest.mark.parametrize("size", [0.0, 1e-30, 0.49, 0.51, 1e4, 1e30, np.inf, np.nan])
def test_gradients_are_clipped_as_optax_clips_them(size):
    gradients = {"a": np.full((3,), size, np.float32), "b": np.array([size], np.float32)}
    found, expected = clipped(gradients)
    for name, gradient in gradients.items():
        if size < 0.5:  # the norm is below 1: the same bits
            np.testing.assert_array_equal(found[name], gradient)
        np.testing.assert_allclose(found[name], expected[name], rtol=3e-7)


def test_clipped_gradients_are_not_written_to_memory():
    config = dataclasses.replace(CONFIG, clip_norm=1.0)
    optimizer, params = make_optimizer(config, 10), {"dense": {"kernel": np.ones((640, 480), np.float32)}}
    state = jax.eval_shape(optimizer.init, params)
    compiled = step_of(optimizer).lower(params, state, params).compile().as_text()
    program = compiled[compiled.index("ENTRY") :]
    assert len(re.findall(r"= f32\[640,480\]\S* fusion\(", program)) == 3, program  # mean, mean square, parameter


def test_updates_shrink_with_the_distance_from_the_top():
    layers = {"attention": {"query": {"kernel": np.ones((2, 3, 4)), "bias": np.ones((2, 4))}}}
    updates = {
        "encoder": {"embeddings": {"word": {"embedding": np.ones((5, 3))}}, "layers": layers},
        "head": np.ones(3),
    }
    scale = scale_by_depth(0.5)
    found = computed(lambda updates: scale.update(updates, scale.init(updates))[0], updates)
    assert jax.tree.structure(found) == jax.tree.structure(updates)
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        name = path_name(path)
        expected = [0.25, 0.5] if "layers" in name else [0.125 if "embeddings" in name else 1] * len(leaf)
        np.testing.assert_array_equal(leaf, np.ones(leaf.shape) * np.reshape(expected, (-1, *[1] * (leaf.ndim - 1))))


@pytest.mark.parametrize(("name", "bias_correction"), [("adamw", False), ("adamw", True), ("muon", True)])
def test_moments_are_reset_and_the_step_of_the_rate_stays(name, bias_correction):
    params = {"encoder": {"layers": {"mlp": {"output": {"kernel": np.ones((2, 2, 2), np.float32)}}}}}
    optimizer = make_optimizer(dataclasses.replace(CONFIG, name=name, bias_correction=bias_correction), 8)
    state = computed(lambda params: optimizer.update(params, optimizer.init(params), params)[1], params)
    again = computed(reset_moments, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    counts = [int(leaf) for leaf in jax.tree.leaves(again) if not leaf.shape]
    assert counts == ([0, 1] if bias_correction else [1])
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(again) if leaf.shape)


def test_decay_table_is_googles_for_every_parameter():
    params = abstract_params(tiny_model(), num_classes=3)
    for path, decays in jax.tree_util.tree_leaves_with_path(decay_mask(params)):
        name = path_name(path)
        assert decays == (not any(part in name for part in ("norm", "bias"))), name


def test_a_parameter_that_no_rule_knows_is_an_error():
    with pytest.raises(InputError, match="'encoder/strange' matches no rule"):
        decay_mask({"encoder": {"strange": jnp.ones(1)}})


@pytest.mark.parametrize("bias_correction", [False, True])
def test_a_mean_in_bfloat16_follows_the_float32_one(bias_correction):
    """40 steps of noisy gradients around 0.1: the path of the parameters differs by less than one part in 200."""
    config = OptimizerConfig(learning_rate=1e-2, warmup_steps=4, bias_correction=bias_correction)
    rng = np.random.default_rng(0)
    gradients = np.float32(rng.normal(0.1, 1, (40, 16, 16)))
    start = {"dense": {"kernel": np.float32(rng.normal(size=(16, 16)))}}

    def train(config):
        optimizer = make_optimizer(config, 40)

        @jax.jit
        def steps(params):
            def step(carry, gradient):
                params, state = carry
                updates, state = optimizer.update({"dense": {"kernel": gradient}}, state, params)
                return (apply_updates(params, updates), state), None

            return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[0]

        return steps(start)

    wide, narrow = train(config), train(dataclasses.replace(config, state_dtype="bfloat16"))
    before, float32, bfloat16 = (tree["dense"]["kernel"] for tree in (start, wide[0], narrow[0]))
    moved = np.linalg.norm(float32 - before)
    assert 0 < np.linalg.norm(float32 - bfloat16) < moved / 200 and moved > 0.5  # many times a step
    kinds = [[str(leaf.dtype) for leaf in jax.tree.leaves(state) if leaf.shape] for _, state in (wide, narrow)]
    assert kinds == [["float32", "float32"], ["bfloat16", "float32"]]
