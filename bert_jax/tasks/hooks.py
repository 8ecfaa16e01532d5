# SPDX-License-Identifier: Apache-2.0
"""Mistakes in a task or a head of one's own: one line with the class, the hook, what it gave and what was needed."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_jax.batch import Row
from bert_jax.errors import InputError, one_line
from bert_jax.tasks.base import Rows, Task


def is_own(thing: object) -> bool:
    """Returns whether a task or a head is of a class of the user's own."""
    module = type(thing).__module__  # those of `own` are made of a function of the user's
    return not module.startswith("bert_jax.") or module.endswith(".own")


def mistake(thing: object, hook: str, gave: object, needed: str) -> InputError:
    """Returns the error for a hook that gave something else than was needed."""
    kind = thing if isinstance(thing, type) else type(thing)
    return InputError(f"{kind.__name__}.{hook} gave {gave}; needed: {needed}")


def check_declared(thing: Any, base: type, **declared: type) -> None:
    """Raises: InputError if the user's task or head is no instance of its base, or lacks what a class declares."""
    if not isinstance(thing, base):
        raise InputError(
            f"{thing!r:.80} is no {base.__name__} of bert_jax; give an instance of a subclass"
        )
    for name, kind in declared.items():
        value = getattr(thing, name, None)
        if not isinstance(value, kind):
            raise mistake(thing, name, repr(value), f"a {kind.__name__}")
    try:
        hash(thing)
    except TypeError as error:
        raise mistake(
            thing, "attributes", vars(thing), f"what can be hashed, such as tuples ({error})"
        ) from None


def check_kind(
    task: Task, hook: str, given: Any, kind: type | tuple[type, ...], needed: str
) -> None:
    """Raises: InputError if a hook of the user's own task did not give what it should."""
    if is_own(task) and not isinstance(given, kind):
        raise mistake(task, hook, f"{type(given).__name__} ({given!r:.60})", needed)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turns the error of a hook of the user's own into an `InputError` of one line, with its place, as its cause."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        steps = list(traceback.walk_tb(error.__traceback__))
        hook = next((step for step, _ in steps if _is_own_hook(step.f_locals.get("self"))), None)
        if hook is None:
            raise
        kind = type(hook.f_locals["self"])
        name = hook.f_code.co_name
        place = "in bert_jax"
        for step, line in steps:  # the last in the user's program
            if step.f_globals.get("__name__") == kind.__module__:
                place = f"{Path(step.f_code.co_filename).name}, line {line}"
        what = f"{type(error).__name__}: {one_line(error)[:300]} ({place})"
        if name == "logits" and "NoneType" in what:
            what += (
                '; encoded.pooled needs "pooler" in parts, encoded.layers needs all_layers = True'
            )
        raise InputError(f"{kind.__name__}.{name} fails with {what}") from error


def _is_own_hook(thing: object) -> bool:
    """Returns whether it is a task or a head of the user's own. Heads are known by name: scores need no JAX."""
    ours = {
        kind.__name__ for kind in type(thing).__mro__ if kind.__module__.startswith("bert_jax.")
    }
    return is_own(thing) and bool(ours & {"Task", "Head"})


@contextlib.contextmanager
def naming(thing: object, hook: str) -> Iterator[None]:
    """Puts class and hook before an `InputError` about what the hook gave."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{type(thing).__name__}.{hook}: {error}") from None


def check_rows_of(task: Task, num_examples: int, made: Any, training: bool) -> None:
    """Raises: InputError if `make_rows` of the user's own task did not give rows that can be laid into batches."""
    hook = "make_rows"
    check_kind(task, hook, made, Rows, "Rows(rows, counts)")
    for row in made.rows if is_own(task) else ():
        check_kind(task, hook, row, Row, "a list of Row")
        shapes = [
            getattr(part, "shape", type(part).__name__) for part in (row.token_ids, row.type_ids)
        ]
        if shapes != [(sum(row.lengths),)] * 2 or not row.lengths:
            gave = f"token_ids {shapes[0]}, type_ids {shapes[1]} and lengths {row.lengths}"
            raise mistake(task, hook, gave, "arrays [L] both, whose L is the sum of lengths")
        if not 0 <= row.example < num_examples:
            raise mistake(task, hook, f"example {row.example}", f"an index below {num_examples}")
        if training and row.label is None:
            raise mistake(task, hook, f"no label of example {row.example}", "one in training")
