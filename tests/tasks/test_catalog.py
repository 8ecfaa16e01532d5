# SPDX-License-Identifier: Apache-2.0
"""Every task is made by its name."""

import pytest

from bert_jax.errors import InputError
from bert_jax.model.heads.sequence import Sequences
from bert_jax.model.heads.table import HEADS
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.base import Task
from bert_jax.tasks.catalog import NAMES, Own, make_task
from bert_jax.tasks.classify import ClassificationTask


@pytest.mark.parametrize("name", NAMES)
def test_a_task_has_the_parts_that_training_needs(name):
    task = make_task(TaskConfig(name=name))
    assert task.config.name == name and (task.head.saved_as or task.head.name) in HEADS and task.metric
    assert set(task.splits) == {"train", "eval", "test"} and all(task.splits["eval"])
    assert not task.head.all_layers


def test_a_name_that_is_nearly_right_is_suggested():
    with pytest.raises(InputError, match=r"there is no task 'sst-2' \(did you mean 'sst2'\?\); tasks: cola,"):
        make_task(TaskConfig(name="sst-2"))
    with pytest.raises(InputError, match="classification"):
        make_task(TaskConfig(name="xyzzy"))


class Mine(Sequences):
    """A head of one's own."""

    name = "mine"


class Usurper(Sequences):
    """A head that differs from the one of its name."""

    parts = ("mine",)


def test_an_own_task_and_head_are_checked():
    config = TaskConfig(name="mine")
    usual = make_task(TaskConfig(name="sst2"))
    head = Mine()
    made = make_task(config, ("a", "b"), Own(ClassificationTask, head))
    assert made.head is head and made.labels == ("a", "b")
    for own, problem in ((Own(lambda config, labels: usual, Usurper()), "give it another"),):
        with pytest.raises(InputError, match=problem):
            make_task(config, (), own)


def test_what_an_own_task_lacks_is_named_before_training():
    class Silent(ClassificationTask):
        """A task without predictions."""

        decode = Task.decode

    with pytest.raises(InputError, match="the task Silent has no decode"):
        make_task(TaskConfig(name="mine"), (), Own(Silent))
