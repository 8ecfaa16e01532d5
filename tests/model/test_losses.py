# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import computed

from bert_jax.errors import InputError
from bert_jax.model.losses import accuracy, cross_entropy, mean_metrics, squared_error


def test_cross_entropy_is_a_weighted_sum():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(3, 4, 7)).astype(np.float32), rng.integers(0, 7, (3, 4))
    weights = rng.integers(0, 2, (3, 4)).astype(np.float32)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -(np.log(np.take_along_axis(probabilities, labels[..., None], -1))[..., 0] * weights).sum()
    total, weight = jax.jit(cross_entropy)(logits, labels, weights)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert weight == weights.sum()


def test_label_0_counts_like_any_other():
    total, weight = jax.jit(cross_entropy)(np.zeros((1, 2), np.float32), np.array([0]), np.ones(1))
    np.testing.assert_allclose(total, np.log(2), rtol=1e-6)
    assert weight == 1


def test_large_logits_stay_finite_and_bfloat16_is_summed_in_float32():
    total, _ = computed(cross_entropy, np.array([[1e4, -1e9]], jnp.bfloat16), np.array([0]), np.ones(1))
    assert total.dtype == jnp.float32 and float(total) == 0.0


def test_squared_error_and_the_means_of_sums():
    given = np.array([1.0, 2.0, 5.0]), np.array([0.0, 4.0, 5.5]), np.array([1, 0.5, 0])
    total, weight = computed(squared_error, *given)
    assert (float(total), float(weight)) == (3.0, 1.5)
    assert mean_metrics({"loss": (total, weight), "none": (0.0, 0.0)}) == {"loss": 2.0, "none": 0.0}


@pytest.mark.parametrize(
    ("labels", "weights", "message"),
    [
        (None, np.ones(2), "no labels or no weights"),
        (np.zeros(2, int), None, "no labels or no weights"),
        (np.zeros(2), np.ones(2), "labels are float64, and a class is a whole number"),
        (np.zeros(1, int), np.ones(2), "labels"),
        (np.zeros(2, int), np.ones((2, 1)), "weights"),
    ],
)
def test_every_row_needs_a_class_and_a_weight(labels, weights, message):
    with pytest.raises(InputError, match=message):
        cross_entropy(np.zeros((2, 3)), labels, weights)


def test_accuracy():
    logits = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    hits, weight = computed(accuracy, logits, np.array([1, 1, 1]), np.array([1, 1, 0.0]))
    assert (float(hits), float(weight)) == (1.0, 2.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tie_is_wrong(dtype):
    """A model that says the same of everything knows nothing; nor does one that is not a number."""
    logits = np.array([[0.5, 0.5, 0.5], [2.0, 2.0, -1.0], [2.0, 1.0, 1.0], [np.nan] * 3, [3.0, 3.0, 3.5]])
    hits, weight = computed(accuracy, logits.astype(dtype), np.array([0, 1, 0, 0, 2]), np.ones(5))
    assert (float(hits), float(weight)) == (2.0, 5.0)
