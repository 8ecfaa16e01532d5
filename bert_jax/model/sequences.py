# SPDX-License-Identifier: Apache-2.0
"""Where the sequences of a row stand, and one vector for each of them. Dimension letters: `batch.py`."""

import jax
import jax.numpy as jnp

from bert_jax.batch import Batch
from bert_jax.model.product import matmul_precision, widened
from bert_jax.model.tables import take_rows
from bert_jax.settings.model import ModelConfig


def positions_in_sequence(sequence_ids: jax.Array) -> jax.Array:
    """Returns [B, L] int32: 0, 1, 2, ... from the start of each sequence of the row, and 0 in padding.

    Padding may be longer than the table of positions, whose rows beyond the end would be NaN.
    """
    sequence_ids = jnp.abs(sequence_ids)
    index = jnp.arange(sequence_ids.shape[1], dtype=jnp.int32)[None, :]
    previous = jnp.pad(sequence_ids, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    starts = jnp.where(sequence_ids != previous.astype(sequence_ids.dtype), index, 0)
    return jnp.where(sequence_ids != 0, index - jax.lax.cummax(starts, axis=1), 0)


def last_positions(sequence_ids: jax.Array, first: jax.Array) -> jax.Array:
    """Returns [B, M] int32: the last position of each sequence, given the first [B, M]."""
    ids = jnp.take_along_axis(sequence_ids, first, axis=1)
    lengths = jnp.sum(sequence_ids[:, None, :] == ids[:, :, None], axis=-1, dtype=jnp.int32)
    return first + lengths - 1


def in_sequences(sequence_ids: jax.Array, num_places: int) -> jax.Array:
    """Returns [B, M, L] bool: which of the M sequences of a row a token is in, given sequence ids [B, L]."""
    return sequence_ids[:, None] == jnp.arange(1, num_places + 1)[None, :, None]


def mean_of_sequences(
    vectors: jax.Array, sequence_ids: jax.Array, num_places: int, precision: str = "highest"
) -> jax.Array:
    """Returns the mean of the tokens' vectors [B, L, H] over each sequence of a row, [B, M, H] float32; 0 if empty.

    sequence_ids [B, L] are as in `Batch`, num_places is M; `precision` is as in `product`.
    """
    inside = in_sequences(sequence_ids, num_places).astype(jnp.float32)
    total = jnp.einsum(
        "BML,BLH->BMH", inside, widened(vectors), precision=matmul_precision(precision)
    )
    return total / jnp.maximum(jnp.sum(inside, axis=-1), 1)[..., None]


def vectors_of_sequences(config: ModelConfig, hidden: jax.Array, batch: Batch) -> jax.Array:
    """Returns one vector for each sequence, [B, M, H]: its first token's, or the mean of all."""
    positions = jnp.asarray(batch.cls_positions, jnp.int32)
    if config.pooling != "cls":
        means = mean_of_sequences(
            hidden, batch.sequence_ids, positions.shape[1], config.matmul_precision
        )
        return means.astype(hidden.dtype)
    # The first token of a sequence that is read from the left has seen only itself, and the last all of it.
    if config.causal:
        positions = last_positions(batch.sequence_ids, positions)
    return take_rows(hidden, positions)
