# SPDX-License-Identifier: Apache-2.0
"""Heads of the three usual kinds, made from a function of the encoder's outputs: of texts, of tokens, of a batch."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from bert_jax.batch import Batch, Encoded
from bert_jax.errors import InputError
from bert_jax.model.heads.base import Head, Linear, Model
from bert_jax.model.heads.embedding import Embeddings, Texts, vectors_of_examples
from bert_jax.model.heads.tokens import Tokens
from bert_jax.model.losses import Pair
from bert_jax.settings.finetuning import TaskConfig

Vectors: TypeAlias = Callable[[Encoded, Batch], jax.Array]


class TextHead(Linear):
    """A class for each text, or a number: dropout and a dense layer on a vector of your own."""

    parts = ("classifier",)

    def __init__(self, name: str, vectors: Vectors) -> None:
        """Makes the head.

        Args:
          name: in saved models.
          vectors: function of (encoded, batch) that returns [B, M, F], a vector for each of the sequences in each row,
            from `encoded.hidden`.
        """
        self.name = name
        self.vectors = vectors

    def features(self, encoded: Encoded, batch: Batch) -> jax.Array:
        return self.vectors(encoded, batch)

    def exported(self, logits: jax.Array) -> jax.Array:
        return logits[:, 0]


class TokenHead(Tokens):
    """A class for each token: dropout and a dense layer on a vector of your own."""

    architecture = pipeline = ""  # Hugging Face has no such model
    of_tokens = False  # no pooler, in no family

    def __init__(self, name: str, vectors: Vectors) -> None:
        """Makes the head; `vectors` returns [B, L, F], a vector for each token, as in `TextHead`."""
        self.name = name
        self.vectors = vectors

    def features(self, encoded: Encoded, batch: Batch) -> jax.Array:
        return self.vectors(encoded, batch)


class BatchHead(Embeddings):
    """A vector for each text, and a loss of your own over the texts of the whole batch.

    Of the settings `task.embedding` the prompts alone have a meaning: vectors and loss are your functions'.
    """

    architecture = pipeline = ""
    can_learn = False

    def __init__(
        self, name: str, vectors: Vectors, loss: Callable[[jax.Array, Texts], jax.Array]
    ) -> None:
        """Makes the head.

        Args:
          name: in saved models.
          vectors: function of (encoded, batch) that returns [B, M, F], a vector for each of the sequences in each row.
          loss: function of (vectors, texts) that returns [E], the loss of each example. Vectors are [E, T, F], those of
            an example's anchor, of its positive and of its negatives; `texts.numbers` [E, T] are the same for equal
            texts, and -1 where there is none. It sees all examples of a batch, on any number of devices and
            microbatches.
        """
        super().__init__()
        self.name = name
        self.vectors = vectors
        self.loss = loss

    def as_set(self, config: TaskConfig) -> Head:
        return self

    def logits(
        self, model: Model, encoded: Encoded, batch: Batch, deterministic: bool
    ) -> jax.Array:
        vectors = self.vectors(encoded, batch)
        if vectors.ndim != 3 or vectors.shape[:2] != batch.cls_positions.shape:
            needed = [*batch.cls_positions.shape, "F"]
            raise InputError(f"{self.name}: vectors gave {vectors.shape}; needed: {needed}")
        return vectors.astype(jnp.float32)

    def losses(self, logits: jax.Array, batch: Batch, weights: jax.Array) -> dict[str, Pair]:
        loss = self.loss(vectors_of_examples(logits, batch), batch.labels)
        if loss.shape != weights.shape:
            raise InputError(
                f"{self.name}: loss gave {loss.shape}; needed: {weights.shape}, one for each example"
            )
        return {"loss": (jnp.sum(loss * weights), jnp.sum(weights))}
