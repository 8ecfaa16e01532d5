# SPDX-License-Identifier: Apache-2.0
"""The page that runs a `Training`, stage after stage."""

import contextlib

import jax

from bert_jax.checkpoints.pretrained import Pretrained, keep_revision, leave_pretrained
from bert_jax.devices.job import this_job
from bert_jax.model.objective import Params
from bert_jax.training.curves import draw_curves
from bert_jax.training.describe import throughput
from bert_jax.training.loop import LoopResult, Work, train_loop
from bert_jax.training.optim import reset_moments
from bert_jax.training.program import Program
from bert_jax.training.run import Run
from bert_jax.training.stages import Stage, Training
from bert_jax.training.step import TrainState, init_state


def run_stages(run: Run, training: Training) -> LoopResult:
    """Trains from where the run stands to the end of the last stage, or until a signal ends the run."""
    run.announce(training.lines, training.describe_start(run.start))
    run.note_data(training.data)
    first, *later = training.stages

    def new_state(start: Pretrained | None) -> TrainState:
        params = start.params if start else None
        return init_state(first.objective, first.optimizer, first.train, training.abstract, params)

    state = run.first_state(new_state)
    result = LoopResult(state, int(state.step), 0, run.restored.notes.get("seen"))
    del state  # or its memory could not be reused
    ended = sum(result.step >= stage.first_step for stage in later)
    for number in range(ended + 1, len(training.stages) + 1):
        stage, taken = (
            training.stages[number - 1],
            result.step - training.stages[number - 1].first_step,
        )
        # A report is of one stage: the notes of an earlier one are dropped, but for the counts of the whole run.
        notes = run.restored.notes if taken else {"seen": result.seen}
        for line in stage.describe():
            run.reporter.message(line)
        with contextlib.ExitStack() as stack:
            stack.callback(stage.close)
            work = _StageWork(run, training, number, taken)
            state = begin_stage(stage, result.state, training.abstract)
            result = train_loop(run, state, stage.pace, work, notes)
        if run.report_stop(result.signal, result.step):
            break
    return result


class _StageWork(Work):
    """The work of a stage, after so many steps of it."""

    def __init__(self, run: Run, training: Training, number: int, taken: int) -> None:
        self.run = run
        self.training = training
        self.stage = training.stages[number - 1]
        stage = self.stage
        self.mesh = training.mesh
        self.train_step = Program(self.mesh).training(
            stage.objective, stage.optimizer, stage.train, training.abstract, stage.schedule_start
        )
        self.batches = stage.batches(taken)
        self.evaluation = stage.evaluation()
        self.phase = number if len(training.stages) > 1 else 0

    def throughput(self, counts: dict[str, float], seconds: float) -> dict[str, float]:
        return throughput(self.training.models, self.mesh, counts, seconds)

    def keep_revision(self, step: int, params: Params, seen: dict[str, int] | None) -> None:
        keep_revision(self.training.trained_model(step, params, seen), self.run.workdir)

    def rank(self, metrics: dict[str, float]) -> float:
        return self.stage.rank(metrics)


def begin_stage(stage: Stage, state: TrainState, abstract: TrainState) -> TrainState:
    """Returns the state to continue with. Adam's means are zero at the first step of a stage that resets them."""
    if not stage.resets_moments or int(state.step) != stage.first_step:
        return state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.optimizer)
    return state._replace(
        optimizer=jax.jit(reset_moments, out_shardings=shardings, donate_argnums=0)(state.optimizer)
    )


def leave_model(run: Run, training: Training, result: LoopResult) -> None:
    """Writes the model and the curves of a finished run."""
    where = run.workdir / "pretrained"
    with run.clock.phase("saving"):
        # First: a model is left once the state that it comes from is sealed.
        run.checkpoints.close()
        leave_pretrained(
            training.trained_model(result.step, result.state.params, result.seen),
            where,
            "the model",
        )
        if this_job().is_first:
            run.reporter.publish()
            draw_curves(run.workdir / "metrics.jsonl", run.workdir / "curves.png")
    run.reporter.message(
        f"trained to step {result.step}: model in {where}, curves in {run.workdir}"
    )
