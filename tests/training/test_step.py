# SPDX-License-Identifier: Apache-2.0
"""One step: the same on one device and eight, whole and in microbatches."""

import dataclasses
import math
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import CLS, MASK, SEP, drawn_params, fresh_state, random_batch, tiny_model
from jax.sharding import PartitionSpec

from bert_jax.devices.sharding import make_mesh, path_name, row_sharding, tree_shardings
from bert_jax.model import flops
from bert_jax.model.masking import predictions_per_row
from bert_jax.model.objective import Objective, PretrainingObjective
from bert_jax.plan import hlo
from bert_jax.settings.pretraining import MaskingConfig, MeshConfig, OptimizerConfig, TrainConfig
from bert_jax.training.memory import gathered_bytes, shard_bytes
from bert_jax.training.optim import Moments, scale_by_muon
from bert_jax.training.program import Program
from bert_jax.training.step import abstract_state

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=1)
MASKING = MaskingConfig()
START = drawn_params(tiny_model())


def take_steps(
    batch, mesh_sizes=None, model=None, accumulate=1, num_steps=3, optimizer=OPTIMIZER, masking=MASKING, zero1="off"
):
    """Returns the metrics of each step, and the last parameters, on a mesh."""
    devices = jax.devices() if mesh_sizes else jax.devices()[:1]
    mesh = make_mesh(MeshConfig(**(mesh_sizes or {})), devices)
    objective = PretrainingObjective(model or tiny_model(), masking, MASK, (CLS, SEP))
    train = TrainConfig(num_steps=10, accumulate=accumulate, zero1=zero1)
    state = fresh_state(objective, optimizer, train, mesh, START)
    step = Program(mesh).training(objective, optimizer, train, state)
    rows = jax.tree.map(lambda x: jax.device_put(x, row_sharding(mesh)), batch)
    history = []
    with jax.set_mesh(mesh):
        for _ in range(num_steps):
            state, metrics = step(state, rows)
            history.append({name: float(total) / max(float(weight), 1e-9) for name, (total, weight) in metrics.items()})
    assert int(state.step) == num_steps
    return history, jax.device_get(state.params)


def assert_same(ours, theirs, tolerance=2e-5):
    """Compares as many steps as the second took."""
    assert len(ours[0]) >= len(theirs[0]) > 0
    for before, after in zip(ours[0], theirs[0]):
        for name in before:
            np.testing.assert_allclose(after[name], before[name], rtol=tolerance, atol=tolerance, err_msg=name)


def two_a_row():
    return random_batch(num_sequences=2)


class Stepped(NamedTuple):
    """Some steps of one compiled program."""

    history: list[dict[str, float]]
    first: Any  # parameters after a step, whose rate is 0
    params: Any
    state: Any  # on its devices
    program: hlo.Module


def take_compiled_steps(num_steps: int, zero1: str = "off", accumulate: int = 1, **sizes: int) -> Stepped:
    """Returns what steps with dropout on `two_a_row` gave, with their program: it is compiled once for both."""
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])
    model = tiny_model(hidden_dropout_rate=0.1, attention_dropout_rate=0.1)
    objective = PretrainingObjective(model, MASKING, MASK, (CLS, SEP))
    train = TrainConfig(num_steps=10, accumulate=accumulate, zero1=zero1)
    state = fresh_state(objective, OPTIMIZER, train, mesh, START)
    rows = jax.tree.map(lambda x: jax.device_put(x, row_sharding(mesh)), two_a_row())
    history, params = [], []
    with jax.set_mesh(mesh):
        step = Program(mesh).training(objective, OPTIMIZER, train, state)
        compiled = step.lower(state, rows).compile()
        for _ in range(num_steps):
            state, metrics = compiled(state, rows, step.key)
            params.append(jax.device_get(state.params))
            history.append({name: float(total) / max(float(weight), 1e-9) for name, (total, weight) in metrics.items()})
    return Stepped(history, params[0], params[-1], state, hlo.parse(compiled.as_text()))


@pytest.fixture(scope="module")
def on_one() -> Stepped:
    """Returns seven steps on one device; shared, for its program takes seconds to compile."""
    return take_compiled_steps(7)


@pytest.fixture(scope="module")
def one_device():
    """Returns three steps without dropout on one device, for slow tests."""
    return take_steps(two_a_row())


@pytest.fixture(scope="module")
def on_all_axes() -> Stepped:
    """Returns three steps on eight devices that divide rows, parameters and, by ZeRO-1, the moments."""
    return take_compiled_steps(3, zero1="on", data=2, fsdp=2, tensor=2)


def test_one_step_computes_what_the_model_needs(on_one):
    model = tiny_model()
    squares = 16 * 32**2  # every position of a row attends to every other, across its two sequences too
    needed = flops.train_flops(model, 16 * 32, squares, 16 * predictions_per_row(MASKING, 32, 2), 32)
    assert 0.95 < hlo.flops(on_one.program) / needed < 1.05


def test_microbatches_on_four_devices_are_the_whole_batch(on_one):
    """With its dropout; and gradients are sent once, however many microbatches there are."""
    found = take_compiled_steps(3, accumulate=2, data=4)
    assert_same((on_one.history, on_one.params), (found.history, found.params))
    sent = Counter()
    for collective in hlo.collectives(found.program):
        sent[collective.kind] += collective.bytes * collective.count / shard_bytes(found.state.params)
    assert dict(sent) == {"all-reduce": pytest.approx(1, abs=0.02)}


def test_rows_parameters_and_moments_divided_over_eight_devices(on_one, on_all_axes):
    """The same steps, with the same dropout."""
    assert_same((on_one.history, on_one.params), (on_all_axes.history, on_all_axes.params))
    assert 8 * hlo.flops(on_all_axes.program) / hlo.flops(on_one.program) == pytest.approx(1, rel=0.02)
    for moment in (on_all_axes.state.optimizer[1].mean, on_all_axes.state.optimizer[1].square):
        kernel = moment["encoder"]["layers"]["mlp"]["intermediate"]["kernel"]
        assert kernel.sharding.spec == PartitionSpec("data", "fsdp", "tensor")
    assert shard_bytes(on_all_axes.state.optimizer) < 0.2 * shard_bytes(on_one.state.optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"fsdp": 8}, {"zero1": "off"}),
        ({"data": 8}, {"zero1": "on"}),
        ({"data": 4, "tensor": 2}, {"accumulate": 2}),
        (None, {"accumulate": 4}),
    ],
)
def test_a_step_is_that_of_one_device(one_device, sizes, options, capfd):
    """And no array is made whole on every device because the compiler knows no other way to cut it anew."""
    assert_same(one_device, take_steps(two_a_row(), sizes, **options))
    assert "full rematerialization" not in capfd.readouterr().err


@pytest.mark.slow
def test_gradients_added_up_in_bfloat16_are_close():
    """Rounded on each of eight devices, so not equal; what is not a matrix is added up in float32 as before."""
    narrow = {"compute_dtype": "bfloat16", "gradient_dtype": "bfloat16"}
    wide, halved = (
        take_steps(two_a_row(), {"data": 8}, model=tiny_model(**options), num_steps=9)[0]
        for options in ({"compute_dtype": "bfloat16"}, narrow)
    )
    # Three updates on: the rate is so high that later losses tell any two roundings apart.
    assert 0 < abs(halved[3]["loss"] / wide[3]["loss"] - 1) < 0.0005
    assert halved[0]["grad_norm"] == pytest.approx(wide[0]["grad_norm"], rel=0.005)


def test_zero1_divides_parameters_and_moments_over_data():
    """All of them that are not smaller than the devices are many."""
    objective = PretrainingObjective(tiny_model(), MASKING, MASK, (CLS, SEP))
    mesh = make_mesh(MeshConfig(data=8))
    plain, divided = (
        abstract_state(objective, OPTIMIZER, TrainConfig(num_steps=10, zero1=zero1), mesh) for zero1 in ("off", "on")
    )
    assert shard_bytes(divided.params) == pytest.approx(shard_bytes(plain.params) / 8, rel=0.01)
    assert gathered_bytes(divided.params) == shard_bytes(plain.params) == gathered_bytes(plain.params)
    assert shard_bytes(divided.optimizer) == pytest.approx(shard_bytes(plain.optimizer) / 8, rel=0.01)
    kernel = divided.optimizer[1].mean["encoder"]["layers"]["mlp"]["intermediate"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec(None, "data", "tensor")
    both = abstract_state(objective, OPTIMIZER, TrainConfig(zero1="on"), make_mesh(MeshConfig(data=4, fsdp=2)))
    assert both.optimizer[1].mean["encoder"]["layers"]["mlp"]["intermediate"]["kernel"].sharding.spec == PartitionSpec(
        None, "fsdp", "data"
    )


class TinyObjective(Objective):
    """The least objective that an optimizer treats as a model: a loss of a layer and of a head."""

    model = tiny_model()

    def __init__(self, unused=(), dropout=0.0):
        self.unused, self.dropout = unused, dropout

    def losses(self, params, batch, key):
        hidden = jnp.sin(batch.token_ids @ params["encoder"]["layers"]["mlp"]["output"]["kernel"][0])
        hidden *= jax.random.bernoulli(key, 1 - self.dropout, hidden.shape)
        return {"loss": (jnp.sum(hidden @ params["mlm"]["transform"]["kernel"]), jnp.float32(4))}

    def init(self, key):
        draw = lambda *shape: jax.random.normal(key, shape)  # noqa: E731
        encoder = {"layers": {"mlp": {"output": {"kernel": draw(1, 32, 8)}}}, "pooler": {"kernel": draw(8, 8)}}
        heads = {"mlm": {"transform": {"kernel": draw(8, 8)}}, "next_sentence": {"kernel": draw(8, 2)}}
        return {"encoder": encoder} | heads

    def denominators(self, batch):
        return {"loss": jnp.float32(4)}


def test_seeds_share_a_program_and_draw_their_own_dropout():
    """A sweep compiles once for all seeds, with options of the compiler, as GPUs have. Each step draws its own too."""
    objective, program = TinyObjective(dropout=0.3), Program(mesh := one_mesh(), {"xla_cpu_enable_fast_math": False})
    runs = [TrainConfig(num_steps=10, seed=seed) for seed in (0, 2**32)]
    first = fresh_state(objective, OPTIMIZER, runs[0], mesh)
    step, other = (program.training(objective, OPTIMIZER, train, first) for train in runs)
    texts = [each.lower(first, random_batch()).as_text() for each in (step, other)]
    assert texts[0] == texts[1]
    losses = set()
    for number, key in ((0, step.key), (0, other.key), (1, step.key)):
        state = jax.tree.map(jnp.copy, first)._replace(step=jnp.full_like(first.step, number))
        losses.add(float(step._one(state, random_batch(), key)[1]["loss"][0]))
    assert len(losses) == 3


def one_mesh():
    return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", "stable_adamw", "muon"])
def test_optimizers_of_whole_parameters_and_runs_of_words_do_not_depend_on_the_mesh(name):
    """A trust ratio needs the norm of a whole parameter, wherever its parts are, and a clipped update its mean."""
    batch = random_batch(seed=2)
    batch = batch._replace(word_starts=np.random.default_rng(0).random(batch.token_ids.shape) < 0.5)
    options = {
        "optimizer": dataclasses.replace(OPTIMIZER, name=name, bias_correction=True),
        "masking": MaskingConfig(whole_word=True, max_ngram=3),
    }
    one = take_steps(batch, **options)
    assert_same(one, take_steps(batch, {"data": 2, "fsdp": 2, "tensor": 2}, **options))
    assert_same(one, take_steps(batch, {"data": 2, "tensor": 4}, accumulate=2, zero1="on", **options))
    assert one[0][-1]["loss"] < one[0][0]["loss"]


@pytest.mark.parametrize(
    ("layers", "sizes", "sends"),
    [
        (6, {"data": 8}, ["all-to-all"] * 2),  # each device takes one of the matrices, or zeros
        (2, {"data": 8}, ["all-gather"]),  # and all of them, where they are too few
        (2, {"data": 2, "fsdp": 2, "tensor": 2}, ["all-gather"] * 3),  # one over each axis
    ],
)
def test_devices_share_out_the_matrices_that_they_orthogonalize(layers, sizes, sends):
    name = {"encoder": {"layers": {"mlp": {"output": {"kernel": np.zeros((layers, 64, 32), np.float32)}}}}}
    matrices = jax.tree.map(lambda leaf: np.float32(np.random.default_rng(0).normal(size=leaf.shape)), name)
    mesh, muon = make_mesh(MeshConfig(**sizes)), scale_by_muon()
    parts = tree_shardings(mesh, matrices, over_data=True)

    def update(gradients):
        return muon.update(gradients, muon.init(gradients))[0]

    with jax.set_mesh(mesh):
        compiled = jax.jit(update, in_shardings=(parts,), out_shardings=parts).lower(matrices).compile()
        found = compiled(jax.device_put(matrices, parts))
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5), found, update(matrices))
    sent = [each.kind for each in hlo.collectives(compiled.as_text()) for _ in range(each.count)]
    assert sent == sends


def test_steps_of_one_call_are_single_steps():
    """With other rows in every step, and other dropout."""
    objective, train, mesh = TinyObjective(dropout=0.3), TrainConfig(num_steps=10), one_mesh()
    first = fresh_state(objective, OPTIMIZER, train, mesh)
    assert_single_steps(first, Program(mesh).training(objective, OPTIMIZER, train, first), jax.devices()[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "more"), [({"data": 2, "fsdp": 2, "tensor": 2}, {}), ({"data": 8}, {"zero1": "on", "accumulate": 2})]
)
def test_steps_of_one_call_are_single_steps_on_a_mesh(sizes, more):
    mesh, train = make_mesh(MeshConfig(**sizes)), TrainConfig(num_steps=10, **more)
    objective = PretrainingObjective(tiny_model(hidden_dropout_rate=0.1), MASKING, MASK, (CLS, SEP))
    first = fresh_state(objective, OPTIMIZER, train, mesh)
    with jax.set_mesh(mesh):
        assert_single_steps(first, Program(mesh).training(objective, OPTIMIZER, train, first), row_sharding(mesh))


def assert_single_steps(first, step, place):
    batches = [jax.device_put(random_batch(seed=seed), place) for seed in range(3)]
    state, history = jax.tree.map(jnp.copy, first), []
    for batch in batches:
        state, metrics = step(state, batch)
        history.append(jax.device_get(metrics))
    after, together = step(jax.tree.map(jnp.copy, first), *batches)
    together = jax.device_get(together).of_steps()
    assert int(after.step) == len(together) == 3 and len(history[0].of_steps()) == 1
    for alone, inside in zip(history, together):
        assert inside.names == alone.names
        np.testing.assert_allclose(inside.table, alone.table, rtol=2e-5, atol=2e-5)
    assert together[0]["loss"][0] != together[1]["loss"][0]
    for ours, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(state)):
        assert ours.sharding == theirs.sharding
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_causal_rows_are_the_same_on_eight_devices_and_in_microbatches():
    masking = MaskingConfig(causal_rate=0.4)
    one = take_steps(two_a_row(), masking=masking)
    assert_same(one, take_steps(two_a_row(), {"data": 4, "tensor": 2}, masking=masking))
    assert_same(one, take_steps(two_a_row(), {"data": 8}, masking=masking, accumulate=2))
    assert_same(one, take_steps(two_a_row(), masking=masking, accumulate=4, model=tiny_model(remat="dots")))
    first, *_, last = one[0]
    assert first["clm_loss"] == pytest.approx(np.log(203), rel=0.02) and first["clm_loss"] != first["mlm_loss"]
    assert last["clm_loss"] < first["clm_loss"] - 0.01


@pytest.mark.slow
def test_microbatches_with_uneven_predictions_and_empty_rows_equal_the_whole_batch():
    batch = random_batch(seed=5)
    batch.sequence_ids[3:9] = 0  # some microbatches have few sequences, and so few predictions
    batch.sequence_weights[3:9] = 0
    assert_same(take_steps(batch), take_steps(batch, accumulate=8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "zero1", "sizes"),
    [("plain", "on", {"data": 8}), ("fused", "off", {"data": 2, "fsdp": 2, "tensor": 2})],
)
def test_microbatches_draw_the_dropout_of_one_device(attention, zero1, sizes):
    model = tiny_model(attention=attention, hidden_dropout_rate=0.3, attention_dropout_rate=0.3)
    one = take_steps(two_a_row(), model=model, accumulate=2)
    assert_same(one, take_steps(two_a_row(), sizes, model=model, accumulate=2, zero1=zero1))
    without = take_steps(two_a_row(), accumulate=2, num_steps=1)
    assert abs(one[0][0]["loss"] - without[0][0]["loss"]) > 1e-4  # it is on


def test_the_first_loss_is_near_that_of_guessing(on_one):
    history = on_one.history
    assert history[0]["mlm_loss"] == pytest.approx(np.log(203), rel=0.02)
    assert history[0]["nsp_loss"] == pytest.approx(np.log(2), rel=0.05)


def test_step_0_has_rate_0_and_moves_nothing_then_it_learns(on_one):
    """Nothing but the dropout, which each step draws."""
    history = on_one.history
    jax.tree.map(np.testing.assert_array_equal, on_one.first, START)
    assert history[0]["learning_rate"] == 0 and abs(history[0]["loss"] - history[1]["loss"]) > 1e-4
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]


def test_counts_leave_padding_out(on_one):
    batch, metrics = two_a_row(), on_one.history[0]
    lengths = np.array([[(row == place).sum() for place in (1, 2)] for row in batch.sequence_ids])
    assert metrics["sequences"] == 32 and metrics["tokens"] == lengths.sum()
    assert metrics["squared_lengths"] == (lengths**2).sum()


@pytest.mark.slow
def test_loss_weighs_every_prediction_of_the_global_batch_the_same():
    """Per-device means of means would differ here: rows have from 1 to 4 predictions."""
    batch = random_batch(seed=7)
    mesh = make_mesh(MeshConfig(data=8))
    objective = PretrainingObjective(tiny_model(), MaskingConfig(), MASK, (CLS, SEP))
    state = fresh_state(objective, OPTIMIZER, TrainConfig(num_steps=1), mesh)
    rows = jax.tree.map(lambda x: jax.device_put(x, row_sharding(mesh)), batch)
    whole = Program(mesh).evaluation(objective, state.params)(state.params, rows)["mlm_loss"]
    single, total, weight = make_mesh(MeshConfig(), jax.devices()[:1]), 0.0, 0.0
    params = jax.device_put(jax.device_get(state.params), tree_shardings(single, state.params))
    evaluate = Program(single).evaluation(objective, params)
    for row in range(16):
        pair = evaluate(params, jax.tree.map(lambda x, row=row: x[row : row + 1], batch))["mlm_loss"]
        total, weight = total + float(pair[0]), weight + float(pair[1])
    np.testing.assert_allclose([float(x) for x in whole], [total, weight], rtol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_given_parameters_outlive_the_first_step(num_devices):
    mesh = make_mesh(MeshConfig(), jax.devices()[:num_devices])
    objective = PretrainingObjective(tiny_model(), MASKING, MASK, (CLS, SEP))
    params = jax.jit(lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree))(START)
    before = jax.tree.map(np.array, params)
    state = fresh_state(objective, OPTIMIZER, TrainConfig(), mesh, params)
    jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)(state)  # as a step does
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(params))


@pytest.mark.parametrize(
    "objective",
    [
        TinyObjective(),
        pytest.param(PretrainingObjective(tiny_model(), MASKING, MASK, (CLS, SEP)), marks=pytest.mark.slow),
    ],
)
def test_state_of_a_seed_is_the_same_on_every_mesh(objective):
    train, everywhere = TrainConfig(seed=3), make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    states = [jax.device_get(fresh_state(objective, OPTIMIZER, train, mesh)) for mesh in (one_mesh(), everywhere)]
    jax.tree.map(np.testing.assert_array_equal, *states)


def one_step(objective, optimizer):
    """Returns what a step on one device leaves, and its norm: parameters before and after, and Adam's mean, by path."""
    mesh, train = make_mesh(MeshConfig(), jax.devices()[:1]), TrainConfig(num_steps=10)
    state = fresh_state(objective, optimizer, train, mesh)
    before = jax.device_get(state.params)
    with jax.set_mesh(mesh):
        state, metrics = Program(mesh).training(objective, optimizer, train, state)(state, random_batch())
    moments = [part for part in jax.tree.leaves(state.optimizer, is_leaf=is_moments) if is_moments(part)]
    mean = moments[0].mean if moments else {}
    found = [
        {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (before, state.params, mean)
    ]
    return *found, float(metrics["grad_norm"][0])


def is_moments(part):
    return isinstance(part, Moments)


LAYER, HEAD = "encoder/layers/mlp/output/kernel", "mlm/transform/kernel"


@pytest.mark.parametrize("name", ["adamw", "lamb", "stable_adamw", "muon"])
def test_what_no_loss_depends_on_is_not_decayed(name):
    """LAMB would take it to zero: its trust ratio makes up for any rate of decay."""
    unused = PretrainingObjective(tiny_model(), MASKING, MASK, (CLS, SEP), next_sentence=False).unused
    optimizer = dataclasses.replace(OPTIMIZER, name=name, warmup_steps=0, bias_correction=name == "stable_adamw")
    before, after, *_ = one_step(TinyObjective(unused), optimizer)
    for part in ("encoder/pooler/kernel", "next_sentence/kernel"):
        np.testing.assert_array_equal(before[part], after[part])
    assert not np.array_equal(before[HEAD], after[HEAD])


def test_a_frozen_encoder_has_no_part_in_the_norm():
    norms = []
    for freeze in (False, True):
        optimizer = dataclasses.replace(OPTIMIZER, freeze_encoder=freeze, warmup_steps=0)
        before, after, mean, norm = one_step(TinyObjective(), optimizer)
        norms.append(norm)
        assert np.array_equal(before[LAYER], after[LAYER]) == freeze and not np.array_equal(before[HEAD], after[HEAD])
    # The first mean of Adam is a tenth of the clipped gradient.
    assert 1 < norms[1] < norms[0] and np.linalg.norm(mean[HEAD]) == pytest.approx(0.1, rel=1e-4)
