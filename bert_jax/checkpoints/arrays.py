# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays on disk, each an Orbax directory: written, described, compared and read. See `states` for a run's."""

import contextlib
import functools
import logging
import math
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax

from bert_jax.batch import PyTree
from bert_jax.devices.job import this_job
from bert_jax.errors import InputError, one_line
from bert_jax.storage.answers import explain
from bert_jax.storage.places import Place, RemotePath, check_no_pattern

ArrayTable: TypeAlias = dict[str, list]  # {path: [dtype, shape]}
_QUIET_LOOKS = 10  # 20 a second


def state_bytes(tree: PyTree) -> int:
    """Returns the bytes of the arrays of a tree; sharded or replicated arrays count once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def describe(tree: PyTree) -> ArrayTable:
    """Returns {path: [dtype, shape]} of every array of a tree."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): [str(leaf.dtype), list(leaf.shape)]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def check_arrays(where: Place | str, found: ArrayTable, expected: ArrayTable) -> None:
    """Raises: InputError, naming the first difference, if two descriptions differ. Orbax would cast or drop arrays."""
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            both = f"{found.get(name, 'missing')} there and {expected.get(name, 'unknown')} here"
            raise InputError(
                f"{where} does not fit this model: {name} is {both}; use its own configuration"
            )


def _checkpointer(alone: bool) -> Any:
    """Returns Orbax's checkpointer, to be closed. With `alone` it waits for no other process."""
    # here: most models that are loaded are in other formats, and it takes 0.15 s
    import orbax.checkpoint as ocp

    options = ocp.options.MultiprocessingOptions()
    if alone:
        index = this_job().index
        options = ocp.options.MultiprocessingOptions(
            primary_host=index,
            active_processes={index} if this_job().is_several else None,
            # two processes that read alone are two barriers of one
            barrier_sync_key_prefix=f"alone_{index}",
        )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return contextlib.closing(ocp.Checkpointer(handler, multiprocessing_options=options))


@contextlib.contextmanager
def _same_log() -> Iterator[None]:
    """Takes back the handler that absl, with which Orbax logs, gives the root logger of a process that has none."""
    before = list(logging.root.handlers)
    try:
        yield
    finally:
        for handler in logging.root.handlers[:]:
            if handler not in before:
                logging.root.removeHandler(handler)


@_same_log()
def save_tree(path: Path, tree: PyTree) -> None:
    """Writes a tree of arrays as a new Orbax directory; with several processes only the first calls this."""
    check_no_pattern(path)
    with _quiet(), _checkpointer(alone=True) as checkpointer:
        try:
            checkpointer.save(str(path.absolute()), tree)
        # TensorStore raises ValueError, also for a full disk
        except (OSError, ValueError) as error:
            _remove_for_good(path)
            raise cannot_write_checkpoint(path, error) from error
    # Orbax may not find again what it wrote, as below a path that it takes for a pattern.
    check_readable(path, describe(tree))


def _remove_for_good(path: Path) -> None:
    """Removes what a failed write has left at `path`, and beside it with Orbax's ending for what is unfinished.

    TensorStore goes on writing the other arrays in threads that cannot be waited for, and makes its directories again
    when they have been removed. So they must have stayed away for half a second.
    """
    both = path, path.with_name(f"{path.name}.orbax-checkpoint-tmp")
    quiet = 0
    for _ in range(60 * _QUIET_LOOKS):
        quiet = 0 if any(map(os.path.exists, both)) else quiet + 1
        if quiet == _QUIET_LOOKS:
            return
        for each in both:
            shutil.rmtree(each, ignore_errors=True)
        time.sleep(0.05)


@_same_log()
def restore_tree(path: Place, abstract_tree: PyTree, alone: bool = False) -> PyTree:
    """Returns the arrays at `path` with the shardings of `abstract_tree`, which may be a part of the saved tree.

    The caller must have checked shapes and dtypes. Without `alone` all processes call this, and Orbax has each wait
    for the others: a process that cannot read leaves them with an error about a file that is whole. So what one process
    may lack, such as another run's model, is read alone, and all then agree on what they have read.
    """
    import orbax.checkpoint as ocp

    arguments = ocp.args.PyTreeRestore(
        item=abstract_tree,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract_tree),
        partial_restore=True,
    )
    with _checkpointer(alone) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return checkpointer.restore(str(path.absolute()), args=arguments)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - Orbax and TensorStore raise errors of many types
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise InputError(
                f"{path} cannot be restored ({reason}); copy it again, or take an older one"
            ) from None


def check_readable(path: Place, arrays: ArrayTable) -> None:
    """Reads the smallest of the arrays that were written. Raises: InputError if it cannot be found again."""
    # the smallest: whether arrays are found again does not depend on their size
    name = min(arrays, key=lambda name: math.prod(arrays[name][1]))
    dtype, shape = arrays[name]
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    tree: PyTree = jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)
    for key in reversed(name.split("/")):
        tree = {key: tree}
    restore_tree(path, tree, alone=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the tracebacks that threads of Orbax and TensorStore print for an error that is raised as well."""
    logger = logging.getLogger("absl")
    level = logger.level
    hook = sys.unraisablehook
    logger.setLevel(logging.CRITICAL)
    _ignore_closed_loops()
    try:
        yield
    finally:
        logger.setLevel(level)
        sys.unraisablehook = hook


def _ignore_closed_loops() -> None:
    hook = sys.unraisablehook

    # the same error, from other threads
    def no_closed_loops(unraisable: "sys.UnraisableHookArgs") -> None:
        if not isinstance(unraisable.exc_value, RuntimeError):
            hook(unraisable)

    sys.unraisablehook = no_closed_loops


@functools.cache
def silence_background() -> None:
    """Silences, from now on, what `_quiet` does: Orbax writes checkpoints in threads that outlive the call."""
    _ignore_closed_loops()
    logging.getLogger("absl").addFilter(
        lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname
    )


def cannot_write_checkpoint(directory: Place, error: Exception) -> InputError:
    """Returns the error to raise after `error` has interrupted the writing of a checkpoint."""
    if isinstance(error, InputError):
        return error
    if isinstance(directory, RemotePath):
        return InputError(
            f"{explain(str(directory), 'write', error)}; what was saved before is untouched"
        )
    # TensorStore goes on for many lines, and has the system's reason at their end.
    of_system = re.search(r"(?:OS error |os_error_code=')(\d+)", str(error))
    full = isinstance(error, ValueError) and "RESOURCE_EXHAUSTED" in str(error)
    known = (
        "no space left"
        if full
        else getattr(error, "strerror", None) or (of_system and os.strerror(int(of_system[1])))
    )
    reason = known or one_line(error)[:300]
    return InputError(
        f"cannot write a checkpoint to {directory}: {reason}; what was saved before is untouched"
    )
