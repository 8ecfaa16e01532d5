# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning, from a pre-trained model and a task's data to a model that does the task: the wiring, on one page."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial

from jax.sharding import Mesh

from bert_jax.batch import Batch, RowShape
from bert_jax.batches.examples import Batching, choose_batching, train_batches
from bert_jax.batches.pack import StoredRows
from bert_jax.batches.shapes import row_group
from bert_jax.checkpoints.arrays import check_arrays, describe
from bert_jax.checkpoints.pretrained import Pretrained, leave_pretrained
from bert_jax.checkpoints.warm_start import complete
from bert_jax.devices.job import this_job
from bert_jax.devices.sharding import Devices, check_divisible, in_no_mesh, make_mesh
from bert_jax.devices.work import beat
from bert_jax.errors import InputError
from bert_jax.model.heads.base import Head
from bert_jax.model.objective import Params, TaskObjective
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
from bert_jax.tasks.hooks import told
from bert_jax.tasks.prepare import TaskInputs, compared, fingerprint, open_task
from bert_jax.tasks.results import (
    FinetuneResult,
    curves,
    describe_batches,
    describe_start,
    describe_task,
    summarise,
)
from bert_jax.training.choices import (
    Batches,
    as_begun,
    choose_memory,
    choose_precision,
    describe_choices,
    memory_of,
)
from bert_jax.training.curves import draw_curves
from bert_jax.training.describe import describe_devices, describe_model
from bert_jax.training.run import open_run
from bert_jax.training.stages import Evaluation, Stage, Training, pace_of
from bert_jax.training.step import abstract_state
from bert_jax.training.teachers import Teaching, learnt_from
from bert_jax.training.train import run_stages
from bert_jax.training.workdir import common, was_packed


@told()
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
    if not isinstance(config, FinetuneConfig):
        raise InputError(
            "these settings are not of fine-tuning; give such, as of recipe('finetune:sst2')"
        )
    config.validate()
    if config.sweep.is_grid:
        raise InputError(
            "sweep.seeds and sweep.learning_rates ask for a grid of runs; call bert_jax.sweep.sweep"
        )
    mesh = make_mesh(config.mesh, devices)
    config = choose_precision(as_begun(config, workdir), mesh.devices.flat[0])
    inputs = fit_into_memory(open_task(config, Own(task, head)), mesh, memory_of(mesh))
    start, inputs = inputs.start, inputs.without_params()  # the state of the run has them
    training = Finetuning(inputs, start, mesh, workdir)
    config = inputs.config
    made = inputs.task
    data = inputs.data
    train = inputs.train

    unused = [start]  # until it is known whether the run needs it
    del start

    def load() -> Pretrained:
        whole = complete(unused.pop(), training.stages[0].objective, train.seed)
        check_arrays(
            config.init_checkpoint, describe(whole.params), describe(training.abstract.params)
        )
        return whole

    rows = data.train.rows
    reading = contextlib.closing(rows) if isinstance(rows, StoredRows) else contextlib.nullcontext()
    with reading, open_run(training, workdir, load, started) as run:
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
            metrics = finish(inputs, params, training.infer, mesh, workdir)
        constant = constant_scores(made, data.train, data.evaluation)
        outcome = FinetuneResult(
            metrics, made.metric, constant, best_step, 0, time.monotonic() - began
        )
        if this_job().is_first:
            run.reporter.publish()
            write_json(workdir / "results.json", {"task": config.task.name} | outcome._asdict())
            draw_curves(workdir / "metrics.jsonl", workdir / "curves.png", curves(made))
            epoch_steps = training.batching.num_steps(len(data.train.rows))
            for line in summarise(workdir, made, best_step, epoch_steps, constant):
                run.reporter.message(line)
    return outcome


def fit_into_memory(inputs: TaskInputs, mesh: Mesh, limit: float) -> TaskInputs:
    """Returns the inputs with the rematerialization and the microbatches that fit into `limit` bytes of a device."""
    config = inputs.config
    model = inputs.model
    train = inputs.train
    task = inputs.task
    row = RowShape(config.task.max_seq_length, sequences=1, predictions=0, bytes=0)
    batches = Batches(config.data.batch_size, config.train.accumulate, row)
    # its shapes do not depend on what is computed again
    keeps_all = dataclasses.replace(model, remat="none")
    objective = TaskObjective(keeps_all, task.head, task.num_outputs, config.teacher)
    state = partial(abstract_state, objective, config.optimizer, train, mesh)
    remat, (count,) = choose_memory(model, [batches], mesh.shape, state, limit)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, remat=remat),
        train=dataclasses.replace(config.train, accumulate=count),
    )
    return inputs._replace(
        config=config,
        model=dataclasses.replace(model, remat=remat),
        train=dataclasses.replace(train, accumulate=count),
    )


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
    rows = inputs.data.train.rows
    apart = inputs.task.head.needs_whole_batch
    return choose_batching(
        rows, inputs.config.data, inputs.model, group, pack, inputs.train.num_steps, apart
    )


class Finetuning(Training):
    """A run of fine-tuning, and the compiled model that it evaluates and predicts with.

    Raises: InputError if the batches do not divide over the mesh.
    """

    def __init__(self, inputs: TaskInputs, start: Pretrained, mesh: Mesh, workdir: Place) -> None:
        config = inputs.config
        task = inputs.task
        data = inputs.data
        model = inputs.model
        train = inputs.train
        rows = inputs.data.train.rows
        self.inputs = inputs
        self.config = config
        self.model = model
        self.mesh = mesh
        self.tokenizer = inputs.start.tokenizer
        batches = (config.data.batch_size, train.microbatches), (_eval_rows(config), 1)
        check_divisible(mesh, model, *batches)
        packing = _how_to_pack(config, task, workdir)
        batching = batching_of(inputs, row_group(mesh, train.microbatches), packing)
        self.batching = batching
        objective = TaskObjective(model, task.head, task.num_outputs, config.teacher)
        self.abstract = abstract_state(objective, config.optimizer, train, mesh)
        params = self.abstract.params
        self.infer = make_inference(model, task, mesh, params, config.data.pack, one_shape=True)
        self.stages = [TaskStage(inputs, objective, batching, mesh, self.infer)]
        self.identity = {
            "model": to_dict(model),
            "task": task.head.name,
            "labels": list(task.labels),
            "task_settings": to_dict(config.task),
            "dataset": fingerprint(rows),
            "packed": batching.shape is not None,
        }
        self.lines = [
            *describe_task(config, task, data, train.num_steps),
            describe_batches(batching, rows, model),
            describe_model(model, params),
            describe_devices(mesh),
            describe_choices(config),
        ]
        num_heldout = sum(len(split.rows) for split in data.evaluation)
        splits = {"train": {"rows": len(rows)}, "heldout": {"rows": num_heldout}}
        self.data = [(config.task.name, {"splits": splits})]
        self.same = compared(start, data) if this_job().is_several else {}

    def trained_model(self, step: int, params: Params, seen: dict[str, int] | None) -> Pretrained:
        bert = finetuned_model(self.inputs, self.inputs.task, params)
        return dataclasses.replace(bert, trained={"step": step, **(seen or {})})

    def describe_start(self, start: Pretrained | None) -> str:
        return describe_start(self.inputs.config, start or self.inputs.start)


class TaskStage(Stage):
    """The one stage of a fine-tuning."""

    def __init__(
        self,
        inputs: TaskInputs,
        objective: TaskObjective,
        batching: Batching,
        mesh: Mesh,
        infer: Inference,
    ) -> None:
        config = inputs.config
        task = inputs.task
        self.inputs = inputs
        self.batching = batching
        self.mesh = mesh
        self.infer = infer
        self.objective = objective
        self.optimizer = config.optimizer
        self.train = inputs.train
        epoch_steps = batching.num_steps(len(inputs.data.train.rows))
        self.pace = pace_of(
            config,
            inputs.train.num_steps,
            epoch_steps,
            evaluate_first=False,
            patience=config.train.patience,
        )
        teaching = Teaching(
            mesh,
            inputs.start.tokenizer,
            task.head,
            inputs.model,
            config.task.max_seq_length,
            labels=tuple(task.labels),
            num_outputs=task.num_outputs,
            probe=config.task.probe,
        )
        self.taught = learnt_from(config.teacher, teaching)

    def batches(self, taken: int) -> Iterator[Batch]:
        rows = self.inputs.data.train.rows
        head = self.inputs.task.head
        return self.taught(train_batches(rows, head, taken, self.batching, self.mesh))

    def evaluation(self) -> Evaluation | None:
        task = self.inputs.task
        splits = self.inputs.data.evaluation
        size = _eval_rows(self.inputs.config)

        def evaluation(
            params: Params, finished: Callable[[], object] = lambda: 0
        ) -> dict[str, float]:
            return evaluate(task, splits, self.infer, size, self.mesh, params, finished=finished)[0]

        return evaluation if splits else None

    def rank(self, metrics: dict[str, float]) -> float:
        return -metrics[self.inputs.task.metric]


def _eval_rows(config: FinetuneConfig) -> int:
    return config.eval.rows(config.data.batch_size, config.train.accumulate)


def finish(
    inputs: TaskInputs, params: Params, infer: Inference, mesh: Mesh, workdir: Place
) -> dict[str, float]:
    """Writes the model and its predictions, and returns the metrics.

    If the task tunes settings, such as a threshold, the metrics are those after tuning.
    """
    task = inputs.task
    data = inputs.data
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
    head = task.head.saved_as or task.head.name
    settings = to_dict(task.as_saved())
    return Pretrained(
        inputs.model,
        params,
        inputs.start.tokenizer,
        head,
        tuple(task.labels),
        task_settings=settings,
    )
