# SPDX-License-Identifier: Apache-2.0
"""Plans of fine-tuning: the step of a run, with the model and a batch of the data that its settings name."""

import dataclasses
from functools import partial

import jax

from bert_jax.batches.examples import train_batches
from bert_jax.batches.shapes import row_group
from bert_jax.devices.sharding import make_mesh
from bert_jax.finetuning import batching_of, fit_into_memory
from bert_jax.model.objective import TaskObjective
from bert_jax.plan.planner import (
    Plan,
    Work,
    check_no_teacher,
    memory_of_chip,
    plan,
    planned_devices,
)
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.pretraining import DataConfig, MeshConfig, PretrainConfig, ResolvedConfig
from bert_jax.tasks.prepare import open_task
from bert_jax.training.choices import choose_precision


def plan_task(config: FinetuneConfig, topology: str) -> Plan:
    """Returns the plan of the step that `finetune` would take on a topology, of its largest batches.

    Raises: InputError as `plan` and `open_task`, and if there is a teacher.
    """
    config.validate()
    check_no_teacher(config.teacher)
    devices, _ = planned_devices(topology, config.mesh.dcn)
    config = choose_precision(config, devices[0])
    mesh = make_mesh(config.mesh, devices)
    limit = memory_of_chip(topology)
    inputs = fit_into_memory(open_task(config).without_params(), mesh, limit)
    head = inputs.task.head
    model = inputs.model
    train = inputs.train
    group = row_group(mesh, train.accumulate)
    batching = batching_of(inputs, group, config.data.pack if head.can_be_packed else "off")
    if batching.shape is not None:
        largest = batching.shape._replace(num_rows=batching.shape.num_rows[-1:])
        batching = dataclasses.replace(batching, shape=largest)
    batching = dataclasses.replace(batching, lengths=batching.lengths[-1:])
    here = make_mesh(MeshConfig(), jax.devices()[:1])
    batch = next(train_batches(inputs.data.train.rows, head, 0, batching, here))
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    data = DataConfig(path="none", batch_size=batch.token_ids.shape[0])
    asked = PretrainConfig(
        model=model, data=data, optimizer=config.optimizer, train=train, mesh=config.mesh
    )
    objective = partial(TaskObjective, head=head, num_outputs=inputs.task.num_outputs)
    return plan(ResolvedConfig(asked), topology, Work(objective, batch))
