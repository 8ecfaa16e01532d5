# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning runs of one shape that train together, in one compiled program.

Each run has its own parameters, order of the data, dropout and learning rate, and comes to what it comes to alone, but
for rounding (its rows may be padded longer). On an accelerator that a small model leaves idle, N runs cost little more
than one; on a CPU they cost N times one. Parameters and optimizers of all runs are in memory at once.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.allocator import give_back_freed_memory
from bert_jax.batch import Batch
from bert_jax.data.pipeline import made_ahead
from bert_jax.errors import InputError
from bert_jax.finetune import FinetuneResult, check_probe, eval_batch_size, finish, load_start, prepare, train_config
from bert_jax.finetune_config import FinetuneConfig
from bert_jax.keys import root_key
from bert_jax.model.objective import Params, task_objective
from bert_jax.pretrain import complete
from bert_jax.report import Reporter
from bert_jax.settings import to_dict
from bert_jax.sharding import ROW_AXES, check_divisible, make_mesh, replicated
from bert_jax.step import init_state, step_function
from bert_jax.storage import write_json
from bert_jax.tasks.base import Row
from bert_jax.tasks.batches import make_batch, padded_length, plan_epoch, steps_per_epoch
from bert_jax.tasks.evaluation import constant_scores, evaluate, make_inference


def run(
    runs: Mapping[str, FinetuneConfig], workdir: Path, devices: Sequence[Any] | None = None
) -> dict[str, FinetuneResult]:
    """Returns what each run comes to. They differ in seeds and learning rate alone.

    Each leaves in `workdir`/NAME what `finetune.run` does, but for checkpoints: nothing is resumed.

    Raises: InputError as `finetune.run`, or if the mesh divides parameters.
    """
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

    # One state for each run, stacked on a leading axis.
    train = train_config(config, data)
    objective = task_objective(model, task.head, task.num_outputs, task.probe)
    states = []
    for one in runs.values():
        params = complete(start, objective, one.train.seed).params
        states.append(init_state(objective, config.optimizer, train, mesh, params))
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    roots = jnp.stack([root_key(one.train.seed, "dropout") for one in runs.values()])
    rates = [one.optimizer.learning_rate for one in runs.values()]
    scales = jnp.array([rate / config.optimizer.learning_rate for rate in rates], jnp.float32)
    del states

    rows_divided = NamedSharding(mesh, PartitionSpec(None, ROW_AXES))
    step = jax.jit(
        jax.vmap(step_function(objective, config.optimizer, train)),
        in_shardings=(replicated(mesh), rows_divided, replicated(mesh), replicated(mesh)),
        out_shardings=(replicated(mesh), replicated(mesh)),
        donate_argnums=0,
    )
    infer = make_inference(model, task, mesh, jax.tree.map(lambda leaf: leaf[0], state.params))
    batches = _batches(data.train.rows, task.head, list(runs.values()), mesh)
    size = eval_batch_size(config)
    epoch_steps = steps_per_epoch(len(data.train.rows), config.data.batch_size)
    every = config.eval.every_steps or epoch_steps
    best: dict[str, tuple[float, int, Params]] = {}
    reporters = {name: Reporter(workdir / name, train.num_steps, tensorboard=False, progress=False) for name in runs}
    try:
        with jax.set_mesh(mesh):
            for number in range(1, train.num_steps + 1):
                state, metrics = step(state, next(batches), roots, scales)
                give_back_freed_memory()
                if number % every and number != train.num_steps:
                    continue
                losses = np.asarray(metrics["loss"][0])
                for index, name in enumerate(runs):
                    print(name, end=" ", file=sys.stderr)
                    params = jax.tree.map(lambda leaf, index=index: leaf[index], state.params)
                    reporters[name].log(number, "train", {"loss": float(losses[index])})
                    scores = evaluate(task, data.evaluation, infer, size, mesh, params)
                    reporters[name].log(number, "eval", scores)
                    if np.isfinite(losses[index]) and scores[task.metric] > best.get(name, (-np.inf,))[0]:
                        best[name] = (scores[task.metric], number, jax.device_get(params))
            seconds = (time.monotonic() - started) / len(runs)
            constant = constant_scores(task, data.train, data.evaluation)
            results = {}
            for name, one in runs.items():
                if name not in best:
                    results[name] = FinetuneResult({}, task.metric, constant, train.num_steps, 0, seconds)
                    continue
                _, best_step, params = best[name]
                scores = finish(one, task, data, model, params, start, infer, mesh, workdir / name)
                results[name] = FinetuneResult(scores, task.metric, constant, best_step, 0, seconds)
                write_json(workdir / name / "config.json", {"run": to_dict(one)})
                write_json(workdir / name / "results.json", {"task": one.task.name} | results[name]._asdict())
    finally:
        for reporter in reporters.values():
            reporter.close()
    return results


def _batches(rows: Sequence[Row], head: str, runs: Sequence[FinetuneConfig], mesh: Mesh) -> Iterator[Batch]:
    """Yields the batches of all runs, step after step, stacked on a leading axis: each has the rows it has alone."""
    lengths = np.array([len(row.token_ids) for row in rows])
    num_places = max(len(row.lengths) for row in rows)
    data = runs[0].data
    epoch_steps = steps_per_epoch(len(rows), data.batch_size)
    sharding = NamedSharding(mesh, PartitionSpec(None, ROW_AXES))

    def make(step: int) -> Batch:
        epoch, place = divmod(step, epoch_steps)
        chosen = [plan_epoch(lengths, data.batch_size, one.data.seed, epoch, data.bucket)[place] for one in runs]
        longest = max(int(lengths[numbers].max()) for numbers in chosen)
        length = padded_length(longest, int(lengths.max())) if data.bucket else int(lengths.max())
        batches = []
        for numbers in chosen:
            empty = [None] * (data.batch_size - len(numbers))
            batches.append(make_batch([*(rows[number] for number in numbers), *empty], length, num_places, head))
        return jax.device_put(jax.tree.map(lambda *arrays: np.stack(arrays), *batches), sharding)

    return made_ahead(make, 0)
