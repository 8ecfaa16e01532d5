# SPDX-License-Identifier: Apache-2.0
"""Pre-training, from a prepared corpus to a trained BERT: the wiring, on one page."""

import contextlib
import time
from functools import partial

import jax
from jax.sharding import Mesh

from bert_jax.checkpoints.pretrained import Pretrained, keep_revision, leave_pretrained
from bert_jax.checkpoints.warm_start import load_start
from bert_jax.data.pipeline import train_batches
from bert_jax.devices.job import this_job
from bert_jax.devices.sharding import Devices, check_divisible, in_no_mesh, make_mesh
from bert_jax.model.objective import Params
from bert_jax.settings.phases import Phase
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.settings.rules import to_dict
from bert_jax.storage.places import AnyPath, to_place
from bert_jax.training.curves import draw_curves
from bert_jax.training.describe import describe_phase, describe_run, describe_start, make_throughput
from bert_jax.training.heldout import make_evaluation
from bert_jax.training.inputs import Inputs, Part, open_inputs
from bert_jax.training.loop import LoopResult, Pace, Work, train_loop
from bert_jax.training.optim import reset_moments
from bert_jax.training.run import Run, open_run
from bert_jax.training.step import TrainState, abstract_state, init_state


@in_no_mesh
def pretrain(
    config: PretrainConfig, workdir: AnyPath, devices: Devices | None = None, started: float = 0.0
) -> LoopResult:
    """Trains through all phases: from random parameters, from `init_checkpoint`, or from where `workdir` stands.

    The model is left in `workdir`/pretrained; `workdir` may be on a disk or at gs://. Uses all devices if none are
    given. `started` is when the command began, in seconds since the epoch, for the goodput; 0 is now.

    Raises: InputError if a setting, the data or the work directory cannot be used; before anything is written.
    """
    workdir, started = to_place(workdir), started or time.time()
    config.validate()
    inputs = open_inputs(config)
    config, tokenizer, parts = inputs
    mesh = make_mesh(config.mesh, devices)
    check_divisible(mesh, config.model, *(batch for part in parts for batch in part.phase.batches))
    fingerprints = [part.dataset.fingerprint for part in parts]
    about = {
        "model": to_dict(config.model),
        "dataset": fingerprints[0],
        "later_datasets": fingerprints[1:],
        "row_lengths": [part.dataset.row_length for part in parts],
    }
    objective = parts[0].objective
    abstract = abstract_state(objective, config.optimizer, config.train, mesh)
    load = partial(load_start, config, objective, tokenizer, abstract.params)
    last_step = parts[-1].phase.last_step

    with open_run(config, workdir, about, tokenizer, abstract, load, last_step, started=started) as run:
        lines, start = describe_run(config, mesh, abstract.params), describe_start(config, run.start)
        run.announce(lines, start)
        run.note_data(
            [part.dataset.manifest for part in parts],
            [path.rstrip("/").rpartition("/")[2] for path in config.data_paths],
        )

        def new_state(start: Pretrained | None) -> TrainState:
            return init_state(objective, config.optimizer, config.train, mesh, start.params if start else None)

        state = run.first_state(new_state)
        result = LoopResult(state, int(state.step), 0, run.notes.get("seen"))
        del state  # or its memory could not be reused
        begun = sum(result.step >= part.phase.last_step for part in parts[:-1])
        for part in parts[begun:]:
            result = train_phase(run, inputs, part, result, abstract, mesh)
            if run.report_stop(result.signal, result.step):
                return result
        with run.clock.phase("saving"):
            leave_model(run, inputs, result)
    return result


def train_phase(
    run: Run,
    inputs: Inputs,
    part: Part,
    so_far: LoopResult,
    abstract: TrainState,
    mesh: Mesh,
) -> LoopResult:
    """Trains from where the run stands, `so_far`, to the end of a phase."""
    phase, dataset, objective, rows_taken = part
    config = phase.config
    taken = so_far.step - phase.first_step
    # A report is of one phase: the notes of an earlier one are dropped, but for the counts of the whole run.
    notes = run.notes if taken else {"seen": so_far.seen}
    for line in describe_phase(phase, dataset, len(inputs.parts), mesh, abstract, part.row_shape()):
        run.reporter.message(line)
    throughput = make_throughput(config.model, mesh)

    def keep(step: int, params: Params, seen: dict[str, int] | None) -> None:
        keep_revision(inputs.trained_model(step, params, seen), run.workdir)

    work = Work(
        mesh,
        part.make_step(abstract, mesh),
        train_batches(dataset.train, taken, config.data.batch_size, config.data.seed, mesh, rows_taken),
        make_evaluation(config, objective, dataset, mesh, abstract.params),
        throughput,
        keep,
        phase=phase.number if len(inputs.parts) > 1 else 0,
        train_steps=part.make_step(abstract, mesh, several=True),
    )
    pace = Pace(
        phase.last_step,
        config.report.every_steps,
        config.eval.every_steps,
        config.checkpoint.every_steps,
        final=phase.number == len(inputs.parts),
        break_off=True,
        keep=config.checkpoint.keep_every,
        steps_per_call=config.train.steps_per_call,
        hang_seconds=config.train.hang_seconds,
        profile=config.report.profile_steps,
    )
    with contextlib.closing(dataset):
        return train_loop(run, begin_phase(phase, so_far.state, abstract), pace, work, notes)


def begin_phase(phase: Phase, state: TrainState, abstract: TrainState) -> TrainState:
    """Returns the state to continue with. Adam's means are zero at the first step of a phase that resets them."""
    if not phase.resets_moments or int(state.step) != phase.first_step:
        return state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.optimizer)
    return state._replace(optimizer=jax.jit(reset_moments, out_shardings=shardings, donate_argnums=0)(state.optimizer))


def leave_model(run: Run, inputs: Inputs, result: LoopResult) -> None:
    """Writes the model and the curves of a finished run."""
    run.checkpoints.close()
    where = run.workdir / "pretrained"
    leave_pretrained(inputs.trained_model(result.step, result.state.params, result.seen), where, "the model")
    if this_job().is_first:
        run.reporter.publish()
        draw_curves(run.workdir / "metrics.jsonl", run.workdir / "curves.png")
    run.reporter.message(f"trained to step {result.step}: model in {where}, curves in {run.workdir}")
