# SPDX-License-Identifier: Apache-2.0
"""GLUE's metrics of a file of predictions."""

from pathlib import Path
from typing import Any

from bert_jax.errors import InputError, reading
from bert_jax.tasks.glue.read import (
    TASKS,
    find_glue,
    official_classes,
    read_place,
    read_split,
    splits_of,
)
from bert_jax.tasks.labels import ClassifyExample, label_name, label_number
from bert_jax.tasks.readers import read_table
from bert_jax.tasks.records import id_of
from bert_jax.tasks.scores import Metrics
from bert_jax.tasks.texts import Classified, Scored, score_classes, score_numbers


def score_files(name: str, data: str, predictions: str) -> Metrics:
    """Returns GLUE's metrics of a file of predictions in the format of a submission.

    Args:
      name: the name of the task.
      data: a file with labels, or a directory with one for dev.
      predictions: a file of two columns, index and prediction: numbers or names of classes. The index is that of
        the data, or counts 0, 1, 2 .. in the order of the data.
    Raises: InputError, with file and line, if an example has no prediction, two, or one that is not a class.
    """
    glue = find_glue(name)
    splits = splits_of(name)
    if Path(data).is_dir():
        examples = read_split(name, data, (*splits["eval"], *splits["test"])[0])
    else:
        examples = read_place(name, data, ("mnli",) if data.endswith(".json") else (), True)
    predicted = _read_predictions(name, predictions)
    ids = [example.id for example in examples]
    if set(predicted) != set(ids) and set(predicted) == set(range(len(ids))):
        ids = list(range(len(ids)))
    seen: dict[int | str, str] = {}
    for index, example in zip(ids, examples):
        if index in seen:
            raise InputError(
                f"{seen[index]} and {example.where} have the same index {index}; give each its own"
            )
        seen[index] = example.where
    for index in (*seen, *predicted):
        if index not in predicted or index not in seen:
            lacks, has = (predictions, data) if index in seen else (data, predictions)
            raise InputError(
                f"{lacks} has no row of index {index}, which {has} has; give predictions of that file"
            )
    ordered = [predicted[index] for index in ids]
    if not glue.classes:
        return score_numbers(examples, ordered)
    return score_classes(glue.metrics, official_classes(glue.classes), examples, ordered)


def _read_predictions(name: str, predictions: str) -> dict[int | str, Any]:
    """Returns the prediction of each index in a file. Raises: InputError if one is missing, repeated or not a class."""
    classes = TASKS[name].classes
    known = official_classes(classes)
    predicted: dict[int | str, Any] = {}
    for position, record in enumerate(read_table(predictions).records):
        with reading(record.where):
            index = id_of(record["index"], position)
            if index in predicted:
                raise InputError(f"index {index} has a prediction already; keep one of them")
            label = (label_name if classes else label_number)(record["prediction"], record.where)
            if label is None:
                raise InputError("there is no prediction; write one")
            predicted[index] = Scored(label)  # type: ignore[arg-type]
            if classes:
                example = ClassifyExample("", label=label, where=record.where)
                predicted[index] = Classified(classes[known.of(example) or 0], {})
    return predicted
