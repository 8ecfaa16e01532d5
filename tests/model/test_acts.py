# SPDX-License-Identifier: Apache-2.0
"""What users of JAX do with a function: each act computes a known value of the encoder in another way.

A traced act runs on one device, and on eight under each kind of mesh axis: divided by the compiler (Auto), with
shardings as part of types (Explicit), and within `jax.shard_map` (Manual).
"""

import contextlib
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from builders import CLS, MASK, SEP, drawn_params, random_batch, tiny_model
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import bert_jax
from bert_jax import InputError
from bert_jax.batch import pad_rows
from bert_jax.model.derivatives import plain_derivatives
from bert_jax.model.heads.table import HEADS
from bert_jax.model.masking import mask_rows
from bert_jax.model.objective import forward, init_params
from bert_jax.model.parts import activate, normalize
from bert_jax.model.product import add_bias, product
from bert_jax.settings.pretraining import MaskingConfig

CONFIG = tiny_model(hidden_size=16, num_heads=2, intermediate_size=32, vocab_size=64, max_positions=8)
ROWS = list(np.random.default_rng(0).integers(5, 64, (8, 8)))
BATCH = jax.device_put(pad_rows([row[: 3 + number % 6] for number, row in enumerate(ROWS)], 8))
PLACES = ["one device", "Auto", "Explicit", "Manual"]
AXIS = "rows"


def hidden(params, batch, config=CONFIG, **options):
    return bert_jax.encode(config, params, batch, **options).hidden


def mean_of_squares(params, batch, **options):
    numbers = hidden(params, batch, **options)[..., 0]
    return jnp.mean(numbers.astype(jnp.promote_types(numbers.dtype, jnp.float32)) ** 2)


def scaled(params, scale):
    return jax.tree.map(lambda leaf: leaf * scale, params)


ACTS: dict[str, tuple[str, Callable[..., Any]]] = {}


def act(value: str):
    """Adds a function of (loss, params, batch) to the acts; it returns the known value of that name."""

    def add(function):
        ACTS[function.__name__] = value, function
        return function

    return add


def dot(left, right):
    return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)))


def twice(tree):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)


@act("hidden")
def vmap_over_rows(loss, params, batch):
    def of_row(row):
        return hidden(params, jax.tree.map(lambda leaf: leaf[None], row))[0]

    return jax.vmap(of_row)(batch)


@act("hidden")
def vmap_over_an_ensemble(loss, params, batch):
    return jax.vmap(hidden, in_axes=(0, None))(twice(params), batch)[1]


@act("hidden")
def scan_over_batches(loss, params, batch):
    return jax.lax.scan(lambda carry, each: (carry, hidden(params, each)), 0, twice(batch))[1][1]


@act("hidden")
def while_loop(loss, params, batch):
    start = 0, jnp.zeros_like(hidden(params, batch))
    step = lambda state: (state[0] + 1, 0 * state[1] + hidden(params, batch))  # noqa: E731
    return jax.lax.while_loop(lambda state: state[0] < 1, step, start)[1]


@act("hidden")
def cond(loss, params, batch):
    return jax.lax.cond(params["encoder"]["embeddings"]["norm"]["scale"][0] > 0.5, hidden, _negative, params, batch)


def _negative(params, batch):
    return -hidden(params, batch)


@act("hidden")
def words_as_vectors(loss, params, batch):
    table = params["encoder"]["embeddings"]["word"]["embedding"]
    vectors = table.at[batch.token_ids].get(out_sharding=jax.typeof(batch.token_ids).sharding.update(spec=P(AXIS))) if (
        jax.sharding.get_abstract_mesh().explicit_axes
    ) else table[batch.token_ids]  # fmt: skip
    return hidden(params, batch._replace(word_vectors=vectors))


@act("gradient")
def value_and_grad(loss, params, batch):
    return jax.value_and_grad(loss)(params, batch)[1]


@act("gradient")
def grad_of_checkpoint(loss, params, batch):
    return jax.grad(jax.checkpoint(loss))(params, batch)


@act("gradient")
def grad_of_scan(loss, params, batch):
    def total(params):
        return jax.lax.scan(lambda carry, each: (carry, loss(params, each)), 0, twice(batch))[1].mean()

    return jax.grad(total)(params)


@act("gradient")
def vmap_of_grad(loss, params, batch):
    found = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, twice(batch))
    return jax.tree.map(lambda leaf: leaf.mean(axis=0), found)


@act("gradient")
def transpose_of_linearize(loss, params, batch):
    with plain_derivatives():
        value, push = jax.linearize(lambda given: loss(given, batch), params)
        return jax.linear_transpose(push, params)(jnp.ones_like(value))[0]


@act("slope")
def jvp(loss, params, batch):
    return jax.jvp(lambda given: loss(given, batch, own_derivatives=False), (params,), (params,))[1]


@act("curvature")
def forward_over_reverse(loss, params, batch):
    gradient = jax.grad(lambda given: loss(given, batch, own_derivatives=False))
    return dot(jax.jvp(gradient, (params,), (params,))[1], params)


@act("curvature")
def reverse_over_reverse(loss, params, batch):
    own = jax.sharding.get_abstract_mesh().manual_axes == ()
    return jax.grad(jax.grad(lambda scale: loss(scaled(params, scale), batch, own_derivatives=own)))(1.0)


@pytest.fixture(scope="module")
def params():
    return {"encoder": jax.device_put(drawn_params(CONFIG)["encoder"])}


@pytest.fixture(scope="module")
def expected(params):
    """The known values: the last layer's outputs, a loss, its gradient, and its first and second derivative along the
    parameters themselves. Derivatives are those of differences, in float64, where these tell.
    """

    def loss(params):
        numbers = hidden(params, BATCH)
        return jnp.mean(numbers[..., 0] ** 2), numbers

    (value, numbers), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    with jax.enable_x64(True):
        config = dataclasses.replace(CONFIG, compute_dtype="float64")
        given = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        loss_of = jax.jit(lambda scale: mean_of_squares(scaled(given, scale), BATCH, config=config))
        low, middle, high = (float(loss_of(scale)) for scale in (1 - 1e-4, 1.0, 1 + 1e-4))
    slope, curvature = (high - low) / 2e-4, (high - 2 * middle + low) / 1e-8
    numbers, value, gradient = jax.device_get((numbers, value, gradient))
    along = sum(np.vdot(*leaves) for leaves in zip(*map(jax.tree.leaves, (gradient, params))))
    assert along == pytest.approx(slope, rel=1e-4)
    return {"hidden": numbers, "loss": value, "gradient": gradient, "slope": slope, "curvature": curvature}


def check(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-3), found, expected)


def computed(place, name, params):
    """Returns the value of an act at a place."""
    value, function = ACTS[name]
    if place == "one device":
        return jax.jit(function, static_argnums=0)(mean_of_squares, params, BATCH)
    kind = AxisType.Explicit if place == "Explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(kind,))
    given = jax.device_put(params, NamedSharding(mesh, P())), jax.device_put(BATCH, NamedSharding(mesh, P(AXIS)))
    if place != "Manual":
        with jax.set_mesh(mesh):
            return jax.jit(function, static_argnums=0)(mean_of_squares, *given)

    def loss(params, batch, **options):
        return jax.lax.pmean(mean_of_squares(params, batch, **options), AXIS)

    out = P(AXIS) if value == "hidden" else P()
    within = jax.shard_map(
        lambda params, batch: function(loss, params, batch), mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=out
    )
    return jax.jit(within)(*given)


# Of each kind some; the others are slow.
FAST = [
    *[("Explicit", "vmap_over_rows"), ("Explicit", "words_as_vectors"), ("Explicit", "value_and_grad")],
    *[("Manual", "grad_of_checkpoint"), ("one device", "vmap_of_grad"), ("Explicit", "jvp")],
]


def everywhere():
    """Returns the acts at all places."""
    for name in ACTS:
        for place in PLACES:
            yield pytest.param(place, name, marks=() if (place, name) in FAST else pytest.mark.slow)


@pytest.mark.parametrize(("place", "name"), list(everywhere()))
def test_an_act_computes_the_known_value(params, expected, place, name):
    check(computed(place, name, params), expected[ACTS[name][0]])


def penalty(params, config, own_derivatives):
    gradient = jax.grad(mean_of_squares)(params, BATCH, config=config, own_derivatives=own_derivatives)
    return dot(gradient, gradient)


def test_what_needs_jaxs_own_derivatives_says_so(params):
    config = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    with pytest.raises(InputError, match="own_derivatives=False"):
        jax.eval_shape(lambda given: jax.grad(penalty)(given, config, True), params)
    square = jnp.ones((3, 3))
    with pytest.raises(TypeError, match="jvp"):  # which rules of ours do not know
        jax.jit(lambda given: jax.jvp(lambda each: product("ij,jk->ik", each, each), (given,), (given,))).lower(square)


def test_our_rules_have_derivatives_of_second_order():
    """Those of f(scale * x) along x, of a product, a bias, an activation and a norm, beside JAX's own."""
    left, right = (jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32) for _ in range(2))

    def summed(scale):
        found = product("ij,jk->ik", left * scale, right * scale)
        found = activate("gelu_tanh", add_bias(found, right[0]))
        return jnp.sum(normalize(True, 1e-12, "float32", found, right[1:2], right[2:]) ** 3)

    def curvature(scale):
        return jax.grad(jax.grad(summed))(scale)

    def plain(scale):
        with plain_derivatives():
            return jax.grad(jax.grad(summed))(scale)

    np.testing.assert_allclose(jax.jit(curvature)(0.7), jax.jit(plain)(0.7), rtol=1e-5)


@pytest.mark.slow
def test_a_gradient_of_a_gradient_in_bfloat16(params):
    config = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    of_penalty = jax.jit(jax.grad(penalty), static_argnums=(1, 2))
    near = of_penalty(params, CONFIG, False)
    assert all(
        np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b)
        for a, b in zip(*map(jax.tree.leaves, (of_penalty(params, config, False), near)))
        if np.linalg.norm(b) > 1e-3
    )


# What is done with a function from outside, on the host.


@pytest.mark.slow
def test_pmapped(params, expected):
    rows = jax.tree.map(lambda leaf: leaf[:, None], BATCH)
    check(jax.pmap(hidden, in_axes=(None, 0))(params, rows)[:, 0], expected["hidden"])


def test_divided_by_shardings_of_the_compiled_function(params, expected):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(("a", "b")))
    found = jax.jit(hidden, in_shardings=(whole, rows), out_shardings=rows)(params, BATCH)
    assert found.sharding == rows
    check(found, expected["hidden"])


def test_on_a_second_device(params, expected):
    device = jax.devices()[1]
    given = jax.device_put((params, BATCH), device)
    found = jax.jit(hidden)(*given)
    assert found.devices() == {device}
    check(found, expected["hidden"])
    with jax.default_device(device):
        check(jax.jit(hidden)(params, BATCH), expected["hidden"])


@pytest.mark.slow
def test_within_a_module_of_nnx(params, expected):
    class Twice(nnx.Module):
        def __init__(self):
            self.encoder = nnx.data(jax.tree.map(nnx.Param, params))

        def __call__(self, batch):
            return hidden(nnx.to_pure_dict(nnx.state(self.encoder)), batch)

    check(nnx.jit(lambda module, batch: module(batch))(Twice(), BATCH), expected["hidden"])


@contextlib.contextmanager
def strict():
    """Refuses copies between host and device, and types and ranks that JAX would widen."""
    with jax.transfer_guard("disallow"), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.parametrize(
    "guard",
    [
        pytest.param(lambda: jax.debug_nans(True), marks=pytest.mark.slow),
        pytest.param(jax.checking_leaks, marks=pytest.mark.slow),
        strict,
        pytest.param(lambda: jax.enable_x64(True), marks=pytest.mark.slow),
        pytest.param(lambda: jax.default_matmul_precision("highest"), marks=pytest.mark.slow),
    ],
    ids=["debug_nans", "checking_leaks", "strict", "64 bits", "precision"],
)
def test_under_what_users_switch_on(params, expected, guard):
    with guard():
        found = jax.jit(jax.value_and_grad(lambda *given: mean_of_squares(*given)))(params, BATCH)
    check(found, (expected["loss"], expected["gradient"]))


@pytest.mark.parametrize("name", HEADS)
def test_heads_and_masks_widen_no_ranks(name):
    model, batch = tiny_model(), random_batch(num_rows=4, num_sequences=2)
    with jax.numpy_rank_promotion("raise"):
        masks = MaskingConfig(whole_word=True, max_ngram=3, causal_rate=0.3)
        masked = jax.eval_shape(lambda: mask_rows(batch, masks, model.vocab_size, MASK, (CLS, SEP)))
        params = jax.eval_shape(lambda: init_params(model, jax.random.key(0), HEADS[name], 3))
        found = jax.eval_shape(lambda params, batch: forward(model, params, batch, HEADS[name]), params, masked)
    assert jax.tree.leaves(found)[0].shape[0] == len(batch.token_ids)


def test_batches_and_outputs_are_values(params, expected):
    """They are pickled, put into trees, and their arrays may be NumPy's."""
    batch = pickle.loads(pickle.dumps(jax.device_get(BATCH)))
    found = jax.jit(bert_jax.encode, static_argnums=0)(CONFIG, jax.device_get(params), batch)
    check(pickle.loads(pickle.dumps(jax.device_get(found))).hidden, expected["hidden"])
    halves = [jax.tree.map(lambda leaf, half=half: np.split(leaf, 2)[half], batch) for half in (0, 1)]
    check(jax.tree.map(lambda *leaves: np.concatenate(leaves), *halves), batch)


def test_a_model_as_an_argument(params, expected, tokenizer):
    bert = bert_jax.Pretrained(CONFIG, params, tokenizer)
    check(jax.jit(lambda bert, batch: bert.apply(batch).hidden)(bert, BATCH), expected["hidden"])
