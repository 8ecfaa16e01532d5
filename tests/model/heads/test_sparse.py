# SPDX-License-Identifier: Apache-2.0
"""Weights of words, FLOPS and queries from a table, against plain NumPy."""

import contextlib
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import computed, drawn_params, random_batch, tiny_model

from bert_jax.batch import pad_rows
from bert_jax.model.derivatives import plain_derivatives
from bert_jax.model.heads import sparse
from bert_jax.model.heads.embedding import Texts
from bert_jax.model.heads.sparse import SparseEmbeddings, _largest, terms_of
from bert_jax.model.objective import encode, forward
from bert_jax.settings.finetuning import EmbeddingConfig

MODEL = tiny_model(initializer_stddev=0.2, activation="gelu_exact")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def params():
    drawn = drawn_params(MODEL, "masked_lm")
    bias = RNG.normal(0, 0.5, MODEL.padded_vocab_size).astype(np.float32)
    mlm = drawn["mlm"] | {"output_bias": bias}
    return drawn | {"mlm": mlm, "query_table": {"weight": RNG.normal(1, 0.3, 203).astype(np.float32)}}


@pytest.fixture(scope="module")
def batch():
    """Rows of two sequences, the last with one, and padding."""
    made = random_batch(num_rows=4, num_sequences=2)
    made.sequence_ids[3, made.cls_positions[3, 1] :] = 0
    return made


def head(**settings):
    return SparseEmbeddings(EmbeddingConfig(kind="sparse", **settings))


@pytest.fixture(scope="module")
def logits(params, batch):
    """Returns the logits [B, L, V] of all tokens, by the formulas of a masked language model in float64."""
    hidden = np.asarray(jax.jit(functools.partial(encode, MODEL))(params, batch).hidden, np.float64)
    own = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["mlm"])
    hidden = hidden @ own["transform"]["kernel"] + own["transform"]["bias"]
    hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    hidden = (hidden - hidden.mean(-1, keepdims=True)) / np.sqrt(hidden.var(-1, keepdims=True) + 1e-12)
    hidden = hidden * own["norm"]["scale"] + own["norm"]["bias"]
    table = params["encoder"]["embeddings"]["word"]["embedding"]
    return (hidden @ table.T.astype(np.float64) + own["output_bias"])[..., :203]


def expected(logits, batch, pool=np.max, logs=1):
    vectors = np.zeros((*batch.cls_positions.shape, 203))
    for row, place in np.ndindex(batch.cls_positions.shape):
        inside = batch.sequence_ids[row] == place + 1
        if inside.any():
            weights = np.maximum(logits[row][inside], 0)
            for _ in range(logs):
                weights = np.log(1 + weights)
            vectors[row, place] = pool(weights, axis=0)
    return vectors


WHOLE, BLOCKS = 1 << 24, 4 * 32 * 32


@pytest.mark.parametrize(
    ("most", "pool", "logs", "settings"),
    [
        (WHOLE, np.max, 1, {}),
        (BLOCKS, np.max, 1, {}),
        (BLOCKS, np.max, 2, {"log_times": 2}),
        (BLOCKS, np.sum, 1, {"pooling": "sum"}),
    ],
)
def test_a_word_has_the_largest_of_its_logits_above_0(monkeypatch, params, batch, logits, most, pool, logs, settings):
    """Or the sum of its weights; also for some words at a time. Rows hold two texts."""
    monkeypatch.setattr(sparse, "_MOST_LOGITS", most)
    found = np.asarray(jax.jit(lambda *given: forward(MODEL, *given, head(**settings)))(params, batch))
    np.testing.assert_allclose(found, expected(logits, batch, pool, logs), atol=2e-5)
    assert not found[3, 1].any() and (found[0] == 0).any()


def weights_of_words(model, given, rows):
    """Returns the vectors of hidden states: of the head alone, whose derivatives compile in a part of the time."""
    encoded = SimpleNamespace(hidden=given["hidden"], word_table=given["table"][None])
    return sparse.WordWeights(model, head().settings).apply({"params": given["mlm"]}, encoded, rows)


def test_the_gradient_of_blocks_is_that_of_all_words_at_once(monkeypatch, params, batch):
    """And that of JAX's own rules."""
    wanted = RNG.normal(size=(4, 2, 203)).astype(np.float32)
    table = params["encoder"]["embeddings"]["word"]["embedding"]
    given = {"hidden": RNG.normal(size=(4, 32, 32)).astype(np.float32), "table": table, "mlm": params["mlm"]}

    def gradient(most, rules=contextlib.nullcontext):
        monkeypatch.setattr(sparse, "_MOST_LOGITS", most)
        with rules():
            return computed(jax.grad(lambda given: jnp.sum(weights_of_words(MODEL, given, batch) * wanted)), given)

    whole, blocks, plain = gradient(WHOLE), gradient(BLOCKS), gradient(BLOCKS, plain_derivatives)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(whole))
    for one, other, usual in zip(*map(jax.tree.leaves, (whole, blocks, plain))):
        np.testing.assert_allclose(other, one, atol=1e-6 * largest)
        np.testing.assert_allclose(usual, one, atol=1e-6 * largest)


def test_tokens_with_the_same_largest_logit_share_its_gradient():
    logits, ids = np.float32([[[1], [3], [3], [9], [2]]]), np.array([[1, 1, 1, 0, 2]])
    loss = lambda logits: jnp.sum(_largest(3, logits, ids) * np.float32([[[4], [5], [6]]]))  # noqa: E731
    gradient = computed(jax.grad(loss), logits)
    assert gradient.ravel().tolist() == [0, 2, 2, 0, 5]


def test_no_more_logits_are_held_than_those_of_a_block(monkeypatch):
    """In the memory of the compiled gradient."""
    model = tiny_model(vocab_size=8192)
    drawn = jax.eval_shape(lambda: drawn_params(model, "masked_lm"))
    hidden = jax.ShapeDtypeStruct((16, 64, 32), jnp.float32)
    shapes = {"hidden": hidden, "table": drawn["encoder"]["embeddings"]["word"]["embedding"], "mlm": drawn["mlm"]}
    rows = pad_rows(np.ones((16, 64), np.int32), 64)

    def temporary_bytes(most):
        monkeypatch.setattr(sparse, "_MOST_LOGITS", most)
        loss = lambda given, rows: jnp.sum(jnp.square(weights_of_words(model, given, rows)))  # noqa: E731
        compiled = jax.jit(jax.grad(loss)).lower(shapes, rows).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 4 * 16 * 64 * 8192
    assert temporary_bytes(16 * 64 * 512) < logits / 2 < logits < temporary_bytes(WHOLE)


# Losses

NUMBERS = np.array([[0, 1, 2], [3, 4, -1], [-1, -1, -1]])


def test_dot_products_are_compared_and_words_are_counted():
    vectors = np.maximum(np.random.default_rng(3).normal(size=(9, 1, 6)), 0).astype(np.float32)
    vectors[5:] = 0
    texts = Texts(np.arange(9, dtype=np.int32).reshape(3, 3), NUMBERS, np.zeros(3, np.float32))
    rows = pad_rows(np.ones((9, 3), np.int32), 3)._replace(labels=texts)
    weights = np.array([1, 1, 0], np.float32)
    found = jax.jit(lambda vectors: head(dot_temperature=2.0).losses(vectors, rows, weights))(vectors)
    v = vectors[:, 0].astype(np.float64)
    scores = np.array([[v[0] @ v[1], v[0] @ v[2], v[0] @ v[4]], [v[3] @ v[4], v[3] @ v[1], v[3] @ v[2]]]) / 2
    losses = np.log(np.exp(scores).sum(1)) - scores[:, 0]
    assert found["loss"] == pytest.approx((losses.sum(), 2), rel=1e-5)
    assert found["base_loss"] == found["loss"]
    passages, queries = v[[1, 2, 4]], v[[0, 3]]
    assert found["passage_flops"] == pytest.approx((np.square(passages.mean(0)).sum(), 1), rel=1e-5)
    assert found["query_flops"] == pytest.approx((np.square(queries.mean(0)).sum(), 1), rel=1e-5)
    few = min((row > 0).sum() for row in passages)
    left = np.where(((passages > 0).sum(1) > few)[:, None], passages, 0)
    assert 0 < left.any(1).sum() < 3
    least = jax.jit(lambda vectors: head(passage_least=int(few)).losses(vectors, rows, weights))(vectors)
    assert least["passage_flops"] == pytest.approx((np.square(left.mean(0)).sum(), 1), rel=1e-5)
    assert least["passage_terms"] == found["passage_terms"]
    assert found["passage_terms"] == ((passages > 0).sum(), 3) and found["query_terms"] == ((queries > 0).sum(), 2)


def test_flops_rise_by_the_square_over_a_third_of_the_steps():
    """floor(100 / 3) = 33 steps here."""
    own = head(passage_flops=0.2, query_flops=0.0)
    found = [float(own.further_losses(jnp.asarray(step), 100)["passage_flops"]) for step in (0, 11, 32, 33, 99)]
    assert found == pytest.approx([0, 0.2 / 9, 0.2 * (32 / 33) ** 2, 0.2, 0.2])
    assert float(own.further_losses(jnp.asarray(99), 300)["passage_flops"]) == pytest.approx(0.2 * 0.99**2)
    assert own.further_losses(jnp.asarray(0), 100).keys() == {"passage_flops"}
    assert head(query_table=True).further_losses(jnp.asarray(0), 100).keys() == {"passage_flops"}
    at_once = head(flops_rise=0.0).further_losses(jnp.asarray(1), 2)
    assert at_once == pytest.approx({"passage_flops": 3e-5, "query_flops": 5e-5})


def test_dot_products_of_candidates_are_as_a_teacher_says():
    """Several teachers say the mean of theirs."""
    rng = np.random.default_rng(1)
    student, *teachers = np.maximum(rng.normal(size=(3, 4, 1, 6)), 0).astype(np.float32)
    texts = Texts(np.arange(4, dtype=np.int32).reshape(2, 2), np.arange(4).reshape(2, 2), np.zeros(2, np.float32))
    rows = pad_rows(np.ones((4, 3), np.int32), 3)._replace(labels=texts)
    own = head(dot_temperature=2.0)
    apart = jax.jit(lambda *outputs: own.divergence(outputs[0], own.mean_of(outputs[1:]), rows, 1.0))(
        student, *teachers
    )

    def log_shares(vectors):
        scores = vectors[::2, 0] @ vectors[1::2, 0].T / 2
        return scores, scores - np.log(np.exp(scores).sum(1, keepdims=True))

    wanted = sum(log_shares(teacher.astype(np.float64))[0] for teacher in teachers) / 2
    wanted -= np.log(np.exp(wanted).sum(1, keepdims=True))
    said = log_shares(student.astype(np.float64))[1]
    np.testing.assert_allclose(apart, (np.exp(wanted) * (wanted - said)).sum(1), rtol=1e-4)


# Queries from a table


def test_queries_have_the_weights_of_their_words_in_a_table(params, batch):
    """Each word once, without [CLS] and [SEP] around the text; passages are as without a table."""
    queries = np.array([[True, False], [False, True], [False, False], [True, True]])
    own = head(query_table=True)
    run = jax.jit(lambda params, batch: forward(MODEL, params, batch, own))
    found, usual = run(params, batch._replace(queries=queries)), run(params, batch)
    weight = params["query_table"]["weight"]
    for row, place in np.ndindex(4, 2):
        if not queries[row, place]:
            np.testing.assert_array_equal(found[row, place], usual[row, place])
            continue
        words = batch.token_ids[row][batch.sequence_ids[row] == place + 1][1:-1]
        vector = np.zeros(203, np.float32)
        vector[words] = weight[words]
        np.testing.assert_array_equal(found[row, place], vector)


def test_terms_are_the_largest_weights():
    vector = np.array([0, 2, 0, 3, 2, -4, 0.5], np.float32)
    assert terms_of(vector).ids.tolist() == [3, 1, 4, 6, 5]
    assert [part.tolist() for part in terms_of(vector, 3)] == [[3, 1, 5], [3, 2, -4]]
    assert not len(terms_of(np.zeros(3, np.float32)).ids)
