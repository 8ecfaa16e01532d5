# SPDX-License-Identifier: Apache-2.0
"""No test traces and compiles a program that another one has: `jax.jit` of equal functions gives one compiled function.

Two functions are equal if their code, and by value all that they have closed over, are. What has closed over something
of which that cannot be said, or was compiled while the package's own code was patched, is compiled by itself. A test
that counts compilations asks for the fixture `own_programs`.
"""

import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec, Sharding

_MOST = 64  # compiled functions, each with a few programs; those that were used last are kept
_LARGEST = 1 << 16  # bytes of an array of which all are compared
_COMPUTING = ("jax.", "jaxlib.", "bert_jax.model.", "bert_jax.devices.sharding.", "bert_jax.training.accumulate.")
_COMPUTING += ("bert_jax.training.optim.", "bert_jax.training.step.", "bert_jax.training.whole_batch.")
_PLAIN = (type(None), bool, int, str, bytes, complex, type, np.dtype, types.CodeType, types.ModuleType)
_COMPARABLE = (Mesh, PartitionSpec, Sharding, jax.ShapeDtypeStruct)


class _UnknownError(Exception):
    """Nobody can say whether two of these are equal."""


class _Same:
    """An object that equals itself alone. It lives as long as this does, so no other has its id."""

    def __init__(self, content: object) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.content is other.content

    def __hash__(self) -> int:
        return id(self.content)


def _key(value: Any, around: tuple[int, ...] = ()) -> Hashable:
    """Returns what equals that of another value exactly if the two are equal, types included.

    Raises: _UnknownError
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, float):
        return float, repr(value)
    if isinstance(value, _COMPARABLE):
        return type(value), value
    if id(value) in around:
        raise _UnknownError
    inner = functools.partial(_key, around=(*around, id(value)))
    if isinstance(value, types.FunctionType):
        try:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError as error:  # one that is still empty
            raise _UnknownError from error
        if not value.__module__.startswith("bert_jax.") and any(isinstance(cell, dict | list) for cell in cells):
            raise _UnknownError  # where a test's function notes something
        parts = (value.__code__, *cells, value.__defaults__, value.__kwdefaults__)
        return _Same(value.__globals__), *map(inner, parts)
    if isinstance(value, types.MethodType):
        return types.MethodType, inner(value.__func__), inner(value.__self__)
    if isinstance(value, functools.partial):
        return functools.partial, inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, tuple | list):
        return type(value), *map(inner, value)
    if isinstance(value, dict):
        return dict, *((inner(name), inner(each)) for name, each in value.items())
    if isinstance(value, np.ndarray | np.generic) and value.nbytes <= _LARGEST and value.dtype != object:
        return type(value), value.dtype, value.shape, value.tobytes()
    if isinstance(value, jax.core.Tracer):  # which looks like an array
        raise _UnknownError
    if isinstance(value, jax.Array | jax.stages.Wrapped | jax.custom_vjp | jax.custom_jvp | types.BuiltinFunctionType):
        return _Same(value)
    if (dataclasses.is_dataclass(value) or type(value).__module__.startswith("bert_jax.")) and hasattr(
        value, "__dict__"
    ):
        return type(value), inner(vars(value))
    raise _UnknownError


class SharedPrograms:
    """Stands in for `jax.jit`."""

    def __init__(self) -> None:
        self.own = False  # whether every function is compiled by itself
        self.patches: pytest.MonkeyPatch | None = None  # of the test that runs
        self._jit = jax.jit
        self._kept: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()

    def __call__(self, *function: Callable, **options: Any) -> Any:
        try:
            if self.own or len(function) != 1 or self._is_patched():
                raise _UnknownError
            key = _key(function[0]), _key(options)
        except _UnknownError:
            return self._jit(*function, **options)
        if key not in self._kept:
            self._kept[key] = self._jit(*function, **options)
            if len(self._kept) > _MOST:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _is_patched(self) -> bool:
        """Returns whether a test has changed something that a compiled function may have in it."""
        targets = [target for target, _, _ in self.patches._setattr] if self.patches else []
        names = [target.__name__ if isinstance(target, types.ModuleType) else _module(target) for target in targets]
        return any(f"{name}.".startswith(_COMPUTING) for name in names)


def _module(target: object) -> str:
    return (target if isinstance(target, type) else type(target)).__module__
