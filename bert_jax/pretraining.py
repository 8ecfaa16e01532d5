# SPDX-License-Identifier: Apache-2.0
"""Pre-training, from a prepared corpus to a trained BERT: the wiring, on one page."""

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from bert_jax.checkpoints.pretrained import Pretrained, keep_revision, leave_pretrained
from bert_jax.checkpoints.warm_start import load_start
from bert_jax.data.pipeline import train_batches
from bert_jax.data.records import Dataset
from bert_jax.data.streamed import open_for_training
from bert_jax.devices import cluster
from bert_jax.devices.sharding import Devices, check_divisible, make_mesh
from bert_jax.errors import InputError
from bert_jax.model.objective import Objective, Params, pretraining_objective
from bert_jax.plan.compiled import abstract_batch_of, describe_step, load_step, read_step
from bert_jax.plan.describe import describe_phase, describe_run, make_throughput
from bert_jax.settings.model import check_types
from bert_jax.settings.phases import Phase, check_rows, phases_of, rows_before
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.settings.rules import to_dict
from bert_jax.storage.places import Place
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.curves import draw_curves
from bert_jax.training.heldout import make_evaluation
from bert_jax.training.loop import LoopResult, Pace, Work, train_loop
from bert_jax.training.optim import reset_moments
from bert_jax.training.run import Run, open_run
from bert_jax.training.step import LowerableStep, TrainState, TrainStep, abstract_state, init_state, make_train_step


class Part(NamedTuple):
    """A phase with its data and objective."""

    phase: Phase
    dataset: Dataset
    objective: Objective  # phases differ in their masks only; the parameters are the same
    rows_before: int  # rows of its data that earlier phases used


class Inputs(NamedTuple):
    """The resolved settings of a run, its tokenizer and its phases."""

    config: PretrainConfig
    tokenizer: Tokenizer
    parts: list[Part]  # one for each phase


def pretrain(
    config: PretrainConfig, workdir: Place, devices: Devices | None = None, started: float = 0.0
) -> LoopResult:
    """Trains through all phases: from random parameters, from `init_checkpoint`, or from where `workdir` stands.

    The model is left in `workdir`/pretrained. Uses all devices if none are given. `started` is when the command began,
    in seconds since the epoch, for the goodput; 0 is now.

    Raises: InputError if a setting, the data or the work directory cannot be used; before anything is written.
    """
    started = started or time.time()
    config.validate()
    inputs = open_inputs(config)
    config, tokenizer, parts = inputs
    mesh = make_mesh(config.mesh, devices)
    check_divisible(mesh, config.model, *(batch for part in parts for batch in part.phase.batches))
    fingerprints = [part.dataset.fingerprint for part in parts]
    about = {"model": to_dict(config.model), "dataset": fingerprints[0], "later_datasets": fingerprints[1:]}
    objective = parts[0].objective
    abstract = abstract_state(objective, config.optimizer, config.train, mesh)
    load = partial(load_start, config, objective, tokenizer, abstract.params)
    compiled = load_compiled(config, parts, abstract, mesh) if config.train.compiled else {}

    last_step = parts[-1].phase.last_step

    with open_run(config, workdir, about, tokenizer, abstract, load, last_step, started=started) as run:
        for line in describe_run(config, mesh, abstract.params):
            run.reporter.message(line)
        run.reporter.message(run.describe_start(_describe_start(config, run.start)))
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
            result = train_phase(run, inputs, part, result, abstract, mesh, compiled.get(part.phase.number))
            if run.was_stopped(result.signal, result.step):
                return result
        with run.clock.phase("saving"):
            leave_model(run, inputs, result)
    return result


def open_inputs(config: PretrainConfig) -> Inputs:
    """Returns the inputs of a run, with settings that follow from the data filled in.

    Raises: InputError if the data cannot be read, do not fit the model, or differ between phases.
    """
    sizes = (config.data.batch_size, config.phase2.batch_size or config.data.batch_size)
    datasets, stream = open_for_training(config.data, config.data_paths, sizes[: len(config.data_paths)])
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, stream=stream))
    tokenizer = datasets[0].load_tokenizer()
    config = resolve(config, datasets, tokenizer)
    phases = phases_of(config)
    never_predicted = (tokenizer.cls_id, tokenizer.sep_id)
    parts = [
        Part(
            phase,
            dataset,
            pretraining_objective(
                config.model, phase.config.masking, tokenizer.mask_id, never_predicted, config.train.next_sentence
            ),
            taken,
        )
        for phase, dataset, taken in zip(
            phases, datasets, rows_before(phases, [dataset.fingerprint for dataset in datasets]), strict=True
        )
    ]
    return Inputs(config, tokenizer, parts)


def lower_phase(part: Part, abstract: TrainState, mesh: Mesh) -> tuple[jax.stages.Lowered, dict]:
    """Returns the training step of a phase, not yet compiled, and what it depends on."""
    batch = abstract_batch_of(part.dataset, part.phase.config.data.batch_size, mesh)
    with jax.set_mesh(mesh):
        lowered = _make_step(part, abstract, mesh).lower(abstract, batch)
    return lowered, describe_step(part.phase, mesh, abstract, batch, lowered)


def load_compiled(
    config: PretrainConfig, parts: Sequence[Part], abstract: TrainState, mesh: Mesh
) -> dict[int, TrainStep]:
    """Returns the step of `train.compiled` by the number of its phase. The step of another phase is compiled as usual.

    Raises: InputError if the file cannot be used for this run.
    """
    path = config.train.compiled
    found = read_step(path)
    number = min(int(found[0].get("phase", 1)), len(parts))
    lowered, about = lower_phase(parts[number - 1], abstract, mesh)
    return {number: load_step(path, about, lowered, mesh, found)}


def _make_step(part: Part, abstract: TrainState, mesh: Mesh) -> LowerableStep:
    phase = part.phase
    return make_train_step(part.objective, phase.config.optimizer, phase.train, mesh, abstract, phase.schedule_start)


def train_phase(
    run: Run,
    inputs: Inputs,
    part: Part,
    so_far: LoopResult,
    abstract: TrainState,
    mesh: Mesh,
    step: TrainStep | None = None,
) -> LoopResult:
    """Trains from where the run stands, `so_far`, to the end of a phase; `step` is its step, if it has been loaded."""
    phase, dataset, objective, rows_taken = part
    config = phase.config
    taken = so_far.step - phase.first_step
    # A report is of one phase: the notes of an earlier one are dropped, but for the counts of the whole run.
    notes = run.notes if taken else {"seen": so_far.seen}
    for line in describe_phase(phase, dataset, len(inputs.parts), mesh, abstract):
        run.reporter.message(line)

    def keep(step: int, params: Params, seen: dict[str, int] | None) -> None:
        keep_revision(trained_model(inputs, step, params, seen), run.workdir)

    work = Work(
        mesh,
        step or _make_step(part, abstract, mesh),
        train_batches(dataset.train, taken, config.data.batch_size, config.data.seed, mesh, rows_taken),
        make_evaluation(config, objective, dataset, mesh, abstract.params),
        make_throughput(config.model, mesh),
        keep,
        phase=phase.number if len(inputs.parts) > 1 else 0,
    )
    pace = Pace(
        phase.last_step,
        config.report.every_steps,
        config.eval.every_steps,
        config.checkpoint.every_steps,
        final=phase.number == len(inputs.parts),
        break_off=True,
        keep=config.checkpoint.keep_every,
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
    leave_pretrained(trained_model(inputs, result.step, result.state.params, result.seen), where, "the model")
    if cluster.is_first():
        run.reporter.publish()
        draw_curves(run.workdir / "metrics.jsonl", run.workdir / "curves.png")
    run.reporter.message(f"trained to step {result.step}: model in {where}, curves in {run.workdir}")


def trained_model(inputs: Inputs, step: int, params: Params, seen: dict[str, int] | None) -> Pretrained:
    """Returns the model of a step, with the counts of its training data if they are known."""
    return Pretrained(inputs.config.model, params, inputs.tokenizer, trained={"step": step, **(seen or {})})


def resolve(config: PretrainConfig, datasets: Sequence[Dataset], tokenizer: Tokenizer) -> PretrainConfig:
    """Returns the configuration with the settings that follow from the data: vocabulary size and next sentence loss.

    `datasets` has one data set per phase.

    Raises: InputError if the data does not fit the model, or the data of one phase that of another.
    """
    model = config.model
    if not model.vocab_size:
        model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    if tokenizer.vocab_size > model.vocab_size:
        raise InputError(
            f"the data's tokenizer has {tokenizer.vocab_size} tokens and model.vocab_size is {model.vocab_size}; "
            "ids would be beyond the table, so raise it (0 takes the tokenizer's size)"
        )
    for dataset in datasets:
        if not dataset.train.num_rows:
            raise InputError(f"{dataset.path} has no row to train on; prepare it from more text, or hold out less")
        if dataset.manifest["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
            raise InputError(
                f"{dataset.path} was made with another vocabulary or casing than {config.data.path}; "
                f"prepare it with --tokenizer={datasets[0].tokenizer_path}"
            )
        if dataset.row_length > model.max_positions:
            raise InputError(
                f"rows of {dataset.row_length} tokens in {dataset.path} are longer than model.max_positions "
                f"{model.max_positions}; prepare shorter rows or raise it"
            )
        if config.model.causal and dataset.manifest["row"].get("predictions"):
            raise InputError(
                f"{dataset.path} has masks of its own, and a causal model predicts the next token of unmasked text; "
                "import it with --masks=redraw"
            )
    check_rows(config, [dataset.row_length for dataset in datasets])
    labels = [dataset.manifest["identity"]["options"].get("next_sentence", "nsp") for dataset in datasets]
    for dataset, label in zip(datasets, labels):
        check_types(model, int(label != "none"), str(dataset.path))
    if config.train.next_sentence and len(set(labels)) > 1:
        raise InputError(
            f"{config.data.path} was prepared with --next_sentence={labels[0]} and {config.phase2.path} with "
            f"{labels[1]}; prepare both alike, or set train.next_sentence=False"
        )
    train = dataclasses.replace(config.train, next_sentence=config.train.next_sentence and labels[0] != "none")
    return dataclasses.replace(config, model=model, train=train)


def _describe_start(config: PretrainConfig, start: Pretrained | None) -> str:
    """Returns a line that says which parameters a new run starts from."""
    if start is None:
        return "start from random parameters, step 0"
    line = f"warm start from {config.init_checkpoint}: its parameters, a fresh optimizer, step 0"
    return "; ".join([line, *start.notes])
