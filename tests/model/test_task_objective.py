# SPDX-License-Identifier: Apache-2.0
"""What fine-tuning minimises, against plain numpy; what padding and other rows must not change; who learns."""

import functools

import jax
import numpy as np
import pytest
from builders import computed, fresh_state, task_params, tiny_model

from bert_jax.batch import Batch, Row
from bert_jax.batches.make import batch_of_rows, unpadded_outputs
from bert_jax.devices.sharding import make_mesh
from bert_jax.model.heads.probe import probed
from bert_jax.model.heads.table import HEADS
from bert_jax.model.objective import TaskObjective, init_params
from bert_jax.model.objective import forward as forward_of
from bert_jax.settings.finetuning import ProbeConfig
from bert_jax.settings.pretraining import MeshConfig, OptimizerConfig, TrainConfig
from bert_jax.training.optim import learning_rate_at
from bert_jax.training.program import Program
from bert_jax.training.step import abstract_state

RNG = np.random.default_rng(0)


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def blank(num_rows, length, lengths, num_places=1, **fields):
    batch = batch_of_rows([[]] * num_rows, length, num_places, HEADS["sequence_classification"])
    for row, each in enumerate(lengths):
        batch.sequence_ids[row, :each] = 1
    weights = np.zeros((num_rows, num_places), np.float32)
    weights[: len(lengths)] = 1
    return batch._replace(**{"sequence_weights": weights} | fields)


@functools.partial(jax.jit, static_argnums=2)
def losses_of(logits, batch, task):
    return HEADS[task].losses(logits, batch, HEADS[task].weights(batch))


def loss_of(logits, batch, task):
    total, weight = losses_of(np.float32(logits), batch, task)["loss"]
    return float(total), float(weight)


def test_classes_count_once_and_filled_up_rows_do_not():
    logits = RNG.normal(size=(4, 1, 3))
    batch = blank(4, 6, [6, 3, 4], labels=np.array([[2], [0], [1], [0]]))
    expected = -sum(log_softmax(logits[row, 0])[label] for row, label in enumerate([2, 0, 1]))
    assert loss_of(logits, batch, "sequence_classification") == pytest.approx((expected, 3))


def test_one_output_is_a_regression():
    logits = RNG.normal(size=(3, 1, 1))
    batch = blank(3, 6, [6, 3], labels=np.array([[1.5], [-2.0], [9.0]], np.float32))
    expected = (logits[0, 0, 0] - 1.5) ** 2 + (logits[1, 0, 0] + 2.0) ** 2
    assert loss_of(logits, batch, "sequence_classification") == pytest.approx((expected, 2))
    assert "accuracy" not in losses_of(np.float32(logits), batch, "sequence_classification")


def test_words_that_are_not_asked_about_weigh_nothing():
    logits = RNG.normal(size=(2, 5, 3))
    labels = np.array([[-1, 2, -1, 0, -1], [-1, -1, 1, -1, 2]])  # the last one is beyond its row
    batch = blank(2, 5, [5, 4], labels=labels)
    expected = -sum(log_softmax(logits[row, place])[labels[row, place]] for row, place in ((0, 1), (0, 3), (1, 2)))
    assert loss_of(logits, batch, "token_classification") == pytest.approx((expected, 3))


def test_spans_are_start_and_end_over_the_tokens_of_the_row():
    logits = RNG.normal(size=(3, 6, 2))
    batch = blank(3, 6, [6, 4], labels=np.array([[[1, 5]], [[0, 0]], [[0, 0]]]))
    expected = -log_softmax(logits[0, :, 0])[1] - log_softmax(logits[0, :, 1])[5]
    expected += -log_softmax(logits[1, :4, 0])[0] - log_softmax(logits[1, :4, 1])[0]
    assert loss_of(logits, batch, "question_answering") == pytest.approx((expected, 4))
    objective = TaskObjective(tiny_model(), HEADS["question_answering"])
    assert float(objective.denominators(batch)["loss"]) == 4


def test_choices_compete_within_a_row_and_empty_places_do_not():
    logits = RNG.normal(size=(2, 3, 1))
    weights = np.array([[1, 1, 0], [1, 1, 1]], np.float32)
    batch = blank(2, 6, [6, 6], 3, labels=np.array([[1, -1, -1], [2, -1, -1]]), sequence_weights=weights)
    expected = -log_softmax(logits[0, :2, 0])[1] - log_softmax(logits[1, :, 0])[2]
    assert loss_of(logits, batch, "multiple_choice") == pytest.approx((expected, 2))


def divergence(said, wanted):
    said, wanted = log_softmax(said / 2), log_softmax(wanted / 2)
    return np.sum(np.exp(wanted) * (wanted - said))


def test_a_teacher_of_spans_and_of_choices_speaks_of_the_same_tokens_and_choices():
    """At a temperature of 2. A row holds two sequences, or two questions and an empty place."""
    said, wanted = RNG.normal(size=(2, 1, 6, 2)).astype(np.float32)
    batch = blank(1, 6, [6], 2, sequence_weights=np.ones((1, 2), np.float32))
    batch.sequence_ids[0] = [1, 1, 2, 2, 2, 0]
    compute = jax.jit(lambda name, *given: HEADS[name].divergence(*given, 2.0), static_argnums=0)
    apart = compute("question_answering", said, wanted, batch)
    tokens = slice(0, 2), slice(2, 5)
    expected = [sum(divergence(said[0, each, end], wanted[0, each, end]) for end in (0, 1)) for each in tokens]
    np.testing.assert_allclose(apart, [expected], rtol=1e-4)
    said, wanted = RNG.normal(size=(2, 1, 5, 1)).astype(np.float32)
    weights, labels = np.array([[1, 1, 1, 1, 0]], np.float32), np.array([[1, -1, 3, -1, -1]])
    batch = blank(1, 6, [6], 5, labels=labels, sequence_weights=weights)
    apart = np.asarray(compute("multiple_choice", said, wanted, batch))
    expected = [divergence(said[0, each, 0], wanted[0, each, 0]) for each in (slice(0, 2), slice(2, 4))]
    np.testing.assert_allclose(apart[0, [0, 2]], expected, rtol=1e-4)
    assert HEADS["multiple_choice"].weights(batch).tolist() == [[1, 0, 1, 0, 0]] and np.isfinite(apart).all()


def test_a_batch_with_nothing_to_say_has_no_loss():
    batch = blank(2, 6, [], labels=np.zeros((2, 1), np.int32))
    assert float(TaskObjective(tiny_model(), HEADS["sequence_classification"], 2).denominators(batch)["loss"]) == 1
    assert loss_of(np.ones((2, 1, 2)), batch, "sequence_classification") == (0, 0)


def test_only_the_ratios_of_class_weights_matter():
    """Before, a batch whose weights sum to less than 1 had a smaller loss."""
    objective = TaskObjective(tiny_model(), HEADS["sequence_classification"], 2)
    logits = RNG.normal(size=(3, 1, 2)).astype(np.float32)

    def loss(scale):
        weights = np.array([[0.1], [0.4], [0.2]], np.float32) * scale
        batch = blank(3, 6, [6, 3, 4], labels=np.array([[1], [0], [1]]), sequence_weights=weights)
        return loss_of(logits, batch, "sequence_classification")[0] / float(objective.denominators(batch)["loss"])

    assert loss(1) == pytest.approx(loss(10), rel=1e-5) == pytest.approx(loss(100), rel=1e-5)


def row(length, label, lengths=None):
    ids = RNG.integers(5, 200, length).astype(np.int32)
    return Row(0, ids, np.zeros(length, np.uint8), lengths or (length,), label)


def alone(rows):
    return [[row] for row in rows]


def forward(task, params, batch):
    return jax.jit(functools.partial(forward_of, tiny_model(), head=HEADS[task]))(params, batch)


PACKED = {
    "sequence_classification": lambda length: int(RNG.integers(0, 3)),
    "regression": lambda length: float(RNG.normal()),
    "token_classification": lambda length: RNG.integers(-1, 3, length),
    "question_answering": lambda length: tuple(sorted(RNG.integers(0, length, 2).tolist())),
    "multiple_choice": lambda length: int(RNG.integers(0, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "causal"), [*((kind, False) for kind in PACKED), ("token_classification", True)])
def test_packed_examples_have_the_losses_gradients_and_outputs_of_rows_of_their_own(kind, causal):
    task = "sequence_classification" if kind == "regression" else kind
    lengths = [9, 7, 12, 5, 8, 6]
    rows = [row(n, PACKED[kind](n), (n // 2, n - n // 2) if kind == "multiple_choice" else None) for n in lengths]
    widest = len(rows[0].lengths)
    single = batch_of_rows(alone(rows), 12, widest, HEADS[task])
    bins = [[2, 3, 5], [0, 4], [1], []]  # any packing, with an empty row
    packed = batch_of_rows([[rows[number] for number in members] for members in bins], 24, 3 * widest, HEADS[task])
    params = task_params(task, {"regression": 1, "question_answering": 0, "multiple_choice": 1}.get(kind, 3))
    objective = TaskObjective(tiny_model(causal=causal), HEADS[task])

    @jax.jit
    def results(params, batch):
        def loss(params):
            logits = forward_of(tiny_model(causal=causal), params, batch, HEADS[task])
            found = losses_of(logits, batch, task)
            return found["loss"][0] / objective.denominators(batch)["loss"], (found, logits)

        return jax.value_and_grad(loss, has_aux=True)(params)

    ((ours, (losses, logits)), gradients), ((theirs, (their_losses, their_logits)), their_gradients) = (
        results(params, batch) for batch in (packed, single)
    )
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    for name, (total, weight) in their_losses.items():
        assert (float(losses[name][0]), float(losses[name][1])) == pytest.approx(
            (float(total), float(weight)), rel=1e-5
        )
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=2e-6), gradients, their_gradients)
    for members, line in zip(bins, np.asarray(logits)):
        outputs = unpadded_outputs([rows[number] for number in members], line, HEADS[task])
        for number, output in zip(members, outputs, strict=True):
            (expected,) = unpadded_outputs([rows[number]], np.asarray(their_logits)[number], HEADS[task])
            np.testing.assert_allclose(output, expected, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sequence_classification", "token_classification", "question_answering"])
def test_a_linear_probe_of_packed_rows_is_that_of_rows_of_their_own(task):
    head = probed(HEADS[task], ProbeConfig(features="weighted_all", kind="linear"))
    rows = [row(length, None) for length in (9, 7, 12)]
    init = jax.jit(functools.partial(init_params, tiny_model(), head=head, num_outputs=3))
    run = jax.jit(functools.partial(forward_of, tiny_model(), head=head, num_outputs=3))
    params = init(jax.random.key(0))
    single = np.asarray(run(params, batch_of_rows(alone(rows), 12, 1, HEADS[task])))
    packed = np.asarray(run(params, batch_of_rows([[rows[2], rows[0]], [rows[1]]], 24, 2, HEADS[task])))
    found = [
        *unpadded_outputs([rows[2], rows[0]], packed[0], HEADS[task]),
        *unpadded_outputs([rows[1]], packed[1], HEADS[task]),
    ]
    for number, output in zip((2, 0, 1), found, strict=True):
        (expected,) = unpadded_outputs([rows[number]], single[number], HEADS[task])
        np.testing.assert_allclose(output, expected, atol=2e-6)


def test_choices_in_one_row_are_as_in_rows_of_their_own():
    params = task_params("multiple_choice", 1)
    together = row(15, 1, (4, 6, 5))
    ends = np.cumsum(together.lengths)
    single_rows = [
        Row(0, together.token_ids[end - length : end], together.type_ids[:length], (length,), 0)
        for end, length in zip(ends, together.lengths)
    ]
    packed = forward("multiple_choice", params, batch_of_rows([[together]], 16, 3, HEADS["multiple_choice"]))
    single = forward("multiple_choice", params, batch_of_rows(alone(single_rows), 6, 1, HEADS["multiple_choice"]))
    np.testing.assert_allclose(packed[0, :, 0], single[:, 0, 0], atol=1e-6)


def test_warm_up_as_a_share_of_the_run():
    by_rate = learning_rate_at(OptimizerConfig(learning_rate=1.0, warmup_steps=0, warmup_rate=0.1), 50)
    by_steps = learning_rate_at(OptimizerConfig(learning_rate=1.0, warmup_steps=5), 50)
    shared, counted = computed(lambda steps: [jax.vmap(rate)(steps) for rate in (by_rate, by_steps)], np.arange(50))
    np.testing.assert_array_equal(shared, counted)
    assert shared[4] == pytest.approx(0.8) and shared[5] == pytest.approx(0.9)


@pytest.mark.slow
@pytest.mark.parametrize("features", ["last", "weighted_all"])
def test_a_probe_learns_and_its_encoder_does_not(features):
    model = tiny_model()
    probe = ProbeConfig(
        features=features, kind="linear" if features == "last" else "bilstm", num_layers=1, hidden_size=8
    )
    objective = TaskObjective(model, probed(HEADS["token_classification"], probe), 3)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    optimizer, train = (
        OptimizerConfig(learning_rate=1e-2, warmup_steps=0, freeze_encoder=True),
        TrainConfig(num_steps=30),
    )
    state = fresh_state(objective, optimizer, train, mesh)
    before = jax.device_get(state.params)
    step = Program(mesh).training(objective, optimizer, train, abstract_state(objective, optimizer, train, mesh))
    rows = [row(7, np.array([-1, 0, 1, 2, 0, 1, -1])), row(5, np.array([-1, 2, 0, 1, -1]))]
    batch = batch_of_rows(alone(rows), 8, 1, HEADS["token_classification"])
    losses = []
    for _ in range(30):
        state, metrics = step(state, Batch(*(None if field is None else jax.numpy.asarray(field) for field in batch)))
        losses.append(float(metrics["loss"][0]))
    assert losses[-1] < 0.7 * losses[0]
    after = jax.device_get(state.params)
    jax.tree.map(np.testing.assert_array_equal, before["encoder"], after["encoder"])
    assert any((one != other).any() for one, other in zip(*map(jax.tree.leaves, (before["probe"], after["probe"]))))
