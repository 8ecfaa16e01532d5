# SPDX-License-Identifier: Apache-2.0
"""The training loop of pre-training and of every task.

`train_loop` takes steps. After each, `due` decides whether to evaluate, to save, or to keep a revision.
"""

import abc
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bert_jax.batch import Batch, PyTree
from bert_jax.checkpoints.states import Notes
from bert_jax.devices import allocator
from bert_jax.devices.job import this_job
from bert_jax.devices.work import beat, under_way
from bert_jax.errors import DivergedError
from bert_jax.model.objective import Params
from bert_jax.training.profiling import profiled
from bert_jax.training.program import EvalStep, TrainStep
from bert_jax.training.run import Run
from bert_jax.training.stages import Evaluation, Pace
from bert_jax.training.step import Metrics, TrainState
from bert_jax.training.window import COUNTS, SEEN, Window

# Calls of the training step that may be dispatched and unfinished. With more than one, the device need not wait for
# the host to read metrics. With few, the host does not run far ahead: jax 0.10 on CPU hangs when some 64 steps with
# collectives are dispatched and none is waited for, and a signal to stop is answered only after these calls.
MAX_IN_FLIGHT = 3


class Work(abc.ABC):
    """What the loop takes its steps with, and what it does with their results."""

    mesh: Mesh
    train_step: TrainStep
    batches: Iterator[Batch]  # from the step of the state on
    evaluation: Evaluation | None
    phase: int = 0  # the number of the phase; 0 if there is one only

    @abc.abstractmethod
    def throughput(self, counts: dict[str, float], seconds: float) -> dict[str, float]:
        """Returns the rates at which steps were taken, given their summed counts."""

    @abc.abstractmethod
    def keep_revision(self, step: int, params: Params, seen: dict[str, int] | None) -> None:
        """Keeps the parameters after a step for good, with the counts of what they have seen."""

    def rank(self, metrics: dict[str, float]) -> float:
        """Returns the rank of an evaluation; lower is better."""
        return metrics["loss"]


class LoopResult(NamedTuple):
    """Where the loop ended."""

    state: TrainState
    step: int
    signal: int  # the signal that ended it early, or 0
    seen: dict[str, int] | None  # sequences, tokens and words trained on since step 0, if known


class Due(NamedTuple):
    """The actions that are due after a step."""

    evaluate: bool
    save: bool
    keep: bool


def due(step: int, pace: Pace) -> Due:
    """Returns the actions that are due after a step."""
    last = step == pace.num_steps
    evaluate, save = (last or _is_multiple(step, every) for every in (pace.evaluate, pace.save))
    return Due(evaluate, save, _is_multiple(step, pace.keep) or step in pace.keep_at)


def call_size(step: int, pace: Pace) -> int:
    """Returns the number of steps of the call that begins after a step: pace.steps_per_call, or 1.

    It is 1 if something is due inside the call. Calls begin at multiples of pace.steps_per_call, so that a resumed run
    divides its steps into the same calls.
    """
    size = pace.steps_per_call
    if step % size or step + size > pace.num_steps:
        return 1
    inside = range(step + 1, step + size)
    return 1 if any(any(due(at, pace)) or _is_multiple(at, pace.report) for at in inside) else size


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclass
class Progress:
    """The position of a run, beside its state. Checkpoints store it in their notes."""

    step: int  # steps taken; the last few may be unfinished
    finished: int  # the last step with finite metrics
    window: Window = field(default_factory=Window)  # metrics since the last report
    overdue: bool = False  # an evaluation was interrupted; the next run begins with it
    best: list[float] = field(default_factory=list)  # the `keep_best` lowest ranks, ascending
    waited: int = 0  # evaluations since the best
    # counts since step 0; None if an older version began the run
    seen: dict[str, int] | None = None

    @classmethod
    def of(cls, step: int, notes: Notes) -> "Progress":
        """Returns the progress at a step from the notes of its checkpoint, {} if there is none."""
        seen = notes.get("seen")
        window = Window(notes.get("unreported"))
        overdue = bool(notes.get("overdue"))
        best = list(notes.get("best", []))
        waited = int(notes.get("waited", 0))
        return cls(
            step, step, window, overdue, best, waited, {} if step == 0 else seen and dict(seen)
        )

    def notes(self) -> dict[str, object]:
        """Returns the notes that `of` reads. They are copies: a thread writes them while training goes on."""
        unreported = {
            name: list(pair) for name, pair in self.window.sums.items() if name not in COUNTS
        }
        others = {
            **({"waited": self.waited} if self.waited else {}),
            "seen": self.seen and dict(self.seen),
        }
        return {
            "unreported": unreported,
            "overdue": self.overdue,
            "best": list(self.best),
            **others,
        }

    def count(self, metrics: Metrics) -> None:
        """Adds the counts of a finished step to those of the run."""
        if self.seen is not None:
            self.seen |= {
                name: self.seen.get(name, 0) + int(metrics[name][0])
                for name in SEEN
                if name in metrics
            }

    def note_rank(self, rank: float | None, how_many: int) -> bool:
        """Remembers the rank of an evaluation if it is one of the best so far, and returns whether it is."""
        if rank is None or not math.isfinite(rank):
            return False
        self.waited = 0 if not self.best or rank < self.best[0] else self.waited + 1
        before, self.best = self.best, sorted([*self.best, rank])[:how_many]
        return self.best != before


def evaluate(
    eval_step: EvalStep,
    params: Params,
    batches: Iterator[Batch],
    stopped: Callable[[], int] = lambda: 0,
) -> dict[str, float] | None:
    """Returns the mean of every metric over all batches, each prediction counted once; None once `stopped()`."""
    window = Window()
    in_flight: deque[Metrics] = deque()
    for batch in batches:
        if stopped():
            return None
        in_flight.append(eval_step(params, batch))
        if len(in_flight) > MAX_IN_FLIGHT:
            window.add(jax.device_get(in_flight.popleft()))
            allocator.give_back_freed_memory()
    for metrics in in_flight:
        window.add(jax.device_get(metrics))
    return window.means()


def train_loop(
    run: Run, state: TrainState, pace: Pace, work: Work, notes: Notes | None = None
) -> LoopResult:
    """Takes steps until pace.num_steps, and evaluates, saves and reports on the way.

    The best checkpoints are those with the lowest `work.rank` of their evaluation. The loop also saves after an
    evaluation that is among the best so far, whatever pace.save is. On a signal the loop saves and ends. With
    pace.break_off and a single process, a signal also interrupts an evaluation, and the next run begins with that
    evaluation. `notes` come from the checkpoint of the state.

    Raises: DivergedError if a loss, a gradient or a parameter is not finite; such a state is never saved.
    """
    step = int(jax.device_get(state.step))
    in_flight = MAX_IN_FLIGHT * pace.steps_per_call
    batches = profiled(
        work.batches, step, in_flight, pace.profile, pace.report, run.reporter, run.workdir
    )
    # Closed here, so that a profile under way is written even if a step fails.
    with jax.set_mesh(work.mesh), contextlib.closing(batches):
        loop = _Loop(run, state, pace, work, Progress.of(step, notes or {}))
        with run.clock.phase("steps"):
            loop.begin()
            received = 0
            while not loop.is_over() and not (received := run.preemption.received()):
                loop.take_steps(batches)
            return loop.end(received)


class _Loop:
    """The state of the loop, and the actions that it takes."""

    def __init__(
        self, run: Run, state: TrainState, pace: Pace, work: Work, progress: Progress
    ) -> None:
        self.run = run
        self.state = state
        self.pace = pace
        self.work = work
        self.progress = progress
        self.first_step = progress.step
        # of every record
        self.labels: dict[str, float] = {"phase": work.phase} if work.phase else {}
        self.learning_rate = 0.0  # of the last finished step
        # the last step of each call, and its metrics
        self.in_flight: deque[tuple[int, Metrics]] = deque()
        self.called: set[object] = set()  # the sizes and shapes of calls that have been compiled
        self.evaluated = False
        self.saved = -1  # the step of the last save

    def is_over(self) -> bool:
        """Returns whether all steps are taken, or as many evaluations as the pace waits for gave no better model."""
        return (
            self.progress.step >= self.pace.num_steps
            or 0 < self.pace.patience <= self.progress.waited
        )

    def begin(self) -> None:
        """Evaluates and keeps a revision before the first step, where that is due."""
        progress = self.progress
        if progress.overdue:
            if (rank := self.evaluate()) is not None:
                progress.note_rank(rank, self.run.checkpoints.keep_best)
                self.run.checkpoints.add_metric(progress.step, rank, progress.notes())
        elif self.first_step == 0 and self.pace.evaluate and self.pace.evaluate_first:
            self.evaluate()
        if self.first_step == 0 and self.pace.keep:
            self.keep()

    def take_steps(self, batches: Iterator[Batch]) -> None:
        """Takes the steps of one call, or one by one if their batches differ in shape."""
        call: list[Batch] = []
        for _ in range(call_size(self.progress.step, self.pace)):
            last = self.in_flight[-1][1] if self.in_flight else None
            batch, waited = self.progress.window.next_batch(batches, last)
            self.run.clock.move("data", waited)
            call.append(batch)
        # A program takes batches of one shape; others are taken one by one, with the same result.
        for part in [call] if len(set(map(_shapes, call))) == 1 else [[batch] for batch in call]:
            self.dispatch(part)

    def dispatch(self, call: list[Batch]) -> None:
        """Dispatches one call, and takes the actions that are due after it."""
        progress = self.progress
        clock = self.run.clock
        work = self.work
        program = len(call), _shapes(call[0])
        compiles = program not in self.called  # a call that compiles is not timed
        if compiles:
            self.finish_all()
            self.called.add(program)
        with clock.phase("compilation") if compiles else contextlib.nullcontext():
            self.state, metrics = work.train_step(self.state, *call)
        progress.step += len(call)
        self.in_flight.append((progress.step, metrics))
        if len(self.in_flight) > MAX_IN_FLIGHT:
            self.finish_oldest()
        now = due(progress.step, self.pace)
        if any(now) or compiles:
            # others may still compile
            with under_way("compilation") if compiles else contextlib.nullcontext():
                self.finish_all()
            if progress.step == self.pace.num_steps and progress.step % self.pace.report:
                self.report(progress.step)  # the last steps, which fill no interval
            if now.keep:
                self.keep()
            rank = self.evaluate() if now.evaluate else None
            is_good = progress.note_rank(rank, self.run.checkpoints.keep_best)
            if (
                progress.step < self.pace.num_steps
                and self.is_over()
                and progress.step % self.pace.report
            ):
                self.report(progress.step)  # as above, of a run that ends early
            if is_good or now.save:
                self.save(rank)
            progress.window.start_clock()

    def end(self, received: int) -> LoopResult:
        """Saves if a signal was received, waits for the checkpoint in progress, and returns the result of the loop."""
        step = self.progress.step
        if step > self.first_step and (
            received or (step < self.pace.num_steps and step != self.saved)
        ):
            self.finish_all()
            self.save(None)
        with self.run.clock.phase("saving"):
            self.run.checkpoints.wait()
        # A signal in the last step of this phase would otherwise be heard only after the next one
        # is opened.
        if not self.pace.final and not received:
            received = self.run.preemption.received()
        return LoopResult(
            self.state,
            step,
            0 if self.is_over() and self.pace.final else received,
            self.progress.seen,
        )

    def finish_oldest(self) -> None:
        """Waits for the oldest unfinished call, and reports if a report is due."""
        last, on_device = self.in_flight.popleft()
        steps = jax.device_get(on_device).of_steps()
        allocator.give_back_freed_memory()
        beat()
        for step, metrics in enumerate(steps, last - len(steps) + 1):
            self.count(step, metrics)
        self.learning_rate = float(steps[-1]["learning_rate"][0])
        if last % self.pace.report == 0:
            self.report(last)
        elif self.run.clock.is_due():
            self.run.report_goodput()

    def count(self, step: int, metrics: Metrics) -> None:
        """Checks the metrics of a finished step and adds them to those of the run."""
        for name in ("loss", "grad_norm"):
            if not math.isfinite(metrics[name][0]):
                raise self.not_finite(f"{name} is {float(metrics[name][0])} at step {step}")
        self.progress.finished = self.run.step = step
        self.progress.window.add(metrics)
        self.progress.count(metrics)

    def finish_all(self) -> None:
        """Waits for all unfinished calls."""
        while self.in_flight:
            self.finish_oldest()
        self.progress.window.stop_clock()

    def report(self, step: int) -> None:
        """Reports the steps since the last report."""
        self.run.checkpoints.check()  # the next save may be hours away
        window = self.progress.window
        window.stop_clock()
        counts = window.counts()  # none if every call has compiled
        rates = self.work.throughput(counts, window.seconds) if counts and window.seconds else {}
        rates |= {"data_wait": window.waited / window.seconds} if window.seconds else {}
        metrics = window.means() | {"learning_rate": self.learning_rate} | rates | self.labels
        self.run.reporter.log(step, "train", metrics)
        self.run.report_goodput()
        self.progress.window = window = Window()
        window.start_clock()

    def evaluate(self) -> float | None:
        """Evaluates the parameters and returns their rank; None if interrupted, or if there is no evaluation."""
        if self.work.evaluation is None:
            return None
        step = self.progress.step
        params = self.state.params
        stoppable = self.pace.break_off and step < self.pace.num_steps and not this_job().is_several

        def stopped() -> int:
            beat()
            return self.run.preemption.received() if stoppable else 0

        with self.run.clock.phase("evaluation"), self.peers_compile():
            metrics = self.work.evaluation(params, stopped)
        self.progress.overdue = metrics is None
        if metrics is None:
            return None
        beat()
        self.run.reporter.log(step, "eval", metrics | self.labels)
        # All save after it, or none: machines of two kinds may compute the metrics of a task with other last digits.
        return float(this_job().broadcast_text("rank", repr(float(self.work.rank(metrics)))))

    def peers_compile(self) -> contextlib.AbstractContextManager[None]:
        """Returns a block in which other processes may still compile the first evaluation."""
        first, self.evaluated = not self.evaluated and this_job().is_several, True
        return under_way("compilation") if first else contextlib.nullcontext()

    def save(self, rank: float | None) -> None:
        """Saves the state, with the rank of its evaluation if it has one."""
        with self.run.clock.phase("saving"):
            self.check_params()
            # before the save, so that a run that resumes from it has the totals
            self.run.report_goodput()
            self.saved = self.progress.step
            self.run.checkpoints.save(
                self.progress.step, self.state, rank, self.progress.notes(), self.work.phase
            )
        beat()

    def keep(self) -> None:
        """Keeps the parameters for good, as a revision."""
        seen = self.progress.seen
        with self.run.clock.phase("saving"):
            self.check_params()
            self.work.keep_revision(self.progress.step, self.state.params, seen and dict(seen))
        beat()

    def check_params(self) -> None:
        """Raises: DivergedError if a parameter is not finite."""
        if not jax.device_get(_all_finite(self.state.params)):
            raise self.not_finite(f"a parameter is not finite after step {self.progress.step}")

    def not_finite(self, what: str) -> DivergedError:
        """Returns the error for a value that is not finite; it names the last checkpoint."""
        self.run.checkpoints.wait()  # a save in progress counts
        steps = self.run.checkpoints.steps()
        return DivergedError(
            f"{what}; losses were finite until step {self.progress.finished}, and the last checkpoint is "
            f"{f'of step {steps[-1]}' if steps else 'none'}; lower optimizer.learning_rate, lengthen "
            "optimizer.warmup_steps, or look for damaged data"
        )


def _shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    return tuple(leaf.shape for leaf in jax.tree.leaves(batch))


@jax.jit
def _all_finite(tree: PyTree) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
