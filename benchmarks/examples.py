# SPDX-License-Identifier: Apache-2.0
"""Finds the examples of a development set that a fine-tuned model got right, from its predictions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.classify import id_of
from bert_jax.tasks.glue.tasks import TASKS, glue_task
from bert_jax.tasks.readers import read_table
from bert_jax.tasks.texts import ClassifyExample, class_of


def right_answers(workdir: Path, run: Mapping[str, Any]) -> str:
    """Returns a digit for each example of the first development set, in its order: 1 for right, 0 for wrong.

    `run` are the settings in the work directory's config.json. "" where there is nothing to compare: the task is not
    one of GLUE's with classes, or its data or the predictions are not there any more.

    Raises: InputError if the predictions are not those of the data.
    """
    name, source = run["task"]["name"], run["data"].get("source") or run["data"].get("path", "")
    classes = TASKS[name].classes if name in TASKS else ()
    if not classes or not Path(source).exists():
        return ""
    task = glue_task(TaskConfig(name=name))
    split = task.splits["eval"][0]
    path = workdir / "predictions" / f"{TASKS[name].folder}-{split}.tsv"
    if not path.is_file():
        return ""
    numbers = {spelled: index for index, each in enumerate(classes) for spelled in (each, str(index))}

    def number(label: Any, where: str) -> int | None:
        return class_of(numbers, ClassifyExample("", None, None if label is None else str(label), 0, where))

    said = {
        id_of(record.get("index"), place): number(record.get("prediction"), record.where)
        for place, record in enumerate(read_table(str(path)).records)
    }
    digits = []
    for example in task.read(source, split):
        if example.id not in said:
            raise InputError(f"{path} has no prediction for index {example.id} ({example.where}); fine-tune again")
        digits.append("1" if said[example.id] == number(example.label, example.where) else "0")
    return "".join(digits)
