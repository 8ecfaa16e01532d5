# SPDX-License-Identifier: Apache-2.0
"""A loss of the whole batch: devices and microbatches change nothing but rounding, and memory is a microbatch's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import drawn_params, fresh_state, tiny_model

from bert_jax.batch import Row, pad_rows
from bert_jax.batches.examples import choose_batching, train_batches
from bert_jax.devices.sharding import make_mesh
from bert_jax.model.heads.embedding import Texts
from bert_jax.model.heads.sparse import SPARSE
from bert_jax.model.heads.table import embedding_head
from bert_jax.model.keys import bits_of_rows
from bert_jax.model.objective import Objective, TaskObjective
from bert_jax.settings.finetuning import EmbeddingConfig, FinetuneDataConfig, TaskConfig
from bert_jax.settings.pretraining import MeshConfig, OptimizerConfig, TrainConfig
from bert_jax.training.program import Program
from bert_jax.training.whole_batch import gradients_of_whole

RNG = np.random.default_rng(0)


class WholeObjective(Objective):
    """A loss that is no sum over rows, of a parameter and of rows with dropout."""

    model, needs_whole_batch = tiny_model(), True

    def __init__(self):
        self.rows_at_once = set()

    def outputs(self, params, rows, key):
        self.rows_at_once.add(len(rows.token_ids))
        kernel = params["pooler"]["kernel"]
        return (jnp.sin(rows.token_ids @ kernel) * (bits_of_rows(key, (*rows.token_ids.shape[:1], 8)) % 4))[:, None]

    def losses_of(self, outputs, batch):
        return {"loss": (jnp.sum(outputs[:, 0] @ outputs[:, 0].T), jnp.float32(3))}

    def losses(self, params, batch, key):
        return self.losses_of(self.outputs(params, batch, key), batch)

    def init(self, key):
        return {"pooler": {"kernel": jax.random.normal(key, (3, 8)), "bias": jnp.zeros(8)}}

    def denominators(self, batch):
        return {"loss": jnp.float32(3)}


def test_a_step_of_a_whole_batch_is_the_same_in_microbatches():
    mesh, optimizer = make_mesh(MeshConfig(), jax.devices()[:1]), OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
    batch = pad_rows([[3, 1], [4], [1, 5, 9], [2]] * 2, 3)
    found = []
    for accumulate in (1, 4):
        train = TrainConfig(num_steps=10, accumulate=accumulate)
        objective = WholeObjective()
        state = fresh_state(objective, optimizer, train, mesh)
        with jax.set_mesh(mesh):
            state, metrics = Program(mesh).training(objective, optimizer, train, state)(state, batch)
        assert objective.rows_at_once == {8 // accumulate}
        found.append(jax.device_get((state.params, metrics["loss"], metrics["grad_norm"])))
    assert found[0][2][0] > 0
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), *found)


def test_a_loss_of_all_outputs_has_the_gradients_of_one_pass():
    """Of a function of rows with dropout that is not a model, where the loss is not a sum over them."""
    batch = pad_rows([[3, 1], [4], [1, 5, 9], [2]], 3)

    def outputs_of(params, rows, key):
        return (jnp.sin(params["w"] * rows.token_ids) * (bits_of_rows(key, rows.token_ids.shape) % 4))[:, None]

    loss_of = lambda outputs: (jnp.sum(jnp.tril(outputs[:, 0] @ outputs[:, 0].T)) ** 2, jnp.max(outputs))  # noqa: E731
    params, key = {"w": jnp.arange(1.0, 4.0)}, jax.random.key(0)
    whole = lambda params: loss_of(outputs_of(params, batch, key))  # noqa: E731
    (loss, largest), gradients = jax.jit(jax.value_and_grad(whole, has_aux=True))(params)
    for count in (1, 2, 4):
        found = jax.jit(functools.partial(gradients_of_whole, outputs_of, loss_of, count))(params, batch, key)
        np.testing.assert_allclose(found[0], (loss, largest), rtol=1e-6)
        np.testing.assert_allclose(found[1]["w"], gradients["w"], rtol=1e-5)


def test_the_outputs_are_all_that_grows_with_the_batch():
    """In the memory of the compiled program, of a function with 16 layers."""

    def outputs_of(params, rows, key):
        hidden = rows.token_ids.astype(jnp.float32)
        for layer in range(16):
            hidden = jnp.sin(hidden @ params["w"][layer])
        return hidden[:, :2]

    loss_of = lambda outputs: (jnp.sum(outputs) ** 2, jnp.max(outputs))  # noqa: E731
    params = {"w": jnp.ones((16, 32, 32))}
    batch = pad_rows(np.ones((16 * 256, 32), np.int32), 32)

    def temporary_bytes(count):
        function = functools.partial(gradients_of_whole, outputs_of, loss_of, count)
        return jax.jit(function).lower(params, batch, jax.random.key(0)).compile().memory_analysis().temp_size_in_bytes

    assert 6 * temporary_bytes(16) < temporary_bytes(1)


def label_rows(lengths, numbers):
    rows = []
    for number, (sizes, texts) in enumerate(zip(lengths, numbers)):
        ids = RNG.integers(5, 200, sum(sizes)).astype(np.int32)
        rows.append(Row(number, ids, np.zeros(len(ids), np.uint8), tuple(sizes), (0.1 * (number % 7), *texts)))
    return rows


ROWS = label_rows(
    [RNG.integers(4, 12, 2 + number % 2).tolist() for number in range(40)],
    [[3 * number, 3 * number + 1, 3 * number + 2][: 2 + number % 2] for number in range(40)],
)
DROPOUT = tiny_model(hidden_dropout_rate=0.1, attention_dropout_rate=0.1)


def take_steps(devices, accumulate, mesh=None, pack="on", model=DROPOUT, count=2, **settings):
    """Returns losses and parameters of some steps of batches of 16 examples."""
    head = embedding_head(TaskConfig(embedding=EmbeddingConfig(**settings)))
    mesh = make_mesh(mesh or MeshConfig(data=devices), jax.devices()[:devices])
    train = TrainConfig(num_steps=10, accumulate=accumulate)
    objective = TaskObjective(model, head)
    data = FinetuneDataConfig(source="x", batch_size=16, pack=pack, bucket=False)
    batching = choose_batching(ROWS, data, model, 8 * 16, pack, 10, apart=True)  # the same batches for all
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, name="adamw")
    params = drawn_params(model, head.name)
    if head.knows_queries:
        params = params | {"query_table": {"weight": np.ones(model.vocab_size, np.float32)}}
    state = fresh_state(objective, optimizer, train, mesh, params)
    step = Program(mesh).training(objective, optimizer, train, state)
    losses = []
    names = ("loss", "grad_norm", *(("passage_flops", "query_terms") if head.name == SPARSE.name else ()))
    with jax.set_mesh(mesh):
        for _, batch in zip(range(count), train_batches(ROWS, head, 0, batching, mesh)):
            state, metrics = step(state, batch)
            losses.append([float(metrics[name][0]) for name in names])
    return np.array(losses), jax.device_get(state.params)


@pytest.fixture(scope="module")
def whole():
    return take_steps(1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "accumulate", "mesh"),
    [(1, 16, None), (8, 4, None), (8, 2, MeshConfig(data=2, fsdp=2, tensor=2))],
)
def test_devices_and_microbatches_change_nothing_but_rounding(whole, devices, accumulate, mesh):
    """With dropout, and packed: the texts of an example are in different rows and microbatches."""
    losses, params = take_steps(devices, accumulate, mesh)
    np.testing.assert_allclose(losses, whole[0], rtol=2e-4)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(whole[1])):
        np.testing.assert_allclose(one, other, atol=2e-4)


SPARSELY = {"kind": "sparse", "passage_flops": 0.1, "query_flops": 0.2, "flops_rise": 0.2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "accumulate", "mesh", "table"),
    [(8, 4, None, False), (8, 2, MeshConfig(data=2, fsdp=2, tensor=2), True)],
)
def test_sparse_vectors_learn_the_same_on_devices_and_in_microbatches(devices, accumulate, mesh, table):
    """Of three steps FLOPS is worth nothing at the first, a quarter at the second and all at the third."""
    whole = take_steps(1, 1, count=3, query_table=table, **SPARSELY)
    losses, params = take_steps(devices, accumulate, mesh, count=3, query_table=table, **SPARSELY)
    np.testing.assert_allclose(losses, whole[0], rtol=2e-4)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(whole[1])):
        np.testing.assert_allclose(one, other, atol=2e-4)


def test_flops_are_worth_more_at_each_step():
    """The loss is the base loss and what FLOPS is worth by the step of the state."""
    head = embedding_head(TaskConfig(embedding=EmbeddingConfig(**SPARSELY)))
    objective = TaskObjective(tiny_model(), head)
    optimizer, train = OptimizerConfig(learning_rate=1e-12, warmup_steps=0), TrainConfig(num_steps=10)
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    state = fresh_state(objective, optimizer, train, mesh, drawn_params(objective.model, head.name))
    texts = np.arange(8, dtype=np.int32).reshape(4, 2)
    batch = pad_rows(RNG.integers(5, 200, (8, 8)), 8)._replace(labels=Texts(texts, texts, np.zeros(4, np.float32)))
    step = Program(mesh).training(objective, optimizer, train, state)
    with jax.set_mesh(mesh):
        for share in (0, 0.25, 1, 1):
            state, metrics = step(state, jax.device_put(batch))
            found = {name: float(total / weight) for name, (total, weight) in metrics.items()}
            worth = share * (0.1 * found["passage_flops"] + 0.2 * found["query_flops"])
            assert found["loss"] == pytest.approx(found["base_loss"] + worth, rel=1e-5) and found["query_flops"] > 0.1
