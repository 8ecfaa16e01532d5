# SPDX-License-Identifier: Apache-2.0
"""The phases of a pre-training run: the steps of each, and its settings as those of a run of one phase.

Everything here follows from the configuration and the sizes of the data, so a resumed run finds its phase from its
step.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bert_jax.errors import InputError
from bert_jax.settings.pretraining import Phase2Config, PretrainConfig, ResolvedConfig, TrainConfig
from bert_jax.settings.rules import Values, affecting


class Phase(NamedTuple):
    """A phase of a run. Steps count from the start of the run, through both phases."""

    number: int  # from 1
    # of a run of this phase alone; train.num_steps is the number of its steps
    config: ResolvedConfig
    first_step: int
    last_step: int  # steps taken by the run when the phase ends
    schedule_start: int  # step at which its learning rate schedule starts
    schedule_steps: int
    resets_moments: bool

    @property
    def train(self) -> TrainConfig:
        """The settings of a training step; num_steps is the length of the learning rate schedule."""
        return dataclasses.replace(self.config.train, num_steps=self.schedule_steps)

    @property
    def batches(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(Rows of a global batch, number of microbatches) of training, and the same of evaluation."""
        size = self.config.data.batch_size
        accumulate = self.config.train.microbatches
        return (size, accumulate), (self.config.eval.rows(size, accumulate), 1)


def phases_of(config: ResolvedConfig) -> tuple[Phase, ...]:
    """Returns the phases of a run, one or two."""
    second = config.phase2
    first_config = dataclasses.replace(config, phase2=Phase2Config())
    if second.num_steps and second.schedule == "restart" and config.optimizer.schedule == "stable":
        # it falls once, at the end of the run
        optimizer = dataclasses.replace(config.optimizer, decay_rate=0.0)
        first_config = dataclasses.replace(first_config, optimizer=optimizer)
    boundary = config.train.num_steps
    total = boundary + second.num_steps
    goes_on = bool(second.num_steps) and second.schedule == "continue"
    first = Phase(1, first_config, 0, boundary, 0, total if goes_on else boundary, False)
    if not second.num_steps:
        return (first,)
    changes = {
        "data": {"path": second.path, "batch_size": second.batch_size},
        "masking": {"max_predictions": second.max_predictions},
        "train": {"num_steps": second.num_steps, "accumulate": second.accumulate},
        "optimizer": {"learning_rate": second.learning_rate},
    }
    sections = {
        name: dataclasses.replace(
            getattr(config, name), **{key: value for key, value in values.items() if value}
        )
        for name, values in changes.items()
    }
    if not goes_on:
        warmup = {"warmup_steps": second.warmup_steps, "warmup_rate": second.warmup_rate}
        sections["optimizer"] = dataclasses.replace(sections["optimizer"], **warmup)
    start, length = (0, total) if goes_on else (boundary, second.num_steps)
    config = dataclasses.replace(first_config, **sections)
    return first, Phase(2, config, boundary, total, start, length, not second.keep_moments)


def check_rows(config: PretrainConfig, row_lengths: Sequence[int]) -> None:
    """Raises: InputError if the phases have rows of different length and phase2.max_predictions is not set."""
    first = config.masking.max_predictions
    length = row_lengths[0]
    for row_length in row_lengths[1:]:
        if row_length != length and first and not config.phase2.max_predictions:
            share = round(first * row_length / length)
            raise InputError(
                f"rows of {config.phase2.path} have {row_length} tokens, not {length}, and masking.max_predictions is "
                f"{first} for both; set phase2.max_predictions={share} for as large a share, or both to 0"
            )


def rows_before(phases: Sequence[Phase], fingerprints: Sequence[str]) -> list[int]:
    """Returns how many rows of each phase's data earlier phases have used; `fingerprints` identify the data."""
    taken: dict[str, int] = {}
    before = []
    for phase, fingerprint in zip(phases, fingerprints, strict=True):
        before.append(taken.get(fingerprint, 0))
        rows = (phase.last_step - phase.first_step) * phase.config.data.batch_size
        taken[fingerprint] = before[-1] + rows
    return before


def revision_steps(
    config: ResolvedConfig, phases: Sequence[Phase], words_of_rows: Sequence[float]
) -> tuple[int, ...]:
    """Returns the steps after which a run has read the words of `checkpoint.keep_words`, each time that it read them.

    `words_of_rows` are the words that a row of each phase's data stands for, on average.

    Raises: InputError if the run ends before.
    """
    marks = list(config.checkpoint.words())
    steps = []
    read = 0.0
    of_step = 0.0
    if not marks:
        return ()
    for phase, words in zip(phases, words_of_rows, strict=True):
        of_step = words * phase.config.data.batch_size
        taken = phase.last_step - phase.first_step
        while marks and marks[0] <= read + (taken + 0.5) * of_step:
            steps.append(
                phase.first_step + min(max(1, round((marks.pop(0) - read) / of_step)), taken)
            )
        read += taken * of_step
    if marks:
        more = math.ceil((marks[-1] - read) / of_step)
        beyond = f"checkpoint.keep_words {marks[-1]:,.0f} is beyond the {read:,.0f} words that the run reads"
        raise InputError(f"{beyond}; leave it out, or take {more:,} steps more")
    return tuple(steps)


def may_change(
    before: Mapping[str, Values], config: ResolvedConfig, steps_taken: int
) -> tuple[str, ...]:
    """Returns the settings that may differ from `before`, the run's earlier settings, after `steps_taken` steps.

    All settings of a phase that has not begun may change.

    Raises: InputError if the first phase would end before the current step, or if it has ended and its end is moved.
    """
    allowed = affecting(PretrainConfig, "end", "place", "work", "nothing")
    boundary = before["train"]["num_steps"]
    has_second = bool(before.get("phase2", {}).get("num_steps"))
    if not has_second or steps_taken <= boundary:
        if config.phase2.num_steps and steps_taken > config.train.num_steps:
            steps = f"train.num_steps {config.train.num_steps}"
            raise InputError(
                f"{steps} is below the {steps_taken} steps of the first phase that the run has taken"
            )
        return (*allowed, "phase2")
    if config.train.num_steps != boundary or not config.phase2.num_steps:
        begun = f"the second phase has begun after step {boundary}"
        raise InputError(
            f"{begun}; keep train.num_steps={boundary}, and set phase2.num_steps for another total"
        )
    return tuple(name for name in allowed if name != "train.num_steps")


def phase_of(config: ResolvedConfig, number: int) -> ResolvedConfig:
    """Returns a phase as a run of its own. Raises: InputError if the run has no phase of that number."""
    phases = phases_of(config)
    if number > len(phases):
        raise InputError(
            f"there is no phase {number} in a run that has {len(phases)}; use 1 to {len(phases)}"
        )
    return phases[number - 1].config
