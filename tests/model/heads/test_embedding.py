# SPDX-License-Identifier: Apache-2.0
"""Losses of vectors of texts against plain numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import computed

from bert_jax.batch import Batch
from bert_jax.errors import InputError
from bert_jax.model.heads import embedding
from bert_jax.model.heads.embedding import EMBEDDINGS, LOSSES, Texts
from bert_jax.settings.finetuning import POOLINGS, EmbeddingConfig, TaskConfig

RNG = np.random.default_rng(0)
# Six examples of an anchor, a positive and two hard negatives, of which some are missing, and an empty place.
NUMBERS = np.array(
    [
        [0, 1, 2, -1],
        [3, 4, 5, 6],
        [0, 7, -1, -1],  # the anchor of the first: its positive is not a negative there
        [8, 4, 9, -1],  # the positive of the second
        [1, 10, 4, -1],  # its anchor is the positive of the first, its hard negative that of the second
        [-1, -1, -1, -1],
    ]
)
SCORES = np.array([0.2, 1.0, 0.5, 0.5, 0.0, 0.0], np.float32)
VECTORS = RNG.normal(size=(6, 4, 8)).astype(np.float32)
WEIGHTS = np.array([1, 1, 1, 1, 1, 0], np.float32)
TEXTS = Texts(np.zeros_like(NUMBERS), NUMBERS, SCORES)


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def loss_of(name, vectors=VECTORS, **settings):
    found = computed(lambda vectors: LOSSES[name](EmbeddingConfig(**settings), vectors, TEXTS, WEIGHTS), vectors)
    return {key: (float(total), float(weight)) for key, (total, weight) in found.items()}


def log_softmax(scores):
    shifted = np.array(scores) - max(scores)
    return shifted - np.log(np.exp(shifted).sum())


def expected_info_nce(vectors, temperature):
    vectors, losses, right = unit(vectors).astype(np.float64), [], []
    for i in range(5):
        own = vectors[i, 0] @ vectors[i, 1] / temperature
        others = []
        for j in range(5):
            for place in (1, 2, 3):
                text = NUMBERS[j, place]
                is_own = (i, 1) == (j, place)
                is_same = text in (NUMBERS[i, 0], NUMBERS[i, 1]) or (place == 1 and NUMBERS[j, 0] == NUMBERS[i, 0])
                if text >= 0 and not is_own and not is_same:
                    others.append(vectors[i, 0] @ vectors[j, place] / temperature)
        losses.append(np.log(np.exp(own) + np.exp(others).sum()) - own)
        right.append(own > max(others))
    return sum(losses), sum(right)


TAUGHT = np.random.default_rng(9).normal(size=(6, 3)).astype(np.float32) * 3


def taught_losses(vectors, name):
    """Returns the loss of four examples with a hard negative or more, for margins, or of five."""
    losses = []
    for own, numbers, taught in zip(vectors.astype(np.float64), NUMBERS[:5], TAUGHT):
        there = numbers[1:] >= 0
        scores, taught = (own[1:] @ own[0])[there], taught[there]
        if name == "margin_mse":
            losses += [((scores[0] - scores[n]) - (taught[0] - taught[n])) ** 2 for n in range(1, len(scores))]
        else:
            target = log_softmax(taught)
            losses.append(np.sum(np.exp(target) * (target - log_softmax(scores / 0.7))))
    return np.mean(losses)


@pytest.mark.parametrize("name", ["margin_mse", "kl"])
def test_scores_of_a_teacher(name):
    head = EMBEDDINGS.as_set(TaskConfig(embedding=EmbeddingConfig(loss=name, temperature=0.7)))
    places = np.arange(24, dtype=np.int32).reshape(6, 4)
    batch = type("B", (), {"labels": Texts(places, NUMBERS, SCORES, TAUGHT)})()
    total, weight = jax.jit(lambda vectors: head.losses(vectors, batch, WEIGHTS)["loss"])(VECTORS)
    there = np.where(NUMBERS[..., None] >= 0, VECTORS, 0)
    assert float(total / weight) == pytest.approx(taught_losses(there, name), rel=1e-5)
    batch.labels = batch.labels._replace(taught=None)
    with pytest.raises(InputError, match=f"embedding.loss {name} needs a teacher's scores"):
        jax.eval_shape(lambda vectors: head.losses(vectors, batch, WEIGHTS), VECTORS)


def expected_gist(vectors, guide, temperature, margin):
    """Returns the sum of the losses of five anchors, told from passages, anchors and other positives."""
    vectors, guide, total = unit(vectors).astype(np.float64), unit(guide).astype(np.float64), 0.0
    for i in range(5):
        own, limit = vectors[i, 0] @ vectors[i, 1] / temperature, guide[i, 0] @ guide[i, 1] - margin
        others = [own]
        for query, place in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 1)):
            for j in range(5):
                text, left = NUMBERS[j, place], NUMBERS[i, :2]
                of_equal = place == 1 and NUMBERS[j, 0] == NUMBERS[i, 0]
                if text >= 0 and text not in left and not of_equal and guide[i, query] @ guide[j, place] <= limit:
                    others.append(vectors[i, query] @ vectors[j, place] / temperature)
        total += np.log(np.exp(others).sum()) - own
    return total


@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_a_guide_leaves_out_what_it_finds_too_near(margin):
    settings = EmbeddingConfig(loss="gist", temperature=0.2, guide_margin=margin)
    guide = np.random.default_rng(1).normal(size=(6, 4, 5)).astype(np.float32)
    both = settings, EmbeddingConfig(guide_margin=2.0)
    found, alone = computed(
        lambda vectors: [embedding.gist(each, guide, vectors, TEXTS, WEIGHTS) for each in both], VECTORS
    )
    loss, weight = found["loss"]
    assert float(weight) == 5 and float(loss) == pytest.approx(expected_gist(VECTORS, guide, 0.2, margin), rel=1e-5)
    # a margin beyond all cosines leaves nothing: the positive is alone
    assert float(alone["loss"][0]) == 0 and float(alone["accuracy"][0]) == 5


@pytest.mark.parametrize("most", [1 << 25, 18])
def test_the_positive_is_found_among_the_texts_of_the_batch_that_are_other_texts(monkeypatch, most):
    monkeypatch.setattr(embedding, "_MOST_COSINES", most)
    loss, right = expected_info_nce(VECTORS, 0.1)
    assert loss_of("infonce", temperature=0.1) == {"loss": pytest.approx((loss, 5)), "accuracy": (right, 5)}


def test_both_directions_are_half_of_each():
    vectors = unit(VECTORS).astype(np.float64)
    back = 0.0
    for i in range(5):
        cosines = vectors[:5, 0] @ vectors[i, 1] / 0.1
        others = [
            cosines[j]
            for j in range(5)
            if j != i and NUMBERS[j, 0] not in (NUMBERS[i, 0], NUMBERS[i, 1]) and NUMBERS[j, 1] != NUMBERS[i, 1]
        ]
        back += np.log(np.exp(cosines[i]) + np.exp(others).sum()) - cosines[i]
    found = loss_of("infonce", temperature=0.1, both_directions=True)["loss"]
    assert found == pytest.approx(((back + expected_info_nce(VECTORS, 0.1)[0]) / 2, 5))


def test_pairs_with_more_are_to_be_nearer():
    first, second = unit(VECTORS[:5, 0].astype(np.float64)), unit(VECTORS[:5, 1].astype(np.float64))
    cosines = np.sum(first * second, axis=1)
    terms = [np.exp((cosines[j] - cosines[i]) / 0.1) for i in range(5) for j in range(5) if SCORES[i] > SCORES[j]]
    assert loss_of("cosent", temperature=0.1)["loss"] == pytest.approx((5 * np.log(1 + sum(terms)), 5), rel=1e-5)
    errors = (cosines - SCORES[:5] / 2) ** 2
    assert loss_of("cosine", best_score=2.0)["loss"] == pytest.approx((errors.sum(), 5), rel=1e-5)


def test_a_positive_is_to_be_nearer_than_hard_negatives_by_a_margin():
    vectors, total = VECTORS.astype(np.float64), 0.0
    for i in range(5):
        far = np.linalg.norm(vectors[i, :1] - vectors[i, 1:], axis=-1)
        terms = [max(0, far[0] - far[k - 1] + 0.5) for k in (2, 3) if NUMBERS[i, k] >= 0]
        total += np.mean(terms) if terms else 0.0
    assert loss_of("triplet", margin=0.5)["loss"] == pytest.approx((total, 5), rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_finite_and_that_of_differences(name):
    """Also where the anchor is its positive, as in a batch of plain texts."""
    vectors = VECTORS.copy()
    vectors[1, 1] = vectors[1, 0]
    loss = jax.jit(jax.value_and_grad(lambda v: LOSSES[name](EmbeddingConfig(), v, TEXTS, WEIGHTS)["loss"][0]))
    gradient = np.asarray(loss(vectors)[1])
    assert np.isfinite(gradient).all() and not gradient[5].any() and gradient[:5].any()
    step = np.zeros_like(vectors)
    step[0, 0, 3] = 1e-2
    change = (float(loss(vectors + step)[0]) - float(loss(vectors - step)[0])) / 2e-2
    assert gradient[0, 0, 3] == pytest.approx(change, rel=2e-2, abs=2e-3)


# A teacher

WANTED = RNG.normal(size=(6, 4, 12)).astype(np.float32)  # vectors of another size


def divergence_of(outputs, teacher, softened=1.0, **settings):
    """Returns how far vectors are from a teacher's, those of each text in a row of its own, [6]."""
    labels = Texts(np.arange(24, dtype=np.int32).reshape(6, 4), NUMBERS, SCORES)
    head = EMBEDDINGS.as_set(TaskConfig(embedding=EmbeddingConfig(**settings)))
    rows = [each.reshape(24, 1, -1) for each in (outputs, teacher)]
    return jax.jit(lambda *rows: head.divergence(*rows, Batch(*[None] * 5)._replace(labels=labels), softened))(*rows)


def expected_divergence(outputs, teacher, temperature):
    """Returns how far the candidates' probabilities of the five anchors are from a teacher's."""
    found = []
    for i in range(5):
        pair = []
        for vectors in (unit(outputs.astype(np.float64)), unit(teacher.astype(np.float64))):
            scores = [vectors[i, 0] @ vectors[i, 1] / temperature]
            for j in range(5):
                for place in (1, 2, 3):
                    text = NUMBERS[j, place]
                    is_same = text in (NUMBERS[i, 0], NUMBERS[i, 1]) or (place == 1 and NUMBERS[j, 0] == NUMBERS[i, 0])
                    if text >= 0 and not is_same:
                        scores.append(vectors[i, 0] @ vectors[j, place] / temperature)
            pair.append(log_softmax(scores))
        said, wanted = pair
        found.append(np.sum(np.exp(wanted) * (wanted - said)))
    return found


@pytest.mark.parametrize("most", [1 << 25, 36])
def test_candidates_are_as_probable_as_a_teacher_says(monkeypatch, most):
    monkeypatch.setattr(embedding, "_MOST_COSINES", most)
    found = np.asarray(divergence_of(VECTORS, WANTED, 2.0, temperature=0.1))
    expected = expected_divergence(VECTORS, WANTED, 0.2)
    np.testing.assert_allclose(found[:5], expected, rtol=1e-4)
    assert np.isfinite(found[5])  # an empty place; its weight is 0
    short = np.asarray(divergence_of(VECTORS, WANTED, 2.0, temperature=0.1, dimensions="8,3"))
    both = found[:5] + expected_divergence(VECTORS[..., :3], WANTED, 0.2)
    np.testing.assert_allclose(short[:5], both, rtol=1e-4)


@pytest.mark.parametrize("loss", ["cosent", "cosine", "triplet"])
def test_cosines_are_as_large_as_a_teacher_says(loss):
    cosines = [np.sum(each[:, :1] * each[:, 1:], axis=-1) for each in (unit(VECTORS), unit(WANTED))]
    there = NUMBERS[:, 1:] >= 0
    expected = (np.square((cosines[0] - cosines[1]) / 2) * there).sum(1) / np.maximum(there.sum(1), 1)
    np.testing.assert_allclose(divergence_of(VECTORS, WANTED, 2.0, loss=loss), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"both_directions": True}, {"loss": "cosent"}, {"loss": "triplet"}])
def test_who_says_what_the_teacher_says_learns_nothing(settings):

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient_of(vectors, teacher):
        apart = divergence_of(vectors, teacher, **settings)
        return jnp.sum(apart * WEIGHTS), apart

    gradient, apart = jax.device_get(gradient_of(VECTORS, 3 * np.pad(VECTORS, ((0, 0), (0, 0), (0, 4)))))
    assert np.abs(apart[:5]).max() < 1e-5
    assert np.isfinite(gradient).all() and np.abs(gradient).max() < 1e-4
    other = gradient_of(VECTORS, WANTED)[0]
    assert np.isfinite(other).all() and np.abs(other).max() > 1e-2


def test_several_teachers_say_the_mean_of_their_cosines():
    both = computed(lambda *vectors: EMBEDDINGS.mean_of(vectors), VECTORS, WANTED)
    cosines = [np.einsum("EK,CK->EC", each[:, 0], each[:, 1]) for each in map(unit, (VECTORS, WANTED, both))]
    np.testing.assert_allclose(cosines[2], (cosines[0] + cosines[1]) / 2, atol=1e-6)


@pytest.mark.parametrize("name", POOLINGS)
def test_each_text_of_a_row_is_pooled_alone(name):
    ids = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 0, 0]], np.int32)
    first, hidden = np.array([[0, 3, 0], [0, 1, 0]]), RNG.normal(size=(2, 7, 4)).astype(np.float32)
    of_text = {
        "mean": lambda tokens: tokens.mean(0),
        "cls": lambda tokens: tokens[0],
        "last": lambda tokens: tokens[-1],
        "max": lambda tokens: tokens.max(0),
        "sqrt": lambda tokens: tokens.sum(0) / np.sqrt(len(tokens)),
        "weighted": lambda tokens: np.arange(1, len(tokens) + 1) @ tokens / np.arange(1, len(tokens) + 1).sum(),
    }[name]
    expected = [[of_text(hidden[row][ids[row] == number]) for number in (1, 2)] for row in range(2)]
    batch = Batch(ids, ids, ids, first, np.ones_like(first))

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient_of(hidden):
        pooled = embedding._pooled(name, hidden, batch, "highest")
        return jnp.sum(pooled[:, :2] ** 2), pooled

    gradient, found = jax.device_get(gradient_of(hidden))
    np.testing.assert_allclose(found[:, :2], expected, atol=1e-6)
    if name not in ("cls", "last"):  # whose empty places have some token's vector
        assert not np.any(found[:, 2])
    assert np.isfinite(gradient).all() and not np.any(gradient[ids == 0])
