# SPDX-License-Identifier: Apache-2.0
"""The base class of tasks, which read examples, make rows of them, decode outputs into predictions and score them.

Each task is a class in its own file; `catalog.make_task` finds it by name. Examples and predictions have the task's own
types, which other modules pass on without looking inside.
"""

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from bert_jax.batch import Row
from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.storage.places import Place
from bert_jax.tasks.scores import Metrics
from bert_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # scores need no JAX
    from bert_jax.model.heads.base import Head

# the task's own types, which a subclass names once: Task[MyExample, MyPrediction]
Example: TypeAlias = Any
Prediction: TypeAlias = Any
Its = TypeVar("Its")
Said = TypeVar("Said")


# counts of what was cut
CUT = "truncated"
CUT_WORDS = "words truncated"
CUT_QUESTIONS = "questions truncated"


def single_row(
    example: int,
    token_ids: np.ndarray,
    label: Any = None,
    detail: Any = None,
    type_ids: np.ndarray | None = None,
) -> Row:
    """Returns a row of one sequence; its types are 0 unless they are given."""
    types = np.zeros(len(token_ids), np.uint8) if type_ids is None else type_ids
    return Row(
        example=example,
        token_ids=token_ids,
        type_ids=types,
        lengths=(len(token_ids),),
        label=label,
        detail=detail,
    )


def without_zeros(counts: Mapping[str, int]) -> dict[str, int]:
    """Returns the counts that are not 0."""
    return {reason: count for reason, count in counts.items() if count}


class Rows(NamedTuple):
    """The rows of a list of examples, in order, and counts of truncated and skipped examples."""

    rows: Sequence[Row]
    counts: dict[str, int]  # such as {"truncated": 12, "skipped: no token": 1}; zeros are left out

    def num_cut(self) -> int:
        """Returns the number of texts, words or questions that were cut."""
        return sum(self.counts.get(reason, 0) for reason in (CUT, CUT_WORDS, CUT_QUESTIONS))


def split_names(text: str) -> tuple[str, ...]:
    """Returns the names in a comma-separated setting."""
    return tuple(name for part in text.split(",") if (name := part.strip()))


def choose_metric(config: TaskConfig, metrics: Iterable[str]) -> str:
    """Returns the metric of the settings, or else the first. Raises: InputError if it is not one of `metrics`."""
    known = tuple(dict.fromkeys(metrics))
    if config.metric and config.metric not in known:
        raise InputError(
            f"task.metric {config.metric!r} is not one of {', '.join(known)}, those of {config.name}"
        )
    return config.metric or known[0]


SPLITS: Mapping[str, tuple[str, ...]] = {"train": ("train",), "eval": ("dev",), "test": ("test",)}


class Task(abc.ABC, Generic[Its, Said]):
    """A task: its head, its labels, and how its data become rows and outputs become predictions.

    A task of one's own is a subclass. It is made of settings, and of the labels of a model or none; `remade` makes one
    of others.
    """

    head: "Head"  # one of model.heads.table.HEADS, or one's own
    metric: str  # chooses the best checkpoint; larger is better
    # "train", "eval" and "test" -> the names that `read` knows. The first of "eval" gives the metrics their plain
    # names; a later one adds its own name to them ("accuracy_mismatched").
    splits: Mapping[str, tuple[str, ...]] = SPLITS

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()) -> None:
        self.config = config  # with `labels` it suffices to make the task again
        # of the classes, in the order of the logits; () for a regression and for spans
        self.labels = tuple(labels)

    @abc.abstractmethod
    def read(self, source: str, split: str) -> list[Its]:
        """Returns the examples of a split; [] if it is missing. Raises: InputError with file and line."""

    @abc.abstractmethod
    def parse(self, value: object, where: str) -> Its:
        """Returns the example, without label, of a user's input: a text, a pair, a dict of JSON."""

    @abc.abstractmethod
    def make_rows(
        self,
        examples: Sequence[Its],
        tokenizer: Tokenizer,
        training: bool,
    ) -> Rows:
        """Returns the rows of examples; those that have none are counted."""

    @abc.abstractmethod
    def decode(
        self,
        examples: Sequence[Its],
        rows: Sequence[Row],
        outputs: Sequence[np.ndarray],
    ) -> list[Said]:
        """Returns a prediction for each example, also for one without rows.

        For each row there are the model's float32 outputs without padding: [K] of a classifier, [M] of a choice,
        [L, K] of tokens, [L, 2] of spans.
        """

    @abc.abstractmethod
    def score(self, examples: Sequence[Its], predictions: Sequence[Said]) -> Metrics:
        """Returns the metrics of predictions for examples with labels."""

    def show(self, prediction: Said) -> dict[str, Any]:
        """Returns a prediction as JSON values; a named tuple is its fields."""
        return prediction._asdict()  # type: ignore[attr-defined]

    @abc.abstractmethod
    def write(
        self,
        directory: Place,
        split: str,
        examples: Sequence[Its],
        predictions: Sequence[Said],
    ) -> None:
        """Writes the predictions of a split in the official format."""

    def find_labels(self, examples: Sequence[Its]) -> tuple[str, ...]:
        """Returns the labels of training examples, in the order for a new classifier."""
        return self.labels

    def settle(self, examples: Sequence[Its]) -> TaskConfig:
        """Returns the settings for all other examples, given those of training."""
        return self.config

    def tune(self, examples: Sequence[Its], predictions: Sequence[Said]) -> TaskConfig:
        """Returns the settings for further predictions, such as a threshold, given some for examples with labels."""
        return self.config

    def remade(self, config: TaskConfig, labels: Sequence[str]) -> "Task":
        """Returns the task of other settings and labels, with a head like its own."""
        task = type(self)(config, labels)
        task.head = self.head.as_set(config)
        return task

    def as_saved(self) -> TaskConfig:
        """Returns the settings that a trained model is saved with."""
        return self.config

    @property
    def num_outputs(self) -> int:
        """K: the head's own number of outputs, or else the number of classes; 1 for a regression."""
        return self.head.num_outputs or len(self.labels) or 1
