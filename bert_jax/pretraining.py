# SPDX-License-Identifier: Apache-2.0
"""Pre-training, from a prepared corpus to a trained BERT: the wiring, on one page."""

import time
from collections.abc import Iterator
from functools import partial

from jax.sharding import Mesh

from bert_jax.batch import Batch
from bert_jax.batches.load import train_batches
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.checkpoints.warm_start import load_start
from bert_jax.devices.sharding import Devices, check_divisible, in_no_mesh, make_mesh
from bert_jax.errors import InputError
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.objective import Params
from bert_jax.model.replacing import GENERATOR, model_alone
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.settings.rules import to_dict
from bert_jax.storage.places import AnyPath, to_place
from bert_jax.training.choices import (
    as_begun,
    choose_precision,
    choose_update,
    describe_choices,
)
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
from bert_jax.training.stages import Evaluation, Stage, Training, pace_of
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
    if not isinstance(config, PretrainConfig):
        raise InputError(
            "these settings are not of pre-training; give such, as of recipe('pretrain:base')"
        )
    config.validate()
    mesh = make_mesh(config.mesh, devices)
    config = choose_precision(as_begun(config, workdir), mesh.devices.flat[0])
    config = choose_update(config, mesh)
    corpora = open_corpora(config, mesh)
    training = Pretraining(corpora, mesh)
    objective = training.stages[0].objective
    params = training.abstract.params
    load = partial(load_start, corpora.config, objective, training.tokenizer, params)
    with open_run(training, workdir, load, started) as run:
        result = run_stages(run, training)
        if not result.signal:
            leave_model(run, training, result)
    return result


class Pretraining(Training):
    """A run of pre-training. Raises: InputError if its batches do not divide over the mesh."""

    def __init__(self, corpora: Corpora, mesh: Mesh) -> None:
        config = corpora.config
        phases = corpora.phases
        self.corpora = corpora
        self.config = config
        self.model = config.model
        self.tokenizer = corpora.tokenizer
        batches = [batch for opened in phases for batch in opened.phase.batches]
        for model in config.models:
            check_divisible(mesh, model, *batches)
        self.mesh = mesh
        self.abstract = abstract_state(phases[0].objective, config.optimizer, config.train, mesh)
        self.stages = [PhaseStage(opened, corpora, mesh, self.abstract) for opened in phases]
        fingerprint, *later = [opened.dataset.fingerprint for opened in phases]
        self.identity = {
            "model": to_dict(config.model),
            "dataset": fingerprint,
            "later_datasets": later,
            "row_lengths": [opened.dataset.row_length for opened in phases],
        }
        self.lines = [
            describe_model(config.model, model_alone(self.abstract.params)),
            *(
                describe_model(model, self.abstract.params[GENERATOR], GENERATOR)
                for model in config.models[1:]
            ),
            describe_devices(mesh),
            describe_choices(config),
        ]
        if corpora.revisions:
            steps = ", ".join(map(str, corpora.revisions))
            self.lines.insert(0, f"revisions after steps {steps}")
        self.data = [
            (path.rstrip("/").rpartition("/")[2], opened.dataset.manifest)
            for path, opened in zip(config.data_paths, phases)
        ]

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        return self.corpora.config.models

    def trained_model(self, step: int, params: Params, seen: dict[str, int] | None) -> Pretrained:
        trained = {"step": step, **(seen or {})}
        return Pretrained(self.model, model_alone(params), self.tokenizer, trained=trained)

    def describe_start(self, start: Pretrained | None) -> str:
        return describe_start(self.corpora.config, start)


class PhaseStage(Stage):
    """The stage that a phase of pre-training is."""

    def __init__(
        self, opened: OpenPhase, corpora: Corpora, mesh: Mesh, abstract: TrainState
    ) -> None:
        phase = opened.phase
        self.opened = opened
        self.mesh = mesh
        self.abstract = abstract
        self.config = phase.config
        self.objective = opened.objective
        self.optimizer = phase.config.optimizer
        self.train = phase.train
        self.num_phases = len(corpora.phases)
        self.pace = pace_of(
            phase.config,
            phase.last_step,
            final=phase.number == self.num_phases,
            break_off=True,
            keep_at=corpora.revisions,
        )
        self.first_step = phase.first_step
        self.schedule_start = phase.schedule_start
        self.resets_moments = phase.resets_moments
        teaching = Teaching(
            mesh,
            corpora.tokenizer,
            MASKED_LM,
            phase.config.model,
            opened.dataset.row_length,
            opened.objective.prepare,
            vocab_size=corpora.tokenizer.vocab_size,
        )
        self.taught = learnt_from(phase.config.teacher, teaching)

    def batches(self, taken: int) -> Iterator[Batch]:
        data = self.config.data
        rows_before = self.opened.rows_before
        rows = self.opened.dataset.train
        return self.taught(
            train_batches(rows, taken, data.batch_size, data.seed, self.mesh, rows_before)
        )

    def evaluation(self) -> Evaluation | None:
        return make_evaluation(
            self.config,
            self.opened.heldout,
            self.opened.dataset,
            self.mesh,
            self.abstract.params,
        )

    def describe(self) -> list[str]:
        opened = self.opened
        return describe_phase(
            opened.phase,
            opened.dataset,
            self.num_phases,
            self.mesh,
            self.abstract,
            opened.row_shape(),
        )

    def close(self) -> None:
        self.opened.dataset.close()
