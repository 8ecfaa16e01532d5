# SPDX-License-Identifier: Apache-2.0
"""The encoder: embeddings, stacked layers, pooler."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.batch import Batch
from bert_jax.devices.sharding import constrain_rows
from bert_jax.model.attention import attention_mask
from bert_jax.model.layers import SAVED, Dense, Embeddings, Layer
from bert_jax.model.on_cpu import layer_name
from bert_jax.settings.model import ModelConfig

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(SAVED),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Encoded(NamedTuple):
    """The outputs of the encoder for a batch."""

    hidden: jax.Array  # [B, L, H]: the last layer
    pooled: jax.Array | None  # [B, M, H]: dense + tanh of one token of every sequence, if there is a pooler
    layers: jax.Array | None  # [num_layers + 1, B, L, H]: embeddings and every layer, with `keep_layers`
    word_table: jax.Array  # [D, V padded, H]: for the tied output layer; D equal copies (`copy_to_rows`)
    attentions: jax.Array | None = None  # [num_layers, B, N, L, L]: the probabilities, with `keep_attentions`


class Encoder(nn.Module):
    """BERT without its heads, to be nested in a model. Parameters of the layers are stacked on a leading axis."""

    config: ModelConfig
    pool: bool = True  # False for models without a pooler, such as those that classify tokens

    @nn.compact
    def __call__(
        self, batch: Batch, deterministic: bool = True, keep_layers: bool = False, keep_attentions: bool = False
    ) -> Encoded:
        """Returns the encoded batch. Without `deterministic` it draws dropout from the stream "dropout"."""
        config, sequence_ids = self.config, batch.sequence_ids
        positions = positions_in_sequence(sequence_ids)
        embed = Embeddings(config, name="embeddings")
        embedded, word_table = embed(batch.token_ids, batch.type_ids, positions, deterministic)
        embedded = constrain_rows(embedded)
        fused = config.attention == "fused" and not keep_attentions  # whose kernels never write the probabilities
        attends = sequence_ids if fused else attention_mask(sequence_ids, config.causal)

        def layer(module: Layer, hidden: jax.Array) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
            hidden, probabilities = module(hidden, attends, deterministic)
            hidden = constrain_rows(hidden)
            return hidden, (hidden if keep_layers else None, probabilities if keep_attentions else None)

        if config.remat != "none":
            layer = nn.remat(layer, policy=REMAT_POLICIES[config.remat], prevent_cse=False)
        if self.has_variable("params", layer_name(0)):  # parameters that `on_cpu.unstack` has taken out of their stack
            hidden, each = embedded, []
            for index in range(config.num_layers):
                hidden, one = layer(Layer(config, name=layer_name(index)), hidden)
                each.append(one)
            kept, attentions = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        else:
            scan = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=config.num_layers,
                unroll=config.layers_at_once(jax.default_backend()),
            )
            hidden, (kept, attentions) = scan(Layer(config, name="layers"), embedded)

        pooled = None
        if self.pool:
            places = batch.cls_positions.astype(jnp.int32)
            if config.causal:  # the first token of a sequence has seen only itself, and the last has seen all of it
                places = last_positions(sequence_ids, places)
            chosen = jnp.take_along_axis(hidden, places[..., None], axis=1)  # [B, M, H]
            pooled = jnp.tanh(Dense(config, config.hidden_size, name="pooler")(chosen))
        layers = None if kept is None else jnp.concatenate([embedded[None], kept])
        return Encoded(hidden, pooled, layers, word_table, attentions)


def positions_in_sequence(sequence_ids: jax.Array) -> jax.Array:
    """Returns [B, L] int32: 0, 1, 2, ... from the start of each sequence of the row, and 0 in padding.

    Padding may be longer than the table of positions, whose rows beyond the end would be NaN.
    """
    index = jnp.arange(sequence_ids.shape[1], dtype=jnp.int32)[None, :]
    previous = jnp.pad(sequence_ids, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    starts = jnp.where(sequence_ids != previous.astype(sequence_ids.dtype), index, 0)
    return jnp.where(sequence_ids != 0, index - jax.lax.cummax(starts, axis=1), 0)


def last_positions(sequence_ids: jax.Array, first: jax.Array) -> jax.Array:
    """Returns [B, M] int32: the last position of each sequence, given the first [B, M]."""
    ids = jnp.take_along_axis(sequence_ids, first, axis=1)
    lengths = jnp.sum(sequence_ids[:, None, :] == ids[:, :, None], axis=-1, dtype=jnp.int32)
    return first + lengths - 1
