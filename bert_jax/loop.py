# SPDX-License-Identifier: Apache-2.0
"""The one training loop, for pre-training and for every task."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bert_jax import allocator, cluster
from bert_jax.batch import Batch
from bert_jax.checkpoint import Checkpoints
from bert_jax.errors import DivergedError
from bert_jax.model.objective import Params
from bert_jax.profiling import profiled
from bert_jax.report import Reporter
from bert_jax.step import Metrics, TrainState
from bert_jax.watchdog import Watchdog

# Steps that may be under way at once. The device never waits for the host to read metrics, and the host never
# runs far ahead: jax 0.10 on CPU hangs when some 64 steps with collectives are dispatched and none is waited for, and
# a signal to stop is answered once these steps are done.
MAX_IN_FLIGHT = 3


class Pace(NamedTuple):
    """How many steps there are, and after how many something is done; 0 does it at the end only."""

    num_steps: int
    report: int
    evaluate: int
    save: int
    evaluate_first: bool = True  # before the first step as well
    final: bool = True  # False: other steps follow, of another phase, so that a signal at the last one counts too
    break_off: bool = False  # a signal ends an evaluation too, but for the last one
    hang_seconds: int = 0  # without a step, an evaluation or a save that ends, after which the run is ended; 0 is never
    profile: str = ""  # which steps to profile: "100:105"
    keep: int = 0  # steps between revisions, the first of them at step 0; 0 keeps none


class LoopResult(NamedTuple):
    """Where the loop ended."""

    state: TrainState
    step: int
    signal: int  # the signal that ended it early, or 0
    seen: dict[str, int] | None  # how many sequences, tokens and words were trained on since step 0, if known


# Metrics that are counts: they become rates, and mean nothing by themselves.
COUNTS = ("sequences", "tokens", "words", "squared_lengths", "predictions")
SEEN = ("sequences", "tokens", "words")  # counts that are added up over the whole run


class Window:
    """The metrics of the steps since the last report, and the time that was spent on steps alone."""

    def __init__(self, sums: Mapping[str, Sequence[float]] | None = None) -> None:
        self.sums = {name: list(pair) for name, pair in (sums or {}).items()}  # {metric: [sum, weight]}
        self.seconds = 0.0
        self.waited = 0.0  # of these seconds, at most as many did the device wait for a batch
        self._started: float | None = None

    def start_clock(self) -> None:
        self._started = time.perf_counter()

    def stop_clock(self) -> None:
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
        self._started = None

    def next_batch(self, batches: Iterator[Batch], last: Metrics | None) -> Batch:
        """Returns the next batch. If the step of the metrics `last` is over when it comes, the device may have waited.

        How long is not known, only that it was no longer than the host waited; so it is never called too short.
        """
        asked = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - asked
        if self._started is not None and (last is None or last["loss"][0].is_ready()):  # type: ignore[attr-defined]
            self.waited += waited
        return batch

    def add(self, metrics: Metrics) -> None:
        """Adds the metrics of a step; its counts only if it was timed."""
        for name, (total, weight) in metrics.items():
            if name not in COUNTS or self._started is not None:
                pair = self.sums.setdefault(name, [0.0, 0.0])
                pair[0] += float(total)
                pair[1] += float(weight)

    def means(self) -> dict[str, float]:
        return mean_metrics({name: pair for name, pair in self.sums.items() if name not in COUNTS})

    def counts(self) -> dict[str, float]:
        return {name: self.sums[name][0] for name in COUNTS if name in self.sums}


def mean_metrics(sums: dict[str, Any]) -> dict[str, float]:
    """Returns sum / weight of every metric; 0 where nothing was weighed."""
    return {name: float(total) / float(weight) if weight else 0.0 for name, (total, weight) in sums.items()}


def evaluate(
    eval_step: Callable[[Params, Batch], Metrics],
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
    state: TrainState,
    pace: Pace,
    mesh: Mesh,
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    batches: Iterator[Batch],
    evaluation: Callable[..., dict[str, float] | None] | None,
    throughput: Callable[[dict[str, float], float], dict[str, float]],
    checkpoints: Checkpoints,
    reporter: Reporter,
    preemption: cluster.Preemption,
    notes: Mapping[str, Any] | None = None,
    rank: Callable[[dict[str, float]], float] = lambda metrics: metrics["loss"],
    keep_revision: Callable[[int, Params, dict[str, int] | None], None] | None = None,
) -> LoopResult:
    """Runs steps until pace.num_steps, evaluating, saving and reporting on the way.

    `batches` yields the batch of the state's step and those after it. `evaluation(params)` returns metrics; the best
    checkpoints are those with the lowest `rank` of them, and an evaluation that is among the best so far is followed by
    a save, whatever pace.save says. `throughput(counts, seconds)` turns summed counts into rates.
    What `preemption` notes saves and returns. With pace.break_off and a single process it does not wait for an
    evaluation: `evaluation(params, stopped)` returns None once `stopped()` is not 0, and the next run begins with that
    evaluation.
    `notes` are those of the checkpoint that the state came from: "unreported", the sums of steps before it that no
    report has covered; "overdue", whether its evaluation was broken off; "best", the lowest ranks until then;
    "seen", the counts of all steps before it. `keep_revision(step, params, seen)` is called every pace.keep steps.

    Raises: DivergedError if a loss, a gradient or a parameter is not finite; such a state is never saved.
    """
    in_flight: deque[tuple[int, Metrics]] = deque()
    notes = notes or {}
    window = Window(notes.get("unreported"))
    best: list[float] = list(notes.get("best", []))  # ascending, as many as checkpoints are kept for
    first_step, num_steps = int(jax.device_get(state.step)), pace.num_steps
    last_good = first_step
    workdir = checkpoints.directory.parent
    overdue = bool(notes.get("overdue"))
    seen = notes.get("seen")  # a run that was begun before there were counts has none
    counted: dict[str, int] | None = {} if first_step == 0 else seen and dict(seen)

    def finish_oldest() -> None:
        nonlocal window, last_good, counted
        step, metrics = in_flight.popleft()
        metrics = jax.device_get(metrics)
        allocator.give_back_freed_memory()
        for name in ("loss", "grad_norm"):
            if not math.isfinite(metrics[name][0]):
                raise _not_finite(f"{name} is {float(metrics[name][0])} at step {step}", last_good, checkpoints)
        last_good = step
        watchdog.alive()
        window.add(metrics)
        if counted is not None:
            counted |= {name: counted.get(name, 0) + int(metrics[name][0]) for name in SEEN if name in metrics}
        if step % pace.report == 0:
            window.stop_clock()
            rates = throughput(window.counts(), window.seconds) if window.seconds else {}
            rates |= {"data_wait": window.waited / window.seconds} if window.seconds else {}
            learning_rate = {"learning_rate": float(metrics["learning_rate"][0])}
            reporter.log(step, "train", window.means() | learning_rate | rates)
            window = Window()
            window.start_clock()

    def finish_all() -> None:
        while in_flight:
            finish_oldest()
        window.stop_clock()

    def evaluate_now(step: int) -> float | None:
        nonlocal overdue
        if evaluation is None:
            return None
        stoppable = pace.break_off and step < num_steps and not cluster.is_several()
        metrics = evaluation(state.params, preemption.received) if stoppable else evaluation(state.params)
        overdue = metrics is None
        if metrics is None:
            return None
        watchdog.alive()
        reporter.log(step, "eval", metrics)
        return float(rank(metrics))

    def is_among_best(metric: float | None) -> bool:
        nonlocal best
        if metric is None or not math.isfinite(metric):
            return False
        before, best = best, sorted([*best, metric])[: checkpoints.keep_best]
        return best != before

    def notes_now() -> dict[str, Any]:
        # Copies: a thread writes them when steps have gone on.
        unreported = {name: list(pair) for name, pair in window.sums.items() if name not in COUNTS}
        return {"unreported": unreported, "overdue": overdue, "best": list(best), "seen": counted and dict(counted)}

    def check_params(step: int) -> None:
        if not jax.device_get(_all_finite(state.params)):
            raise _not_finite(f"a parameter is not finite after step {step}", last_good, checkpoints)

    def save(step: int, metric: float | None) -> None:
        check_params(step)
        checkpoints.save(step, state, metric, notes_now())
        watchdog.alive()

    def keep(step: int) -> None:
        if keep_revision is not None:
            check_params(step)  # for what is kept stays for good
            keep_revision(step, state.params, counted and dict(counted))

    step = first_step
    received = 0
    batches = profiled(batches, first_step, MAX_IN_FLIGHT, pace.profile, pace.report, reporter, workdir)
    with jax.set_mesh(mesh), Watchdog(pace.hang_seconds) as watchdog, contextlib.closing(batches):
        if overdue:
            metric = evaluate_now(step)
            if metric is not None:
                is_among_best(metric)
                checkpoints.add_metric(step, metric, notes_now())
        elif first_step == 0 and pace.evaluate and pace.evaluate_first:
            evaluate_now(step)
        if first_step == 0 and pace.keep:
            keep(step)
        while step < num_steps and not (received := preemption.received()):
            batch = window.next_batch(batches, in_flight[-1][1] if in_flight else None)
            state, metrics = train_step(state, batch)
            step += 1
            in_flight.append((step, metrics))
            if len(in_flight) > MAX_IN_FLIGHT:
                finish_oldest()
            last = step == num_steps
            to_evaluate = last or _due(step, pace.evaluate)
            to_save = last or _due(step, pace.save)
            to_keep = _due(step, pace.keep)
            if to_evaluate or to_save or to_keep or step == first_step + 1:  # the first step compiles: it is not timed
                finish_all()
                if to_keep:
                    keep(step)
                metric = evaluate_now(step) if to_evaluate else None
                if is_among_best(metric) or to_save:
                    save(step, metric)
                window.start_clock()
        if received and step > first_step:
            finish_all()
            save(step, None)
        checkpoints.wait()
        if not pace.final and not received:
            received = preemption.received()
    return LoopResult(state, step, 0 if step >= num_steps and pace.final else received, counted)


def _not_finite(what: str, last_good: int, checkpoints: Checkpoints) -> DivergedError:
    steps = checkpoints.steps()
    return DivergedError(
        f"{what}; losses were finite until step {last_good}, and the last checkpoint is "
        f"{f'of step {steps[-1]}' if steps else 'none'}; lower optimizer.learning_rate, lengthen "
        "optimizer.warmup_steps, or look for damaged data"
    )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
