# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning, from a pre-trained model and a task's data to a model that does the task: the wiring, on one page."""

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from bert_jax import cluster
from bert_jax.checkpoint import Checkpoints, check_arrays, describe
from bert_jax.config import ModelConfig, TrainConfig, check_types
from bert_jax.describe import make_throughput
from bert_jax.errors import InputError
from bert_jax.finetune_config import FINETUNE_RESUMABLE_CHANGES, FinetuneConfig
from bert_jax.finetune_results import FinetuneResult, curves, describe_run, describe_start, listed, summarise
from bert_jax.loop import Pace, train_loop
from bert_jax.model.objective import Params, task_objective
from bert_jax.pretrained import FINETUNED, Pretrained, load_pretrained, save_pretrained
from bert_jax.report import Reporter, draw_curves
from bert_jax.revisions import save_revision
from bert_jax.settings import to_dict
from bert_jax.sharding import check_divisible, make_mesh
from bert_jax.step import abstract_state, init_state, make_train_step
from bert_jax.storage import write_json
from bert_jax.tasks.base import Row, Task, largest_type
from bert_jax.tasks.batches import steps_per_epoch, train_batches
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.evaluation import (
    Data,
    Inference,
    Split,
    constant_scores,
    evaluate,
    make_inference,
    make_split,
    predict_split,
)
from bert_jax.warm_start import complete, params_digest
from bert_jax.workdir import check_workdir, common, locked


def run(config: FinetuneConfig, workdir: Path, devices: Sequence[Any] | None = None) -> FinetuneResult:
    """Fine-tunes until config.train.num_epochs, from `init_checkpoint` or from where `workdir` stands.

    Leaves the model of the best evaluation in `finetuned/`, its predictions in `predictions/`, and `results.json`.

    Raises: InputError if a setting, the data or the work directory cannot be used; before anything is written.
    """
    with cluster.Preemption() as preemption:  # from before XLA compiles, which Ctrl-C must not break off
        return _run(config, workdir, devices, preemption)


def _run(
    config: FinetuneConfig, workdir: Path, devices: Sequence[Any] | None, preemption: cluster.Preemption
) -> FinetuneResult:
    # Everything that can be wrong is found before anything is written.
    started = time.monotonic()
    config.validate()
    start = load_start(config.init_checkpoint)
    task, start, data = prepare(config, start)
    model = dataclasses.replace(start.config, **to_dict(config.model))
    config = check_probe(config, task, model)
    mesh = make_mesh(config.mesh, devices)
    check_divisible(mesh, model, config.data.batch_size, config.train.accumulate)
    check_divisible(mesh, model, eval_batch_size(config))
    identity = {
        "format": 1,
        "model": to_dict(model),
        "task": task.head,
        "labels": list(task.labels),
        "task_settings": to_dict(config.task),
        "run": to_dict(config),
        "tokenizer": start.tokenizer.fingerprint,
        "dataset": fingerprint(data.train.rows),
    }
    check_workdir(workdir, identity, FinetuneConfig, FINETUNE_RESUMABLE_CHANGES)
    cluster.check_same(common(workdir, identity))
    check_same_inputs(start, data)

    # The objective, and a state: resumed or new.
    objective = task_objective(model, task.head, task.num_outputs, task.probe)
    train = train_config(config, data)
    abstract = abstract_state(objective, config.optimizer, train, mesh)
    start = complete(start, objective, train.seed)
    check_arrays(Path(config.init_checkpoint), describe(start.params), describe(abstract.params))
    keep = config.checkpoint.keep_last, max(1, config.checkpoint.keep_best)
    sealed = {"tokenizer": start.tokenizer.fingerprint}
    with locked(workdir), Checkpoints(workdir / "checkpoints", *keep, about=sealed) as checkpoints:
        restored = checkpoints.restore(abstract)
        if cluster.is_first():
            write_json(workdir / "config.json", identity)
            start.tokenizer.save(workdir / "tokenizer")
        state = restored.state if restored else init_state(objective, config.optimizer, train, mesh, start.params)
        first_step = int(state.step)

        # Steps.
        epoch_steps = steps_per_epoch(len(data.train.rows), config.data.batch_size)
        every = config.eval.every_steps or epoch_steps
        pace = Pace(train.num_steps, config.report.every_steps, every, config.checkpoint.every_steps or every, False)
        pace = pace._replace(
            keep=config.checkpoint.keep_every,
            hang_seconds=config.train.hang_seconds,
            profile=config.report.profile_steps,
        )
        about = {"tokenizer": start.tokenizer, "task": task.head, "labels": task.labels}
        save = partial(save_pretrained, config=model, task_settings=to_dict(task.config), **about)
        train_step = make_train_step(objective, config.optimizer, train, mesh, abstract)
        infer = make_inference(model, task, mesh, abstract.params)
        evaluation = partial(evaluate, task, data.evaluation, infer, eval_batch_size(config), mesh)
        batches = train_batches(
            data.train.rows, task.head, first_step, config.data.batch_size, config.data.seed, config.data.bucket, mesh
        )
        with Reporter(
            workdir,
            train.num_steps,
            first_step,
            progress=config.report.progress,
            tensorboard=config.report.tensorboard,
            enabled=cluster.is_first(),
        ) as reporter:
            for line in describe_run(config, task, data, model, mesh, train.num_steps):
                reporter.message(line)
            reporter.message("; ".join([*checkpoints.never_finished, describe_start(config, start, restored)]))
            result = train_loop(
                state,
                pace,
                mesh,
                train_step,
                batches,
                evaluation if data.evaluation else None,
                make_throughput(model, mesh),
                checkpoints,
                reporter,
                preemption,
                restored.notes if restored else None,
                rank=lambda metrics: -metrics[task.metric],
                keep_revision=partial(save_revision, workdir, save),
            )
            seconds = time.monotonic() - started
            if result.signal:
                checkpoints.close()
                reporter.message(
                    f"stopped by signal {result.signal} after step {result.step}; the same command resumes"
                )
                return FinetuneResult({}, task.metric, {}, result.step, result.signal, seconds)

            # What is left behind: the best model, what it says, and how good it is.
            best_step = checkpoints.best_step() if data.evaluation else result.step
            state = result.state if best_step == result.step else checkpoints.restore_at(best_step, abstract)
            checkpoints.close()
            metrics = finish(config, task, data, model, state.params, start, infer, mesh, workdir)
            constant = constant_scores(task, data.train, data.evaluation)
            outcome = FinetuneResult(metrics, task.metric, constant, best_step, 0, seconds)
            if cluster.is_first():
                write_json(workdir / "results.json", {"task": config.task.name} | outcome._asdict())
                draw_curves(workdir / "metrics.jsonl", workdir / "curves.png", curves(task))
                for line in summarise(workdir, task, best_step, epoch_steps, constant):
                    reporter.message(line)
        return outcome


def load_start(init_checkpoint: str) -> Pretrained:
    """Returns the model to start from; "random:PATH" is one of its shape that has learnt nothing."""
    if not init_checkpoint.startswith("random:"):
        return load_pretrained(init_checkpoint)
    like = load_pretrained(init_checkpoint.removeprefix("random:"))
    notes = ("every parameter starts at random",)
    return dataclasses.replace(like, params={"encoder": {}}, task="pretraining", labels=(), notes=notes)


def prepare(config: FinetuneConfig, start: Pretrained) -> tuple[Task, Pretrained, Data]:
    """Returns the task, the model to start from without a head of another task, and the data.

    Raises: InputError if the data cannot be read, fits no task, or the model is none that can be fine-tuned.
    """
    task = make_task(config.task)
    if not task.splits.get("train"):
        raise InputError(
            f"task {config.task.name} has no training data, only a test; fine-tune mnli, which predicts it too where "
            "the folder AX is beside MNLI"
        )
    if start.config.causal:
        raise InputError(
            f"init_checkpoint {config.init_checkpoint} reads from left to right, and its [CLS] sees itself alone; "
            "fine-tune a model that sees both sides"
        )
    if config.task.max_seq_length > start.config.max_positions:
        raise InputError(
            f"task.max_seq_length {config.task.max_seq_length} is above the {start.config.max_positions} positions of "
            f"{config.init_checkpoint}; lower it, or lengthen the model with grow_model"
        )
    source = config.data.source or config.data.path
    examples = task.read(source, task.splits["train"][0])
    if not examples:
        raise InputError(f"{source} has no training examples for task {config.task.name}; give data that has some")
    labels = task.labels or task.find_labels(examples)
    known = start.params.get("classifier")
    num_outputs = len(labels) or task.num_outputs
    if (
        known is not None
        and start.task == task.head
        and sorted(start.labels) == sorted(labels)
        and known["bias"].shape[0] == num_outputs
    ):
        labels = start.labels  # the head is kept, so its order is too
    elif known is not None:
        about = f"of {', '.join(start.labels)}" if start.labels else f"of {known['bias'].shape[0]} classes"
        note = f"its classifier, {about}, is not used"
        params = {name: part for name, part in start.params.items() if name != "classifier"}
        start = dataclasses.replace(start, params=params, notes=(*start.notes, note))
    if labels != task.labels:
        task = make_task(config.task, labels)
    train = make_split(task, start.tokenizer, task.splits["train"][0], examples, training=True)
    if not train.rows:
        raise InputError(f"no training example of {source} has a row: {listed(train.counts)}")
    others = {
        kind: [
            make_split(task, start.tokenizer, name, found)
            for name in task.splits.get(kind, ())
            if (found := task.read(source, name))
        ]
        for kind in ("eval", "test")
    }
    for split in (train, *others["eval"], *others["test"]):
        check_types(start.config, largest_type(split.rows), f"{split.name} of {source}")
    return task, start, Data(train, others["eval"], others["test"])


def check_probe(config: FinetuneConfig, task: Task, model: ModelConfig) -> FinetuneConfig:
    """Returns the configuration, with an encoder that stays if a probe is to learn from it.

    Raises: InputError if there is no probe for the task or the model has too few layers.
    """
    if task.probe is None:
        return config
    if task.head not in ("token_classification", "sequence_classification"):
        raise InputError(
            f"task.probe.features {task.probe.features} with task {config.task.name}: probes tag tokens and classify "
            "sequences; use another task, or fine-tune"
        )
    if task.probe.features in ("weighted_last4", "concat_last4") and model.num_layers < 4:
        raise InputError(
            f"task.probe.features {task.probe.features} needs 4 layers and the model has {model.num_layers}; use last, "
            "second_to_last or weighted_all"
        )
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, freeze_encoder=True))


def train_config(config: FinetuneConfig, data: Data) -> TrainConfig:
    """Returns how long to train: epochs in steps, a batch that is not full counting as one."""
    num_steps = round(steps_per_epoch(len(data.train.rows), config.data.batch_size) * config.train.num_epochs)
    return TrainConfig(num_steps=max(1, num_steps), accumulate=config.train.accumulate, seed=config.train.seed)


def eval_batch_size(config: FinetuneConfig) -> int:
    """Returns the rows of an evaluation batch."""
    return config.eval.batch_size or config.data.batch_size // config.train.accumulate


def check_same_inputs(start: Pretrained, data: Data) -> None:
    """Returns if every process has read the same model and the same rows, those to evaluate on too.

    Raises: InputError, on every process, if not.
    """
    if not cluster.is_several():
        return
    splits = {split.name: fingerprint(split.rows) for split in (data.train, *data.evaluation, *data.test)}
    cluster.check_same({"parameters of init_checkpoint": params_digest(start.params), "rows": splits})


def fingerprint(rows: Sequence[Row]) -> str:
    """Returns a sha256 over all that is learnt from."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.token_ids.tobytes() + row.type_ids.tobytes())
        digest.update(repr((row.lengths, np.asarray(row.label).tolist())).encode())
    return digest.hexdigest()


def finish(
    config: FinetuneConfig,
    task: Task,
    data: Data,
    model: ModelConfig,
    params: Params,
    start: Pretrained,
    infer: Inference,
    mesh: Mesh,
    workdir: Path,
) -> dict[str, float]:
    """Returns the metrics of the parameters, and writes model and predictions.

    Where the task has something to tune, such as a threshold, the metrics are those after it.
    """
    size = eval_batch_size(config)
    if task.tune is not None and data.evaluation:
        first = data.evaluation[0]
        predictions, _ = predict_split(task, first, infer, params, size, mesh)
        task = make_task(task.tune(first.examples, predictions), task.labels)

    def keep(split: Split, predictions: list[Any]) -> None:
        if cluster.is_first():
            task.write(workdir / "predictions", split.name, split.examples, predictions)

    metrics = evaluate(task, data.evaluation, infer, size, mesh, params, keep)
    for split in data.test:
        keep(split, predict_split(task, split, infer, params, size, mesh)[0])
    params, settings = cluster.on_host(params), to_dict(task.config)
    save = partial(save_pretrained, workdir / FINETUNED, model, params, start.tokenizer)
    cluster.first_does("write the model", partial(save, task.head, task.labels, settings))
    return metrics
