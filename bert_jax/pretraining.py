# SPDX-License-Identifier: Apache-2.0
"""Pre-training, from a prepared corpus to a trained BERT: the wiring, on one page."""

import time
from functools import partial

from jax.sharding import Mesh

from bert_jax.batches.load import train_batches
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.checkpoints.warm_start import load_start
from bert_jax.devices.sharding import Devices, check_divisible, in_no_mesh, make_mesh
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.objective import Params
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.settings.rules import to_dict
from bert_jax.storage.places import AnyPath, to_place
from bert_jax.training.choices import as_begun, choose_precision, describe_choices
from bert_jax.training.describe import (
    describe_devices,
    describe_model,
    describe_phase,
    describe_start,
)
from bert_jax.training.heldout import make_evaluation
from bert_jax.training.loop import LoopResult
from bert_jax.training.phases import Corpora, OpenPhase, open_corpora
from bert_jax.training.run import open_run
from bert_jax.training.stages import Stage, Training, pace_of
from bert_jax.training.step import TrainState, abstract_state
from bert_jax.training.teachers import Teaching, learnt_from
from bert_jax.training.train import leave_model, run_stages


@in_no_mesh()
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
    mesh = make_mesh(config.mesh, devices)
    config = choose_precision(as_begun(config, workdir), mesh.devices.flat[0])
    corpora = open_corpora(config, mesh)
    training = describe_pretraining(corpora, mesh)
    objective, params = training.stages[0].objective, training.abstract.params
    load = partial(load_start, corpora.config, objective, training.tokenizer, params)
    with open_run(training, workdir, load, started) as run:
        result = run_stages(run, training)
        if not result.signal:
            leave_model(run, training, result)
    return result


def describe_pretraining(corpora: Corpora, mesh: Mesh) -> Training:
    """Returns what a run of pre-training trains. Raises: InputError if its batches do not divide over the mesh."""
    config, tokenizer, phases, revisions = corpora
    check_divisible(
        mesh, config.model, *(batch for opened in phases for batch in opened.phase.batches)
    )
    abstract = abstract_state(phases[0].objective, config.optimizer, config.train, mesh)
    lines = [f"revisions after steps {', '.join(map(str, revisions))}"] if revisions else []
    fingerprint, *later = [opened.dataset.fingerprint for opened in phases]

    def trained_model(step: int, params: Params, seen: dict[str, int] | None) -> Pretrained:
        return Pretrained(config.model, params, tokenizer, trained={"step": step, **(seen or {})})

    return Training(
        config,
        config.model,
        tokenizer,
        mesh,
        abstract,
        [stage_of(opened, corpora, mesh, abstract) for opened in phases],
        {
            "model": to_dict(config.model),
            "dataset": fingerprint,
            "later_datasets": later,
            "row_lengths": [opened.dataset.row_length for opened in phases],
        },
        trained_model,
        [
            *lines,
            describe_model(config.model, abstract.params),
            describe_devices(mesh),
            describe_choices(config),
        ],
        partial(describe_start, config),
        [
            (path.rstrip("/").rpartition("/")[2], opened.dataset.manifest)
            for path, opened in zip(config.data_paths, phases)
        ],
    )


def stage_of(opened: OpenPhase, corpora: Corpora, mesh: Mesh, abstract: TrainState) -> Stage:
    """Returns the stage that a phase is."""
    phase, dataset, objective, heldout, rows_before = opened
    config, count = phase.config, len(corpora.phases)
    teaching = Teaching(
        *(mesh, corpora.tokenizer, MASKED_LM, config.model, dataset.row_length, objective.prepare),
        vocab_size=corpora.tokenizer.vocab_size,
    )
    taught = learnt_from(config.teacher, teaching)
    order = config.data.batch_size, config.data.seed, mesh, rows_before
    return Stage(
        objective,
        config.optimizer,
        phase.train,
        pace_of(
            config,
            phase.last_step,
            final=phase.number == count,
            break_off=True,
            keep_at=corpora.revisions,
        ),
        lambda taken: taught(train_batches(dataset.train, taken, *order)),
        lambda: make_evaluation(config, heldout, dataset, mesh, abstract.params),
        phase.first_step,
        phase.schedule_start,
        phase.resets_moments,
        lambda: describe_phase(phase, dataset, count, mesh, abstract, opened.row_shape()),
        close=dataset.close,
    )
