# SPDX-License-Identifier: Apache-2.0
"""Derivative rules of our own, in every place where JAX traces: where they are used, and where JAX's own are."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from bert_jax.errors import InputError

Function = TypeVar("Function", bound=Callable[..., Any])

_OWN: contextvars.ContextVar[bool] = contextvars.ContextVar("own derivatives", default=True)


@contextlib.contextmanager
def plain_derivatives() -> Iterator[None]:
    """Within it functions have JAX's own derivatives, of every order and in both modes, and cost more."""
    token = _OWN.set(False)
    try:
        yield
    finally:
        _OWN.reset(token)


def with_rule(
    forward: Callable[..., Any], backward: Callable[..., Any], static: int = 0
) -> Callable[[Function], Function]:
    """Returns a decorator that gives a function of arrays a rule for reverse mode, unless plain ones are asked for.

    `static` arguments come first. `forward` and `backward` are as `jax.custom_vjp` takes them; what `forward` saves
    begins with no scalar. Such a rule knows no forward mode.
    """

    def checked(*arguments: Any) -> Any:
        *_, saved, _ = arguments
        # Where a loop over layers is differentiated twice, JAX (0.10 to 0.12) may take the constants of the function
        # that it had moved out of the loop, scalars, for the first of what was saved.
        if any(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(saved)[:1]):
            raise InputError(
                "a gradient of a gradient in bfloat16 or in jax.shard_map needs JAX's own derivatives; take "
                "bert_jax.encode(..., own_derivatives=False), or the same of bert_jax.forward"
            )
        return backward(*arguments)

    def decorate(function: Function) -> Function:
        ruled = jax.custom_vjp(function, nondiff_argnums=tuple(range(static)))
        ruled.defvjp(forward, checked)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            if not _OWN.get():
                return function(*arguments)
            return ruled(*arguments[:static], *_alike(arguments[static:]))

        return call  # type: ignore[return-value]

    return decorate


def _alike(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arrays with one set of mesh axes over which they vary.

    In `jax.shard_map` a rule must return gradients that vary as its arguments do. Parameters, which are the same on
    all devices, and rows, which are not, would need sums over devices in between; so JAX makes these where it widens
    the arguments.
    """
    axes = set().union(*(_varies_over(leaf) for leaf in jax.tree.leaves(arrays)))

    def widen(leaf: Any) -> Any:
        missing = tuple(sorted(axes - _varies_over(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(widen, arrays) if axes else arrays


def _varies_over(array: Any) -> frozenset[str]:
    kind = jax.typeof(array)
    # `vma` in some versions of JAX
    return getattr(
        getattr(kind, "manual_axis_type", kind), "varying", getattr(kind, "vma", frozenset())
    )
