# SPDX-License-Identifier: Apache-2.0
"""The type of a head, and the model that it makes with the encoder.

Where no other function is given, a head gives each sequence a class, or a number if there is a single output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from bert_jax.batch import Batch
from bert_jax.errors import InputError
from bert_jax.model.bert import Encoded, Encoder
from bert_jax.model.heads.labels import (
    Spot,
    class_losses,
    constant_class,
    no_sequence_labels,
    sequence_outputs,
    write_sequence_label,
)
from bert_jax.model.losses import Pair
from bert_jax.model.parts import Dense, Dropout
from bert_jax.model.teaching import class_divergence
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.settings.model import ModelConfig


@dataclass(frozen=True)
class Head:
    """A head: its parameters, its computation, the layout of its labels and outputs in a batch, its names elsewhere.

    Custom heads need a name, parts and a module; the defaults are those of a classifier of sequences.
    """

    name: str  # in saved models
    parts: tuple[str, ...]  # of parameters, beside embeddings and layers: "pooler", and modules of the head
    # Model, number of outputs -> Linen module, called with (Encoded, Batch, deterministic). Its submodules are those of
    # the model: `parts` are their names.
    module: Callable[[ModelConfig, int], nn.Module]
    num_outputs: int = 0  # K; 0 is as many as there are classes, or 1
    all_layers: bool = False  # whether the module reads `Encoded.layers`
    is_frozen: bool = False  # whether the encoder is not trained, and has no dropout
    can_be_packed: bool = True  # whether several examples may share a row
    of_tokens: bool = False  # whether it classifies tokens, which in some families pass through the pooler (`Block`)

    # Training. Batch -> 1 for each label that counts; the loss is a mean over labels, or over the `answers` in each.
    weights: Callable[[Batch], jax.Array] = lambda batch: batch.sequence_weights
    answers: int = 1
    # Outputs of the module, batch, weights -> sums and weights of "loss" and of metrics.
    losses: Callable[[Any, Batch, jax.Array], dict[str, Pair]] = class_losses
    # Outputs, a teacher's, batch, temperature -> how far they are apart, of the shape of `weights`; None: no teacher.
    divergence: Callable[[jax.Array, jax.Array, Batch, float], jax.Array] | None = class_divergence
    mean_of: Callable[[Sequence[jax.Array]], jax.Array] = lambda outputs: sum(outputs[1:], outputs[0]) / len(outputs)
    # B, L, M, the label of an example -> `Batch.labels` before any is written.
    no_labels: Callable[[int, int, int, Any], np.ndarray] = no_sequence_labels
    write_label: Callable[[np.ndarray, Any, Spot], None] = write_sequence_label  # into those of its row
    # The rows of the task in each row of a batch (one text each), M, number of examples of the batch -> `Batch.labels`
    # of the whole batch. A head that has it has a loss that needs the outputs of all rows at once.
    labels_of_batch: Callable[[Sequence[Sequence[Any]], int, int], Any] | None = None
    # Head, settings of the task -> the head as they ask for it.
    as_set: Callable[["Head", TaskConfig], "Head"] = lambda head, config: head
    # Prediction. Outputs of a row -> those of an example, as `Task.decode` takes them.
    outputs: Callable[[np.ndarray, Spot], np.ndarray] = sequence_outputs
    # Labels of training, K -> the outputs [K] of a constant answer.
    constant: Callable[[Sequence[Any], int], np.ndarray] = constant_class
    usual_task: Callable[[int], str] | None = None  # K -> the task of a model that was saved without one
    has_windows: bool = False  # whether longer inputs are read in windows, and not cut
    most_tokens: str = "max_seq_length"  # the setting of the task that limits the length
    takes_words: bool = False  # whether a tab in an input parts no texts
    probe: str = ""  # what a probe in its place classifies: "sequences", "tokens", or "" if there is none
    # Export. Outputs of rows with one sequence -> the exported array, and its description.
    exported: Callable[[jax.Array], jax.Array] = lambda logits: logits
    about_exported: str = "logits, as the head makes them."
    # Hugging Face: the class of a model, its pipeline, whether it names classes, and its problem_type: that of a single
    # output first, that of several last.
    architecture: str = ""
    family: str = ""  # the one of `BLOCKS` whose models alone have it; "" is all
    pipeline: str = ""
    has_labels: bool = False
    problem_types: tuple[str, ...] = ()

    @property
    def own_parts(self) -> set[str]:
        """The parts without the pooler, which is the encoder's."""
        return set(self.parts) - {"pooler"}

    def parts_in(self, config: ModelConfig) -> tuple[str, ...]:
        """Returns the parts of a model with this head. Only here do families differ in which heads have a pooler."""
        if self.of_tokens and config.block.of_tokens:
            return ("pooler", *self.parts)
        return self.parts if self.own_parts or config.block.of_encoder else ()


class Model(nn.Module):
    """The encoder and a head. The head's submodules stand beside the encoder."""

    config: ModelConfig
    head: Head
    num_outputs: int = 0  # K, if the head does not fix it

    @nn.compact
    def __call__(self, batch: Batch, deterministic: bool = True) -> Any:
        """Returns the outputs of the head's module: float32 logits, for most."""
        config, head = self.config, self.head
        encoder = Encoder(config, "pooler" in head.parts_in(config), head.of_tokens, name="encoder")
        encoded = encoder(batch, head.is_frozen or deterministic, keep_layers=head.all_layers)
        module = head.module(config, head.num_outputs or self.num_outputs)
        nn.share_scope(self, module)
        return module(encoded, batch, deterministic)


class Linear(nn.Module):
    """A dense layer on the pooled output of each sequence, or on the last layer's vector of each token.

    Where a family pools tokens, that is the last layer's vector after the pooler.
    """

    config: ModelConfig
    num_outputs: int
    part: str = "classifier"
    of_tokens: bool = False
    has_dropout: bool = True  # of its input

    @nn.compact
    def __call__(self, encoded: Encoded, batch: Batch, deterministic: bool) -> jax.Array:
        """Returns float32 logits: [B, M, K] of sequences, [B, L, K] of tokens."""
        if not self.num_outputs:
            raise InputError(f"num_outputs is 0, so the {self.part} has no outputs; give the number of classes")
        config = self.config
        features = encoded.hidden if self.of_tokens and encoded.pooled is None else encoded.pooled
        assert features is not None
        if self.has_dropout or (self.of_tokens and config.block.span_dropout):
            features = Dropout(config.hidden_dropout_rate)(features, deterministic)
        return Dense(config, self.num_outputs, "float32", stddev=config.classifier_stddev, name=self.part)(features)
