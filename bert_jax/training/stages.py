# SPDX-License-Identifier: Apache-2.0
"""What a run trains: pre-training and fine-tuning each describe a `Training`, and `train.run_stages` runs it."""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jax.sharding import Mesh

from bert_jax.batch import Batch
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.model.objective import Objective, Params
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import OptimizerConfig, ResolvedConfig, TrainConfig
from bert_jax.settings.rules import step_range
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.step import TrainState


class Evaluation(Protocol):
    """A function from parameters to metrics.

    It calls `stopped` for each batch, as a sign that it goes on, and returns None if that has returned a signal, not 0,
    before the evaluation was complete.
    """

    def __call__(
        self, params: Params, stopped: Callable[[], int] = ..., /
    ) -> dict[str, float] | None: ...


class Pace(NamedTuple):
    """The number of steps, and the steps between reports, evaluations and saves; 0 is at the end only."""

    num_steps: int
    report: int
    evaluate: int
    save: int
    evaluate_first: bool = True  # before the first step as well
    # False if another phase follows: a signal at the last step then stops the run too
    final: bool = True
    break_off: bool = False  # whether a signal interrupts evaluations, except the last one
    profile: tuple[int, int] = (0, 0)  # steps to profile: those after the first, to the last
    keep: int = 0  # steps between revisions, from step 0 on; 0 keeps none
    keep_at: tuple[int, ...] = ()  # steps of more revisions
    steps_per_call: int = 1  # steps that are dispatched in one call
    patience: int = 0  # evaluations without a better one after which the run ends; 0 goes on


class Stage(abc.ABC):
    """Steps with one objective, one schedule and one set of data: a phase of pre-training, or a whole fine-tuning."""

    objective: Objective
    optimizer: OptimizerConfig
    train: TrainConfig  # num_steps is the length of the learning rate schedule
    pace: Pace  # num_steps is the last step, counted from the start of the run
    first_step: int = 0
    schedule_start: int = 0  # the step at which the learning rate schedule begins
    resets_moments: bool = False  # Adam's means are zero at the first step

    @abc.abstractmethod
    def batches(self, taken: int) -> Iterator[Batch]:
        """Returns the batches after so many steps of the stage."""

    @abc.abstractmethod
    def evaluation(self) -> Evaluation | None:
        """Makes what evaluates parameters; None if there is nothing to evaluate on."""

    def describe(self) -> list[str]:
        """Returns lines to print when the stage begins."""
        return []

    def rank(self, metrics: dict[str, float]) -> float:
        """Returns the rank of an evaluation; lower is better."""
        return metrics["loss"]

    def close(self) -> None:  # noqa: B027, most have nothing to close
        """Closes the data."""


class Training(abc.ABC):
    """What a run trains: its stages, and all that identifies and describes it."""

    config: ResolvedConfig | FinetuneConfig
    model: ModelConfig
    tokenizer: Tokenizer
    mesh: Mesh
    abstract: TrainState  # shapes, dtypes and shardings of the training state
    stages: Sequence[Stage]
    # JSON values beside the settings: the model, and the fingerprint of the data
    identity: Mapping[str, object]
    lines: Sequence[str]  # to print at the beginning
    # name and manifest of each data set, for about.json
    data: Sequence[tuple[str, Mapping[str, Any]]]
    same: Mapping[str, object] = {}  # further values that must be equal on all processes

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """The model, and others that are trained with it; the last predicts masked words."""
        return (self.model,)

    @abc.abstractmethod
    def trained_model(self, step: int, params: Params, seen: dict[str, int] | None) -> Pretrained:
        """Returns the model after a step, with the counts of what it has seen."""

    @abc.abstractmethod
    def describe_start(self, start: Pretrained | None) -> str:
        """Returns a line about the parameters that a new run starts from."""


def pace_of(
    config: ResolvedConfig | FinetuneConfig, num_steps: int, epoch_steps: int = 0, **rest: Any
) -> Pace:
    """Returns the pace that the settings ask for; by default evaluations and saves are after each epoch."""
    evaluate = config.eval.every_steps or epoch_steps
    return Pace(
        num_steps,
        config.report.every_steps,
        evaluate,
        config.checkpoint.every_steps or (epoch_steps and evaluate),
        keep=config.checkpoint.keep_every,
        steps_per_call=config.train.steps_per_call,
        profile=step_range(config.report.profile_steps),
        **rest,
    )
