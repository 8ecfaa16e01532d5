# SPDX-License-Identifier: Apache-2.0
"""BERT on one page: embeddings, layers, encoder, pooler. Source: Devlin et al. 2018, section 3; google-research/bert.

What is unusual here:

- One encoder for BERT and its relatives. An option is a field of `ModelConfig`, named by what it does, and stands here
  where the paper's page has its line: `norm`, `positions`, `score_bias`, `feed_forward`, `window`, `pooling`,
  `block`.
- A row may hold several sequences. `sequence_ids` [B, L] is the padding mask and the mask between sequences at once:
  a query sees a key if their ids are equal and not 0. Positions start again with each sequence.
- The layers' parameters are stacked on a leading axis, and one `scan` runs over them; where some see windows, over
  groups of layers (`groups`). `unroll` chooses between the time to compile and the time of a step. On a CPU the
  answering functions take them apart (`on_cpu.unstack`).
- Products have operands in the compute dtype and sums in float32, in both passes (`product`). Parameters, layer norm,
  softmax and losses are float32.
- Layer norm and the activation are computed again in the backward pass: cheaper than to keep them. `remat` does more.
- Dropout takes 16 random bits a number, and every row of a batch has a key of its own (`keys`), so a row draws the same
  in any microbatch and on any mesh.
- The word table is used twice, by the embeddings and by the output layer. Under a mesh each device has a copy of its
  own (`copy_to_rows`), so both gradients are added on the device and sent once.
- Scores [B, N, L, L] are stored for rows of up to 1,024 tokens. Longer rows and local windows are computed in blocks,
  and `attention="fused"` in kernels (`fused_attention`).
- The vocabulary is padded to a multiple of 128, so that it divides over a mesh.

Dimension letters: `batch.py`. Heads, which read what the encoder returns, are in `heads/`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from bert_jax.batch import Batch, Encoded
from bert_jax.devices.sharding import constrain_rows
from bert_jax.model.attention import SAVED, Sight, attend, repeat_heads, turn_heads, what_is_seen
from bert_jax.model.distances import biases_of_model, vectors_of_layer
from bert_jax.model.groups import by_layer, run_layers, sharing
from bert_jax.model.inputs import check_batch
from bert_jax.model.on_cpu import layer_name
from bert_jax.model.parts import (
    ACTIVATIONS,
    REMAT_POLICIES,
    Dense,
    Dropout,
    activate,
    layer_norm,
    small_rows,
    words_table,
)
from bert_jax.model.score_bias import DistanceTable, bias_of_scores
from bert_jax.model.sequences import vectors_of_sequences
from bert_jax.model.tables import copy_to_rows, look_up_words
from bert_jax.settings.model import ModelConfig


class Embeddings(nn.Module):
    """Word + position + type embeddings, as far as there are any, layer norm, dropout."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, batch: Batch, positions: jax.Array, deterministic: bool
    ) -> tuple["Stream", jax.Array]:
        """Returns the embedded tokens in the compute dtype, and copies of the word table [D, V padded, its width]."""
        config = self.config
        words = words_table(config, "word")
        copies = copy_to_rows(words.embedding, batch.token_ids.shape[0], config.gradient_dtype)
        ids_of_copies = jnp.asarray(batch.token_ids, jnp.int32).reshape(copies.shape[0], -1)
        looked_up = jax.vmap(look_up_words)(copies, ids_of_copies)
        summed = looked_up.reshape(*batch.token_ids.shape, config.embedding_width)
        if batch.word_vectors is not None:
            summed = jnp.asarray(batch.word_vectors, summed.dtype)
        if config.positions == "learned":
            offset = config.position_offset  # RoBERTa's positions start at 2
            size = config.max_positions + offset
            summed = summed + small_rows(config, "position", size, positions + offset)
        if config.type_vocab_size:
            types = batch.type_ids.astype(jnp.int32)
            if config.type_vocab_size == 1:  # a tokenizer may mark second sentences all the same
                types = jnp.zeros_like(types)
            summed = summed + small_rows(config, "type", config.type_vocab_size, types)

        drop = Dropout(config.hidden_dropout_rate)
        if config.norm == "before_all":
            summed = drop(summed, deterministic).astype(config.compute_dtype)
            return Stream(layer_norm(config)(summed).astype(config.compute_dtype), summed), copies
        embedded = drop(layer_norm(config)(summed), deterministic).astype(config.compute_dtype)
        if config.widens_embeddings:  # ELECTRA's and ALBERT's narrow tables
            embedded = Dense(config, config.hidden_size, name="project")(embedded)
        return Stream(embedded, None), copies


class Stream(NamedTuple):
    """The activations between layers. With norm before a block, its input and the sum it adds to are two arrays."""

    hidden: jax.Array  # [B, L, H]: the input of the next block
    # [B, L, H] before the norm; None with norm after the sum, where `hidden` is added to
    summed: jax.Array | None

    @property
    def output(self) -> jax.Array:
        """What the next block adds to."""
        return self.hidden if self.summed is None else self.summed

    def add(self, config: ModelConfig, update: jax.Array) -> "Stream":
        """Returns the stream after a block. The norm is that of the module that calls this."""
        summed = self.output + update
        hidden = layer_norm(config)(summed).astype(config.compute_dtype)
        return Stream(hidden, None if config.norm == "after" else summed)


class Attention(nn.Module):
    """Multi-head self-attention: LN(x + dropout(attention(x)))."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, stream: Stream, sight: Sight, is_global: bool, deterministic: bool
    ) -> tuple[Stream, jax.Array | None]:
        """Returns the stream, and the probabilities of attention [B, N, L, L], if `sight` has masks of that shape.

        `is_global` says whether the layer sees whole sequences, and not windows.
        """
        config = self.config
        probabilities = None
        dense = functools.partial(Dense, config, has_bias=config.layer_bias)
        sizes = {"query": config.hidden_size, "key": config.key_size, "value": config.key_size}
        projections = {name: dense(size, name=name) for name, size in sizes.items()}
        query, key, value = (project(stream.hidden) for project in projections.values())
        if config.positions == "rotary":
            query, key = turn_heads(config, query, key, sight.positions, is_global)
        key, value = repeat_heads(config, key), repeat_heads(config, value)
        biases: Any = sight.biases
        if isinstance(biases, DistanceTable):
            query, biases = vectors_of_layer(config, biases, projections, query, deterministic)

        if sight.attends.ndim == 2:
            from bert_jax.model.fused_attention import attend_by_ids  # importing Pallas is slow

            draws = config.attention_dropout_rate > 0 and not deterministic
            dropout_key = self.make_rng("dropout") if draws else None
            context = attend_by_ids(
                config, query, key, value, sight.attends, is_global, dropout_key, biases
            )
        else:
            heads = (*value.shape[:2], config.num_heads, config.head_size)
            query, key, value = (array.reshape(heads) for array in (query, key, value))
            dropout = Dropout(config.attention_dropout_rate)
            drop = functools.partial(dropout, deterministic=deterministic)
            attends = sight.mask(is_global)
            precision = config.matmul_precision
            bias = None
            if biases is not None:
                bias = bias_of_scores(biases, query, key, precision=precision)
            context, probabilities = attend(query, key, value, attends, drop, precision, bias)
            context = checkpoint_name(context.reshape(stream.hidden.shape), SAVED)

        update = dense(config.hidden_size, name="output", stddev=config.output_stddev)(context)
        update = Dropout(config.hidden_dropout_rate)(update, deterministic)
        return stream.add(config, update), probabilities


class FeedForward(nn.Module):
    """The feed-forward block: LN(x + dropout(W2 gelu(W1 x))); gated, LN(x + dropout(W2 (gelu(W1 x) * W3 x)))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream: Stream, deterministic: bool) -> Stream:
        """Returns the stream."""
        config = self.config
        wide = functools.partial(Dense, config, config.intermediate_size, has_bias=config.wide_bias)
        widened = activate(config.activation, wide(name="intermediate")(stream.hidden))
        if config.feed_forward == "gated":
            widened = widened * wide(name="gate")(stream.hidden)
        narrow = {"has_bias": config.layer_bias, "stddev": config.output_stddev}
        update = Dense(config, config.hidden_size, name="output", **narrow)(widened)
        update = Dropout(config.hidden_dropout_rate)(update, deterministic)
        return stream.add(config, update)


class Layer(nn.Module):
    """One layer of the encoder: attention, then feed-forward."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, stream: Stream, sight: Sight, is_global: bool, deterministic: bool
    ) -> tuple[Stream, jax.Array | None]:
        """Returns the stream in the compute dtype, and the probabilities of `Attention`."""
        stream, probabilities = Attention(self.config, name="attention")(
            stream, sight, is_global, deterministic
        )
        return FeedForward(self.config, name="mlp")(stream, deterministic), probabilities


class Pooler(nn.Module):
    """The layers before the logits of a classifier: dense, activation and, in some families, norm (`Block`)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, vectors: jax.Array, deterministic: bool) -> jax.Array:
        """Returns [..., H] of vectors [..., H]."""
        config = self.config
        block = self.config.block
        if not block.activation:
            return vectors
        if block.dropout:
            vectors = Dropout(config.hidden_dropout_rate)(vectors, deterministic)
        size = config.hidden_size
        stddev = config.output_stddev
        dense = Dense(config, size, has_bias=config.dense_bias, stddev=stddev)
        nn.share_scope(self, dense)
        pooled = dense(vectors)
        activation = jnp.tanh if block.activation == "tanh" else ACTIVATIONS[block.activation]
        pooled = activation(pooled)
        return layer_norm(config)(pooled).astype(config.compute_dtype) if block.norm else pooled


class Encoder(nn.Module):
    """BERT without its heads, to be nested in a model. Parameters of the layers are stacked on a leading axis."""

    config: ModelConfig
    pool: bool = True  # False for models without a pooler, such as those that classify tokens
    # `Encoded.pooled` [B, L, H] is of every token, for families that do so
    pool_tokens: bool = False

    @nn.compact
    def __call__(
        self,
        batch: Batch,
        deterministic: bool = True,
        keep_layers: bool = False,
        keep_attentions: bool = False,
    ) -> Encoded:
        """Returns the encoded batch. Without `deterministic` it draws dropout from the stream "dropout".

        Raises: InputError if a setting of the model breaks a rule, or the batch does not fit it.
        """
        config = self.config
        check_batch(config, batch)
        sight = what_is_seen(config, batch, keep_attentions)
        embed = Embeddings(config, name="embeddings")
        stream, word_table = embed(batch, sight.positions, deterministic)
        stream = jax.tree.map(constrain_rows, stream)
        embedded = stream.output
        sight = sight._replace(biases=biases_of_model(config, *batch.token_ids.shape))

        def layer(is_global: bool) -> Callable[..., tuple[Stream, tuple]]:
            def run(module: Layer, stream: Stream, _: None = None) -> tuple[Stream, tuple]:
                stream, probabilities = module(stream, sight, is_global, deterministic)
                stream = jax.tree.map(constrain_rows, stream)
                kept = stream.output if keep_layers else None
                return stream, (kept, probabilities if keep_attentions else None)

            if config.remat == "none":
                return run
            return nn.remat(run, policy=REMAT_POLICIES[config.remat], prevent_cse=False)

        stream = stream._replace(summed=embedded) if config.norm == "before" else stream
        apart = self.has_variable("params", layer_name(0))
        if (apart or config.num_local) and not self.is_initializing():
            module = Layer(config, parent=None)
            stream, (kept, attentions) = run_layers(self, config, layer, module, stream)
        else:
            scan = nn.scan(
                sharing(config, layer(is_global=True)),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=config.num_stacked,
                unroll=config.layers_at_once(jax.default_backend()),
            )
            stream, (kept, attentions) = scan(Layer(config, name="layers"), stream, None)
            kept, attentions = by_layer(config, (kept, attentions))

        hidden = stream.hidden
        pooled = None
        if self.pool:
            late = config.pooling == "late" and not self.pool_tokens
            first = self.pool_tokens or late  # each token passes through the pooler
            summaries = hidden if first else vectors_of_sequences(config, hidden, batch)
            pooled = Pooler(config, name="pooler")(summaries, deterministic)
            pooled = vectors_of_sequences(config, pooled, batch) if late else pooled
        layers = None
        if keep_layers:
            layers = jnp.concatenate([embedded[None], kept[:-1], hidden[None]])
        return Encoded(hidden, pooled, layers, word_table, attentions)
