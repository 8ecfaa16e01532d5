# SPDX-License-Identifier: Apache-2.0
"""Vectors of tokens, their scores and losses against plain numpy; how a batch is laid out changes nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import CLS, MASK, SEP, computed, drawn_like, tiny_model

from bert_jax.batch import UNSCORED, UNSEEN, Row
from bert_jax.batches.examples import choose_batching, train_batches
from bert_jax.batches.make import texts_apart
from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import InputError
from bert_jax.model.heads import multi_vector
from bert_jax.model.heads.embedding import Texts
from bert_jax.model.heads.multi_vector import MULTI_VECTORS, maxsim
from bert_jax.model.objective import TaskObjective, forward, init_params
from bert_jax.settings.finetuning import EmbeddingConfig, FinetuneDataConfig, TaskConfig
from bert_jax.settings.pretraining import MeshConfig

RNG = np.random.default_rng(0)
# Four examples of an anchor, a positive and a hard negative, and an empty place.
NUMBERS = np.array([[0, 1, 2], [3, 4, -1], [5, 1, 6], [0, 7, 2], [-1, -1, -1]])
COUNTS = RNG.integers(1, 6, NUMBERS.shape) * (NUMBERS >= 0)
VECTORS = RNG.normal(size=(5, 3, 6, 8)).astype(np.float32)
VECTORS /= np.linalg.norm(VECTORS, axis=-1, keepdims=True)
VECTORS *= np.arange(6)[:, None] < COUNTS[..., None, None]
MODEL = tiny_model(max_positions=32)
SETTINGS = EmbeddingConfig(kind="multi_vector", projection_size=8, projection_activation="none", query_length=6)
HEAD = MULTI_VECTORS.as_set(TaskConfig(max_seq_length=12, embedding=SETTINGS))


def score(query, passage):
    """The sum over the tokens of a query of the largest product, one by one."""
    return sum(max(float(one @ other) for other in passage) for one in query.astype(np.float64))


def tokens(example, kind):
    return VECTORS[example, kind, : COUNTS[example, kind]]


@pytest.mark.parametrize("most", [1 << 25, 200])
def test_a_score_is_the_sum_of_the_largest_products(monkeypatch, most):
    monkeypatch.setattr(multi_vector, "_MOST_ON_CPU", most)
    queries, passages = VECTORS[:4, 0], VECTORS[:, 1:].reshape(-1, 6, 8)

    def both(queries, passages):
        found, pull_back = jax.vjp(maxsim, queries, passages)
        return found, pull_back(jnp.ones((4, 10)))[0]

    found, gradient = computed(both, queries, passages)
    expected = np.full((4, 10), -1e9)
    for row in range(4):
        for column, (example, kind) in enumerate((e, k) for e in range(5) for k in (1, 2)):
            if NUMBERS[example, kind] >= 0:
                expected[row, column] = score(tokens(row, 0), tokens(example, kind))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # The gradient of a query's token is the sum of its nearest tokens, one of each passage.
    there = [tokens(example, kind) for example in range(5) for kind in (1, 2) if NUMBERS[example, kind] >= 0]
    nearest = sum(passage[np.argmax(passage @ queries[1, 0])] for passage in there)
    np.testing.assert_allclose(gradient[1, 0], nearest, rtol=1e-5)


def test_the_products_of_a_few_passages_are_all_that_is_held(monkeypatch):
    """Of the compiled program of both passes; whole they are 8 MB, and some kinds of them are held at once."""
    shapes = [jax.ShapeDtypeStruct((64, size, 8), jnp.float32) for size in (16, 32)]

    def temporary_bytes(most):
        monkeypatch.setattr(multi_vector, "_MOST_ON_CPU", most)
        gradient = jax.grad(lambda queries, passages: jnp.sum(maxsim(queries, passages) ** 2), argnums=(0, 1))
        return jax.jit(gradient).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert 8 * temporary_bytes(1 << 17) < temporary_bytes(1 << 25) > 8e6


@pytest.mark.parametrize("most", [1 << 25, 200])
def test_the_loss_is_the_cross_entropy_among_the_other_texts_of_the_batch(monkeypatch, most):
    monkeypatch.setattr(multi_vector, "_MOST_ON_CPU", most)
    losses, right = [], []
    for i in range(4):
        own, others = score(tokens(i, 0), tokens(i, 1)) / 0.5, []
        for j in range(4):
            for kind in (1, 2):
                is_same = NUMBERS[j, kind] in NUMBERS[i, :2] or (kind == 1 and NUMBERS[j, 0] == NUMBERS[i, 0])
                if NUMBERS[j, kind] >= 0 and (i, 1) != (j, kind) and not is_same:
                    others.append(score(tokens(i, 0), tokens(j, kind)) / 0.5)
        losses.append(np.log(np.exp(own) + np.exp(others).sum()) - own)
        right.append(own > max(others))
    found = jax.jit(functools.partial(losses_of, dot_temperature=0.5))(VECTORS)
    assert float(found["loss"][0]) == pytest.approx(sum(losses), rel=1e-5)
    assert (float(found["accuracy"][0]), float(found["accuracy"][1])) == (sum(right), 4)


def losses_of(vectors, **settings):
    """Returns the head's losses of vectors [E, T, S, K] that lie in rows of their own."""
    examples, kinds, size = vectors.shape[:3]
    places = np.arange(examples * kinds * size, dtype=np.int32).reshape(examples, kinds, size)
    batch = multi_vector.Batch(*[None] * 5, labels=Texts(places, NUMBERS, np.zeros(5)))
    head = MULTI_VECTORS.as_set(TaskConfig(embedding=EmbeddingConfig(kind="multi_vector", **settings)))
    return head.losses(vectors.reshape(-1, size, vectors.shape[-1]), batch, head.weights(batch))


def test_margins_of_a_teacher():
    """Scores are those of the passages of an example alone."""
    taught = np.array([[1.0, -2.0], [0.5, 0.0], [3.0, 1.0], [0.0, 4.0]], np.float32)[: len(NUMBERS)]
    taught = np.resize(taught, (len(NUMBERS), NUMBERS.shape[1] - 1)).astype(np.float32)
    examples, kinds, size = VECTORS.shape[:3]
    places = np.arange(examples * kinds * size, dtype=np.int32).reshape(examples, kinds, size)
    batch = multi_vector.Batch(*[None] * 5, labels=Texts(places, NUMBERS, np.zeros(examples), taught))
    settings = EmbeddingConfig(kind="multi_vector", loss="margin_mse")
    head = MULTI_VECTORS.as_set(TaskConfig(embedding=settings))
    vectors = VECTORS.reshape(-1, size, VECTORS.shape[-1])
    total, weight = computed(lambda vectors: head.losses(vectors, batch, head.weights(batch))["loss"], vectors)
    errors = []
    for own, numbers, known in zip(VECTORS.astype(np.float64), NUMBERS, taught):
        if numbers[0] < 0:
            continue
        asks = own[0][own[0].any(axis=-1)]
        scores = [(asks @ text[text.any(axis=-1)].T).max(axis=1).sum() for text in own[1:][numbers[1:] >= 0]]
        errors += [((scores[0] - scores[n]) - (known[0] - known[n])) ** 2 for n in range(1, len(scores))]
    assert len(errors) == 3 and float(total / weight) == pytest.approx(np.mean(errors), rel=1e-5)
    assert int(weight) == 4  # examples, of which a step takes the mean


def make_rows(expansion=UNSEEN, count=24):
    """Rows of a query filled up to six tokens, a positive and maybe a negative, whose token 9 does not count."""
    random, rows = np.random.default_rng(1), []
    for number in range(count):
        texts = [[CLS, *random.integers(5, 12, random.integers(1, 3)), SEP]]
        texts += [[CLS, *random.integers(5, 12, random.integers(1, 9)), SEP] for _ in range(1 + number % 2)]
        filled = [0] * len(texts[0]) + [expansion] * (6 - len(texts[0]))
        texts[0] += [MASK] * (6 - len(texts[0]))
        ids = np.concatenate(texts).astype(np.int32)
        marks = np.where(ids == 9, UNSCORED, 0)
        marks[:6] = filled
        label = (0.0, *(3 * number + place for place in range(len(texts))))
        lengths = tuple(map(len, texts))
        rows.append(Row(number, ids, np.zeros(len(ids), np.uint8), lengths, label, marks=marks.astype(np.uint8)))
    return rows


def params_of(head):
    return drawn_like(jax.eval_shape(functools.partial(init_params, MODEL, head=head), jax.random.key(0)), 0.3)


def batches(pack, devices=1, rows=None):
    """Returns the first batch of eight examples, packed or not."""
    rows = rows or make_rows()
    data = FinetuneDataConfig(source="x", batch_size=8, pack=pack, bucket=False)
    batching = choose_batching(rows, data, MODEL, 8, pack, 10, apart=True)
    mesh = make_mesh(MeshConfig(data=devices), jax.devices()[:devices])
    return mesh, next(iter(train_batches(rows, HEAD, 0, batching, mesh)))


def test_texts_are_found_packed_and_alone_by_the_tokens_that_count():
    rows, found = texts_apart(make_rows()), []
    known = {row.label[2]: row.token_ids[row.marks & UNSCORED == 0].tolist() for row in rows}
    for pack in ("on", "off"):
        mesh, batch = batches(pack)
        places, numbers = np.asarray(batch.labels.places), np.asarray(batch.labels.numbers)
        assert len(np.unique(places)) == places.size and places.shape[:2] == (8, 3)
        ids = np.asarray(batch.token_ids).ravel()
        for place, number in zip(places.reshape(-1, places.shape[-1]), numbers.ravel()):
            there = ids[place[place < ids.size]].tolist()
            assert there == (known[number] if number >= 0 else [])
        loss = jax.jit(jax.value_and_grad(lambda params, batch: mean_loss(params, batch)))
        with jax.set_mesh(mesh):
            found.append(jax.device_get(loss(params_of(HEAD), batch)))
    (loss, gradients), (expected, theirs) = found
    assert loss == pytest.approx(expected, rel=1e-5) and loss > 0.1
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-4), gradients, theirs)
    assert np.abs(gradients["projection"]["kernel"]).max() > 1e-3


def mean_loss(params, batch):
    total, weight = TaskObjective(MODEL, HEAD).losses(params, batch, None)["loss"]
    return total / weight


def test_tokens_that_fill_up_a_query_change_no_other_vector_unless_they_are_seen():
    params, found = params_of(HEAD), []
    vectors = jax.jit(lambda batch: forward(MODEL, params, batch, HEAD))
    for expansion in (UNSEEN, 0):
        _, batch = batches("on", rows=make_rows(expansion))
        found.append(vectors(batch))
        ids, sequences = np.asarray(batch.token_ids), np.abs(np.asarray(batch.sequence_ids))
    real = (sequences > 0) & (ids != MASK)
    texts_of_masks = np.array([[(ids[line] == MASK)[row == place].any() for place in row] for line, row in
                               enumerate(sequences)])  # fmt: skip
    apart = np.abs(np.asarray(found[0]) - np.asarray(found[1])).max(axis=-1)
    assert apart[real & ~texts_of_masks].max() < 1e-6 < 1e-3 < apart[real & texts_of_masks].max()
    masks = np.asarray(found[0])[ids == MASK]
    assert np.abs(masks - masks[0]).max() > 0.1  # each has its place, and sees its text
    np.testing.assert_allclose(np.linalg.norm(masks, axis=-1), 1, atol=1e-6)


def test_tokens_that_fill_up_a_query_see_its_text_in_every_layer():
    near = dataclasses.replace(MODEL, num_layers=2, window=3, global_every=2)
    batch = batches("off")[1]
    for settings, fits in (
        (SETTINGS, False),
        (dataclasses.replace(SETTINGS, query_expansion=5), True),
        (dataclasses.replace(SETTINGS, expansion_is_seen=True), True),
    ):
        head = MULTI_VECTORS.as_set(TaskConfig(max_seq_length=12, embedding=settings))
        compute = functools.partial(jax.eval_shape, lambda: forward(near, params_of(head), batch, head))  # noqa: B023
        if fits:
            assert compute().shape[-1] == 8
            continue
        with pytest.raises(InputError, match=r"filled up to 6 tokens, and in layers that see 3 .* to 5 at most"):
            compute()


@pytest.mark.slow
@pytest.mark.parametrize("pack", ["on", "off"])
def test_eight_devices_find_the_loss_and_the_gradients_of_one(pack):
    results = []
    for devices in (1, 8):
        mesh, batch = batches(pack, devices)
        with jax.set_mesh(mesh):
            results.append(jax.device_get(jax.jit(jax.value_and_grad(mean_loss))(params_of(HEAD), batch)))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-4), results[0][1], results[1][1])


def test_a_student_learns_the_scores_of_a_teacher_for_the_candidates_of_the_batch():
    mesh, batch = batches("off")
    teacher = computed(lambda params: forward(MODEL, params, batch, HEAD), params_of(HEAD))
    apart = jax.jit(lambda *outputs: HEAD.divergence(*outputs, batch, 0.5))
    assert np.abs(apart(teacher, teacher)).max() < 1e-5
    other = np.roll(teacher, 1, axis=1)
    labels, index = jax.device_get(batch.labels), 2
    logs = []
    for outputs in (other, teacher):
        vectors = outputs.reshape(-1, 8)
        flat = [place[place < len(vectors)] for place in labels.places.reshape(-1, labels.places.shape[-1])]
        texts = [vectors[place] for place in flat]
        there = [place for place in range(24) if place % 3 and labels.numbers.ravel()[place] >= 0]
        scores = np.array([score(texts[3 * index], texts[place]) / 0.5 for place in there])
        logs.append(scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max())
    expected = float(np.sum(np.exp(logs[1]) * (logs[1] - logs[0])))
    assert float(np.asarray(apart(other, teacher))[index]) == pytest.approx(expected, rel=1e-3) and expected > 0.01
    with pytest.raises(InputError, match="one teacher, and there are 2"):
        HEAD.mean_of([teacher, teacher])
