# SPDX-License-Identifier: Apache-2.0
"""Whole runs, evaluations and predictors of one process share what they trace and compile, where their settings are the
same: that is most of what a run of twelve steps costs.

Equal settings give one objective, and one objective on one mesh gives one step, one evaluation and one compiled model.
A test of what a run compiles takes the `Program` of the package (`test_gates.py`), and so do tests of single steps.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

from bert_jax import finetuning
from bert_jax.inference import evaluate, predict
from bert_jax.model import replacing
from bert_jax.training import heldout, train
from bert_jax.training.program import Program


def shared_by(function: Callable, key_of: Callable) -> Callable:
    """Returns the function, which gives its earlier result for arguments with the same key."""
    made: dict[Any, Any] = {}

    @functools.wraps(function)
    def shared(*arguments: Any, **more: Any) -> Any:
        key = key_of(*arguments, **more)
        if key not in made:
            made[key] = function(*arguments, **more)
        return made[key]

    return shared


def shapes(tree: Any) -> tuple:
    """Returns what a compiled program depends on: structure, shapes, dtypes and shardings."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)) for leaf in leaves)


class SharedProgram(Program):
    training = shared_by(
        Program.training,
        lambda self, objective, optimizer, train, state, first_step=0: (
            *(self._mesh, objective, optimizer, train, first_step, shapes(state)),
        ),
    )
    evaluation = shared_by(Program.evaluation, lambda self, objective, params: (self._mesh, objective, shapes(params)))


class SharedJit:
    """JAX, whose `jit` of the same function is the earlier one."""

    jit = staticmethod(functools.cache(jax.jit))

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


def shared_state(init_state: Callable) -> Callable:
    """Returns the function; of a seed it gives the arrays that it has given before, each time in buffers of its own."""
    made: dict[Any, Any] = {}

    @functools.wraps(init_state)
    def shared(objective: Any, optimizer: Any, train: Any, state: Any, params: Any = None) -> Any:
        if params is not None:
            return init_state(objective, optimizer, train, state, params)
        key = objective, optimizer, train, shapes(state)
        if key not in made:
            made[key] = jax.device_get(init_state(objective, optimizer, train, state))
        put = lambda leaf, like: jax.device_put(leaf, like.sharding, may_alias=False)  # noqa: E731
        return jax.tree.map(put, made[key], state)

    return shared


def inference_key(model: Any, task: Any, mesh: Any, params: Any, pack: str = "auto", one_shape: bool = False) -> tuple:
    return model, task.head, task.num_outputs, mesh, shapes(params), pack, one_shape


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """In the block runs share their programs."""
    make_inference = shared_by(finetuning.make_inference, inference_key)
    with (
        mock.patch.object(replacing, "PretrainingObjective", functools.cache(replacing.PretrainingObjective)),
        mock.patch.object(replacing, "ReplacedTokens", functools.cache(replacing.ReplacedTokens)),
        mock.patch.object(evaluate, "PretrainingObjective", functools.cache(evaluate.PretrainingObjective)),
        mock.patch.object(evaluate, "_Scoring", functools.cache(evaluate._Scoring)),
        mock.patch.object(finetuning, "TaskObjective", functools.cache(finetuning.TaskObjective)),
        mock.patch.object(finetuning, "make_inference", make_inference),
        mock.patch.object(predict, "make_inference", make_inference),
        mock.patch.object(train, "Program", SharedProgram),
        mock.patch.object(train, "init_state", shared_state(train.init_state)),
        mock.patch.object(heldout, "jax", SharedJit()),
        mock.patch.object(heldout, "Program", SharedProgram),
        mock.patch.object(evaluate, "Program", SharedProgram),
    ):
        yield
