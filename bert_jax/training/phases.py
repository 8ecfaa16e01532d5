# SPDX-License-Identifier: Apache-2.0
"""From settings to all that pre-training reads: its tokenizer, and its phases with their data and objectives."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from jax.sharding import Mesh

from bert_jax.batch import RowShape
from bert_jax.batches.load import abstract_batch
from bert_jax.batches.stream import open_for_training
from bert_jax.data.records import Dataset
from bert_jax.devices.chips import vmem_bytes
from bert_jax.errors import InputError
from bert_jax.model.attention import LONGEST_WHOLE
from bert_jax.model.objective import Objective
from bert_jax.model.replacing import objective_of
from bert_jax.settings.model import check_type_ids
from bert_jax.settings.phases import Phase, check_rows, phases_of, revision_steps, rows_before
from bert_jax.settings.pretraining import MaskingConfig, PretrainConfig, ResolvedConfig
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.choices import Batches, choose_memory, memory_of
from bert_jax.training.step import abstract_state


class OpenPhase(NamedTuple):
    """A phase with its data and objective."""

    phase: Phase
    dataset: Dataset
    objective: Objective  # phases differ in their masks only; the parameters are the same
    heldout: Objective  # of evaluation: it masks every row
    rows_before: int  # rows of its data that earlier phases used

    def row_shape(self) -> RowShape:
        """Returns the sizes of a row of the phase's batches."""
        return self.objective.row_shape(abstract_batch(self.dataset.train.dtype))


class Corpora(NamedTuple):
    """The resolved settings of a run, its tokenizer, its phases with their data, and its revisions."""

    config: ResolvedConfig
    tokenizer: Tokenizer
    phases: list[OpenPhase]
    # steps after which the parameters are kept, by `checkpoint.keep_words`
    revisions: tuple[int, ...]


def open_corpora(config: PretrainConfig, mesh: Mesh) -> Corpora:
    """Returns the inputs of a run, with settings that follow from the data, and from the memory of a device, filled in.

    Raises: InputError if the data cannot be read, do not fit the model, or differ between phases, or if the run does
      not read the words of its revisions.
    """
    sizes = (config.data.batch_size, config.phase2.batch_size or config.data.batch_size)
    datasets, stream = open_for_training(
        config.data, config.data_paths, sizes[: len(config.data_paths)]
    )
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, stream=stream))
    tokenizer = datasets[0].load_tokenizer()
    resolved = _fit_into_memory(resolve(config, datasets, tokenizer), datasets, tokenizer, mesh)
    phases = phases_of(resolved)
    used = rows_before(phases, [dataset.fingerprint for dataset in datasets])
    words = [dataset.words_of_row for dataset in datasets] if resolved.checkpoint.keep_words else []
    revisions = revision_steps(resolved, phases, words)

    opened = []
    for phase, dataset, rows in zip(phases, datasets, used, strict=True):
        heldout = dataclasses.replace(phase.config.masking, causal_rate=0.0)
        opened.append(
            OpenPhase(
                phase,
                dataset,
                _objective(resolved, phase.config.masking, tokenizer),
                _objective(resolved, heldout, tokenizer),
                rows,
            )
        )
    return Corpora(resolved, tokenizer, opened, revisions)


def _objective(config: PretrainConfig, masking: MaskingConfig, tokenizer: Tokenizer) -> Objective:
    # of masks, and of tokens never predicted
    ids = tokenizer.mask_id, (tokenizer.cls_id, tokenizer.sep_id)
    return objective_of(config, config.model, masking, *ids)


def _fit_into_memory(
    config: ResolvedConfig, datasets: Sequence[Dataset], tokenizer: Tokenizer, mesh: Mesh
) -> ResolvedConfig:
    """Returns the settings with the rematerialization and the microbatches of each phase that fit into a device."""
    phases = [phase.config for phase in phases_of(config)]
    # neither rows nor shapes of the state depend on what is computed again
    keeps_all = dataclasses.replace(config, model=dataclasses.replace(config.model, remat="none"))
    objectives = [_objective(keeps_all, phase.masking, tokenizer) for phase in phases]
    batches = []
    for phase, objective, dataset in zip(phases, objectives, datasets, strict=True):
        row = objective.row_shape(abstract_batch(dataset.train.dtype))
        batches.append(Batches(phase.data.batch_size, phase.train.accumulate, row))
    # which all phases share
    state = partial(abstract_state, objectives[0], config.optimizer, config.train, mesh)
    vmem = vmem_bytes(mesh.devices.flat[0].device_kind)
    remat, counts = choose_memory(
        config.in_memory, batches, mesh.shape, state, memory_of(mesh), vmem
    )
    model = dataclasses.replace(config.model, remat=remat)
    train = dataclasses.replace(config.train, accumulate=counts[0])
    second = config.phase2
    if second.num_steps:
        second = dataclasses.replace(second, accumulate=counts[1])
    return ResolvedConfig(dataclasses.replace(config, model=model, train=train, phase2=second))


def resolve(
    config: PretrainConfig, datasets: Sequence[Dataset], tokenizer: Tokenizer
) -> ResolvedConfig:
    """Returns the configuration with the settings that follow from the data: vocabulary size and next sentence loss.

    `datasets` has one data set per phase.

    Raises: InputError if the data does not fit the model, or the data of one phase that of another.
    """
    model = dataclasses.replace(
        config.model, vocab_size=config.model.vocab_size or tokenizer.vocab_size
    )
    if tokenizer.vocab_size > model.vocab_size:
        both = f"{tokenizer.vocab_size} tokens and model.vocab_size is {model.vocab_size}"
        raise InputError(
            f"the data's tokenizer has {both}; raise it (0 takes the tokenizer's size)"
        )
    for dataset in datasets:
        if not dataset.train.num_rows:
            raise InputError(
                f"{dataset.path} has no row to train on; prepare it from more text, or hold out less"
            )
        if dataset.manifest["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
            made = (
                f"{dataset.path} was made with another vocabulary or casing than {config.data.path}"
            )
            raise InputError(f"{made}; prepare it with --tokenizer={datasets[0].tokenizer_path}")
        if dataset.row_length > model.max_positions:
            rows = f"rows of {dataset.row_length} tokens in {dataset.path}"
            raise InputError(
                f"{rows} are longer than model.max_positions {model.max_positions}; raise it"
            )
        if (config.model.causal or config.masking.causal_rate) and dataset.manifest["row"].get(
            "predictions"
        ):
            causal = (
                "a causal model"
                if config.model.causal
                else f"masking.causal_rate {config.masking.causal_rate}"
            )
            raise InputError(
                f"{dataset.path} has masks of its own, unlike {causal}; import it with --masks=redraw"
            )
        if config.masking.causal_rate and dataset.row_length > LONGEST_WHOLE:
            rows = f"rows of {dataset.row_length} tokens in {dataset.path} are read in blocks, all alike"
            raise InputError(
                f"{rows}; with masking.causal_rate use rows of {LONGEST_WHOLE} at most"
            )
    check_rows(config, [dataset.row_length for dataset in datasets])
    labels = [
        dataset.manifest["identity"]["options"].get("next_sentence", "nsp") for dataset in datasets
    ]
    for dataset, label in zip(datasets, labels):
        check_type_ids(model, int(label != "none"), str(dataset.path))
    if config.train.next_sentence and len(set(labels)) > 1:
        two = f"{config.data.path} was prepared with --next_sentence={labels[0]}, {config.phase2.path} with {labels[1]}"
        raise InputError(f"{two}; prepare both alike, or set train.next_sentence=False")
    train = dataclasses.replace(
        config.train,
        next_sentence=config.train.next_sentence
        and labels[0] != "none"
        and not config.generator.num_layers,
    )
    return ResolvedConfig(dataclasses.replace(config, model=model, train=train))
