# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning runs of one shape that train together, in one compiled program.

Each run has its own parameters, order of the data, dropout and learning rate, and comes to what it comes to alone, but
for rounding (its rows may be padded longer). On an accelerator that a small model leaves idle, N runs cost little more
than one; on a CPU they cost N times one. Parameters and optimizers of all runs are in memory at once.
"""

import contextlib
import dataclasses
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax import cluster
from bert_jax.allocator import give_back_freed_memory
from bert_jax.batch import Batch
from bert_jax.data.pipeline import made_ahead
from bert_jax.errors import InputError
from bert_jax.finetune import check_probe, check_same_inputs, eval_batch_size, finish, load_start, prepare, train_config
from bert_jax.finetune_config import FinetuneConfig
from bert_jax.finetune_results import FinetuneResult
from bert_jax.keys import root_key
from bert_jax.loop import MAX_IN_FLIGHT
from bert_jax.model.objective import Params, task_objective
from bert_jax.report import Reporter
from bert_jax.settings import to_dict
from bert_jax.sharding import ROW_AXES, check_divisible, make_mesh, replicated
from bert_jax.step import TrainState, init_state, step_function
from bert_jax.storage import write_json
from bert_jax.tasks.base import Row
from bert_jax.tasks.batches import make_batch, padded_length, plan_epoch, steps_per_epoch
from bert_jax.tasks.evaluation import constant_scores, evaluate, make_inference
from bert_jax.warm_start import complete


class _Best(NamedTuple):
    """The best evaluation of a run so far."""

    score: float
    step: int
    params: Params  # on the host


def run(
    runs: Mapping[str, FinetuneConfig], workdir: Path, devices: Sequence[Any] | None = None
) -> dict[str, FinetuneResult]:
    """Returns what each run comes to. They differ in seeds and learning rate alone.

    Each leaves in `workdir`/NAME what `finetune.run` does, but for checkpoints: nothing is resumed. After SIGTERM or
    SIGINT every result has that signal, and nothing is left behind. A run that does not stay finite goes on beside
    the others, and ends with its best evaluation before.

    Raises: InputError as `finetune.run`, or if the mesh divides parameters.
    """
    with cluster.Preemption() as preemption:  # from before XLA compiles, which Ctrl-C must not break off
        return _run(runs, workdir, devices, preemption)


def _run(
    runs: Mapping[str, FinetuneConfig], workdir: Path, devices: Sequence[Any] | None, preemption: cluster.Preemption
) -> dict[str, FinetuneResult]:
    started = time.monotonic()
    config = next(iter(runs.values()))
    start = load_start(config.init_checkpoint)
    task, start, data = prepare(config, start)
    if not data.evaluation:
        raise InputError("sweep.together needs evaluation data, to tell which epoch of a run is best; give some")
    model = dataclasses.replace(start.config, **to_dict(config.model))
    config = check_probe(config, task, model)
    mesh = make_mesh(config.mesh, devices)
    if mesh.shape["fsdp"] * mesh.shape["tensor"] != 1:
        raise InputError(
            "sweep.together divides rows only; set mesh.fsdp and mesh.tensor to 1, or sweep.together=False"
        )
    check_divisible(mesh, model, config.data.batch_size, config.train.accumulate)
    check_divisible(mesh, model, eval_batch_size(config))
    check_same_inputs(start, data)

    train = train_config(config, data)
    objective = task_objective(model, task.head, task.num_outputs, task.probe)
    params = [complete(start, objective, one.train.seed).params for one in runs.values()]
    state = _stacked([init_state(objective, config.optimizer, train, mesh, one) for one in params], mesh)
    del params
    take = jax.jit(lambda params, index: jax.tree.map(lambda leaf: leaf[index], params), out_shardings=replicated(mesh))
    infer = make_inference(model, task, mesh, jax.eval_shape(take, state.params, 0))
    size = eval_batch_size(config)
    epoch_steps = steps_per_epoch(len(data.train.rows), config.data.batch_size)
    every = config.eval.every_steps or epoch_steps
    best: dict[str, _Best] = {}

    with contextlib.ExitStack() as stack:
        reporters = {name: stack.enter_context(_reporter(workdir / name, train.num_steps)) for name in runs}

        def evaluate_all(number: int, losses: np.ndarray) -> None:
            for index, (name, reporter) in enumerate(reporters.items()):
                params = take(state.params, index)
                if cluster.is_first():
                    print(name, end=" ", file=sys.stderr)
                reporter.log(number, "train", {"loss": float(losses[index])})
                scores = evaluate(task, data.evaluation, infer, size, mesh, params)
                reporter.log(number, "eval", scores)
                if np.isfinite(losses[index]) and (name not in best or scores[task.metric] > best[name].score):
                    best[name] = _Best(scores[task.metric], number, jax.device_get(params))

        step = _make_step(step_function(objective, config.optimizer, train), list(runs.values()), mesh)
        batches = _batches(data.train.rows, task.head, list(runs.values()), mesh)
        in_flight: deque[jax.Array] = deque()
        stack.enter_context(jax.set_mesh(mesh))
        for number in range(1, train.num_steps + 1):
            if received := preemption.received():
                return _stopped(runs, task.metric, number - 1, received)
            state, metrics = step(state, next(batches))
            in_flight.append(metrics["loss"][0])
            if len(in_flight) > MAX_IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
                give_back_freed_memory()
            if number % every == 0 or number == train.num_steps:
                evaluate_all(number, np.asarray(in_flight.pop()))
                in_flight.clear()

        seconds = (time.monotonic() - started) / len(runs)
        constant = constant_scores(task, data.train, data.evaluation)
        results = {}
        place = jax.jit(lambda params: params, out_shardings=replicated(mesh))
        for name, one in runs.items():
            scores = {}
            if name in best:
                params = place(best[name].params)
                scores = finish(one, task, data, model, params, start, infer, mesh, workdir / name)
            best_step = best[name].step if name in best else train.num_steps
            results[name] = FinetuneResult(scores, task.metric, constant, best_step, 0, seconds)
            if scores and cluster.is_first():
                write_json(workdir / name / "config.json", {"run": to_dict(one)})
                write_json(workdir / name / "results.json", {"task": one.task.name} | results[name]._asdict())
    return results


def _stopped(runs: Iterable[str], metric: str, step: int, received: int) -> dict[str, FinetuneResult]:
    if cluster.is_first():
        print(
            f"stopped by signal {received} after step {step}; runs together save no state, so the same command begins "
            "again",
            file=sys.stderr,
            flush=True,
        )
    return {name: FinetuneResult({}, metric, {}, step, received, 0.0) for name in runs}


def _reporter(workdir: Path, num_steps: int) -> Reporter:
    return Reporter(workdir, num_steps, tensorboard=False, progress=False, enabled=cluster.is_first())


def _stacked(states: Sequence[TrainState], mesh: Mesh) -> TrainState:
    """Returns one state of all runs, on a leading axis."""
    stack = jax.jit(
        lambda *states: jax.tree.map(lambda *leaves: jnp.stack(leaves), *states), out_shardings=replicated(mesh)
    )
    return stack(*states)


def _make_step(step: Callable[..., Any], runs: Sequence[FinetuneConfig], mesh: Mesh) -> Callable[..., Any]:
    """Returns the compiled (states, batches) -> (states, metrics) of all runs; it consumes the states it is given."""
    roots = jnp.stack([root_key(one.train.seed, "dropout") for one in runs])
    rates = np.array([one.optimizer.learning_rate for one in runs])
    scales = (rates / rates[0]).astype(np.float32)
    return jax.jit(
        lambda state, batch: jax.vmap(step)(state, batch, roots, jnp.asarray(scales)),
        in_shardings=(replicated(mesh), NamedSharding(mesh, PartitionSpec(None, ROW_AXES))),
        out_shardings=(replicated(mesh), replicated(mesh)),
        donate_argnums=0,
    )


def _batches(rows: Sequence[Row], head: str, runs: Sequence[FinetuneConfig], mesh: Mesh) -> Iterator[Batch]:
    """Yields the batches of all runs, step after step, stacked on a leading axis: each has the rows it has alone."""
    lengths = np.array([len(row.token_ids) for row in rows])
    num_places = max(len(row.lengths) for row in rows)
    data = runs[0].data
    epoch_steps = steps_per_epoch(len(rows), data.batch_size)
    sharding = NamedSharding(mesh, PartitionSpec(None, ROW_AXES))
    plans: dict[int, dict[int, list[np.ndarray]]] = {}  # of the epoch under way, by the seed of the data

    def to_mesh(*arrays: np.ndarray) -> jax.Array:
        stacked = np.stack(arrays)
        return jax.make_array_from_callback(stacked.shape, sharding, lambda index: stacked[index])

    def make(step: int) -> Batch:
        epoch, place = divmod(step, epoch_steps)
        if epoch not in plans:
            plans.clear()
            seeds = {one.data.seed for one in runs}
            plans[epoch] = {seed: plan_epoch(lengths, data.batch_size, seed, epoch, data.bucket) for seed in seeds}
        chosen = [plans[epoch][one.data.seed][place] for one in runs]
        longest = max(int(lengths[numbers].max()) for numbers in chosen)
        length = padded_length(longest, int(lengths.max())) if data.bucket else int(lengths.max())
        batches = []
        for numbers in chosen:
            empty = [None] * (data.batch_size - len(numbers))
            batches.append(make_batch([*(rows[number] for number in numbers), *empty], length, num_places, head))
        return jax.tree.map(to_mesh, *batches)

    return made_ahead(make, 0)
