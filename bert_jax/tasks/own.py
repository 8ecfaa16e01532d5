# SPDX-License-Identifier: Apache-2.0
"""Tasks of the three usual kinds, made from a function that reads your data: of texts, of words, of groups of texts."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.base import Task
from bert_jax.tasks.classify import ClassificationTask, RegressionTask
from bert_jax.tasks.embeddings.beir import TextsExample
from bert_jax.tasks.embeddings.task import EmbeddingTask
from bert_jax.tasks.labels import ClassifyExample
from bert_jax.tasks.ner import NerTask
from bert_jax.tasks.tagging import NerExample

# source, "train", "dev" or "test" -> the examples, each a tuple; [] if there are none
Read: TypeAlias = Callable[[str, str], Sequence[tuple[Any, ...]]]


def text_task(read: Read, labels: Sequence[str] = ()) -> type[Task]:
    """Returns a task with a class for each text, one of `labels`, or with a number if there are none.

    `read(source, split)` returns (text, label) or (text, second text, label) for each example; the label may be None.
    Rows, predictions, metrics and files are those of the tasks "classification" and "regression". A subclass has
    methods of its own, such as `score`.
    """

    def example(where: str, *values: Any) -> ClassifyExample:
        *texts, label = values
        if len(texts) not in (1, 2) or not _are_texts(texts):
            raise _unlike(where, values, "(text, label) or (text, second text, label)")
        if not labels and isinstance(label, str):
            raise _unlike(where, values, "a number as the label, or text_task(read, labels)")
        second = texts[1] if len(texts) == 2 else None
        return ClassifyExample(texts[0], second, label, where=where)

    return _task_class(ClassificationTask if labels else RegressionTask, read, example, labels)


def token_task(read: Read, labels: Sequence[str] = ()) -> type[Task]:
    """Returns a task with a tag for each word; `labels` are all tags, those of the training data if there are none.

    `read(source, split)` returns (words, tags) for each example, two lists of strings; None are unknown tags. The rest
    is as in the task "ner".
    """

    def example(where: str, *values: Any) -> NerExample:
        words, tags = values if len(values) == 2 else ("", None)
        is_list = isinstance(words, (list, tuple)) and _are_texts(words)
        are_tags = tags is None or (len(tags) == len(words) and _are_texts(tags))
        if not is_list or not are_tags:
            raise _unlike(where, values, "(words, tags), two lists of one length")
        return NerExample(words=words, tags=tags, where=where)

    return _task_class(NerTask, read, example, labels)


def batch_task(read: Read) -> type[Task]:
    """Returns a task with a vector for each text, whose loss compares the texts of a batch.

    `read(source, split)` returns (anchor, positive) or (anchor, positive, negative, ...) for each example. The rest is
    as in the task "embeddings".
    """

    def example(where: str, *values: Any) -> TextsExample:
        if len(values) < 2 or not _are_texts(values):
            raise _unlike(where, values, "(anchor, positive) or (anchor, positive, negative, ...)")
        return TextsExample(texts=values, where=where)

    return _task_class(EmbeddingTask, read, example)


def _task_class(
    kind: type[Task], read: Read, example: Callable[..., Any], labels: Sequence[str] = ()
) -> type[Task]:
    """Returns the class of a task of the kind that reads its examples by a user's function."""

    class OwnTask(kind):
        def __init__(self, config: TaskConfig, of_model: Sequence[str] = ()) -> None:
            super().__init__(config, tuple(of_model) or tuple(labels))

        def read(self, source: str, split: str) -> list[Any]:
            examples = []
            for number, values in enumerate(read(source, split), 1):
                where = f"{split} example {number}"
                # a text would be taken apart into its characters
                if not isinstance(values, (list, tuple)) or not values:
                    raise _unlike(where, values, "a tuple for each example")
                examples.append(example(where, *values))
            return examples

    return OwnTask


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _unlike(where: str, values: Any, needed: str) -> InputError:
    return InputError(f"{where}: read gave {values!r:.80}; needed: {needed}")
