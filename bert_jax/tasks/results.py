# SPDX-License-Identifier: Apache-2.0
"""The results of a fine-tuning run: descriptions, tables and curves."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_type_hints

import numpy as np

from bert_jax.batch import Row
from bert_jax.batches.examples import Batching
from bert_jax.batches.pack import sizes_of
from bert_jax.batches.shapes import needed_flops
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.storage import schema
from bert_jax.storage.places import Place
from bert_jax.storage.resolve import FINETUNED
from bert_jax.tasks.base import Task
from bert_jax.tasks.evaluation import Data
from bert_jax.tasks.scores import Metrics
from bert_jax.training.describe import schedule_warnings
from bert_jax.training.report import read_metrics


class FinetuneResult(NamedTuple):
    """The result of a run."""

    metrics: Metrics  # of the best checkpoint on the evaluation data
    metric: str  # the metric that chose it
    constant: Metrics  # metrics of a constant prediction
    step: int  # of the best checkpoint, or the step at which the run stopped
    signal: int  # the signal that ended it early, or 0
    seconds: float  # of this call


def curves(task: Task) -> list[tuple[str, str, float]]:
    """Returns the panels of the curves: (metric, title, factor)."""
    return [("loss", "Loss", 1.0), (task.metric, task.metric.replace("_", " ").capitalize(), 1.0)]


def describe_task(
    config: FinetuneConfig,
    task: Task,
    data: Data,
    num_steps: int,
) -> list[str]:
    """Returns lines that describe the task and the data."""
    kinds = f", {len(task.labels)} classes ({', '.join(task.labels[:12])})" if task.labels else ""
    lines = [
        f"task: {config.task.name}, {task.head.name.replace('_', ' ')}{kinds}; the best is chosen by {task.metric}"
    ]
    others = [*data.evaluation, *data.test]
    for split in (data.train, *others):
        lengths = sizes_of(split.rows).tokens if len(split.rows) else [0]
        columns = ", ".join(getattr(split.examples, "columns", ()))
        of = f" of columns {columns}" if columns else ""
        counts = f"; {listed(split.counts)}" if split.counts else ""
        lines.append(
            f"{split.name}: {len(split.examples):,} examples{of}, {len(split.rows):,} rows of "
            f"{np.mean(lengths):.0f} tokens on average, {max(lengths)} at most{counts}"
        )
    lines += schedule_warnings(config.optimizer, num_steps)
    same = [split.name for split in others if split.examples == data.train.examples]
    if same:
        lines.append(
            f"warning: {' and '.join(same)} {'is' if len(same) == 1 else 'are'} the training data, so the metrics say "
            "nothing of new data; give TRAIN_FILE,DEV_FILE"
        )
    if not data.evaluation:
        lines.append("there is nothing to evaluate on: the last model is kept")
    elif config.train.patience:
        lines.append(
            f"the run ends after {config.train.patience} evaluations without a better one; until then its learning "
            f"rate is that of {num_steps:,} steps"
        )
    lines.append(
        f"{num_steps:,} steps of {config.data.batch_size} rows are {config.train.num_epochs:g} epochs"
    )
    return lines


def describe_batches(batching: Batching, rows: Sequence[Row], model: ModelConfig) -> str:
    """Returns a line that describes how training batches are made and how much of their work is padding."""
    needed = needed_flops(model, rows)
    padding = batching.flops(rows, model) / needed
    if batching.shape is None:
        how = "like lengths" if batching.bucket else "one length"
        return f"batches: {batching.batch_size} rows padded to {how}, {padding:.2f} times the FLOPs of their tokens"
    few, *_, many = (*batching.shape.num_rows, batching.shape.num_rows[-1])
    line = (
        f"batches: {batching.batch_size} rows packed into {few if few == many else f'{few} to {many}'} of "
        f"{batching.shape.length} tokens, {padding:.2f} times the FLOPs of their tokens"
    )
    if not batching.lengths:
        return line
    other = dataclasses.replace(batching, shape=None).flops(rows, model) / needed
    return f"{line} (not packed: {other:.2f})"


def describe_start(config: FinetuneConfig, start: Pretrained) -> str:
    """Returns a line that names the parameters a new run starts from."""
    notes = start.notes[:1] if config.init_checkpoint.startswith("random:") else start.notes
    return "; ".join([f"start from {config.init_checkpoint}", *notes])


def summarise(
    workdir: Place,
    task: Task,
    best_step: int,
    epoch_steps: int,
    constant: Mapping[str, float],
) -> list[str]:
    """Returns a table of all evaluations, with the best one marked, and the paths of the model and predictions."""
    model = workdir / FINETUNED
    predictions = workdir / "predictions"
    records = read_metrics(workdir / "metrics.jsonl")
    records = [record for record in records if record["kind"] == "eval"]
    if not records:
        made = (
            f", its predictions in {predictions}" if predictions.is_dir() else ""
        )  # of a test set
        return [f"the last model is in {model}{made}; there was nothing to evaluate on"]
    names = [name for name in records[-1] if name not in ("step", "kind", "time")]
    rows = [["step", "epoch", *names]]
    for record in (*records, constant):
        step = record.get("step")
        mark = "* " if step == best_step else "  "
        start = ["constant", ""] if step is None else [f"{mark}{step}", f"{step / epoch_steps:.2f}"]
        rows.append(start + [f"{record[name]:.4f}" if name in record else "" for name in names])
    best = f"the best by {task.metric} (*) is in {model}, its predictions in {predictions}"
    return [*table(rows), best]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table with right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(value.rjust(width) for value, width in zip(row, widths)) for row in rows]


def listed(counts: Mapping[str, int]) -> str:
    """Returns counts in one line: "name 1,234, other 5"."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def read_results(workdir: Place) -> FinetuneResult | None:
    """Returns the results of a finished run, or None if it has not finished. Raises: InputError if damaged."""
    path = workdir / "results.json"
    if not path.exists():
        return None
    values = schema.read_record(
        path,
        schema.record(get_type_hints(FinetuneResult)),
        "it is damaged, so delete it and give the same command again",
    )
    return FinetuneResult(**{name: values[name] for name in FinetuneResult._fields})
