# SPDX-License-Identifier: Apache-2.0
"""What a model knows of the distances between tokens: its tables, and what its layers make of them (`score_bias`)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from bert_jax.devices.sharding import whole
from bert_jax.model.parts import Dense, Dropout, layer_norm, truncated_normal
from bert_jax.model.score_bias import (
    BUCKETS,
    DistanceTable,
    DistanceVectors,
    rows_of_distances,
    slopes_of,
)
from bert_jax.model.tables import copy_to_rows
from bert_jax.settings.model import ModelConfig


class Distances(nn.Module):
    """The table of vectors of distances, the same for all layers, and its layer norm."""

    config: ModelConfig

    @nn.compact
    def __call__(self, length: int) -> DistanceTable:
        """Returns the rows that rows of `length` tokens need, float32."""
        config = self.config
        farthest = self.config.farthest_distance
        size = 2 * (config.distance_buckets or farthest)
        initial = truncated_normal(config.initializer_stddev)
        shape = (size, config.hidden_size)
        vectors = whole(self.param("embedding", initial, shape, jnp.float32))
        rows = rows_of_distances(config.distance_buckets, farthest)
        if isinstance(length, int):  # no number in an exported program
            reach = min(length - 1, farthest)
            first = rows[farthest - reach]
            last = rows[farthest + reach]
            vectors, rows = vectors[first : last + 1], np.clip(rows, first, last) - first
        vectors = layer_norm(config)(vectors) if config.distance_norm else vectors
        return DistanceTable(jnp.asarray(rows, jnp.int32), vectors)


def biases_of_model(
    config: ModelConfig, num_rows: int, length: int
) -> jax.Array | DistanceTable | None:
    """Returns `Sight.biases` of a batch. To be called in the method of a module, whose parameters it makes."""
    if config.score_bias == "buckets":
        initial = truncated_normal(config.initializer_stddev)
        table = nn.Embed(BUCKETS, config.num_heads, embedding_init=initial, name="score_bias")
        return copy_to_rows(table.embedding.T, num_rows, config.gradient_dtype)
    if config.score_bias == "alibi":
        slopes = jnp.asarray(slopes_of(config.num_heads), config.wide_dtype)
        return slopes[None, :, None]
    return Distances(config, name="distances")(length) if config.score_bias == "vectors" else None


def vectors_of_layer(
    config: ModelConfig,
    table: DistanceTable,
    projections: Mapping[str, nn.Module],
    query: jax.Array,
    deterministic: bool,
) -> tuple[jax.Array, DistanceVectors]:
    """Returns the queries [B, L, H] on the scale of as many terms as there are, and the vectors of a layer.

    `projections` are the dense layers of its queries and keys, which distances share or have their own of. To be called
    as `biases_of_model`.
    """
    scale = (1 + len(config.distance_products)) ** -0.5
    # The same for all rows of a batch, whichever of them this device or microbatch has.
    drop = Dropout(config.hidden_dropout_rate, of_rows=False)
    vectors = drop(table.vectors, deterministic).astype(config.compute_dtype)

    def projected(name: str, factor: float) -> jax.Array | None:
        if name not in config.distance_products:
            return None
        project = projections[name]
        if not config.distance_shared:
            size = config.hidden_size
            has_bias = config.layer_bias
            project = Dense(config, size, has_bias=has_bias, name=f"distance_{name}")
        scaled = project(vectors) * jnp.asarray(factor, vectors.dtype)
        return scaled.reshape(-1, config.num_heads, config.head_size)

    of_scores = config.head_size**-0.5  # `attend` scales its own product alone
    of_queries = projected("key", of_scores)
    of_keys = projected("query", of_scores * scale)
    scaled = query * jnp.asarray(scale, query.dtype)
    return scaled, DistanceVectors(table.rows, of_queries, of_keys)
