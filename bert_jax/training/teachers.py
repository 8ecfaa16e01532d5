# SPDX-License-Identifier: Apache-2.0
"""Teachers: trained models whose outputs a student learns. They are computed on its mesh, batch by batch, in its row.

Sources: Hinton et al. 2015; Turc et al. 2019, who made the miniatures so; Sanh et al. 2019.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import Batch
from bert_jax.checkpoints.pretrained import Pretrained, read_pretrained
from bert_jax.checkpoints.warm_start import params_digest
from bert_jax.devices.job import this_job
from bert_jax.devices.sharding import check_divisible, row_sharding, tree_shardings
from bert_jax.errors import InputError, reading
from bert_jax.model.heads.base import Head
from bert_jax.model.heads.embedding import Embeddings
from bert_jax.model.heads.table import embedding_head
from bert_jax.model.objective import Params, forward, init_params
from bert_jax.settings.finetuning import ProbeConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import TeacherConfig
from bert_jax.settings.rules import from_dict
from bert_jax.storage.files import split_places
from bert_jax.storage.resolve import resolve
from bert_jax.text.tokenizer import Tokenizer


class Teaching(NamedTuple):
    """The student's settings, which a teacher must fit."""

    mesh: Mesh
    tokenizer: Tokenizer
    head: Head  # of the student
    model: ModelConfig  # of the student: whether it is causal, and what it is computed in
    length: int  # of rows
    # as the student's objective does: masks
    prepare: Callable[[Batch], Batch] = lambda batch: batch
    labels: tuple[str, ...] = ()
    num_outputs: int = 0  # of a student with a task
    vocab_size: int | None = None  # of a student of masked words: outputs beyond it are none
    probe: ProbeConfig = ProbeConfig()


Batches = Iterator[Batch]


def learnt_from(config: TeacherConfig, about: Teaching) -> Callable[[Batches], Batches]:
    """Returns a function that adds the mean of the teachers' outputs to batches; without a teacher it changes nothing.

    Raises: InputError if a teacher has other tokens, classes, head or probe, or does not divide over the mesh.
    """
    if not config.checkpoint:
        return lambda batches: batches
    return partial(_taught, _open(config, about), about)


def _taught(teachers: Sequence[Pretrained], about: Teaching, batches: Batches) -> Batches:
    mesh = about.mesh
    places = [_order(teacher, about) for teacher in teachers]

    def add(params: list, batch: Batch) -> Batch:
        batch = about.prepare(batch)
        outputs = [
            forward(teacher.config, own, batch, _head_of(teacher, about), None, about.num_outputs)[
                ..., order
            ]
            for teacher, own, order in zip(teachers, params, places)
        ]
        return batch._replace(teacher=about.head.mean_of(outputs))

    params = [teacher.params for teacher in teachers]
    shardings = tree_shardings(mesh, params)
    with jax.set_mesh(mesh):
        params = jax.jit(lambda given: given, out_shardings=shardings)(
            jax.tree.map(np.asarray, params)
        )
        run = jax.jit(
            add, in_shardings=(shardings, row_sharding(mesh)), out_shardings=row_sharding(mesh)
        )
    try:
        for batch in batches:
            # for each call: a generator that waits would leave the mesh set for everybody else
            with jax.set_mesh(mesh):
                taught = run(params, batch)
            yield taught
    finally:
        getattr(batches, "close", lambda: None)()


def _order(teacher: Pretrained, about: Teaching) -> np.ndarray | slice:
    """Returns the indices of a teacher's outputs, in the order of the student's classes."""
    if about.labels:
        return np.array([teacher.labels.index(label) for label in about.labels])
    return slice(about.vocab_size)


def _head_of(teacher: Pretrained, about: Teaching) -> Head:
    """Returns the head of a teacher: for vectors its own, which pools and projects as it was trained."""
    if teacher.embedding and isinstance(about.head, Embeddings):
        return embedding_head(teacher.embedding)
    return about.head


def _shapes(params: Params, head: Head) -> dict[str, Any]:
    """Returns the shapes of the parameters that a head adds to an encoder."""
    return jax.tree.map(
        np.shape, {part: params[part] for part in sorted(head.own_parts) if part in params}
    )


def _probe(config: ProbeConfig) -> str:
    """Returns the settings of a probe that its outputs depend on; "" without a probe."""
    names = (
        ("features", "kind")
        if config.kind == "linear"
        else ("features", "kind", "num_layers", "hidden_size")
    )
    return " ".join(f"{name}={getattr(config, name)}" for name in names) if config.features else ""


def _open(config: TeacherConfig, about: Teaching) -> list[Pretrained]:
    teachers = []
    for path in split_places(config.checkpoint):
        teacher = read_pretrained(resolve(path))
        own = from_dict(
            ProbeConfig, teacher.task_settings.get("probe", {}), f"teacher.checkpoint {path}: probe"
        )
        theirs = _probe(own)
        ours = _probe(about.probe)
        if teacher.task == about.head.name and theirs != ours:
            both = f"the probe {theirs or 'none'}, and the student {ours or 'none'}"
            raise InputError(f"teacher.checkpoint {path} has {both}; give both the same task.probe")
        there = {*teacher.params, *teacher.params["encoder"]}
        head = _head_of(teacher, about)
        fits = there.issuperset(head.parts_in(teacher.config)) and (
            about.vocab_size or teacher.task == about.head.name
        )
        if not about.head.can_learn or not fits:
            what = f"teaches {teacher.task}" if about.head.can_learn else "cannot be learnt from"
            raise InputError(
                f"teacher.checkpoint {path} {what}, and the student's task is {about.head.name}"
            )
        if teacher.tokenizer.fingerprint != about.tokenizer.fingerprint:
            raise InputError(
                f"teacher.checkpoint {path} has other tokens than the student; give one with the same ids"
            )
        if sorted(teacher.labels) != sorted(about.labels):
            theirs, ours = (
                ", ".join(labels)[:80] or "none" for labels in (teacher.labels, about.labels)
            )
            raise InputError(
                f"teacher.checkpoint {path} has the classes {theirs}, and the student has {ours}"
            )
        init = partial(init_params, teacher.config, head=head, num_outputs=about.num_outputs)
        if _shapes(teacher.params, head) != _shapes(jax.eval_shape(init, jax.random.key(0)), head):
            raise InputError(
                f"teacher.checkpoint {path} has another number of outputs than the student; give the same"
            )
        if (
            teacher.config.causal != about.model.causal
            or teacher.config.max_positions < about.length
        ):
            reads = f"{teacher.config.max_positions} positions and causal {teacher.config.causal}"
            raise InputError(
                f"teacher.checkpoint {path} has {reads}; rows have {about.length} tokens"
            )
        with reading(f"teacher.checkpoint {path}, on the student's mesh"):
            check_divisible(about.mesh, teacher.config)
        computed = teacher.config.computing_in(about.model.compute_dtype)
        teachers.append(dataclasses.replace(teacher, config=computed))
    if this_job().is_several:
        facts = [
            [params_digest(model.params), model.config, model.task_settings, model.labels]
            for model in teachers
        ]
        this_job().check_same({"teachers": [str(fact) for fact in facts]})
    return teachers
