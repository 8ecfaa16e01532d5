# SPDX-License-Identifier: Apache-2.0
"""The nine tasks of GLUE and its diagnostic set, and the files of a submission.

A model with its own class names keeps its own order. Source: gluebenchmark.com/faq for the format of submissions.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import numpy as np

from bert_jax.errors import InputError
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.storage.places import Place
from bert_jax.tasks import texts
from bert_jax.tasks.base import Task, choose_metric, split_names
from bert_jax.tasks.classify import parse_texts
from bert_jax.tasks.glue.read import TASKS, find_glue, official_classes, read_split, splits_of
from bert_jax.tasks.labels import Classes, ClassifyExample, number_of

_SUBMISSIONS = {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm", "test_ax": "AX"}


def glue_task(config: TaskConfig, labels: Sequence[str] = ()) -> Task:
    """Returns the GLUE task named `config.name`.

    Args:
      config: its settings.
      labels: the classes of a trained model, in its order; their names must be those of the task.
    Raises: InputError if the name, the metric or the labels cannot be used.
    """
    glue = find_glue(config.name)
    metrics = texts.CLASS_METRICS if glue.classes else texts.NUMBER_METRICS
    metric = choose_metric(config, (glue.metrics[0], *metrics))
    if config.metric == "f1" and len(glue.classes) != 2:
        raise InputError(f"task.metric f1 is of two classes, {config.name} has {len(glue.classes)}; use macro_f1")
    own = tuple(labels) or split_names(config.labels) or glue.classes
    order = _own_order(config.name, glue.classes, own)
    numbers = {spelled: order[number] for spelled, number in official_classes(glue.classes).numbers.items()}
    numbers |= {name: index for index, name in enumerate(own) if name not in numbers}
    reported = (*glue.metrics, *({metric} - set(glue.metrics)))
    task = Task(
        config=config,
        head=SEQUENCES,
        labels=own,
        metric=metric,
        splits=splits_of(config.name),
        read=partial(read_split, config.name),
        parse=partial(
            parse_texts,
            [(names[0], names[1] if len(names) == 2 else "") for names in glue.texts],
            len(glue.texts[0]) == 2,
        ),
        make_rows=partial(texts.make_class_rows, config, Classes(numbers)),
        decode=partial(texts.decode_classes, own),
        score=partial(_score, glue.classes, order, reported),
        show=lambda prediction: prediction._asdict(),
        write=partial(_write, config.name, order),
        find_labels=lambda examples: own,
    )
    if glue.classes:
        return task
    return dataclasses.replace(
        task,
        labels=(),
        make_rows=partial(texts.make_rows, config, number_of),
        decode=partial(texts.decode_numbers, ""),
        score=texts.score_numbers,
        find_labels=lambda examples: (),
    )


def _own_order(name: str, classes: Sequence[str], own: Sequence[str]) -> list[int]:
    """Returns the index of each GLUE class among the classes of a model.

    Names may differ in case, or be numbers, with or without the LABEL_ that transformers puts before them.
    """
    spelled = [label.lower().removeprefix("label_").replace(" ", "_").replace("-", "_") for label in own]
    order = [
        next((position for position, label in enumerate(spelled) if label in (class_name, str(index))), -1)
        for index, class_name in enumerate(classes)
    ]
    if len(own) != len(classes) or sorted(order) != list(range(len(classes))):
        raise InputError(
            f"the model's classes {', '.join(own)} are not those of {name}: {', '.join(classes)}; use a model of that "
            "task, or set task.labels to their order in the model"
        )
    return order


# Predictions


def _score(
    classes: Sequence[str],
    order: Sequence[int],
    metrics: Sequence[str],
    examples: Sequence[ClassifyExample],
    predictions: Sequence[texts.Classified],
) -> dict[str, float]:
    """Returns the metrics, computed with GLUE's class numbers, independent of the order of the model's classes."""
    canonical = [prediction._replace(label=classes[_canonical(order, prediction)]) for prediction in predictions]
    return texts.score_classes(metrics, official_classes(classes), examples, canonical)


def _canonical(order: Sequence[int], prediction: texts.Classified) -> int:
    """Returns GLUE's class number of a prediction."""
    return order.index(list(prediction.probabilities).index(prediction.label))


def _write(
    name: str,
    order: Sequence[int],
    directory: Place,
    split: str,
    examples: Sequence[ClassifyExample],
    predictions: Sequence[texts.Classified | texts.Scored],
) -> None:
    """Writes the file for the leaderboard. For splits other than test, the name of the split is appended."""
    values: list[str] = []
    for prediction in predictions:
        if isinstance(prediction, texts.Scored):
            values.append(f"{min(5.0, max(0.0, prediction.value)):.3f}")
        else:
            index = _canonical(order, prediction)
            values.append(TASKS[name].classes[index] if TASKS[name].names_in_files else str(index))
    stem = _SUBMISSIONS.get(split, TASKS[name].folder) + ("" if split.startswith("test") else f"-{split}")
    ids = [example.id for example in examples]
    if all(isinstance(id_, int) for id_ in ids):  # those of TFDS are shuffled
        by_id = np.argsort(np.array(ids, np.int64), kind="stable")
        ids, values = [ids[position] for position in by_id], [values[position] for position in by_id]
    texts.write_predictions(directory / f"{stem}.tsv", ids, values)
