# SPDX-License-Identifier: Apache-2.0
"""Sparse vectors of texts: a weight for each word of the vocabulary, 0 for most, from a masked language model.

Source: Formal et al. 2021, "SPLADE v2", sections 2 and 3; Paria et al. 2020 for the regularizer FLOPS; Geng et al. 2024
for queries from a table, with log(1 + x) taken twice.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from bert_jax.batch import Batch
from bert_jax.devices.sharding import constrain_rows
from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.bert import Encoded
from bert_jax.model.derivatives import with_rule
from bert_jax.model.heads.base import Head, Model
from bert_jax.model.heads.embedding import Embeddings, vectors_of_examples
from bert_jax.model.heads.labels import Spot
from bert_jax.model.heads.pretraining import against_words, own_words, transformed
from bert_jax.model.losses import Pair
from bert_jax.model.sequences import in_sequences, last_positions
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.model import ModelConfig

_USUAL = EmbeddingConfig(kind="sparse")
_MOST_LOGITS = 1 << 24  # that a device holds at once, of all tokens and some words
_Run = tuple[jax.Array, jax.Array]  # whether a sequence begins, the largest logits since
QUERY_TABLE = "query_table"  # the part of a table's weights, {"weight": [V]}


class Terms(NamedTuple):
    """The words of a text, largest weight first. Arrays are on the host."""

    ids: np.ndarray  # [n] int32
    weights: np.ndarray  # [n] float32


class SparseEmbeddings(Embeddings):
    """Weights of words: the largest logit that a word has at any token, above 0, on a scale of log(1 + x)."""

    name = "sparse_embedding"
    about_exported = "vectors [B, V] of texts: a weight for each word of the vocabulary."
    architecture = ""  # transformers has its parts as a masked language model
    pipeline = "feature-extraction"

    def __init__(self, settings: EmbeddingConfig = _USUAL) -> None:
        super().__init__(settings)
        self.knows_queries = settings.query_table
        self.parts = ("mlm", QUERY_TABLE) if settings.query_table else ("mlm",)

    def as_set(self, config: TaskConfig) -> Head:
        return SparseEmbeddings(config.embedding)

    def logits(
        self,
        model: Model,
        encoded: Encoded,
        batch: Batch,
        deterministic: bool,
    ) -> jax.Array:
        """Returns float32 vectors [B, M, V]."""
        config = model.config
        vectors = WordWeights(config, self.settings, name="mlm")(encoded, batch)
        if self.settings.query_table:
            weight = QueryTable(config.vocab_size, name=QUERY_TABLE)()
            if batch.queries is not None:
                of_table = words_of_texts(batch, config.vocab_size) * weight[None, None]
                vectors = jnp.where(batch.queries[..., None], of_table, vectors)
        return constrain_rows(vectors)

    def losses(
        self,
        logits: jax.Array,
        batch: Batch,
        weights: jax.Array,
    ) -> dict[str, Pair]:
        """Returns the loss of `Embeddings`, and of passages and queries FLOPS and how many words a text has.

        FLOPS is the sum over words of the square of their mean weight. Passages are positives and hard negatives.
        Source: Paria et al. 2020; Geng et al. 2025 for texts of few words, which do not count.
        """
        metrics = super().losses(logits, batch, weights)
        metrics["base_loss"], settings = metrics["loss"], self.settings
        vectors = vectors_of_examples(logits, batch)
        there = batch.labels.numbers >= 0
        columns = {
            "passage": slice(1, None),
            "query": slice(0, 1),
        }
        for kind, column in columns.items():
            # places without a text have zeros
            texts = vectors[:, column]
            number = jnp.sum(there[:, column], dtype=jnp.float32)
            number = jnp.maximum(number, 1)
            active = jnp.sum(texts != 0, dtype=jnp.float32)
            if least := {"passage": settings.passage_least, "query": settings.query_least}[kind]:
                words = jnp.sum(texts != 0, axis=-1, keepdims=True)
                texts = jnp.where(words > least, texts, 0)
            mean = jnp.sum(texts, axis=(0, 1)) / number
            metrics[f"{kind}_flops"] = jnp.sum(jnp.square(mean)), jnp.ones(())
            metrics[f"{kind}_terms"] = active, number
        return metrics

    def further_losses(self, step: jax.Array, num_steps: int) -> dict[str, jax.Array]:
        """Returns what FLOPS is worth: it rises by the square, so that words are found before they are counted."""
        settings = self.settings
        # a third, in twelve digits, of 300 steps is 100 of them
        rise = max(1, math.floor(num_steps * settings.flops_rise + 1e-6))
        share = jnp.square(jnp.minimum(step / rise, 1.0))
        worth = {"passage_flops": settings.passage_flops}
        if not settings.query_table:
            worth["query_flops"] = settings.query_flops
        return {name: most * share for name, most in worth.items() if most}

    def mean_of(self, outputs: Sequence[jax.Array]) -> jax.Array:
        """Returns vectors whose dot products are the mean of those of several models."""
        return jnp.concatenate(outputs, axis=-1) / math.sqrt(len(outputs))

    def outputs(self, outputs: np.ndarray, spot: Spot) -> Terms:  # type: ignore[override]
        """Returns the words of a text."""
        return terms_of(outputs[spot.places.start], self.settings.max_terms)


SPARSE = SparseEmbeddings()


class WordWeights(nn.Module):
    """The weights of words, by the parameters of `MaskedLanguageModel`, which has the same names."""

    config: ModelConfig
    settings: EmbeddingConfig

    @nn.compact
    def __call__(self, encoded: Encoded, batch: Batch) -> jax.Array:
        """Returns [B, M, V] float32; 0 where there is no sequence.

        Logits of all tokens [B, L] and all words are too many to hold, so they are made for some words at a time, and
        again in the backward pass.
        """
        config = self.config
        hidden = transformed(config, encoded.hidden)
        table, bias = own_words(self, config, hidden.shape[0], encoded.word_table)
        copies, size, width = table.shape
        ids = jnp.asarray(batch.sequence_ids, jnp.int32)
        num_places = batch.cls_positions.shape[1]

        def of_words(
            hidden: jax.Array,
            table: jax.Array,
            bias: jax.Array,
        ) -> jax.Array:
            hidden = hidden.astype(config.compute_dtype)
            logits = against_words(config, hidden, table)
            if self.settings.poolings() == ["sum"]:
                inside = jax.nn.one_hot(ids - 1, num_places)
                weights = self.scaled(logits + bias[None, None])
                return jnp.einsum(
                    "BLM,BLV->BMV",
                    inside,
                    weights,
                    precision="highest",
                )
            # The weight grows with the logit, so it is taken of the largest one alone.
            return self.scaled(_largest(num_places, logits, ids) + bias[None, None])

        tokens = hidden.shape[0] * hidden.shape[1] // copies
        count = next(
            count
            for count in range(1, size + 1)
            if not size % count and (tokens * size <= _MOST_LOGITS * count or count == size)
        )
        if count == 1:
            vectors = of_words(hidden, table, bias)
        else:
            # A block has every `count`th word, so that each device keeps its own where they are divided.
            tables = jnp.moveaxis(table.reshape(copies, -1, count, width), 2, 0)
            biases = bias.reshape(-1, count).T
            # its gradient is a sum over blocks, in float32
            wide = hidden.astype(config.wide_dtype)
            blocks = jax.lax.map(
                lambda block: jax.checkpoint(of_words)(wide, *block), (tables, biases)
            )
            vectors = jnp.moveaxis(blocks, 0, -1).reshape(*blocks.shape[1:3], size)
        return vectors[..., : config.vocab_size]

    def scaled(self, logits: jax.Array) -> jax.Array:
        """Returns the weights of logits."""
        weights = jnp.log1p(jax.nn.relu(logits))
        return weights if self.settings.log_times == 1 else jnp.log1p(weights)


class QueryTable(nn.Module):
    """The weight of each word in a query; 1 before training."""

    vocab_size: int

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param(
            "weight",
            nn.initializers.ones,
            (self.vocab_size,),
            jnp.float32,
        )


def _largest_forward(
    num_places: int,
    logits: jax.Array,
    ids: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    top = _largest(num_places, logits, ids)
    return top, (logits, ids, top)


def _largest_backward(
    num_places: int,
    saved: tuple[jax.Array, ...],
    gradient: jax.Array,
) -> tuple[jax.Array, np.ndarray]:
    """Tokens that share the largest logit share its gradient.

    JAX's own rule keeps the steps of the running maximum; this one keeps the logits and the result.
    """
    logits, ids, top = saved
    own = jnp.maximum(ids, 1)[..., None] - 1  # the place of each token
    is_top = logits == jnp.take_along_axis(top, own, axis=1)
    is_top &= (ids > 0)[..., None]
    inside = jax.nn.one_hot(ids - 1, num_places, dtype=gradient.dtype)  # padding has none
    counts = jnp.einsum("BLM,BLV->BMV", inside, is_top.astype(gradient.dtype))
    shares = gradient / jnp.maximum(counts, 1)
    of_tokens = jnp.take_along_axis(shares, own, axis=1)
    of_ids = np.zeros(ids.shape, jax.dtypes.float0)
    return jnp.where(is_top, of_tokens, 0), of_ids


@with_rule(_largest_forward, _largest_backward, static=1)
def _largest(num_places: int, logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the largest logits [B, M, V] of each sequence, of logits [B, L, V] and sequence ids [B, L] int32."""
    inside = in_sequences(ids, num_places)
    if num_places == 1:
        return jnp.max(jnp.where(inside[:, 0, :, None], logits, MASKED_SCORE), axis=1)[:, None]
    # A maximum that runs over the tokens of a row and begins anew with each sequence: the passes over the logits do
    # not grow with the number of sequences.
    begins = jnp.diff(ids, axis=1, prepend=0)[..., None] != 0

    def later(before: _Run, after: _Run) -> _Run:
        (began, largest), (begin, logits) = before, after
        return began | begin, jnp.where(begin, logits, jnp.maximum(largest, logits))

    _, running = jax.lax.associative_scan(later, (begins, logits), axis=1)
    last = jnp.max(jnp.where(inside, jnp.arange(ids.shape[1]), 0), axis=2)
    largest = jnp.take_along_axis(running, last[..., None], axis=1)
    return jnp.where(jnp.any(inside, axis=2)[..., None], largest, MASKED_SCORE)


def words_of_texts(batch: Batch, vocab_size: int) -> jax.Array:
    """Returns [B, M, V] float32: 1 for each word of a sequence, without [CLS] and [SEP] around it."""
    ids = batch.sequence_ids
    first = jnp.asarray(batch.cls_positions, jnp.int32)
    num_rows, num_places = first.shape
    rows = jnp.arange(num_rows)[:, None]
    places = jnp.asarray(ids, jnp.int32)
    # place 0, which is dropped, takes padding and the special tokens
    for special in (first, last_positions(ids, first)):
        places = places.at[rows, special].set(0)
    words = jnp.asarray(batch.token_ids, jnp.int32)
    found = jnp.zeros((num_rows, num_places + 1, vocab_size), jnp.float32)
    found = found.at[rows, places, words].max(1.0)
    return found[:, 1:]


def terms_of(vector: np.ndarray, most: int = 0) -> Terms:
    """Returns the words of a vector [V], at most so many if `most` is not 0; of equal weights the first."""
    ids = np.flatnonzero(vector)
    weights = np.asarray(vector[ids], np.float32)
    order = np.arange(len(ids))
    if most:  # by their size, since a table may have weights below 0
        order = np.argsort(-np.abs(weights), kind="stable")[:most]
    order = order[np.argsort(-weights[order], kind="stable")]
    return Terms(
        ids=ids[order].astype(np.int32),
        weights=weights[order],
    )
