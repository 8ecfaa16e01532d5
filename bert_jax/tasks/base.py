# SPDX-License-Identifier: Apache-2.0
"""What a task is: examples are read, become rows of a model's input, its outputs become predictions, these are scored.

A task is a value, made by a function of its own file; `catalog.make_task` finds it by name. Examples and predictions
are the task's own types: the rest of the project hands them on and never looks inside.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.settings.finetuning import ProbeConfig, TaskConfig
from bert_jax.text.tokenizer import Tokenizer


class Row(NamedTuple):
    """A row of a model's input that was made of an example: one sequence, or several one after the other."""

    example: int  # the place of its example in the list; a long example may have several rows
    token_ids: np.ndarray  # [L] int32, no padding
    type_ids: np.ndarray  # [L] uint8
    lengths: tuple[int, ...]  # of its sequences, in order; they add up to L
    label: Any = None  # what the model is to say, as in `Batch.labels` for one row; None where it is not known
    detail: Any = None  # what decoding needs to know of this row; the model does not see it


def largest_type(rows: Sequence[Row]) -> int:
    """Returns the largest type id of some rows; 0 if each is of a single text."""
    return max((int(row.type_ids.max(initial=0)) for row in rows), default=0)


class Rows(NamedTuple):
    """The rows of some examples, in the order of the examples, and what had to be done to make them."""

    rows: list[Row]
    counts: dict[str, int]  # such as {"truncated": 12, "skipped: no token": 1}; zeros are left out


@dataclass(frozen=True)
class Task:
    """A kind of examples, and all that is done with them outside of the model.

    Splits: `splits` maps "train", "eval" and "test" to the names that `read` knows. The first of "eval" gives the
    metrics their plain names; a later one adds its own name to them ("accuracy_mismatched").
    """

    config: TaskConfig  # what it was made of; enough to make it again, with `labels`
    head: str  # one of model.heads.TASK_PARTS
    labels: tuple[str, ...]  # of the classes, in the order of the logits; () for a regression and for spans
    num_outputs: int  # of the classifier: len(labels), 1 for a regression or a choice, 0 for spans
    metric: str  # the one by which the best checkpoint is chosen; larger is better
    splits: Mapping[str, tuple[str, ...]]

    # (source, split) -> examples. Raises: InputError with file and line. [] if the split is not there.
    read: Callable[[str, str], list[Any]]
    # A user's input to predict on (a text, a pair, a dict of JSON), and where it stands -> an example without label.
    parse: Callable[[Any, str], Any]
    # Examples, tokenizer, "is this for training?" -> rows. Examples that have no row are counted.
    make_rows: Callable[[Sequence[Any], Tokenizer, bool], Rows]
    # Examples, their rows, and for each row the model's float32 outputs without padding -> a prediction per example,
    # also for one without rows. Outputs: [K] of a classifier (K = num_outputs), [M] of a choice, [L, K] of tokens,
    # [L, 2] of spans.
    decode: Callable[[Sequence[Any], Sequence[Row], Sequence[np.ndarray]], list[Any]]
    # Examples with labels, and predictions -> metrics.
    score: Callable[[Sequence[Any], Sequence[Any]], dict[str, float]]
    # A prediction as what JSON has, for people and programs.
    show: Callable[[Any], dict[str, Any]]
    # (directory, split, examples, predictions): writes them in the official format.
    write: Callable[[Path, str, Sequence[Any], Sequence[Any]], None]
    # Training examples -> the labels there are, in the order for a new classifier.
    find_labels: Callable[[Sequence[Any]], tuple[str, ...]] = lambda examples: ()
    # Examples with labels, and predictions -> the settings to predict with from now on, such as a threshold; None
    # keeps them.
    tune: Callable[[Sequence[Any], Sequence[Any]], TaskConfig] | None = None

    @property
    def probe(self) -> ProbeConfig | None:
        """What learns in place of the encoder and its head; None if these do."""
        return self.config.probe if self.config.probe.features else None
