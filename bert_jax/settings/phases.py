# SPDX-License-Identifier: Apache-2.0
"""The phases of a pre-training run: which steps each takes, and the settings of each as if it were a run.

Everything here is a function of the configuration alone, so that a resumed run finds its place by the step it is at.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bert_jax.errors import InputError
from bert_jax.settings.pretraining import RESUMABLE_CHANGES, Phase2Config, PretrainConfig, TrainConfig


class Phase(NamedTuple):
    """A part of a run. Steps are those of the run, counted through."""

    number: int  # 1 is the first
    config: PretrainConfig  # of a run of this phase alone; train.num_steps are its steps
    first_step: int
    last_step: int  # how many steps have been taken when it is done
    schedule_start: int  # the step at which its schedule of the learning rate starts
    schedule_steps: int
    resets_moments: bool

    @property
    def train(self) -> TrainConfig:
        """What a step is made with: train.num_steps are those of the schedule."""
        return dataclasses.replace(self.config.train, num_steps=self.schedule_steps)

    @property
    def batches(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The rows of a global batch, and the microbatches that it is divided into: of training and of evaluation."""
        size, accumulate = self.config.data.batch_size, self.config.train.accumulate
        return (size, accumulate), (self.config.eval.rows(size, accumulate), 1)


def phases_of(config: PretrainConfig) -> tuple[Phase, ...]:
    """Returns the phases of a run, one or two."""
    second = config.phase2
    first_config = dataclasses.replace(config, phase2=Phase2Config())
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
        name: dataclasses.replace(getattr(config, name), **{key: value for key, value in values.items() if value})
        for name, values in changes.items()
    }
    if not goes_on:
        warmup = {"warmup_steps": second.warmup_steps, "warmup_rate": second.warmup_rate}
        sections["optimizer"] = dataclasses.replace(sections["optimizer"], **warmup)
    start, length = (0, total) if goes_on else (boundary, second.num_steps)
    config = dataclasses.replace(first_config, **sections)
    return first, Phase(2, config, boundary, total, start, length, not second.keep_moments)


def check_rows(config: PretrainConfig, row_lengths: Sequence[int]) -> None:
    """Raises: InputError if nothing says how many tokens are to be predicted in rows that get longer or shorter."""
    first, length = config.masking.max_predictions, row_lengths[0]
    for row_length in row_lengths[1:]:
        if row_length != length and not config.phase2.max_predictions:
            raise InputError(
                f"rows of {config.phase2.path} have {row_length} tokens, those of {config.data.path} {length}, and "
                f"masking.max_predictions is {first} for both; set phase2.max_predictions, to "
                f"{round(first * row_length / length)} for as large a share"
            )


def rows_before(phases: Sequence[Phase], fingerprints: Sequence[str]) -> list[int]:
    """Returns how many rows of its data each phase finds taken by those before it, which read the same data."""
    taken: dict[str, int] = {}
    before = []
    for phase, fingerprint in zip(phases, fingerprints, strict=True):
        before.append(taken.get(fingerprint, 0))
        rows = (phase.last_step - phase.first_step) * phase.config.data.batch_size
        taken[fingerprint] = before[-1] + rows
    return before


def may_change(before: Mapping[str, Any], config: PretrainConfig, steps_taken: int) -> tuple[str, ...]:
    """Returns which settings may differ from those that the run has had, `before`, after `steps_taken` steps.

    A phase that has not begun may still become another.

    Raises: InputError if the first phase would end before the step that it is at, or elsewhere than where it ended.
    """
    boundary = before["train"]["num_steps"]
    has_second = bool(before.get("phase2", {}).get("num_steps"))
    if not has_second or steps_taken <= boundary:
        if config.phase2.num_steps and steps_taken > config.train.num_steps:
            raise InputError(
                f"the run has taken {steps_taken} steps of its first phase and train.num_steps is "
                f"{config.train.num_steps}; use {steps_taken} or more, so that the second begins after them"
            )
        return (*RESUMABLE_CHANGES, "phase2")
    if config.train.num_steps != boundary or not config.phase2.num_steps:
        raise InputError(
            f"the second phase has begun after step {boundary}, so train.num_steps {config.train.num_steps} with "
            f"phase2.num_steps {config.phase2.num_steps} would undo it; keep train.num_steps={boundary}, and set "
            "phase2.num_steps, 1 or more, for another total"
        )
    return (*(name for name in RESUMABLE_CHANGES if name != "train.num_steps"), "phase2.num_steps", "phase2.path")
