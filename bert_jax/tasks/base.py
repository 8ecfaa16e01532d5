# SPDX-License-Identifier: Apache-2.0
"""The type of a task: functions that read examples, make rows of them, decode outputs into predictions and score them.

Each task has a function in its own file that makes a `Task`; `catalog.make_task` finds it by name. Examples and
predictions have the task's own types, which other modules pass on without looking inside.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.storage.places import Place
from bert_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # scores need no JAX
    from bert_jax.model.heads.base import Head

Example: TypeAlias = Any  # the task's own type of examples
Prediction: TypeAlias = Any  # the task's own type of predictions


class Row(NamedTuple):
    """A row of model input made from an example: one sequence, or several packed one after the other."""

    example: int  # the index of its example; a long example may have several rows
    token_ids: np.ndarray  # [L] int32, no padding
    type_ids: np.ndarray  # [L] uint8
    lengths: tuple[int, ...]  # of its sequences, in order; they add up to L
    # None if unknown. A class or a number; [K] float, a probability for each class or label; the right choice, from 0;
    # [L] int, a class for each token or -1; the first and the last token of an answer.
    label: Any = None
    detail: Any = None  # further data for `Task.decode`; not an input of the model
    weight: float = 1.0  # of its label in the loss


def largest_type(rows: Sequence[Row]) -> int:
    """Returns the largest type id in the rows: 0 if all are single texts, 1 with pairs."""
    return max((int(row.type_ids.max(initial=0)) for row in rows), default=0)


CUT, CUT_WORDS, CUT_QUESTIONS = "truncated", "words truncated", "questions truncated"  # counts of what was cut


class Rows(NamedTuple):
    """The rows of a list of examples, in order, and counts of truncated and skipped examples."""

    rows: list[Row]
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
            f"task.metric {config.metric!r} is not one of {', '.join(known)}, those of {config.name}; use one of them"
        )
    return config.metric or known[0]


SPLITS: Mapping[str, tuple[str, ...]] = {"train": ("train",), "eval": ("dev",), "test": ("test",)}


@dataclass(frozen=True)
class Task:
    """A task: its head, its labels, and the functions that turn its data into rows and outputs into predictions.

    Splits: `splits` maps "train", "eval" and "test" to the names that `read` knows. The first of "eval" gives the
    metrics their plain names; a later one adds its own name to them ("accuracy_mismatched").
    """

    config: TaskConfig  # its settings; with `labels` they suffice to make the task again
    head: "Head"  # one of model.heads.table.HEADS, or one's own
    labels: tuple[str, ...]  # of the classes, in the order of the logits; () for a regression and for spans
    metric: str  # chooses the best checkpoint; larger is better

    # (source, split) -> examples. Raises: InputError with file and line. [] if the split is missing.
    read: Callable[[str, str], list[Example]]
    # A user's input to predict on (a text, a pair, a dict of JSON), and its location -> an example without label.
    parse: Callable[[object, str], Example]
    # Examples, tokenizer, "is this for training?" -> rows. Examples that have no row are counted.
    make_rows: Callable[[Sequence[Example], Tokenizer, bool], Rows]
    # Examples, their rows, and for each row the model's float32 outputs without padding -> a prediction per example,
    # also for one without rows. Outputs: [K] of a classifier, [M] of a choice, [L, K] of tokens, [L, 2] of spans.
    decode: Callable[[Sequence[Example], Sequence[Row], Sequence[np.ndarray]], list[Prediction]]
    # Examples with labels, and predictions -> metrics.
    score: Callable[[Sequence[Example], Sequence[Prediction]], dict[str, float]]
    # Prediction -> JSON values.
    show: Callable[[Prediction], dict[str, object]]
    # (directory, split, examples, predictions): writes them in the official format.
    write: Callable[[Place, str, Sequence[Example], Sequence[Prediction]], None]
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SPLITS)
    # Training examples -> their labels, in the order for a new classifier.
    find_labels: Callable[[Sequence[Example]], tuple[str, ...]] = lambda examples: ()
    # Training examples -> the settings for all others. None if the settings do not depend on them.
    settle: Callable[[Sequence[Example]], TaskConfig] | None = None
    # Examples with labels, and predictions -> the settings for further predictions, such as a threshold; at each
    # evaluation. None if the task has nothing to tune.
    tune: Callable[[Sequence[Example], Sequence[Prediction]], TaskConfig] | None = None

    @property
    def num_outputs(self) -> int:
        """K: the head's own number of outputs, or else the number of classes; 1 for a regression."""
        return self.head.num_outputs or len(self.labels) or 1
