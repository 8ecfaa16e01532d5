# SPDX-License-Identifier: Apache-2.0
"""The encoder: embeddings, stacked layers, pooler."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from bert_jax.batch import Batch
from bert_jax.devices.sharding import constrain_rows
from bert_jax.model.attention import LONGEST_WHOLE, attention_mask
from bert_jax.model.layers import SAVED, Embeddings, Layer, Pooler, Sight, Stream
from bert_jax.model.on_cpu import layer_name
from bert_jax.model.product import matmul_precision
from bert_jax.settings.model import ModelConfig

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(SAVED),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Encoded(NamedTuple):
    """The outputs of the encoder for a batch."""

    hidden: jax.Array  # [B, L, H]: the last layer
    pooled: jax.Array | None  # [B, M, H]: dense + tanh of one token of every sequence, if there is a pooler (`Block`)
    # [num_layers + 1, B, L, H]: embeddings and every layer, with `keep_layers`; with norm before a block they are sums,
    # all but the last before a norm
    layers: jax.Array | None
    word_table: jax.Array  # [D, V padded, width of it]: for the tied output layer; D equal copies (`copy_to_rows`)
    attentions: jax.Array | None = None  # [num_layers, B, N, L, L]: the probabilities, with `keep_attentions`


class Encoder(nn.Module):
    """BERT without its heads, to be nested in a model. Parameters of the layers are stacked on a leading axis."""

    config: ModelConfig
    pool: bool = True  # False for models without a pooler, such as those that classify tokens
    pool_tokens: bool = False  # `Encoded.pooled` [B, L, H] is of every token, for families that do so

    @nn.compact
    def __call__(
        self, batch: Batch, deterministic: bool = True, keep_layers: bool = False, keep_attentions: bool = False
    ) -> Encoded:
        """Returns the encoded batch. Without `deterministic` it draws dropout from the stream "dropout".

        Raises: InputError if a setting of the model breaks a rule.
        """
        config, sequence_ids = self.config, batch.sequence_ids
        config.validate()
        positions = positions_in_sequence(sequence_ids)
        embed = Embeddings(config, name="embeddings")
        embedded, word_table = embed(batch.token_ids, batch.type_ids, positions, deterministic)
        embedded = constrain_rows(embedded)
        # Without ids in place of masks the scores of whole rows are stored; kernels never write the probabilities.
        length = sequence_ids.shape[1]  # no number in an exported program
        blocks = isinstance(length, int) and (config.num_local > 0 or length > LONGEST_WHOLE)
        if (config.attention == "fused" or blocks) and not keep_attentions and batch.causal is None:
            sight = Sight(sequence_ids, None, positions)
        else:
            causal = config.causal if batch.causal is None else batch.causal
            local = attention_mask(sequence_ids, causal, config.window) if config.num_local else None
            sight = Sight(attention_mask(sequence_ids, causal), local, positions)
        is_global = np.arange(config.num_layers) % config.global_every == 0 if config.num_local else None

        def layer(module: Layer, stream: Stream, is_global: jax.Array | None) -> tuple[Stream, tuple]:
            stream, probabilities = module(stream, sight, is_global, deterministic)
            stream = jax.tree.map(constrain_rows, stream)
            output = stream.hidden if stream.summed is None else stream.summed
            return stream, (output if keep_layers else None, probabilities if keep_attentions else None)

        if config.remat != "none":
            layer = nn.remat(layer, policy=REMAT_POLICIES[config.remat], prevent_cse=False)
        stream = Stream(embedded, None if config.norm == "after" else embedded)
        if self.has_variable("params", layer_name(0)):  # parameters that `on_cpu.unstack` has taken out of their stack
            per_layer = []
            for index in range(config.num_layers):
                here = None if is_global is None else is_global[index]
                stream, extras = layer(Layer(config, name=layer_name(index)), stream, here)
                per_layer.append(extras)
            kept, attentions = jax.tree.map(lambda *leaves: jnp.stack(leaves), *per_layer)
        else:
            scan = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=config.num_layers,
                unroll=config.layers_at_once(jax.default_backend()),
            )
            flags = None if is_global is None else jnp.asarray(is_global)
            stream, (kept, attentions) = scan(Layer(config, name="layers"), stream, flags)

        hidden, pooled = stream.hidden, None
        if self.pool:
            summaries = hidden if self.pool_tokens else self._summarize(hidden, batch)
            pooled = Pooler(config, name="pooler")(summaries, deterministic)
        layers = None if kept is None else jnp.concatenate([embedded[None], kept[:-1], hidden[None]])
        return Encoded(hidden, pooled, layers, word_table, attentions)

    def _summarize(self, hidden: jax.Array, batch: Batch) -> jax.Array:
        """Returns one vector for each sequence, [B, M, H]: its first token's, or the mean of all."""
        config, places = self.config, batch.cls_positions.astype(jnp.int32)
        if config.pooling == "mean":
            means = mean_of_sequences(hidden, batch.sequence_ids, places.shape[1], config.matmul_precision)
            return means.astype(hidden.dtype)
        if config.causal:  # the first token of a sequence has seen only itself, and the last has seen all of it
            places = last_positions(batch.sequence_ids, places)
        return jnp.take_along_axis(hidden, places[..., None], axis=1)


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


def mean_of_sequences(
    vectors: jax.Array, sequence_ids: jax.Array, num_places: int, precision: str = "highest"
) -> jax.Array:
    """Returns the mean of the tokens' vectors [B, L, H] over each sequence of a row, [B, M, H] float32; 0 if empty.

    sequence_ids [B, L] are as in `Batch`, num_places is M; `precision` is as in `product`.
    """
    inside = (sequence_ids[:, None, :] == jnp.arange(1, num_places + 1)[:, None]).astype(jnp.float32)  # [B, M, L]
    total = jnp.einsum("BML,BLH->BMH", inside, vectors.astype(jnp.float32), precision=matmul_precision(precision))
    return total / jnp.maximum(jnp.sum(inside, axis=-1), 1)[..., None]
