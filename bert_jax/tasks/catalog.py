# SPDX-License-Identifier: Apache-2.0
"""Every task by its name."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from bert_jax.errors import InputError, one_line
from bert_jax.model.heads.base import Head
from bert_jax.model.heads.probe import probed
from bert_jax.model.heads.table import HEADS
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.settings.rules import suggest
from bert_jax.tasks.base import Task
from bert_jax.tasks.choice import ChoiceTask
from bert_jax.tasks.classify import ClassificationTask, RegressionTask
from bert_jax.tasks.embeddings.task import EmbeddingTask
from bert_jax.tasks.glue.read import TASKS as GLUE
from bert_jax.tasks.glue.tasks import glue_task
from bert_jax.tasks.hooks import check_declared
from bert_jax.tasks.multilabel import MultilabelTask
from bert_jax.tasks.ner import NerTask
from bert_jax.tasks.reranking import RerankingTask
from bert_jax.tasks.squad.task import SquadTask

# settings, labels of a model or () -> its task
MakeTask: TypeAlias = Callable[[TaskConfig, tuple[str, ...]], Task]

_TASKS: dict[str, MakeTask] = {
    **dict.fromkeys(GLUE, glue_task),
    "classification": ClassificationTask,
    "regression": RegressionTask,
    "multilabel": MultilabelTask,
    "squad1": SquadTask,
    "squad2": SquadTask,
    "choice": ChoiceTask,
    "ner": NerTask,
    "embeddings": EmbeddingTask,
    "reranking": RerankingTask,
}
NAMES = tuple(_TASKS)


class Own(NamedTuple):
    """A user's own task and head, as a recipe defines them; None takes those of bert_jax."""

    task: MakeTask | None = None
    head: Head | None = None


USUAL = Own()


def make_task(config: TaskConfig, labels: Sequence[str] = (), own: Own = USUAL) -> Task:
    """Returns the task of that name, or the user's own; `labels` are the classes of a model, if they are known.

    Raises: InputError if there is no such task (it lists the names), or no probe for it, or if the user's task or head
    is not a `Task` or `Head`.
    """
    if own.task is not None and not callable(own.task):
        raise InputError(
            f"task is a {type(own.task).__name__}; give its class, which is made of settings"
        )
    if missing := sorted(getattr(own.task, "__abstractmethods__", ())):
        raise InputError(
            f"the task {getattr(own.task, '__name__', '')} has no {', '.join(missing)}; write it"
        )
    if own.task is None and config.name not in NAMES:
        raise InputError(
            f"there is no task {config.name!r}{suggest(config.name, NAMES)}; tasks: {', '.join(NAMES)}"
        )
    try:
        task = (own.task or _TASKS[config.name])(config, tuple(labels))
    except TypeError as error:
        if own.task is None:
            raise
        raise InputError(
            f"{getattr(own.task, '__name__', 'task')}(config, labels) makes no task: {one_line(error)}"
        ) from error
    head: Any = own.head if own.head is not None else getattr(task, "head", None)
    check_declared(task, Task, metric=str)
    check_declared(head, Head, name=str, parts=tuple)
    if head.name in HEADS and head != HEADS[head.name]:
        raise InputError(
            f"an own head has the name {head.name}, which is one of bert_jax's; give it another"
        )
    task.head = probed(head, config.probe) if config.probe.features else head.as_set(config)
    return task
