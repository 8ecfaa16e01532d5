# SPDX-License-Identifier: Apache-2.0
"""A score for each pair of a query and a candidate, learnt from all candidates of a query (rerankers).

Source: Nogueira and Cho 2019 for a BERT that reranks. The losses name their own.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Array, Batch
from bert_jax.devices.sharding import constrain_rows
from bert_jax.errors import InputError
from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.heads.base import Head, Linear
from bert_jax.model.heads.labels import places_of_texts
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.model.inputs import check_shapes
from bert_jax.model.losses import Pair
from bert_jax.settings.finetuning import RankingConfig, TaskConfig


class Candidates(NamedTuple):
    """The labels of a batch: E queries with up to T candidates each."""

    # [E, T] int32: index of a candidate's score among those of all rows, row x M + place; beyond them if there is none
    places: Array
    grades: Array  # [E, T] float32: how well each fits, or a teacher's score
    there: Array  # [E, T] float32: 1 for a candidate, 0 where there is none


class Ranking(Linear):
    """A score for each candidate. The model is that of a regression, and is saved as one."""

    name = "ranking"
    saved_as = SEQUENCES.name
    parts = SEQUENCES.parts
    num_outputs = 1
    is_of_several = True
    needs_whole_batch = True
    can_learn = False  # a teacher's scores are in the data
    about_exported = SEQUENCES.about_exported
    architecture = SEQUENCES.architecture
    pipeline = SEQUENCES.pipeline

    def __init__(self, settings: RankingConfig = RankingConfig()) -> None:  # noqa: B008
        self.settings = settings

    def as_set(self, config: TaskConfig) -> Head:
        return Ranking(config.ranking) if config.ranking != RankingConfig() else RANKING

    def weights(self, batch: Batch) -> jax.Array:
        """Returns [E]: 1 for each query."""
        if not isinstance(batch.labels, Candidates):
            raise InputError("the batch has no candidates; give make_batch labels, and the head")
        return jnp.max(jnp.asarray(batch.labels.there), axis=1)

    def losses(self, logits: jax.Array, batch: Batch, weights: jax.Array) -> dict[str, Pair]:
        """Returns the loss of the settings, and how often the best candidate has the highest score."""
        places, grades, there = batch.labels
        check_shapes("losses", logits=(logits, "BM1"), weights=(weights, places.shape[:1]))
        flat = logits.reshape(-1)
        scores = constrain_rows(flat.at[places].get(mode="fill", fill_value=0, unique_indices=True))
        loss = LOSSES[self.settings.loss](scores, jnp.asarray(grades), jnp.asarray(there))
        counts = jnp.where(there > 0, scores, MASKED_SCORE)
        best = jnp.max(jnp.where(there > 0, grades, MASKED_SCORE), axis=1, keepdims=True)
        # a tie with a worse candidate is wrong
        right = jnp.max(jnp.where(grades == best, counts, MASKED_SCORE), axis=1)
        other = jnp.max(jnp.where(grades < best, counts, MASKED_SCORE), axis=1)
        total = jnp.sum(weights)
        return {
            "loss": (loss * total, total),
            "accuracy": (jnp.sum((right > other) * weights), total),
        }

    def labels_of_batch(
        self, bins: Sequence[Sequence[Any]], num_places: int, num_examples: int, length: int = 0
    ) -> Candidates:
        """Returns the labels of rows of one pair each: (T, its place among them, grade, unused)."""
        places, rows = places_of_texts(bins, num_places, num_examples)
        labels = Candidates(
            places, np.zeros(places.shape, np.float32), np.zeros(places.shape, np.float32)
        )
        for slot, row in rows:
            labels.grades[slot, row.label[1]] = row.label[2]
            labels.there[slot, row.label[1]] = 1
        return labels

    def constant(self, labels: Sequence[Any], num_outputs: int) -> np.ndarray:
        """Returns the score that makes all candidates equal."""
        return np.zeros(1, np.float32)

    def exported(self, logits: jax.Array) -> jax.Array:
        return logits[:, 0]


# Losses: scores, grades and there, all [E, T] -> the mean, a scalar


def _over(values: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the mean of the values that count; 0 of none."""
    return jnp.sum(values * counts) / jnp.maximum(jnp.sum(counts), 1)


def _mean_of_queries(losses: jax.Array, there: jax.Array) -> jax.Array:
    return _over(losses, jnp.max(there, axis=1))


def softmax(
    scores: jax.Array,
    grades: jax.Array,
    there: jax.Array,
) -> jax.Array:
    """Returns the cross entropy of the candidates of a query, whose grades are shares; it is 0 if all of them are."""
    log_shares = jax.nn.log_softmax(jnp.where(there > 0, scores, MASKED_SCORE), axis=1)
    target = grades * there
    target /= jnp.maximum(jnp.sum(target, axis=1, keepdims=True), 1e-9)
    return _mean_of_queries(-jnp.sum(target * log_shares * there, axis=1), there)


def listnet(
    scores: jax.Array,
    grades: jax.Array,
    there: jax.Array,
) -> jax.Array:
    """Returns the cross entropy with the softmax of the grades. Source: Cao et al. 2007, "ListNet"."""
    target = jax.nn.softmax(jnp.where(there > 0, grades, MASKED_SCORE), axis=1)
    log_shares = jax.nn.log_softmax(jnp.where(there > 0, scores, MASKED_SCORE), axis=1)
    return _mean_of_queries(-jnp.sum(target * log_shares * there, axis=1), there)


def ranknet(
    scores: jax.Array,
    grades: jax.Array,
    there: jax.Array,
) -> jax.Array:
    """Returns the mean over pairs of candidates, the first better: log(1 + exp(its score's lack)), in bits.

    Source: Burges et al. 2005.
    """
    better = (grades[:, :, None] > grades[:, None]) * there[:, :, None] * there[:, None]
    lack = scores[:, None] - scores[:, :, None]
    return _over(jax.nn.softplus(lack), better) / jnp.log(2.0)


def bce(
    scores: jax.Array,
    grades: jax.Array,
    there: jax.Array,
) -> jax.Array:
    """Returns the binary cross entropy of each candidate by itself, whose grade is from 0 to 1."""
    return _over(jax.nn.softplus(scores) - grades * scores, there)


def margin_mse(
    scores: jax.Array,
    grades: jax.Array,
    there: jax.Array,
) -> jax.Array:
    """Returns the squared error of how far the first candidate is above each other. Source: Hofstätter et al. 2020."""
    errors = (scores[:, :1] - scores[:, 1:]) - (grades[:, :1] - grades[:, 1:])
    return _over(jnp.square(errors), there[:, 1:])


def mse(
    scores: jax.Array,
    grades: jax.Array,
    there: jax.Array,
) -> jax.Array:
    """Returns the squared error of each score."""
    return _over(jnp.square(scores - grades), there)


LOSSES: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "softmax": softmax,
    "listnet": listnet,
    "ranknet": ranknet,
    "bce": bce,
    "margin_mse": margin_mse,
    "mse": mse,
}
RANKING = Ranking()
