# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning, from a pre-trained model and a task's data to a model that does the task: the wiring, on one page."""

import dataclasses
import time
from collections.abc import Callable

from jax.sharding import Mesh

from bert_jax.batches.examples import Batching, choose_batching, train_batches
from bert_jax.batches.order import steps_per_epoch
from bert_jax.batches.shapes import row_group
from bert_jax.checkpoints.arrays import check_arrays, describe
from bert_jax.checkpoints.pretrained import Pretrained, leave_pretrained
from bert_jax.checkpoints.warm_start import complete
from bert_jax.devices.job import this_job
from bert_jax.devices.sharding import Devices, check_divisible, in_no_mesh, make_mesh
from bert_jax.devices.work import beat
from bert_jax.errors import InputError
from bert_jax.model.heads.base import Head
from bert_jax.model.objective import Params, task_objective
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.rules import to_dict
from bert_jax.storage.places import AnyPath, Place, to_place
from bert_jax.storage.resolve import FINETUNED
from bert_jax.storage.writing import write_json
from bert_jax.tasks.base import Prediction, Task
from bert_jax.tasks.catalog import MakeTask, Own
from bert_jax.tasks.evaluation import (
    Inference,
    Split,
    constant_scores,
    evaluate,
    make_inference,
    predict_split,
)
from bert_jax.tasks.prepare import TaskInputs, compared, fingerprint, open_task
from bert_jax.tasks.results import (
    FinetuneResult,
    curves,
    describe_batches,
    describe_start,
    describe_task,
    summarise,
)
from bert_jax.training.curves import draw_curves
from bert_jax.training.describe import describe_devices, describe_model
from bert_jax.training.run import open_run
from bert_jax.training.stages import Stage, Training, pace_of
from bert_jax.training.step import abstract_state
from bert_jax.training.teachers import Teaching, learnt_from
from bert_jax.training.train import run_stages
from bert_jax.training.workdir import common, was_packed


@in_no_mesh()
def finetune(
    config: FinetuneConfig,
    workdir: AnyPath,
    devices: Devices | None = None,
    started: float = 0.0,
    task: MakeTask | None = None,
    head: Head | None = None,
) -> FinetuneResult:
    """Fine-tunes until config.train.num_epochs, from `init_checkpoint` or from where `workdir` stands.

    Leaves the model of the best evaluation in `finetuned/`, its predictions in `predictions/`, and `results.json`.
    `started` is when the command began, in seconds since the epoch, for the goodput; 0 is now. `task` makes a
    custom task from its settings and labels, and `head` is a custom head that replaces the task's own.

    Raises: InputError if a setting, the data or the work directory cannot be used; before anything is written.
    """
    workdir, began, started = to_place(workdir), time.monotonic(), started or time.time()
    config.validate()
    if config.sweep.is_grid:
        raise InputError(
            "sweep.seeds and sweep.learning_rates ask for a grid of runs; call bert_jax.sweep.sweep"
        )
    inputs = open_task(config, Own(task, head))
    start, inputs = inputs.start, inputs.without_params()  # the state of the run has them
    mesh = make_mesh(config.mesh, devices)
    training, infer = describe_finetuning(inputs, start, mesh, workdir)
    config, made, data, train = inputs.config, inputs.task, inputs.data, inputs.train

    unused = [start]  # until it is known whether the run needs it
    del start

    def load() -> Pretrained:
        whole = complete(unused.pop(), training.stages[0].objective, train.seed)
        check_arrays(
            config.init_checkpoint, describe(whole.params), describe(training.abstract.params)
        )
        return whole

    with open_run(training, workdir, load, started) as run:
        unused.clear()
        # results of fewer epochs must not be taken for those of this run
        if run.step < train.num_steps:
            this_job().first_does(
                "delete results.json", lambda: (workdir / "results.json").unlink(missing_ok=True)
            )
        result = run_stages(run, training)
        if result.signal:
            return FinetuneResult(
                {}, made.metric, {}, result.step, result.signal, time.monotonic() - began
            )

        # Write the best model, its predictions and its metrics.
        best_step = run.checkpoints.best_step() if data.evaluation else result.step
        params = result.state.params if best_step == result.step else None
        # of which the parameters are needed, and another's in most cases
        result = result._replace(state=None)
        if params is None:
            params = run.checkpoints.restore_at(best_step, {"params": training.abstract.params})[
                "params"
            ]
        run.checkpoints.close()
        with run.clock.phase("evaluation"):
            metrics = finish(inputs, params, infer, mesh, workdir)
        constant = constant_scores(made, data.train, data.evaluation)
        outcome = FinetuneResult(
            metrics, made.metric, constant, best_step, 0, time.monotonic() - began
        )
        if this_job().is_first:
            run.reporter.publish()
            write_json(workdir / "results.json", {"task": config.task.name} | outcome._asdict())
            draw_curves(workdir / "metrics.jsonl", workdir / "curves.png", curves(made))
            epoch_steps = steps_per_epoch(len(data.train.rows), config.data.batch_size)
            for line in summarise(workdir, made, best_step, epoch_steps, constant):
                run.reporter.message(line)
    return outcome


def _how_to_pack(config: FinetuneConfig, task: Task, workdir: Place) -> str:
    """Returns data.pack, which a run that is resumed has settled. Raises: InputError as `was_packed`."""
    # so that all of them ask, or none
    this_job().check_same(common(workdir, {"run": to_dict(config)}))
    if not task.head.can_be_packed:
        return "off"
    before = was_packed(workdir) if config.data.pack == "auto" else None
    return config.data.pack if before is None else "on" if before else "off"


def batching_of(inputs: TaskInputs, group: int, pack: str) -> Batching:
    """Returns how the training batches of a run are made; `group` and `pack` are those of `choose_batching`."""
    rows, apart = inputs.data.train.rows, inputs.task.head.needs_whole_batch
    return choose_batching(
        rows, inputs.config.data, inputs.model, group, pack, inputs.train.num_steps, apart
    )


def describe_finetuning(
    inputs: TaskInputs, start: Pretrained, mesh: Mesh, workdir: Place
) -> tuple[Training, Inference]:
    """Returns what a run of fine-tuning trains, and the compiled model that it evaluates and predicts with.

    Raises: InputError if the batches do not divide over the mesh.
    """
    config, task, data, model, train = (
        inputs.config,
        inputs.task,
        inputs.data,
        inputs.model,
        inputs.train,
    )
    check_divisible(
        mesh, model, (config.data.batch_size, config.train.accumulate), (_eval_rows(config), 1)
    )
    rows = data.train.rows
    batching = batching_of(
        inputs, row_group(mesh, train.accumulate), _how_to_pack(config, task, workdir)
    )
    objective = task_objective(model, task.head, task.num_outputs, config.teacher)
    teaching = Teaching(
        *(mesh, inputs.start.tokenizer, task.head, model, config.task.max_seq_length),
        labels=tuple(task.labels),
        num_outputs=task.num_outputs,
        probe=config.task.probe,
    )
    taught = learnt_from(config.teacher, teaching)
    abstract = abstract_state(objective, config.optimizer, train, mesh)
    infer = make_inference(model, task, mesh, abstract.params, config.data.pack, one_shape=True)

    def evaluation(params: Params, finished: Callable[[], object] = lambda: 0) -> dict[str, float]:
        return evaluate(
            task, data.evaluation, infer, _eval_rows(config), mesh, params, finished=finished
        )[0]

    def trained_model(step: int, params: Params, seen: dict[str, int] | None) -> Pretrained:
        return dataclasses.replace(
            finetuned_model(inputs, task, params), trained={"step": step, **(seen or {})}
        )

    epoch_steps = steps_per_epoch(len(rows), batching.batch_size)
    stage = Stage(
        objective,
        config.optimizer,
        train,
        pace_of(
            config,
            train.num_steps,
            epoch_steps,
            evaluate_first=False,
            patience=config.train.patience,
        ),
        lambda taken: taught(train_batches(rows, task.head, taken, batching, mesh)),
        lambda: evaluation if data.evaluation else None,
        rank=lambda metrics: -metrics[task.metric],
    )
    lines = [
        *describe_task(config, task, data, train.num_steps),
        describe_batches(batching, rows, model),
    ]
    splits = {
        "train": {"rows": len(rows)},
        "heldout": {"rows": sum(len(s.rows) for s in data.evaluation)},
    }
    training = Training(
        config,
        model,
        inputs.start.tokenizer,
        mesh,
        abstract,
        [stage],
        {
            "model": to_dict(model),
            "task": task.head.name,
            "labels": list(task.labels),
            "task_settings": to_dict(config.task),
            "dataset": fingerprint(rows),
            "packed": batching.shape is not None,
        },
        trained_model,
        [*lines, describe_model(model, abstract.params), describe_devices(mesh)],
        lambda start: describe_start(config, start or inputs.start),
        [(config.task.name, {"splits": splits})],
        compared(start, data) if this_job().is_several else {},
    )
    return training, infer


def _eval_rows(config: FinetuneConfig) -> int:
    return config.eval.rows(config.data.batch_size, config.train.accumulate)


def finish(
    inputs: TaskInputs, params: Params, infer: Inference, mesh: Mesh, workdir: Place
) -> dict[str, float]:
    """Writes the model and its predictions, and returns the metrics.

    If the task tunes settings, such as a threshold, the metrics are those after tuning.
    """
    task, data = inputs.task, inputs.data
    size = _eval_rows(inputs.config)

    def keep(split: Split, predictions: list[Prediction]) -> None:
        if this_job().is_first:
            task.write(workdir / "predictions", split.name, split.examples, predictions)

    metrics, task = evaluate(task, data.evaluation, infer, size, mesh, params, keep, beat)
    ready = infer.ready(params)
    for split in data.test:
        keep(split, predict_split(task, split, infer, ready, size, mesh, beat))
    leave_pretrained(finetuned_model(inputs, task, params), workdir / FINETUNED, "the model")
    return metrics


def finetuned_model(inputs: TaskInputs, task: Task, params: Params) -> Pretrained:
    """Returns the model of a task, with tokenizer, labels and settings for prediction."""
    tokenizer, settings = inputs.start.tokenizer, to_dict(task.config)
    return Pretrained(
        inputs.model, params, tokenizer, task.head.name, tuple(task.labels), task_settings=settings
    )
