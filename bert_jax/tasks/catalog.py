# SPDX-License-Identifier: Apache-2.0
"""Every task by its name."""

from collections.abc import Sequence

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.settings.rules import suggest
from bert_jax.tasks.base import Task
from bert_jax.tasks.choice import choice_task
from bert_jax.tasks.classify import classification_task, regression_task
from bert_jax.tasks.glue.tasks import TASKS as GLUE
from bert_jax.tasks.glue.tasks import glue_task
from bert_jax.tasks.ner import ner_task
from bert_jax.tasks.squad.task import squad_task

NAMES = (*GLUE, "classification", "regression", "squad1", "squad2", "choice", "ner")


def make_task(config: TaskConfig, labels: Sequence[str] = ()) -> Task:
    """Returns the task of that name; `labels` are the classes of a model, where they are known.

    Raises: InputError if there is no such task, with the names there are.
    """
    labels = tuple(labels)
    if config.name in GLUE:
        return glue_task(config, labels)
    if config.name in ("squad1", "squad2"):
        return squad_task(config)
    if config.name == "regression":
        return regression_task(config)
    if config.name not in NAMES:
        raise InputError(
            f"there is no task {config.name!r}{suggest(config.name, NAMES)}; tasks: {', '.join(NAMES)} "
            "(your own tables: classification or regression)"
        )
    return {"classification": classification_task, "choice": choice_task, "ner": ner_task}[config.name](config, labels)
