# SPDX-License-Identifier: Apache-2.0
"""The nine tasks of GLUE and its diagnostic set, and the files of a submission.

A model with its own class names keeps its own order. Source: gluebenchmark.com/faq for the format of submissions.
"""

import abc
from collections.abc import Iterable, Sequence
from typing import Any

from bert_jax.errors import InputError
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks import texts
from bert_jax.tasks.base import Prediction, Task, choose_metric, split_names
from bert_jax.tasks.classify import ClassesTask, NumbersTask
from bert_jax.tasks.classify_read import parse_texts
from bert_jax.tasks.glue.read import find_glue, official_classes, read_split, splits_of
from bert_jax.tasks.labels import Classes, ClassifyExample

_SUBMISSIONS = {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm", "test_ax": "AX"}


def glue_task(config: TaskConfig, labels: Sequence[str] = ()) -> Task:
    """Returns the GLUE task named `config.name`; `labels` are the classes of a trained model, in its order.

    Raises: InputError if the name, the metric or the labels cannot be used.
    """
    return (
        GlueClasses(config, labels)
        if find_glue(config.name).classes
        else GlueNumbers(config, labels)
    )


class _Glue(Task[ClassifyExample, Any]):
    """One of the tasks; its name is in the settings."""

    head = SEQUENCES

    def __init__(
        self,
        config: TaskConfig,
        metrics: Iterable[str],
        labels: Sequence[str] = (),
    ) -> None:
        super().__init__(config, labels)
        self.glue = find_glue(config.name)
        self.metric = choose_metric(config, (self.glue.metrics[0], *metrics))
        self.splits = splits_of(config.name)

    def read(self, source, split):
        return read_split(self.config.name, source, split)

    def parse(self, value, where):
        return parse_texts(self.glue.texts, len(self.glue.texts[0]) == 2, value, where)

    @abc.abstractmethod
    def value_of(self, prediction: Prediction) -> str:
        """Returns what is written of a prediction."""

    def write(self, directory, split, examples, predictions):
        """Writes the file for the leaderboard. For splits other than test, the name of the split is appended."""
        suffix = "" if split.startswith("test") else f"-{split}"
        pairs = list(zip(examples, map(self.value_of, predictions)))
        if all(isinstance(example.id, int) for example in examples):  # those of TFDS are shuffled
            pairs.sort(key=lambda pair: pair[0].id)
        path = directory / f"{_SUBMISSIONS.get(split, self.glue.folder)}{suffix}.tsv"
        texts.write_predictions(path, pairs)


class GlueClasses(ClassesTask, _Glue):
    """A task with classes. A model may have them in another order, and under other names."""

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()) -> None:
        names = find_glue(config.name).classes
        super().__init__(
            config, texts.CLASS_METRICS, tuple(labels) or split_names(config.labels) or names
        )
        if config.metric == "f1" and len(names) != 2:
            raise InputError(
                f"task.metric f1 is of two classes, {config.name} has {len(names)}; use macro_f1"
            )
        self._order = _own_order(config.name, names, self.labels)
        self._official = official_classes(names)
        numbers = {
            spelled: self._order[number] for spelled, number in self._official.numbers.items()
        }
        for index, name in enumerate(self.labels):
            numbers.setdefault(name, index)
        self.classes = Classes(numbers)

    def score(self, examples, predictions):
        """Returns the metrics, computed with GLUE's class numbers, independent of the order of the model's classes."""
        metrics = (*self.glue.metrics, *({self.metric} - set(self.glue.metrics)))
        canonical = [
            prediction._replace(label=self.glue.classes[self._number(prediction)])
            for prediction in predictions
        ]
        return texts.score_classes(metrics, self._official, examples, canonical)

    def _number(self, prediction: texts.Classified) -> int:
        """Returns GLUE's class number of a prediction."""
        return self._order.index(list(prediction.probabilities).index(prediction.label))

    def value_of(self, prediction: texts.Classified) -> str:
        number = self._number(prediction)
        return self.glue.classes[number] if self.glue.names_in_files else str(number)


class GlueNumbers(NumbersTask, _Glue):
    """The task with numbers, STS-B."""

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()) -> None:
        super().__init__(config, texts.NUMBER_METRICS)

    def value_of(self, prediction: texts.Scored) -> str:
        return f"{min(5.0, max(0.0, prediction.value)):.3f}"


def _own_order(name: str, classes: Sequence[str], own: Sequence[str]) -> list[int]:
    """Returns the index of each GLUE class among the classes of a model.

    Names may differ in case, or be numbers, with or without the LABEL_ that transformers puts before them.
    """
    spelled = [
        label.lower().removeprefix("label_").replace(" ", "_").replace("-", "_") for label in own
    ]
    order = []
    for index, class_name in enumerate(classes):
        found = [at for at, label in enumerate(spelled) if label in (class_name, str(index))]
        order += found[:1]
    if len(own) != len(classes) or sorted(order) != list(range(len(classes))):
        raise InputError(
            f"the model's classes {', '.join(own)} are not those of {name}: {', '.join(classes)}; use a model of that "
            "task, or set task.labels to their order in the model"
        )
    return order
