# SPDX-License-Identifier: Apache-2.0
"""The base class of heads, and the model that a head makes with the encoder."""

import abc
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from bert_jax.batch import Batch
from bert_jax.errors import InputError
from bert_jax.model.bert import Encoded, Encoder
from bert_jax.model.heads.labels import Spot, as_label, class_losses, most_frequent
from bert_jax.model.losses import Pair
from bert_jax.model.parts import Dense, Dropout
from bert_jax.model.teaching import class_divergence
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.settings.model import ModelConfig


class Head(abc.ABC):
    """A head: its parameters, its computation, the layout of its labels and outputs in a batch, its names elsewhere.

    A head of one's own needs a name, parts and `logits`. What it does not say is as of a head that gives each sequence
    a class, or a number if there is a single output. Heads are equal if their class and their attributes are.
    """

    name: str  # in saved models, if no other is
    saved_as: str = ""  # the name of the head that a model is saved with, where this one only learns differently
    # of parameters, beside embeddings and layers: "pooler", and modules of the head
    parts: tuple[str, ...]
    num_outputs: int = 0  # K; 0 is as many as there are classes, or 1
    all_layers: bool = False  # whether it reads `Encoded.layers`
    is_frozen: bool = False  # whether the encoder is not trained, and has no dropout
    can_be_packed: bool = True  # whether several examples may share a row
    is_of_several: bool = False  # whether an example is several texts, each a sequence
    # whether it classifies tokens, which in some families pass through the pooler (`Block`)
    of_tokens: bool = False

    # Training:
    answers: int = 1  # in each label; the loss is a mean over them
    can_learn: bool = True  # whether a teacher's outputs can be learnt
    # whether a teacher's outputs tell what counts in the loss, and are not learnt: see `guided_losses`
    is_guided: bool = False
    # whether its loss needs the outputs of all rows at once: see `labels_of_batch`
    needs_whole_batch: bool = False
    knows_queries: bool = False  # whether it reads `Batch.queries`

    # Prediction:
    has_windows: bool = False  # whether longer inputs are read in windows, and not cut
    most_tokens: str = "max_seq_length"  # the setting of the task that limits the length
    takes_words: bool = False  # whether a tab in an input parts no texts
    about_exported: str = "logits, as the head makes them."

    # Hugging Face: the class of a model, its pipeline, whether it names classes, and its problem_type: that of a single
    # output first, that of several last.
    architecture: str = ""
    family: str = ""  # the one of `BLOCKS` whose models alone have it; "" is all
    pipeline: str = ""
    has_labels: bool = False
    problem_types: tuple[str, ...] = ()

    @abc.abstractmethod
    def logits(self, model: "Model", encoded: Encoded, batch: Batch, deterministic: bool) -> Any:
        """Returns the outputs for a batch: float32 logits, for most; [B, M, K] of the sequences in each row.

        It is called in the Flax module `model`, which has `config` and `num_outputs`. Modules that are made here belong
        to it: `parts` are their names. Dropout is left out if `deterministic`.
        """

    def weights(self, batch: Batch) -> jax.Array:
        """Returns 1 for each label that counts, 0 for the others."""
        return batch.sequence_weights

    def losses(self, logits: Any, batch: Batch, weights: jax.Array) -> dict[str, Pair]:
        """Returns sums and weights of "loss" and of metrics."""
        return class_losses(logits, batch, weights)

    def further_losses(self, step: jax.Array, num_steps: int) -> dict[str, jax.Array]:
        """Returns what metrics of `losses` beside "loss" are worth in the loss, after `step` of `num_steps`.

        They are means over the batch, of a head that `needs_whole_batch`.
        """
        return {}

    def divergence(
        self, logits: jax.Array, teacher: jax.Array, batch: Batch, temperature: float
    ) -> jax.Array:
        """Returns how far outputs are from a teacher's, of the shape of `weights`."""
        return class_divergence(logits, teacher, batch, temperature)

    def guided_losses(
        self, logits: Any, teacher: Any, batch: Batch, weights: jax.Array
    ) -> dict[str, Pair]:
        """Returns what `losses` returns, given a teacher's outputs, if the head `is_guided`."""
        raise NotImplementedError(f"{type(self).__name__}.guided_losses")

    def mean_of(self, outputs: Sequence[jax.Array]) -> jax.Array:
        """Returns the mean of the outputs of several teachers."""
        return sum(outputs[1:], outputs[0]) / len(outputs)

    def no_labels(self, num_rows: int, length: int, num_places: int, label: Any) -> np.ndarray:
        """Returns `Batch.labels` before any is written, for labels like `label`; B, L and M are given."""
        kind = np.asarray(label)
        return np.zeros(
            (num_rows, num_places, *kind.shape), np.float32 if kind.dtype.kind == "f" else np.int32
        )

    def write_label(self, labels: np.ndarray, label: Any, spot: Spot) -> None:
        """Writes the label of an example into the labels of its row."""
        labels[spot.places] = as_label(labels, label, *labels.shape[1:])

    def labels_of_batch(
        self, bins: Sequence[Sequence[Any]], num_places: int, num_examples: int, length: int = 0
    ) -> Any:
        """Returns `Batch.labels` of a whole batch, if the head `needs_whole_batch`.

        `bins` are the rows of the task in each row of the batch, one text each; `num_places` is M, and `length` L.
        """
        raise NotImplementedError(f"{type(self).__name__}.labels_of_batch")

    def as_set(self, config: TaskConfig) -> "Head":
        """Returns the head as the settings of a task ask for it."""
        return self

    def outputs(self, outputs: np.ndarray, spot: Spot) -> np.ndarray:
        """Returns the outputs of an example, as `Task.decode` takes them, from those of its row."""
        return outputs[spot.places.start]

    def constant(self, labels: Sequence[Any], num_outputs: int) -> np.ndarray:
        """Returns the outputs [K] of a constant answer, such as the most frequent label of the training data."""
        if any(np.ndim(label) and np.asarray(label).dtype.kind == "f" for label in labels):  # soft
            return np.mean(np.stack(labels), axis=0).astype(np.float32)
        known = np.concatenate([np.ravel(label) for label in labels])
        if num_outputs == 1:
            return np.array([known.mean()], np.float32)
        return most_frequent(known, num_outputs)

    def usual_task(self, num_outputs: int) -> str:
        """Returns the task of a model that was saved without one; "" if the head has no task."""
        return ""

    def exported(self, logits: jax.Array) -> jax.Array:
        """Returns the array that an exported model gives, from the outputs of rows with one sequence."""
        return logits

    @property
    def own_parts(self) -> set[str]:
        """The parts without the pooler, which is the encoder's."""
        return set(self.parts) - {"pooler"}

    def parts_in(self, config: ModelConfig) -> tuple[str, ...]:
        """Returns the parts of a model with this head. Only here do families differ in which heads have a pooler."""
        if self.of_tokens and config.block.of_tokens:
            return ("pooler", *self.parts)
        if not config.block.activation:  # its pooler has no parameters
            return tuple(sorted(self.own_parts))
        return self.parts if self.own_parts or config.block.of_encoder else ()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:  # programs are compiled for a head
        return hash((type(self), *sorted(vars(self).items())))


class Model(nn.Module):
    """The encoder and a head. The head's submodules stand beside the encoder."""

    config: ModelConfig
    head: Head
    num_outputs: int = 0  # K, if the head does not fix it

    def __post_init__(self) -> None:
        self.num_outputs = self.head.num_outputs or self.num_outputs
        super().__post_init__()

    @nn.compact
    def __call__(self, batch: Batch, deterministic: bool = True) -> Any:
        """Returns the outputs of the head: float32 logits, for most."""
        config = self.config
        head = self.head
        pools = "pooler" in (head.parts_in(config) if config.block.activation else head.parts)
        encoder = Encoder(config, pools, head.of_tokens, name="encoder")
        encoded = encoder(batch, head.is_frozen or deterministic, keep_layers=head.all_layers)
        return head.logits(self, encoded, batch, deterministic)


class Linear(Head):
    """A dense layer on the pooled output of each sequence, or on the last layer's vector of each token.

    Where a family pools tokens, that is the last layer's vector after the pooler.
    """

    parts = ("pooler", "classifier")
    has_dropout: bool = True  # of its input

    def logits(
        self, model: Model, encoded: Encoded, batch: Batch, deterministic: bool
    ) -> jax.Array:
        """Returns float32 logits: [B, M, K] of sequences, [B, L, K] of tokens."""
        (part,) = self.own_parts
        if not model.num_outputs:
            raise InputError(
                f"num_outputs is 0, so the {part} has no outputs; give the number of classes"
            )
        config = model.config
        features = self.features(encoded, batch)
        if self.has_dropout or (self.of_tokens and config.block.span_dropout):
            features = Dropout(config.hidden_dropout_rate)(features, deterministic)
        return Dense(
            config, model.num_outputs, "float32", stddev=config.classifier_stddev, name=part
        )(features)

    def features(self, encoded: Encoded, batch: Batch) -> jax.Array:
        """Returns the input of the dense layer, [B, M, F] or [B, L, F]."""
        features = encoded.hidden if self.of_tokens and encoded.pooled is None else encoded.pooled
        assert features is not None
        return features
