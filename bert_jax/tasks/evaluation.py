# SPDX-License-Identifier: Apache-2.0
"""What a model says of a task's examples, and how good that is."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import Batch
from bert_jax.devices.allocator import give_back_freed_memory
from bert_jax.devices.sharding import replicated, row_sharding, tree_shardings
from bert_jax.model.objective import Params, task_forward, task_losses
from bert_jax.model.on_cpu import unstack
from bert_jax.settings.model import ModelConfig
from bert_jax.tasks.base import Row, Task
from bert_jax.tasks.batches import eval_batches, unpadded_outputs
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.window import mean_metrics


class Split(NamedTuple):
    """Examples of one kind and their rows."""

    name: str
    examples: list[Any]
    rows: list[Row]
    counts: dict[str, int]


class Data(NamedTuple):
    """All that a run reads."""

    train: Split
    evaluation: list[Split]
    test: list[Split]


def make_split(task: Task, tokenizer: Tokenizer, name: str, examples: list[Any], training: bool = False) -> Split:
    """Returns the examples with their rows."""
    made = task.make_rows(examples, tokenizer, training)
    return Split(name, examples, made.rows, made.counts)


class Inference(NamedTuple):
    """A compiled model, and what it takes in place of parameters."""

    ready: Callable[[Params], Any]  # of parameters, once for all batches
    run: Callable[[Any, Batch], tuple[dict[str, Any], jax.Array]]  # the losses, if there are labels, and the logits


def make_inference(model: ModelConfig, task: Task, mesh: Mesh, params: Params) -> Inference:
    """Returns the compiled model of a task; its outputs are whole on every host. Of `params` the shapes are read."""

    def infer(params: Params, batch: Batch) -> tuple[dict[str, Any], jax.Array]:
        logits = task_forward(model, params, batch, task.head, None, task.num_outputs, task.probe)
        return {} if batch.labels is None else task_losses(logits, batch, task.head), logits

    if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu" or task.probe:
        shardings = tree_shardings(mesh, params), row_sharding(mesh)
        return Inference(lambda params: params, jax.jit(infer, in_shardings=shardings, out_shardings=replicated(mesh)))
    # On one CPU copying matrices out of their stack takes a good part of a short batch's time. Do it once.
    return Inference(lambda params: params | {"encoder": unstack(model, params["encoder"])}, jax.jit(infer))


def predict_split(
    task: Task, split: Split, infer: Inference, ready: Any, batch_size: int, mesh: Mesh
) -> tuple[list[Any], dict[str, float]]:
    """Returns a prediction for every example of a split, and the loss where the labels are known.

    `ready` is what `infer.ready` made of the parameters.
    """
    outputs: list[Any] = [None] * len(split.rows)
    sums: dict[str, list[float]] = {}
    for numbers, batch in eval_batches(split.rows, task.head, batch_size, mesh):
        losses, logits = jax.device_get(infer.run(ready, batch))
        give_back_freed_memory()
        for place, number in enumerate(numbers):
            outputs[number] = unpadded_outputs(split.rows[number], logits[place], task.head)
        for name, (total, weight) in losses.items():
            pair = sums.setdefault(name, [0.0, 0.0])
            pair[0] += float(total)
            pair[1] += float(weight)
    loss = {name: value for name, value in mean_metrics(sums).items() if name == "loss"}
    return task.decode(split.examples, split.rows, outputs), loss


def evaluate(
    task: Task,
    splits: Sequence[Split],
    infer: Inference,
    batch_size: int,
    mesh: Mesh,
    params: Params,
    keep: Callable[[Split, list[Any]], None] = lambda split, predictions: None,
) -> dict[str, float]:
    """Returns the task's metrics on every split; those of a later one have its name behind theirs.

    `keep` is given the predictions.
    """
    metrics: dict[str, float] = {}
    ready = infer.ready(params)
    for split in splits:
        predictions, loss = predict_split(task, split, infer, ready, batch_size, mesh)
        keep(split, predictions)
        metrics |= _named(loss | task.score(split.examples, predictions), split, splits)
    return metrics


def constant_scores(task: Task, train: Split, splits: Sequence[Split]) -> dict[str, float]:
    """Returns the metrics of a model that says of everything what is said most often in training.

    Of a regression that is the mean; of choices the first; of spans the first token, which is no answer.
    """
    constant = np.zeros(max(1, task.num_outputs), np.float32)
    labels = [np.ravel(row.label) for row in train.rows if row.label is not None]
    if task.labels and task.head != "multiple_choice":
        known = np.concatenate(labels)
        constant[np.bincount(known[known >= 0].astype(np.int64), minlength=len(constant)).argmax()] = 1
    elif task.head == "sequence_classification":
        constant[0] = np.concatenate(labels).mean()

    def output(row: Row) -> np.ndarray:
        if task.head == "sequence_classification":
            return constant
        if task.head == "multiple_choice":
            return np.zeros(len(row.lengths), np.float32)
        width = constant if task.head == "token_classification" else np.zeros(2, np.float32)
        return np.tile(width, (len(row.token_ids), 1))

    metrics: dict[str, float] = {}
    for split in splits:
        predictions = task.decode(split.examples, split.rows, [output(row) for row in split.rows])
        metrics |= _named(task.score(split.examples, predictions), split, splits)
    return metrics


def _named(scores: dict[str, float], split: Split, splits: Sequence[Split]) -> dict[str, float]:
    """Returns the metrics of a split; of a later one than the first with its own name behind theirs."""
    suffix = "" if split is splits[0] else split.name.removeprefix(splits[0].name.partition("_")[0])
    return {name + suffix: float(value) for name, value in scores.items()}
