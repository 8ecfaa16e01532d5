# SPDX-License-Identifier: Apache-2.0
"""What a run trains, and the page that runs it. Pre-training and fine-tuning each describe a `Training`."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from bert_jax.batch import Batch
from bert_jax.checkpoints.pretrained import Pretrained, keep_revision
from bert_jax.model.objective import Objective, Params
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import OptimizerConfig, PretrainConfig, TrainConfig
from bert_jax.storage.places import Place
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.describe import make_throughput
from bert_jax.training.loop import Evaluation, LoopResult, Pace, Work, train_loop
from bert_jax.training.optim import reset_moments
from bert_jax.training.run import Run, open_run
from bert_jax.training.step import TrainState, init_state, make_train_step


class Stage(NamedTuple):
    """Steps with one objective, one schedule and one set of data: a phase of pre-training, or a whole fine-tuning."""

    objective: Objective
    optimizer: OptimizerConfig
    train: TrainConfig  # num_steps is the length of the learning rate schedule
    pace: Pace  # num_steps is the last step, counted from the start of the run
    batches: Callable[[int], Iterator[Batch]]  # steps of the stage that are taken -> the batches after them
    evaluation: Callable[[], Evaluation | None]  # makes it; None if there is nothing to evaluate on
    first_step: int = 0
    schedule_start: int = 0  # the step at which the learning rate schedule begins
    resets_moments: bool = False  # Adam's means are zero at the first step
    describe: Callable[[], list[str]] = list  # lines to print when it begins
    rank: Callable[[dict[str, float]], float] = lambda metrics: metrics["loss"]  # of an evaluation; lower is better
    close: Callable[[], None] = lambda: None  # of the data


class Training(NamedTuple):
    """What a run trains: its stages, and all that identifies and describes it."""

    config: PretrainConfig | FinetuneConfig  # resolved: with the values that follow from the data
    model: ModelConfig
    tokenizer: Tokenizer
    mesh: Mesh
    abstract: TrainState  # shapes, dtypes and shardings of the training state
    stages: Sequence[Stage]
    identity: Mapping[str, object]  # JSON values beside the settings: the model, and the fingerprint of the data
    trained_model: Callable[[int, Params, dict[str, int] | None], Pretrained]  # of (step, parameters, counts seen)
    lines: Sequence[str]  # to print at the beginning
    describe_start: Callable[[Pretrained | None], str]  # a line about the parameters that a new run starts from
    data: Sequence[tuple[str, Mapping[str, Any]]]  # name and manifest of each data set, for about.json
    same: Mapping[str, object] = {}  # further values that must be equal on all processes


def open_training(
    training: Training, workdir: Place, load: Callable[[], Pretrained | None], started: float
) -> contextlib.AbstractContextManager[Run]:
    """Opens a work directory for a run; see `open_run`, which raises InputError if it cannot be used."""
    last_step = training.stages[-1].pace.num_steps
    of_run = training.identity, training.tokenizer, training.abstract
    return open_run(training.config, workdir, *of_run, load, last_step, training.same, started)


def pace_of(config: PretrainConfig | FinetuneConfig, num_steps: int, epoch_steps: int = 0, **rest: bool) -> Pace:
    """Returns the pace that the settings ask for; evaluations and saves are after each epoch if they do not say."""
    evaluate = config.eval.every_steps or epoch_steps
    return Pace(
        num_steps,
        config.report.every_steps,
        evaluate,
        config.checkpoint.every_steps or (epoch_steps and evaluate),
        keep=config.checkpoint.keep_every,
        steps_per_call=config.train.steps_per_call,
        profile=config.report.profile_steps,
        **rest,
    )


def run_stages(run: Run, training: Training) -> LoopResult:
    """Trains from where the run stands to the end of the last stage, or until a signal ends the run."""
    run.announce(training.lines, training.describe_start(run.start))
    run.note_data([manifest for _, manifest in training.data], [name for name, _ in training.data])
    first, *later = training.stages

    def new_state(start: Pretrained | None) -> TrainState:
        params = start.params if start else None
        return init_state(first.objective, first.optimizer, first.train, training.mesh, params)

    state = run.first_state(new_state)
    result = LoopResult(state, int(state.step), 0, run.notes.get("seen"))
    del state  # or its memory could not be reused
    ended = sum(result.step >= stage.first_step for stage in later)
    for number in range(ended + 1, len(training.stages) + 1):
        result = _run_stage(run, training, number, result)
        if run.report_stop(result.signal, result.step):
            break
    return result


def _run_stage(run: Run, training: Training, number: int, so_far: LoopResult) -> LoopResult:
    """Trains from where the run stands, `so_far`, to the end of a stage."""
    stage, mesh, abstract = training.stages[number - 1], training.mesh, training.abstract
    taken = so_far.step - stage.first_step
    # A report is of one stage: the notes of an earlier one are dropped, but for the counts of the whole run.
    notes = run.notes if taken else {"seen": so_far.seen}
    for line in stage.describe():
        run.reporter.message(line)

    def keep(step: int, params: Params, seen: dict[str, int] | None) -> None:
        keep_revision(training.trained_model(step, params, seen), run.workdir)

    step = stage.objective, stage.optimizer, stage.train, mesh, abstract, stage.schedule_start
    work = Work(
        mesh,
        make_train_step(*step),
        stage.batches(taken),
        stage.evaluation(),
        make_throughput(training.model, mesh),
        keep,
        stage.rank,
        phase=number if len(training.stages) > 1 else 0,
        train_steps=make_train_step(*step, several=True),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(stage.close)
        return train_loop(run, begin_stage(stage, so_far.state, abstract), stage.pace, work, notes)


def begin_stage(stage: Stage, state: TrainState, abstract: TrainState) -> TrainState:
    """Returns the state to continue with. Adam's means are zero at the first step of a stage that resets them."""
    if not stage.resets_moments or int(state.step) != stage.first_step:
        return state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.optimizer)
    return state._replace(optimizer=jax.jit(reset_moments, out_shardings=shardings, donate_argnums=0)(state.optimizer))
