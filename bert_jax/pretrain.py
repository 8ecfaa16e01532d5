# SPDX-License-Identifier: Apache-2.0
"""Pre-training, from a prepared corpus to a trained BERT: the wiring, on one page."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from bert_jax import cluster
from bert_jax.checkpoint import Checkpoints, Restored, checkpoint_steps
from bert_jax.config import PretrainConfig, check_types
from bert_jax.data.pipeline import train_batches
from bert_jax.data.records import Dataset, open_dataset
from bert_jax.describe import describe_phase, describe_run, make_throughput
from bert_jax.errors import InputError
from bert_jax.heldout import eval_batch_size, make_evaluation
from bert_jax.loop import LoopResult, Pace, train_loop
from bert_jax.model.objective import Objective, pretraining_objective
from bert_jax.optim import reset_moments
from bert_jax.phases import Phase, check_rows, phases_of, rows_before
from bert_jax.pretrained import Pretrained, save_pretrained
from bert_jax.report import Reporter, draw_curves
from bert_jax.revisions import save_revision
from bert_jax.settings import to_dict
from bert_jax.sharding import check_divisible, make_mesh
from bert_jax.step import TrainState, abstract_state, init_state, make_train_step
from bert_jax.storage import write_json
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.warm_start import load_start
from bert_jax.workdir import changes_of, check_workdir, common, locked


class Part(NamedTuple):
    """What a phase is made of."""

    phase: Phase
    dataset: Dataset
    objective: Objective
    rows_before: int  # of its data, taken by earlier phases


def run(config: PretrainConfig, workdir: Path, devices: Sequence[Any] | None = None) -> LoopResult:
    """Trains through all phases, from scratch, from `init_checkpoint` or from where `workdir` stands.

    Uses all devices if none are given.

    Raises: InputError if a setting, the data or the work directory cannot be used; before anything is written.
    """
    with cluster.Preemption() as preemption:  # from before XLA compiles, which Ctrl-C must not break off
        return _run(config, workdir, devices, preemption)


def _run(
    config: PretrainConfig, workdir: Path, devices: Sequence[Any] | None, preemption: cluster.Preemption
) -> LoopResult:
    # Everything that can be wrong is found before anything is written.
    config.validate()
    datasets = [open_dataset(phase.config.data.path, verify=config.data.verify) for phase in phases_of(config)]
    tokenizer = datasets[0].load_tokenizer()
    config = resolve(config, datasets, tokenizer)
    mesh = make_mesh(config.mesh, devices)
    for phase in phases_of(config):
        check_divisible(mesh, config.model, phase.config.data.batch_size, phase.config.train.accumulate)
        check_divisible(mesh, config.model, eval_batch_size(phase.config))
    identity = {
        "format": 1,
        "model": to_dict(config.model),
        "run": to_dict(config),
        "tokenizer": tokenizer.fingerprint,
        "dataset": datasets[0].fingerprint,
        "later_datasets": [dataset.fingerprint for dataset in datasets[1:]],
    }
    check_workdir(workdir, identity, PretrainConfig, changes_of(workdir, identity, config))
    cluster.check_same(common(workdir, identity))

    # The task, and a state: resumed, warm-started or new.
    parts = make_parts(config, datasets, tokenizer)
    objective = parts[0].objective
    abstract = abstract_state(objective, config.optimizer, config.train, mesh)
    resumes = cluster.first_says(len(checkpoint_steps(workdir / "checkpoints"))) > 0
    start = None if resumes else load_start(config, objective, tokenizer, abstract.params)
    keep = config.checkpoint.keep_last, config.checkpoint.keep_best
    sealed = {"tokenizer": tokenizer.fingerprint}
    with locked(workdir), Checkpoints(workdir / "checkpoints", *keep, about=sealed) as checkpoints:
        restored = checkpoints.restore(abstract)
        if resumes and restored is None:  # it was killed in its first save
            start = load_start(config, objective, tokenizer, abstract.params)
        if cluster.is_first():
            write_json(workdir / "config.json", identity)
            tokenizer.save(workdir / "tokenizer")
        state, how = _first_state(config, objective, mesh, restored, start)
        how = "; ".join([*checkpoints.never_finished, how])
        notes = restored.notes if restored else {}
        restored = None  # no other name keeps a state's memory
        result = LoopResult(state, int(state.step), 0, notes.get("seen"))
        del state
        keep_revision = partial(
            save_revision, workdir, partial(save_pretrained, config=config.model, tokenizer=tokenizer)
        )

        with Reporter(
            workdir,
            parts[-1].phase.last_step,
            result.step,
            progress=config.report.progress,
            tensorboard=config.report.tensorboard,
            enabled=cluster.is_first(),
        ) as reporter:
            for line in [*describe_run(config, mesh, abstract.params), how]:
                reporter.message(line)
            for part in parts[sum(result.step >= part.phase.last_step for part in parts[:-1]) :]:
                result = run_phase(
                    part, len(parts), result, abstract, mesh, checkpoints, reporter, preemption, notes, keep_revision
                )
                if result.signal:
                    break
            checkpoints.close()
            if result.signal:
                reporter.message(
                    f"stopped by signal {result.signal} after step {result.step}; the same command resumes"
                )
                return result

            # What is left behind.
            params, trained = cluster.on_host(result.state.params), {"step": result.step, **(result.seen or {})}
            save = partial(save_pretrained, workdir / "pretrained", config.model, params, tokenizer, trained=trained)
            cluster.first_does("write the model", save)
            if cluster.is_first():
                draw_curves(workdir / "metrics.jsonl", workdir / "curves.png")
            reporter.message(f"trained to step {result.step}: model in {workdir / 'pretrained'}, curves in {workdir}")
        return result


def begin_phase(phase: Phase, state: TrainState, abstract: TrainState) -> TrainState:
    """Returns the state that goes on: at the first step of a phase that resets them, with Adam's means at zero."""
    if not phase.resets_moments or int(state.step) != phase.first_step:
        return state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.optimizer)
    return state._replace(optimizer=jax.jit(reset_moments, out_shardings=shardings, donate_argnums=0)(state.optimizer))


def run_phase(
    part: Part,
    num_phases: int,
    so_far: LoopResult,
    abstract: TrainState,
    mesh: Mesh,
    checkpoints: Checkpoints,
    reporter: Reporter,
    preemption: cluster.Preemption,
    notes: dict[str, Any],
    keep_revision: Callable[..., None],
) -> LoopResult:
    """Trains from where the run stands, `so_far`, to the end of a phase.

    `notes` are those of the checkpoint: the sums of steps that no report covers, and whether an evaluation is overdue.
    Those of an earlier phase are dropped, for a report is of one phase.
    """
    phase, dataset, objective, rows_before = part
    config = phase.config
    state = begin_phase(phase, so_far.state, abstract)
    taken = so_far.step - phase.first_step
    notes = notes if taken else {"seen": so_far.seen}
    if num_phases > 1:
        reporter.labels = {"phase": phase.number}
    for line in describe_phase(phase, dataset, num_phases, mesh, abstract):
        reporter.message(line)
    train_step = make_train_step(objective, config.optimizer, phase.train, mesh, abstract, phase.schedule_start)
    evaluation = make_evaluation(config, objective, dataset, mesh, abstract.params)
    batches = train_batches(dataset.train, taken, config.data.batch_size, config.data.seed, mesh, rows_before)
    pace = Pace(
        phase.last_step,
        config.report.every_steps,
        config.eval.every_steps,
        config.checkpoint.every_steps,
        final=phase.number == num_phases,
        break_off=True,
        keep=config.checkpoint.keep_every,
        hang_seconds=config.train.hang_seconds,
        profile=config.report.profile_steps,
    )
    return train_loop(
        state,
        pace,
        mesh,
        train_step,
        batches,
        evaluation,
        make_throughput(config.model, mesh),
        checkpoints,
        reporter,
        preemption,
        notes,
        keep_revision=keep_revision,
    )


def make_parts(config: PretrainConfig, datasets: Sequence[Dataset], tokenizer: Tokenizer) -> list[Part]:
    """Returns the phases with what they are made of. Objectives differ in their masks, never in their parameters."""
    phases = phases_of(config)
    never_predicted = (tokenizer.cls_id, tokenizer.sep_id)
    taken = rows_before(phases, [dataset.fingerprint for dataset in datasets])
    return [
        Part(
            phase,
            dataset,
            pretraining_objective(
                config.model, phase.config.masking, tokenizer.mask_id, never_predicted, config.train.next_sentence
            ),
            rows,
        )
        for phase, dataset, rows in zip(phases, datasets, taken, strict=True)
    ]


def resolve(config: PretrainConfig, datasets: Sequence[Dataset], tokenizer: Tokenizer) -> PretrainConfig:
    """Returns the configuration with what the data decide: the vocabulary's size, and whether there is a next sentence.

    `datasets` are those of the phases.

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


def _first_state(
    config: PretrainConfig, objective: Objective, mesh: Mesh, restored: Restored | None, start: Pretrained | None
) -> tuple:
    """Returns the state to go on from, and a line that says where it comes from."""
    if restored is not None:
        line = f"resume from step {int(restored.state.step)}: parameters, optimizer and data order"
        return restored.state, "; ".join([*restored.passed_over, line])
    if start is not None:
        state = init_state(objective, config.optimizer, config.train, mesh, start.params)
        line = f"warm start from {config.init_checkpoint}: its parameters, a fresh optimizer, step 0"
        return state, "; ".join([line, *start.notes])
    return init_state(objective, config.optimizer, config.train, mesh), "start from random parameters, step 0"
