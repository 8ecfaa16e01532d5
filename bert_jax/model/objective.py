# SPDX-License-Identifier: Apache-2.0
"""Training objectives and forward passes, as pure functions of parameters and a batch. Only `model/` uses Flax."""

import abc
import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bert_jax.batch import Batch, Encoded, PyTree, RowShape
from bert_jax.devices.sharding import axis_of_rows, has_explicit_axes
from bert_jax.model.bert import Encoder
from bert_jax.model.derivatives import plain_derivatives
from bert_jax.model.heads.base import Head, Model
from bert_jax.model.heads.pretraining import (
    PRETRAINING,
    next_sentence_weights,
    prediction_weights,
)
from bert_jax.model.inputs import check_parts
from bert_jax.model.losses import Pair
from bert_jax.model.masking import leave_causal, mask_rows, next_tokens, rate_at
from bert_jax.model.teaching import class_divergence, taught
from bert_jax.settings.model import ModelConfig, check_has_words
from bert_jax.settings.pretraining import MaskingConfig, TeacherConfig

NO_TEACHER = TeacherConfig()
# Functions of batches and of what is encoded can be exported.
for _kind in (Batch, Encoded):
    jax.export.register_namedtuple_serialization(
        _kind, serialized_name=f"bert_jax.{_kind.__name__}"
    )
Params = dict[str, PyTree]  # nested dicts of float32 arrays


class Objective(abc.ABC):
    """A task for the one training step: pure functions of parameters and a batch.

    The loss is the sum over `denominators` of sum / denominator, and of `further_losses`. All are of the global batch,
    so the loss does not depend on microbatches or devices.
    """

    model: ModelConfig
    # paths of parameters that the loss does not depend on; they are not decayed either
    unused: tuple[str, ...] = ()
    # Whether the loss is one of all rows at once. It has two parts then: `outputs` of some rows, and `losses_of` those
    # of all rows.
    needs_whole_batch = False

    @abc.abstractmethod
    def init(self, key: jax.Array) -> Params:
        """Returns random parameters."""

    def prepare(self, batch: Batch, step: jax.Array | None = None) -> Batch:
        """Returns the batch as the losses take it. Called once per step, before it is divided into microbatches.

        `step` is that of a run in training; evaluation has none.
        """
        return batch

    def apart(self, params: Params) -> Params:
        """Returns the parameters that the optimizer changes, where those of the model are sums of them."""
        return params

    def together(self, updates: Params) -> Params:
        """Returns the updates of parameters, from those of what `apart` returns."""
        return updates

    @abc.abstractmethod
    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns what the sums of a prepared batch are divided by, by the name of the loss."""

    def further_losses(self, step: jax.Array, num_steps: int) -> dict[str, jax.Array]:
        """Returns what other metrics, means over the whole batch, are worth in the loss at a step, by their name."""
        return {}

    @abc.abstractmethod
    def losses(
        self, params: Params, batch: Batch, dropout_key: jax.Array | None
    ) -> dict[str, Pair]:
        """Returns losses and metrics of a prepared batch; no dropout without a key."""

    def outputs(self, params: Params, batch: Batch, dropout_key: jax.Array | None) -> jax.Array:
        """Returns the outputs of rows, of an objective that needs the whole batch."""
        raise NotImplementedError

    def losses_of(self, outputs: jax.Array, batch: Batch) -> dict[str, Pair]:
        """Returns losses and metrics of the outputs of all rows, of an objective that needs the whole batch."""
        raise NotImplementedError

    def row_shape(self, batch: Batch) -> RowShape:
        """Returns the sizes of the rows of a batch of arrays or of shapes, with the predictions of `prepare`."""
        (num_rows, length), sequences = batch.token_ids.shape, batch.cls_positions.shape[1]
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(batch)) // num_rows
        positions = jax.eval_shape(self.prepare, batch).mlm_positions  # of a task there are none
        return RowShape(length, sequences, 0 if positions is None else positions.shape[1], size)


class PretrainingObjective(Objective):
    """Masked language model plus next sentence prediction. Source: paper, section 3.1.

    A batch with `mlm_positions` is not masked again. For a causal model the "mlm" loss is that of the next token.
    Without `next_sentence` there is no next sentence loss, whatever the labels. `num_steps` are those of the run, in
    which the rate of masks falls to `masking.end_rate`. Rows that are read from left to right
    (`masking.causal_rate`) have the loss "clm"; a prediction weighs the same in either loss.
    """

    def __init__(
        self,
        model: ModelConfig,
        masking: MaskingConfig,
        mask_id: int,
        never_predicted: tuple[int, ...],
        next_sentence: bool = True,
        teacher: TeacherConfig = NO_TEACHER,
        num_steps: int = 1,
    ) -> None:
        self.model = model
        self.masking = masking
        self.num_steps = num_steps
        self.teacher = teacher
        self.mask_id = mask_id
        self.never_predicted = never_predicted
        self.next_sentence = next_sentence
        self.unused = () if next_sentence else ("encoder/pooler", "next_sentence")

    def init(self, key: jax.Array) -> Params:
        return init_params(self.model, key)

    def prepare(self, batch: Batch, step: jax.Array | None = None) -> Batch:
        if batch.mlm_positions is not None:
            return batch
        if self.model.causal:
            return next_tokens(batch)
        special = self.mask_id, self.never_predicted
        rate = None
        if step is not None and self.masking.end_rate:
            rate = rate_at(self.masking, step, self.num_steps)
        masked = mask_rows(batch, self.masking, self.model.vocab_size, *special, rate)
        return leave_causal(masked, batch, self.masking) if self.masking.causal_rate else masked

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        # 1e-5 as in Google's run_pretraining.py: a batch without predictions has loss 0 and not NaN.
        predictions = jnp.sum(batch.mlm_weights) + 1e-5
        counts = {f"{kind}_loss": predictions for kind in prediction_weights(batch)}
        if self.next_sentence:
            counts["nsp_loss"] = jnp.maximum(jnp.sum(next_sentence_weights(batch)), 1.0)
        return counts

    def losses(
        self, params: Params, batch: Batch, dropout_key: jax.Array | None
    ) -> dict[str, Pair]:
        output = forward(self.model, params, batch, PRETRAINING, dropout_key)
        labelled = batch if self.next_sentence else batch._replace(next_sentence_labels=None)
        metrics = PRETRAINING.losses(output, labelled, batch.mlm_weights)
        del metrics["loss"]  # a run adds up the others, each over the whole batch
        if batch.teacher is not None:
            teacher = self.teacher
            apart = class_divergence(output.mlm_logits, batch.teacher, batch, teacher.temperature)
            metrics["mlm_loss"] = taught(metrics["mlm_loss"], apart, batch.mlm_weights, teacher)
        return metrics


class TaskObjective(Objective):
    """Fine-tuning with a head of `num_outputs`, if the head does not fix the number.

    Rows that pad the batch have weight 0. Source: google-research/bert run_classifier.py and run_squad.py.
    """

    def __init__(
        self,
        model: ModelConfig,
        head: Head,
        num_outputs: int = 0,
        teacher: TeacherConfig = NO_TEACHER,
    ) -> None:
        self.model = model
        self.head = head
        self.num_outputs = num_outputs
        self.teacher = teacher
        self.needs_whole_batch = head.needs_whole_batch

    def init(self, key: jax.Array) -> Params:
        return init_params(self.model, key, self.head, self.num_outputs)

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        # the weight of all labels of the batch
        labels = jnp.sum(self.head.weights(batch)) * self.head.answers
        return {"loss": jnp.where(labels > 0, labels, 1.0)}  # the loss of none is 0 and not NaN

    def further_losses(self, step: jax.Array, num_steps: int) -> dict[str, jax.Array]:
        return self.head.further_losses(step, num_steps)

    def losses(
        self, params: Params, batch: Batch, dropout_key: jax.Array | None
    ) -> dict[str, Pair]:
        return self.losses_of(self.outputs(params, batch, dropout_key), batch)

    def outputs(self, params: Params, batch: Batch, dropout_key: jax.Array | None) -> jax.Array:
        return forward(self.model, params, batch, self.head, dropout_key, self.num_outputs)

    def losses_of(self, outputs: jax.Array, batch: Batch) -> dict[str, Pair]:
        head = self.head
        teacher = self.teacher
        weights = head.weights(batch)
        if batch.teacher is not None and head.is_guided:
            return head.guided_losses(outputs, batch.teacher, batch, weights)
        metrics = head.losses(outputs, batch, weights)
        if batch.teacher is not None and head.can_learn:
            apart = head.divergence(outputs, batch.teacher, batch, teacher.temperature)
            metrics["loss"] = taught(metrics["loss"], apart, weights, teacher)
        return metrics


def encode(
    config: ModelConfig,
    params: Params,
    batch: Batch,
    dropout_key: jax.Array | None = None,
    layers: bool = False,
    attentions: bool = False,
    own_derivatives: bool = True,
) -> Encoded:
    """Returns the encoder's outputs for a batch: a pure function, for `jax.jit`, `jax.grad` and a loss of your own.

    Args:
      config: of the model.
      params: with the part "encoder"; those of heads are not read. `pooled` is None if there is no pooler.
      batch: of numpy or JAX arrays, such as `make_batch` makes.
      dropout_key: without one there is no dropout.
      layers: keep the embeddings and the outputs of all layers, `Encoded.layers`.
      attentions: keep the probabilities of attention, `Encoded.attentions`.
      own_derivatives: False takes JAX's own derivatives, which forward mode needs (`jax.jvp`, `jax.hessian`), and a
        gradient of a gradient in bfloat16 or in `jax.shard_map`. They take more time and memory.

    Raises: InputError if the batch does not fit the model: its shapes, and ids beyond the model's tables where they are
      known. A compiled program does not know those that it is given: NaN is what it makes of them.

    Examples:
      >>> bert = bert_jax.load_pretrained("models/bert-mini-en")
      >>> batch = bert_jax.make_batch(bert, ["open the door"])
      >>> jax.jit(bert_jax.encode, static_argnums=0)(bert.config, bert.params, batch)
      Encoded(hidden=float32[1,8,256], pooled=float32[1,1,256], word_table=float32[1,8192,256])
    """
    check_parts(params, ("encoder",))
    encoder = Encoder(config, pool="pooler" in params["encoder"])
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    deterministic = dropout_key is None

    def apply(params: Params, batch: Batch, rngs: dict[str, jax.Array]) -> Encoded:
        kept = layers, attentions
        return encoder.apply({"params": params}, batch, deterministic, *kept, rngs=rngs)  # type: ignore[return-value]

    with contextlib.nullcontext() if own_derivatives else plain_derivatives():
        return _on_any_mesh(apply, params["encoder"], batch, rngs)


def _on_any_mesh(
    apply: Callable[..., Any], params: Params, batch: Batch, rngs: dict[str, jax.Array]
) -> Any:
    """Returns `apply(params, batch, rngs)`.

    On a mesh whose shardings are part of types the compiler divides the arrays within, and outputs are divided as the
    rows of the batch are.
    """
    if not has_explicit_axes():
        return apply(params, batch, rngs)
    axis = axis_of_rows(batch.token_ids)
    num_rows = len(batch.token_ids)

    def divided(output: jax.ShapeDtypeStruct) -> PartitionSpec:
        if output.shape[:1] == (num_rows,):
            return PartitionSpec(axis)
        # the layers' outputs are stacked on an axis before the rows
        return PartitionSpec(None, axis) if output.shape[1:2] == (num_rows,) else PartitionSpec()

    given = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, batch, rngs)
    )
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        out = jax.tree.map(divided, jax.eval_shape(apply, *given))
    return jax.sharding.auto_axes(apply, out_sharding=out)(params, batch, rngs)  # type: ignore[call-arg]


def forward(
    config: ModelConfig,
    params: Params,
    batch: Batch,
    head: Head,
    dropout_key: jax.Array | None = None,
    num_outputs=0,
    own_derivatives: bool = True,
) -> Any:
    """Returns the outputs of the head's module for a batch; no dropout without a key.

    `num_outputs` is needed if neither the head nor a part "classifier" determines it. `own_derivatives` is as in
    `encode`.

    Raises: InputError if the batch does not fit the model, or the parameters lack a part of the head.

    Examples:
      >>> bert = bert_jax.load_pretrained("models/bert-mini-en")
      >>> batch = bert_jax.make_batch(bert, ["open the door"])
      >>> head = bert_jax.HEADS["masked_lm"]
      >>> bert_jax.forward(bert.config, bert.params, batch, head).shape  # of the one place to predict
      (1, 1, 8192)
    """
    check_parts(params, ("encoder", *head.parts_in(config)))
    if not num_outputs and "classifier" in params:
        num_outputs = params["classifier"]["bias"].shape[0]
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    module = Model(config, head, num_outputs)
    deterministic = dropout_key is None

    def apply(params: Params, batch: Batch, rngs: dict[str, jax.Array]) -> Any:
        return module.apply({"params": params}, batch, deterministic, rngs=rngs)

    with contextlib.nullcontext() if own_derivatives else plain_derivatives():
        return _on_any_mesh(apply, params, batch, rngs)


# traced once, for shapes and values
@functools.partial(jax.jit, static_argnames=("config", "head", "num_outputs"))
def init_params(
    config: ModelConfig, key: jax.Array, head: Head = PRETRAINING, num_outputs: int = 0
) -> Params:
    """Returns random parameters of the encoder and a head, float32. Raises: InputError if there can be none.

    Examples:
      >>> config = bert_jax.ModelConfig(vocab_size=1000, num_layers=2)
      >>> params = bert_jax.init_params(config, jax.random.key(0))
      >>> sorted(params)
      ['encoder', 'mlm', 'next_sentence']
    """
    check_has_words(config)
    # the same numbers from a program that does not grow with the layers
    config = replace(config, unroll=1)
    row = jnp.zeros((1, 2), jnp.int32)
    sequence = jnp.zeros((1, 1), jnp.int32)
    batch = Batch(row, row, row, sequence, sequence, mlm_positions=sequence)
    return dict(Model(config, head, num_outputs).init(key, batch)["params"])


def parts_of(params: Params) -> tuple[str, ...]:
    """Returns the names of the parts beside embeddings and layers: "pooler" and heads."""
    return ("pooler",) * ("pooler" in params["encoder"]) + tuple(
        name for name in sorted(params) if name != "encoder"
    )


def count_parameters(params: Params) -> int:
    """Returns the number of parameters, padding included."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
