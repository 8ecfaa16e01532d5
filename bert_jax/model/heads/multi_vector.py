# SPDX-License-Identifier: Apache-2.0
"""A vector for each token of a text, and scores that each token of a query takes from its nearest token of a passage.

Source: Khattab and Zaharia 2020, "ColBERT"; Santhanam et al. 2022, "ColBERTv2", for distillation.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import UNSCORED, Batch
from bert_jax.devices.sharding import num_row_shards
from bert_jax.errors import InputError
from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.bert import Encoded
from bert_jax.model.heads.base import Head, Model
from bert_jax.model.heads.embedding import (
    ACTIVATIONS,
    TAUGHT_LOSSES,
    Embeddings,
    Texts,
    divergence_of_candidates,
    info_nce,
    normalized,
    search_batch,
    vectors_of_examples,
)
from bert_jax.model.heads.labels import Spot, places_of_texts
from bert_jax.model.inputs import check_shapes
from bert_jax.model.losses import Pair
from bert_jax.model.parts import Dense
from bert_jax.model.product import widened
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.model import ModelConfig

_PLAIN = EmbeddingConfig(kind="multi_vector")
# of a model that is to be trained
USUAL = dataclasses.replace(_PLAIN, projection_size=128, projection_activation="none")
# products of two tokens that a device holds at once; on a CPU they stay in the caches, which is three times as fast
_MOST_PRODUCTS = 1 << 25
_MOST_ON_CPU = 1 << 20


class MultiVectors(Embeddings):
    """The vectors of the tokens of the last layer after a dense layer, of length 1."""

    name = "token_embeddings"
    about_exported = "vectors [B, L, K] of tokens."
    places = "ETS"

    def __init__(self, settings: EmbeddingConfig = _PLAIN, longest: int = 0) -> None:
        """Makes the head of texts of up to `longest` tokens; 0 is as many as a batch has."""
        super().__init__(settings)
        self.longest = longest

    def as_set(self, config: TaskConfig) -> Head:
        longest = max(config.max_seq_length, config.embedding.query_length)
        return MultiVectors(config.embedding, longest)

    def logits(
        self, model: Model, encoded: Encoded, batch: Batch, deterministic: bool
    ) -> jax.Array:
        """Returns float32 vectors [B, L, K]."""
        vectors = widened(encoded.hidden)
        settings = self.settings
        self._check_window(model.config)
        if settings.projection_size:
            size = settings.projection_size
            dense = Dense(model.config, size, "float32", has_bias=False, name="projection")
            vectors = ACTIVATIONS[settings.projection_activation](dense(encoded.hidden))
        return normalized(vectors) if settings.normalize else vectors

    def _check_window(self, config: ModelConfig) -> None:
        """Raises: InputError if what fills up a query may see no token of it in a layer with windows."""
        settings, most = self.settings, config.window + 2  # the shortest query is [CLS] [SEP]
        filled = settings.filled_length()
        if config.num_local and not settings.expansion_is_seen and filled > most:
            raise InputError(
                f"queries are filled up to {filled} tokens, and in layers that see {config.window} tokens to each side "
                f"the last may see none; set embedding.query_expansion to {most} at most, or expansion_is_seen"
            )

    def losses(self, logits: jax.Array, batch: Batch, weights: jax.Array) -> dict[str, Pair]:
        """Returns the cross entropy of an anchor's positive among the positives and hard negatives of the batch."""
        check_shapes(
            "losses", logits=(logits, "BLK"), weights=(weights, batch.labels.numbers.shape[:1])
        )
        if self.settings.loss in TAUGHT_LOSSES:
            return super().losses(logits, batch, weights)
        vectors = vectors_of_examples(logits, batch)
        return info_nce(self.settings, vectors, batch.labels, weights, self._compare)

    def scores(self, vectors: jax.Array) -> jax.Array:
        """Returns the scores [E, T - 1] of the passages of each example [E, T, S, K] for its query."""
        return jax.vmap(lambda texts: self._compare(texts[:1], texts[1:])[0])(vectors)

    def divergence(
        self, logits: jax.Array, teacher: jax.Array, batch: Batch, temperature: float
    ) -> jax.Array:
        """Returns [E] how far the softmax of scores over the candidates of an anchor is from a teacher's."""
        vectors = [vectors_of_examples(each, batch) for each in (logits, teacher)]
        apart = partial(divergence_of_candidates, temperature)
        return search_batch(self.settings, batch.labels, apart, *vectors, compare=self._compare)

    def _compare(self, queries: jax.Array, passages: jax.Array) -> jax.Array:
        # Places are of the longest texts, which queries are not.
        return maxsim(queries[:, : self.settings.query_length], passages)

    def mean_of(self, outputs: Sequence[jax.Array]) -> jax.Array:
        """Returns the vectors of a teacher. Raises: InputError if there are several: scores have no mean in vectors."""
        if len(outputs) > 1:
            raise InputError(
                f"vectors of tokens are learnt from one teacher, and there are {len(outputs)}; give one of them"
            )
        return outputs[0]

    def labels_of_batch(
        self, bins: Sequence[Sequence[Any]], num_places: int, num_examples: int, length: int = 0
    ) -> Texts:
        """Returns the labels of rows of one text each, with the places of those of their tokens that count."""
        texts = super().labels_of_batch(bins, num_places, num_examples)
        size = min(length, self.longest or length)
        shape = (*texts.numbers.shape, size)
        # Places that are in no row, each once.
        places = len(bins) * length + (1 << 30) + np.arange(np.prod(shape), dtype=np.int32)
        places = places.reshape(shape)
        slots = iter(places_of_texts(bins, num_places, num_examples)[1])
        for line, rows in enumerate(bins):
            start = line * length
            for row, (slot, _) in zip(rows, slots):
                marks = np.zeros_like(row.type_ids) if row.marks is None else row.marks
                scored = start + np.flatnonzero(marks & UNSCORED == 0)
                places[slot, row.label[1], : len(scored)] = scored
                start += len(marks)
        return texts._replace(places=places)

    def outputs(self, outputs: np.ndarray, spot: Spot) -> np.ndarray:
        return outputs[spot.tokens]

    def exported(self, logits: jax.Array) -> jax.Array:
        return logits


MULTI_VECTORS = MultiVectors()


def maxsim(queries: jax.Array, passages: jax.Array) -> jax.Array:
    """Returns the scores [Q, C] of queries [Q, S, K] with passages [C, T, K]; a vector of zeros is no token.

    A score is the sum over the tokens of the query of the largest product with a token of the passage, or -1e9 of a
    passage without tokens. All products of a few passages are held at once, also in the backward pass.
    """
    count = passages.shape[0]
    rows = -(-queries.shape[0] // num_row_shards())
    asks = jnp.any(queries != 0, axis=-1)  # [Q, S]

    def of_some(some: jax.Array) -> jax.Array:
        there = jnp.any(some != 0, axis=-1)  # [c, T]
        products = jnp.einsum("QSK,CTK->QSCT", queries, some, precision="highest")
        best = jnp.max(jnp.where(there, products, MASKED_SCORE), axis=-1)  # [Q, S, c]
        total = jnp.sum(jnp.where(asks[..., None], best, 0), axis=1)
        return jnp.where(jnp.any(there, axis=-1), total, MASKED_SCORE)

    of_each = rows * queries.shape[1] * passages.shape[1]
    most = _MOST_ON_CPU if jax.default_backend() == "cpu" else _MOST_PRODUCTS
    blocks = next(
        each
        for each in range(1, count + 1)
        if not count % each and (count // each * of_each <= most or each == count)
    )
    if blocks == 1:
        return of_some(passages)
    pieces = passages.reshape(blocks, count // blocks, *passages.shape[1:])
    scores = jax.lax.map(jax.checkpoint(of_some), pieces)  # [blocks, Q, c]
    return jnp.moveaxis(scores, 0, 1).reshape(queries.shape[0], count)
