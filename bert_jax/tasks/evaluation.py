# SPDX-License-Identifier: Apache-2.0
"""Prediction and evaluation of a task on the device mesh."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import Batch, PyTree, Row
from bert_jax.batches.infer import computed, inference_layouts
from bert_jax.batches.make import batch_of_layout, unpadded_outputs
from bert_jax.batches.pack import Layout, StoredRows, sizes_of
from bert_jax.devices.sharding import gathered, replicated, row_sharding, tree_shardings
from bert_jax.errors import TextError
from bert_jax.model.losses import Pair, mean_metrics
from bert_jax.model.objective import Params, forward
from bert_jax.model.on_cpu import unstack
from bert_jax.settings.model import ModelConfig
from bert_jax.tasks.base import Example, Prediction, Task
from bert_jax.tasks.hooks import check_kind, check_rows_of, mistake
from bert_jax.tasks.scores import Metrics
from bert_jax.text.tokenizer import Tokenizer


class Split(NamedTuple):
    """The examples of a split, and their rows."""

    name: str
    examples: list[Example]
    rows: Sequence[Row]
    counts: dict[str, int]


class Data(NamedTuple):
    """The splits of a fine-tuning run."""

    train: Split
    evaluation: list[Split]
    test: list[Split]


def make_split(
    task: Task,
    tokenizer: Tokenizer,
    name: str,
    examples: list[Example],
    training: bool = False,
) -> Split:
    """Returns the examples with their rows. Raises: TextError, with its place, if the tokenizer fails on a text."""
    try:
        made = task.make_rows(examples, tokenizer, training)
    except TextError as error:
        places = [getattr(each, "where", "") for each in examples if _holds(each, error.text)]
        raise error.at(next(filter(None, places), name)) from None
    check_rows_of(task, len(examples), made, training)
    return Split(name, examples, made.rows, made.counts)


def _holds(value: object, text: str) -> bool:
    """Returns whether a text is a part of a value, which may be an example of texts and of collections of texts."""
    if isinstance(value, str):
        return text in value
    return isinstance(value, (list, tuple)) and any(_holds(item, text) for item in value)


class Inference(NamedTuple):
    """A compiled model, and the preparation of its parameters."""

    model: ModelConfig
    pack: str  # see `inference_layouts`
    one_shape: bool  # see `inference_layouts`
    ready: Callable[[Params], PyTree]  # prepares parameters, once for all batches
    # losses, {} without labels, and logits
    run: Callable[[PyTree, Batch], tuple[dict[str, Pair], jax.Array]]


def make_inference(
    model: ModelConfig,
    task: Task,
    mesh: Mesh,
    params: Params,
    pack: str = "auto",
    one_shape: bool = False,
) -> Inference:
    """Returns the compiled model of a task, with outputs replicated on every host.

    `params` gives the shapes. `pack` and `one_shape` are those of `inference_layouts`; a head that cannot be packed
    never is.
    """
    head = task.head
    num_outputs = task.num_outputs
    pack = pack if head.can_be_packed else "off"

    def infer(params: Params, batch: Batch) -> tuple[dict[str, Pair], jax.Array]:
        logits = forward(model, params, batch, head, None, num_outputs)
        return {} if batch.labels is None else head.losses(
            logits, batch, head.weights(batch)
        ), logits

    shardings = tree_shardings(mesh, params), row_sharding(mesh)
    run = jax.jit(infer, in_shardings=shardings, out_shardings=replicated(mesh))
    ready: Callable[[Params], PyTree] = functools.partial(gathered, mesh)
    if mesh.size == 1 and mesh.devices.flat[0].platform == "cpu" and not head.all_layers:
        # On one CPU, copying matrices out of their stack takes much of the time of a short batch: do it once.
        ready = lambda params: params | {"encoder": unstack(model, params["encoder"])}  # noqa: E731
        run = jax.jit(infer)
    return Inference(
        model=model,
        pack=pack,
        one_shape=one_shape,
        ready=ready,
        run=run,
    )


def predict_split(
    task: Task,
    split: Split,
    infer: Inference,
    ready: PyTree,
    batch_size: int,
    mesh: Mesh,
    finished: Callable[[], object] = lambda: None,
) -> list[Prediction]:
    """Returns a prediction for every example of a split.

    `ready` is the result of `infer.ready` for the parameters, `batch_size` is `most_rows` of `inference_layouts`.
    `finished` is called after each batch.
    """
    outputs, _ = _compute_split(task, split, infer, ready, batch_size, mesh, finished)
    return task.decode(split.examples, split.rows, outputs)


def _compute_split(
    task: Task,
    split: Split,
    infer: Inference,
    ready: PyTree,
    batch_size: int,
    mesh: Mesh,
    finished: Callable[[], object],
) -> tuple[list[np.ndarray], Metrics]:
    """Returns the outputs for each row of a split, and the loss if the labels are known."""
    outputs = [np.zeros(0)] * len(split.rows)
    sums: dict[str, list[float]] = {}
    sizes = sizes_of(split.rows)
    layouts = inference_layouts(sizes, infer.model, infer.pack, mesh, batch_size, infer.one_shape)

    def compute(layout: Layout) -> PyTree:
        batch = batch_of_layout(split.rows, layout, task.head, mesh)
        with jax.set_mesh(mesh):  # a program belongs to the mesh that was set when it was compiled
            return infer.run(ready, batch)

    for layout, (losses, logits) in computed(layouts, compute):
        finished()
        for numbers, row_logits in zip(layout.bins, logits):  # rows beyond the bins are empty
            unpadded = unpadded_outputs(
                [split.rows[number] for number in numbers], row_logits, task.head
            )
            for number, output in zip(numbers, unpadded, strict=True):
                outputs[number] = output
        for name, (total, weight) in losses.items():
            pair = sums.setdefault(name, [0.0, 0.0])
            pair[0] += float(total)
            pair[1] += float(weight)
    loss = {name: value for name, value in mean_metrics(sums).items() if name == "loss"}
    return outputs, loss


def evaluate(
    task: Task,
    splits: Sequence[Split],
    infer: Inference,
    batch_size: int,
    mesh: Mesh,
    params: Params,
    keep: Callable[[Split, list[Prediction]], None] = lambda split, predictions: None,
    finished: Callable[[], object] = lambda: None,
) -> tuple[Metrics, Task]:
    """Returns the task's metrics on every split, and the task; from the second split on, names end with the split's.

    If the task tunes settings, such as thresholds, they are tuned on the first split, for all: the metrics of every
    evaluation, by which the best model is chosen, are those that the model has when it is used.

    `keep` is called with each split and its predictions, and `finished` after each batch.
    """
    metrics: Metrics = {}
    ready = infer.ready(params)
    for split in splits:
        outputs, loss = _compute_split(task, split, infer, ready, batch_size, mesh, finished)
        task, predictions = _decode(task, split, outputs, tunes=split is splits[0])
        keep(split, predictions)
        metrics |= _named(loss | _scores(task, split, predictions), split, splits)
    return metrics, task


def _decode(
    task: Task,
    split: Split,
    outputs: Sequence[np.ndarray],
    tunes: bool,
) -> tuple[Task, list[Prediction]]:
    """Returns the predictions of a split and the task, whose settings they tune if `tunes`."""
    predictions = task.decode(split.examples, split.rows, outputs)
    settings = task.tune(split.examples, predictions) if tunes else task.config
    if settings != task.config:
        task = task.remade(settings, task.labels)
        predictions = task.decode(split.examples, split.rows, outputs)
    return task, predictions


def constant_scores(task: Task, train: Split, splits: Sequence[Split]) -> Metrics:
    """Returns the metrics of the constant prediction: the most frequent label of the training data.

    For regression it is the mean, for choices the first choice, and for spans the first token, which is not an answer.
    Settings are tuned as in `evaluate`.
    """
    # those of rows that are stored are texts to compare, of which none is frequent
    rows = [] if isinstance(train.rows, StoredRows) else train.rows
    labels = [row.label for row in rows if row.label is not None]
    constant = task.head.constant(labels, task.num_outputs)
    metrics: Metrics = {}
    for split in splits:
        outputs = []
        for row in split.rows:
            logits = np.tile(constant, (len(row.token_ids), 1))
            outputs += unpadded_outputs([row], logits, task.head)
        task, predictions = _decode(task, split, outputs, tunes=split is splits[0])
        metrics |= _named(_scores(task, split, predictions), split, splits)
    return metrics


def _scores(task: Task, split: Split, predictions: Sequence[Prediction]) -> Metrics:
    """Returns the metrics of predictions. Raises: InputError if the user's own task gives none, or not its `metric`."""
    scores = task.score(split.examples, predictions)
    check_kind(task, "score", scores, dict, "a dict of numbers")
    if task.metric not in scores:
        raise mistake(task, "score", sorted(scores), f"also the task's metric, {task.metric!r}")
    return scores


def _named(scores: Metrics, split: Split, splits: Sequence[Split]) -> Metrics:
    """Returns the metrics of a split; from the second split on, names end with the split's name."""
    suffix = "" if split is splits[0] else split.name.removeprefix(splits[0].name.partition("_")[0])
    return {name + suffix: float(value) for name, value in scores.items()}
