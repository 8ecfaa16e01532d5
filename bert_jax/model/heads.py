# SPDX-License-Identifier: Apache-2.0
"""The heads: masked language model, next sentence prediction, and those of the tasks that BERT is fine-tuned for."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.batch import Batch
from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.encoder import Encoded, Encoder
from bert_jax.model.layers import Dense, Dropout, activate, layer_norm
from bert_jax.model.probe import Probe
from bert_jax.model.product import matmul_precision, product
from bert_jax.settings.finetuning import ProbeConfig
from bert_jax.settings.model import ModelConfig

# The parts of a model for each task, beside embeddings and layers, by the names of their parameters.
TASK_PARTS: dict[str, tuple[str, ...]] = {
    "encoder": ("pooler",),
    "pretraining": ("pooler", "mlm", "next_sentence"),
    "masked_lm": ("mlm",),
    "next_sentence": ("pooler", "next_sentence"),
    "sequence_classification": ("pooler", "classifier"),
    "token_classification": ("classifier",),
    "multiple_choice": ("pooler", "classifier"),
    "question_answering": ("span",),
}


class MaskedLanguageModel(nn.Module):
    """Dense, activation, layer norm, then the word table transposed and a bias.

    Source: google-research/bert run_pretraining.py, get_masked_lm_output.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array, word_table: jax.Array) -> jax.Array:
        """Returns float32 logits [B, P, V padded] of hidden vectors [B, P, H]; padded entries are MASKED_SCORE."""
        config = self.config
        dense = Dense(config, config.hidden_size, add=False, name="transform")
        hidden = activate(config.activation, *dense(hidden))
        hidden = layer_norm(config)(hidden).astype(config.compute_dtype)
        bias = self.param("output_bias", nn.initializers.zeros, (config.padded_vocab_size,), jnp.float32)
        if word_table.shape[0] == 1:
            rows = hidden.reshape(-1, hidden.shape[-1])
            logits = product("RH,VH->RV", rows, word_table[0], precision=config.matmul_precision)
        else:  # rows of the devices that share a copy
            rows = hidden.reshape(word_table.shape[0], -1, hidden.shape[-1])
            logits = product("DRH,DVH->DRV", rows, word_table, precision=config.matmul_precision)
        logits = logits.reshape(*hidden.shape[:2], -1)
        # The rows that pad the vocabulary are zero, so masking the bias masks their logits. The bias is added as a
        # product with ones, because its gradient is then a matrix product too: only products and the loss itself make
        # passes over B x P x V numbers.
        is_word = jnp.arange(config.padded_vocab_size) < config.vocab_size
        bias = jnp.where(is_word, bias, MASKED_SCORE)
        precision = matmul_precision(config.matmul_precision)
        return logits + jnp.einsum("BP,V->BPV", jnp.ones(hidden.shape[:2], jnp.float32), bias, precision=precision)


def logits_of(config: ModelConfig, num_classes: int, name: str) -> Dense:
    """Returns the layer of that name that makes float32 logits; a part of the module that calls it."""
    return Dense(config, num_classes, "float32", name=name)


class PretrainingOutput(NamedTuple):
    """The outputs of pre-training. Logits are float32."""

    encoded: Encoded
    mlm_logits: jax.Array  # [B, P, V padded]
    next_sentence_logits: jax.Array  # [B, M, 2]: 0 the true next sentence, 1 a random one


class PretrainingModel(nn.Module):
    """The encoder with both heads. Only the positions to predict reach the vocabulary."""

    config: ModelConfig

    @nn.compact
    def __call__(self, batch: Batch, deterministic: bool = True) -> PretrainingOutput:
        """Returns encodings and logits; `batch.mlm_positions` are the positions to predict."""
        encoder = Encoder(self.config, name="encoder")
        encoded = encoder(batch.token_ids, batch.type_ids, batch.sequence_ids, batch.cls_positions, deterministic)
        assert batch.mlm_positions is not None and encoded.pooled is not None
        predicted = jnp.take_along_axis(encoded.hidden, batch.mlm_positions.astype(jnp.int32)[..., None], axis=1)
        mlm_logits = MaskedLanguageModel(self.config, name="mlm")(predicted, encoded.word_table)
        next_sentence_logits = logits_of(self.config, 2, "next_sentence")(encoded.pooled)
        return PretrainingOutput(encoded, mlm_logits, next_sentence_logits)


class TaskModel(nn.Module):
    """The encoder with the head of one task other than pre-training.

    Classifiers apply dropout to their input; span and vocabulary heads do not. Source: google-research/bert
    run_classifier.py and run_squad.py, create_model.
    """

    config: ModelConfig
    task: str
    num_classes: int = 0  # for classifiers
    probe: ProbeConfig | None = None  # replaces the head

    @nn.compact
    def __call__(self, batch: Batch, deterministic: bool = True) -> jax.Array:
        """Returns float32 logits; see `task_forward` for their shapes."""
        config = self.config
        if self.probe is not None:
            encoder = Encoder(config, pool=False, name="encoder")
            inputs = (batch.token_ids, batch.type_ids, batch.sequence_ids, batch.cls_positions)
            frozen = not self.probe.train_encoder
            layers = encoder(*inputs, deterministic=frozen or deterministic, keep_layers=True).layers
            assert layers is not None
            pool = self.task == "sequence_classification"
            num_outputs = 2 if self.task == "question_answering" else self.num_classes
            probe = Probe(config, self.probe, num_outputs, pool, name="probe")
            return probe(layers, batch.sequence_ids, deterministic, batch.cls_positions.shape[1])
        encoder = Encoder(config, pool="pooler" in TASK_PARTS[self.task], name="encoder")
        encoded = encoder(batch.token_ids, batch.type_ids, batch.sequence_ids, batch.cls_positions, deterministic)
        if self.task == "encoder":
            assert encoded.pooled is not None
            return encoded.pooled.astype(jnp.float32)
        if self.task == "masked_lm":
            assert batch.mlm_positions is not None
            predicted = jnp.take_along_axis(encoded.hidden, batch.mlm_positions.astype(jnp.int32)[..., None], axis=1)
            return MaskedLanguageModel(config, name="mlm")(predicted, encoded.word_table)
        if self.task == "next_sentence":
            assert encoded.pooled is not None
            return logits_of(config, 2, "next_sentence")(encoded.pooled)
        if self.task == "question_answering":
            return logits_of(config, 2, "span")(encoded.hidden)
        features = encoded.hidden if self.task == "token_classification" else encoded.pooled
        assert features is not None
        features = Dropout(config.hidden_dropout_rate)(features, deterministic)
        return logits_of(config, self.num_classes, "classifier")(features)
