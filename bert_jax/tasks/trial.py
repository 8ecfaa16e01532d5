# SPDX-License-Identifier: Apache-2.0
"""A task or a head of one's own, tried before the first step: each hook once, on shapes or on two examples.

What would fail after hours, or train for nothing, is told in one line at once (`hooks`). Nothing of bert_jax's own is
tried, no device computes, and each process of several tries for itself.
"""

import dataclasses
import functools
import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch, PyTree, Row
from bert_jax.batches.make import batch_of_rows, texts_apart, unpadded_outputs
from bert_jax.batches.pack import StoredRows
from bert_jax.model.heads.base import Head
from bert_jax.model.objective import forward, init_params
from bert_jax.settings.finetuning import FinetuneConfig, TaskConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.tasks.base import Task
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.embeddings.beir import TextsExample
from bert_jax.tasks.evaluation import Data, Split, constant_scores, make_split
from bert_jax.tasks.hooks import check_kind, is_own, mistake, naming
from bert_jax.text.tokenizer import Tokenizer

_ROWS_AT_ONCE = 1024
_PLACES = 5  # of a packed row: unlike other sizes, so that none is taken for it


def try_own(
    task: Task, data: Data, model: ModelConfig, tokenizer: Tokenizer, config: FinetuneConfig
) -> None:
    """Raises: InputError if a hook of the user's task or head gives what the run could not use."""
    if not (is_own(task) or is_own(task.head)):
        return
    # what a run has yet to choose changes no shape
    dtype = "float32" if model.compute_dtype == "auto" else model.compute_dtype
    model = dataclasses.replace(model.computing_in(dtype), attention="plain", remat="none")
    _check_labels(task, data.train.rows)
    train = _first_two(task, tokenizer, data.train, training=True)
    _try_head(task, model, train.rows, config)
    asked = next((split for split in data.evaluation if split.rows), data.train)
    _try_task(task, model, data, _first_two(task, tokenizer, asked))


def _first_two(task: Task, tokenizer: Tokenizer, split: Split, training: bool = False) -> Split:
    """Returns the split of the first two examples that have rows."""
    if isinstance(split.rows, StoredRows):
        rows = split.rows[:2]
        examples = [TextsExample(texts=("a", "b", *"c" * (len(row.lengths) - 2))) for row in rows]
        return make_split(task, tokenizer, split.name, examples, training)
    chosen = sorted({row.example for row in split.rows})[:2]
    examples = [split.examples[number] for number in chosen]
    return make_split(task, tokenizer, split.name, examples, training)


def _batch_of(head: Head, rows: Sequence[Row], places: int = 0) -> Batch:
    """Returns a batch of rows, each in a row of its own, with room for more sequences."""
    if head.needs_whole_batch and rows[0].label is not None:
        apart = texts_apart(rows)
        bins = [[row] for row in apart]
        longest = max(len(row.token_ids) for row in apart)
        labels = head.labels_of_batch(bins, 1, len(rows), longest)
        return batch_of_rows(bins, longest, 1, head)._replace(labels=labels)
    longest, widest = (
        max(map(len, sizes)) for sizes in zip(*((row.token_ids, row.lengths) for row in rows))
    )
    return batch_of_rows([[row] for row in rows], longest, widest + places, head)


def _check_labels(task: Task, rows: Sequence[Row]) -> None:
    """Raises: InputError if a label of the training data cannot be written, or is a class that there is not."""
    head = task.head
    classes = task.num_outputs
    if isinstance(rows, StoredRows):  # whose labels are of our own making
        return
    if head.needs_whole_batch:
        for row in rows:
            if np.size(np.asarray(row.label, object)) != 1 + len(row.lengths):
                needed = "(score, the number of each text), where equal texts have equal numbers"
                raise mistake(task, "make_rows", f"the label {row.label!r:.60}", needed)
        return
    is_usual = type(head).losses is Head.losses and classes > 1
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        with naming(task, "make_rows"):
            labels = _batch_of(head, rows[first : first + _ROWS_AT_ONCE]).labels
        if is_usual and labels.dtype.kind in "iu" and labels.max() >= classes:
            needed = f"one below {classes}, as many as there are classes"
            raise mistake(task, "make_rows", f"the label {labels.max()}", needed)


def _params_of(task: Task, model: ModelConfig) -> PyTree:
    """Returns the shapes of the parameters of a model with the task's head."""
    init = functools.partial(init_params, model, head=task.head, num_outputs=task.num_outputs)
    return jax.eval_shape(init, jax.random.key(0))


def _shape_of(
    task: Task,
    model: ModelConfig,
    params: PyTree,
    batch: Batch,
    dropout_key: jax.Array | None = None,
) -> Any:
    """Returns the shape of what a model with the task's head gives for a batch."""
    how = {"head": task.head, "num_outputs": task.num_outputs, "dropout_key": dropout_key}
    return jax.eval_shape(functools.partial(forward, model, **how), params, batch)


def _try_head(task: Task, model: ModelConfig, rows: Sequence[Row], config: FinetuneConfig) -> None:
    """Raises: InputError if a hook of the head, run on the shapes of rows with labels, does not fit the others."""
    head = task.head
    batch = _batch_of(head, rows)
    params = _params_of(task, model)
    own = sorted(set(params) - {"encoder"})
    if own != sorted(head.own_parts):
        needed = f'the names of the modules that logits makes, {own}, and "pooler" if it reads that'
        raise mistake(head, "parts", head.parts, needed)
    _shape_of(task, model, params, batch, dropout_key=jax.random.key(0))
    outputs = _shape_of(task, model, params, batch)
    weights = _check_outputs(task, outputs, batch, "")
    with naming(head, "guided_losses" if head.is_guided else "losses"):
        if head.is_guided:
            metrics = jax.eval_shape(head.guided_losses, outputs, outputs, batch, weights)
        else:
            metrics = jax.eval_shape(head.losses, outputs, batch, weights)
    shapes = jax.tree.map(np.shape, metrics)
    if (
        not isinstance(metrics, dict)
        or "loss" not in metrics
        or any(shape != ((), ()) for shape in shapes.values())
    ):
        raise mistake(head, "losses", shapes, '{"loss": (sum, weight), ...}, each of them a scalar')
    if head.can_be_packed and not head.needs_whole_batch:
        packed = _batch_of(head, rows, _PLACES)
        fix = "; a row may hold several sequences, unless the head says can_be_packed = False"
        _check_outputs(task, _shape_of(task, model, params, packed), packed, fix)
    if config.teacher.checkpoint and head.can_learn:
        mean = jax.eval_shape(lambda given: head.mean_of([given, given]), outputs)
        warm = functools.partial(head.divergence, temperature=config.teacher.temperature)
        apart = jax.eval_shape(lambda *arrays: warm(*arrays), outputs, mean, batch)
        if apart.shape != weights.shape:
            raise mistake(head, "divergence", apart.shape, f"{weights.shape}, the shape of weights")
    jax.eval_shape(head.exported, outputs)
    head.usual_task(task.num_outputs)
    if not is_own(task) and not head.needs_whole_batch:
        usual = make_task(task.config, task.labels)
        given, needed = (
            [np.shape(output) for output in _drawn(each, model, rows)] for each in (task, usual)
        )
        if given != needed:
            what = f"{needed}, as {type(task).__name__}.decode reads them"
            raise mistake(head, "logits", f"{given} for two examples", what)


def _check_outputs(task: Task, outputs: PyTree, batch: Batch, fix: str) -> Any:
    """Returns the shape of the weights. Raises: InputError if the head's outputs do not fit them or the loss."""
    head = task.head
    rows = batch.token_ids.shape[0]
    shape = jax.tree.map(np.shape, outputs)
    is_array = isinstance(outputs, jax.ShapeDtypeStruct) and outputs.shape[:1] == (rows,)
    if not is_array or not jnp.issubdtype(outputs.dtype, jnp.floating):
        raise mistake(head, "logits", shape, f"an array of floats [B, ...], where B is {rows}")
    weights = jax.eval_shape(head.weights, batch)
    needed = (*weights.shape, task.num_outputs)
    if type(head).losses is Head.losses and shape != needed:
        what = f"{needed}, {task.num_outputs} outputs for each of the labels{fix}"
        raise mistake(head, "logits", shape, what)
    return weights


def _drawn(task: Task, model: ModelConfig, rows: Sequence[Row]) -> list[np.ndarray]:
    """Returns random outputs of rows, of the shapes that the model gives, as `Task.decode` takes them."""
    bare = [row._replace(label=None) for row in rows]
    outputs = _shape_of(task, model, _params_of(task, model), _batch_of(task.head, bare))
    numbers = np.random.default_rng(0).normal(size=outputs.shape).astype(np.float32)
    pairs = zip(bare, numbers, strict=True)
    return [unpadded_outputs([row], own, task.head)[0] for row, own in pairs]


def _try_task(task: Task, model: ModelConfig, data: Data, split: Split) -> None:
    """Runs decode, show, write, tune and score on two examples, the last on all where it fails with so few."""
    examples = split.examples
    said = task.decode(examples, split.rows, _drawn(task, model, split.rows))
    if not hasattr(said, "__len__") or len(said) != len(examples):
        raise mistake(
            task, "decode", f"{said!r:.80}", f"a list of {len(examples)}, one for each example"
        )
    for prediction in said:
        shown = task.show(prediction)
        try:
            json.dumps(shown)
        except (TypeError, ValueError) as error:
            raise mistake(task, "show", f"{shown!r:.80}", f"values of JSON ({error})") from None
        check_kind(task, "show", shown, dict, "a dict")
    with tempfile.TemporaryDirectory() as folder:
        task.write(Path(folder) / "predictions", split.name, examples, said)
    if not data.evaluation:
        return
    check_kind(task, "tune", task.tune(examples, said), TaskConfig, "settings, a TaskConfig")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of means of nothing
        try:
            constant_scores(task, data.train, [split])
        except (ArithmeticError, ValueError):  # as of a metric that needs examples of two classes
            constant_scores(task, data.train, data.evaluation)
