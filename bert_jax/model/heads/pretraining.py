# SPDX-License-Identifier: Apache-2.0
"""The heads of pre-training, together and each alone: masked language model, next sentence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.batch import Batch
from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.bert import Encoded
from bert_jax.model.heads.base import Head, Linear, Model
from bert_jax.model.losses import Pair, accuracy, cross_entropy
from bert_jax.model.parts import Dense, activate, layer_norm, words_table
from bert_jax.model.product import add_bias, product
from bert_jax.model.tables import copy_to_rows, take_rows
from bert_jax.settings.model import ModelConfig


class MaskedLanguageModel(nn.Module):
    """Dense, activation, layer norm, then the word table transposed and a bias.

    Source: google-research/bert run_pretraining.py, get_masked_lm_output.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array, word_table: jax.Array) -> jax.Array:
        """Returns float32 logits [B, P, V padded] of hidden vectors [B, P, H]; padded entries are MASKED_SCORE."""
        config = self.config
        hidden = transformed(config, hidden)
        word_table, bias = own_words(self, config, hidden.shape[0], word_table)
        logits = against_words(config, hidden, word_table)
        # The rows that pad the vocabulary are zero, so masking the bias masks their logits.
        is_word = jnp.arange(config.padded_vocab_size) < config.vocab_size
        return add_bias(logits, jnp.where(is_word, bias, MASKED_SCORE))


def transformed(config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Returns what is compared with the words, [B, P, width of the word table], of hidden vectors [B, P, H].

    Its modules belong to the module that calls it.
    """
    if not config.block.word_layers:
        return hidden
    if config.block.word_layers == 2:
        for name, size in config.word_sizes.items():
            dense = Dense(config, size, has_bias=False, name=name)
            hidden = activate("gelu_tanh", dense(hidden))
        return hidden
    how = {"has_bias": config.dense_bias, "stddev": config.output_stddev}
    dense = Dense(config, config.embedding_width, name="transform", **how)
    hidden = activate(config.words_activation, dense(hidden))
    return layer_norm(config)(hidden).astype(config.compute_dtype)


def own_words(
    head: nn.Module, config: ModelConfig, num_rows: int, word_table: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the table of a masked language model, copies as of `word_table` or of its own, and its bias [V]."""
    size = config.padded_vocab_size
    if not config.block.has_own_words:
        return word_table, head.param("output_bias", nn.initializers.zeros, (size,), jnp.float32)
    table = words_table(config, "words").embedding
    return copy_to_rows(table, num_rows, config.gradient_dtype), jnp.zeros(size, jnp.float32)


def against_words(config: ModelConfig, hidden: jax.Array, word_table: jax.Array) -> jax.Array:
    """Returns float32 logits without bias, [B, P, V], of transformed vectors and the table [D, V, width]."""
    if word_table.shape[0] == 1:
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = product("RH,VH->RV", rows, word_table[0], precision=config.matmul_precision)
    else:  # rows of the devices that share a copy
        rows = hidden.reshape(word_table.shape[0], -1, hidden.shape[-1])
        logits = product("DRH,DVH->DRV", rows, word_table, precision=config.matmul_precision)
    return logits.reshape(*hidden.shape[:2], logits.shape[-1])


class PretrainingOutput(NamedTuple):
    """The outputs of pre-training. Logits are float32."""

    encoded: Encoded
    mlm_logits: jax.Array  # [B, P, V padded]
    next_sentence_logits: jax.Array  # [B, M, 2]: 0 the true next sentence, 1 a random one


class MaskedWords(Head):
    """The logits [B, P, V padded] of words at the positions to predict. Only these reach the vocabulary."""

    name = "masked_lm"
    parts = ("mlm",)
    architecture = "BertForMaskedLM"
    pipeline = "fill-mask"

    def logits(
        self, model: Model, encoded: Encoded, batch: Batch, deterministic: bool
    ) -> jax.Array:
        assert batch.mlm_positions is not None, (
            "the batch has no mlm_positions [B, P], the places that are predicted"
        )
        predicted = take_rows(encoded.hidden, jnp.asarray(batch.mlm_positions, jnp.int32))
        return MaskedLanguageModel(model.config, name="mlm")(predicted, encoded.word_table)

    def weights(self, batch: Batch) -> jax.Array:
        """Returns [B, P]: 1 for a prediction."""
        return batch.mlm_weights

    def losses(self, logits: jax.Array, batch: Batch, weights: jax.Array) -> dict[str, Pair]:
        return {
            "loss": cross_entropy(logits, batch.mlm_labels, weights),
            "accuracy": accuracy(logits, batch.mlm_labels, weights),
        }


class NextSentence(Linear):
    """Whether a sequence's second segment follows the first."""

    name = "next_sentence"
    parts = ("pooler", "next_sentence")
    num_outputs = 2
    has_dropout = False
    architecture = "BertForNextSentencePrediction"


MASKED_LM = MaskedWords()
NEXT_SENTENCE = NextSentence()


class Pretraining(Head):
    """Both."""

    name = "pretraining"
    parts = ("pooler", "mlm", "next_sentence")
    num_outputs = 2
    architecture = "BertForPreTraining"
    pipeline = "fill-mask"

    def logits(
        self, model: Model, encoded: Encoded, batch: Batch, deterministic: bool
    ) -> PretrainingOutput:
        words = MASKED_LM.logits(model, encoded, batch, deterministic)
        return PretrainingOutput(
            encoded, words, NEXT_SENTENCE.logits(model, encoded, batch, deterministic)
        )

    def weights(self, batch: Batch) -> jax.Array:
        """Returns [B, P]: 1 for a prediction of a word."""
        return batch.mlm_weights

    def losses(
        self, logits: PretrainingOutput, batch: Batch, weights: jax.Array
    ) -> dict[str, Pair]:
        """Returns the losses and accuracies of words and, if the batch has its labels, of the next sentence.

        "loss" is the sum of their means.
        """
        metrics: dict[str, Pair] = {}
        words = logits.mlm_logits
        for kind, of_kind in prediction_weights(batch._replace(mlm_weights=weights)).items():
            metrics[f"{kind}_loss"] = cross_entropy(words, batch.mlm_labels, of_kind)
            metrics[f"{kind}_accuracy"] = accuracy(words, batch.mlm_labels, of_kind)
        if batch.next_sentence_labels is not None:
            of_pairs = logits.next_sentence_logits
            counted = next_sentence_weights(batch)
            labels = jnp.maximum(batch.next_sentence_labels, 0).astype(jnp.int32)
            metrics["nsp_loss"] = cross_entropy(of_pairs, labels, counted)
            metrics["nsp_accuracy"] = accuracy(of_pairs, labels, counted)
        means = [
            total / jnp.maximum(count, 1.0)
            for name, (total, count) in metrics.items()
            if name.endswith("_loss")
        ]
        return {"loss": (sum(means[1:], means[0]), jnp.ones(())), **metrics}


PRETRAINING = Pretraining()


def prediction_weights(batch: Batch) -> dict[str, jax.Array]:
    """Returns the weights [B, P] of predictions by their kind: "mlm", and "clm" in rows read from left to right."""
    weights = batch.mlm_weights
    if batch.causal is None:
        return {"mlm": weights}
    return {"mlm": weights * ~batch.causal[:, None], "clm": weights * batch.causal[:, None]}


def next_sentence_weights(batch: Batch) -> jax.Array:
    """Returns [B, M] float: 1 for a sequence with a next sentence label, 0 for any other place.

    The [CLS] of a row that is read from left to right sees only itself, so its label does not count.
    """
    weights = batch.sequence_weights * (batch.next_sentence_labels >= 0)
    return weights if batch.causal is None else weights * ~batch.causal[:, None]
