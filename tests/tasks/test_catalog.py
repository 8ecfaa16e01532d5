# SPDX-License-Identifier: Apache-2.0
"""Every task is made by its name."""

import pytest

from bert_jax.errors import InputError
from bert_jax.model.heads.table import HEADS
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.catalog import NAMES, make_task


@pytest.mark.parametrize("name", NAMES)
def test_a_task_has_the_parts_that_training_needs(name):
    task = make_task(TaskConfig(name=name))
    assert task.config.name == name and task.head in HEADS.values() and task.metric
    assert set(task.splits) == {"train", "eval", "test"} and all(task.splits["eval"])
    assert not task.head.all_layers


def test_a_name_that_is_nearly_right_is_suggested():
    with pytest.raises(InputError, match=r"there is no task 'sst-2' \(did you mean 'sst2'\?\); tasks: cola,"):
        make_task(TaskConfig(name="sst-2"))
    with pytest.raises(InputError, match="your own tables: classification or regression"):
        make_task(TaskConfig(name="xyzzy"))
