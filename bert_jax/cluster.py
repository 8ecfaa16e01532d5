# SPDX-License-Identifier: Apache-2.0
"""Several processes that train as one: how they join, and what only the first of them does.

The only home of jax.distributed and multihost_utils. With a single process every function here does the obvious.
"""

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bert_jax.errors import InputError

# What schedulers tell the processes of a job: a variable, and from what on it means that there are several.
_JOB_SIZES = (
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_SIZE",
    "MEGASCALE_NUM_SLICES",
)
_HOST_LISTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")


def join(how: str = "auto", coordinator: str = "", num_processes: int = 0, process_id: int = -1) -> None:
    """Joins the processes of a job, before anything else of JAX is used; the same command runs on each of them.

    `how` is "off", "on" (JAX asks the scheduler or the TPU who the others are) or "auto": on if the scheduler speaks of
    several processes. With `coordinator` (HOST:PORT of the first process), `num_processes` and `process_id` nothing is
    asked.

    Raises: InputError if the three do not go together, or the others cannot be reached.
    """
    given = (bool(coordinator), num_processes > 0, process_id >= 0)
    if any(given) != all(given):
        raise InputError("--coordinator, --num_processes and --process_id go together; give all three or none")
    if not any(given) and (how == "off" or (how == "auto" and not is_job(os.environ))):
        return
    if any(given) and process_id >= num_processes:
        raise InputError(f"--process_id {process_id} is not below --num_processes {num_processes}; they count from 0")
    try:
        if any(given):
            jax.distributed.initialize(coordinator, num_processes, process_id)
        else:
            jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"the processes cannot join: {reason}; see docs/pods.md, or --distributed=off") from None


def is_job(environment: Mapping[str, str]) -> bool:
    """Returns whether a scheduler's variables speak of several processes."""
    sizes = (environment.get(name, "") for name in _JOB_SIZES)
    hosts = (environment.get(name, "") for name in _HOST_LISTS)
    return any(size.isdecimal() and int(size) > 1 for size in sizes) or any("," in names for names in hosts)


def is_several() -> bool:
    """Returns whether there are other processes."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Returns whether this process is the one that writes what is written once."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when every process has come here; `what` names the place."""
    if is_several():
        multihost_utils.sync_global_devices(what)


def first_says(value: int) -> int:
    """Returns the value that the first process has."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(value))) if is_several() else value


def first_does(what: str, action: Callable[[], None]) -> None:
    """Runs `action` on the first process, and returns on every process when it is done.

    `what` completes "the first process could not ...". Raises: InputError, on every process, if the action failed.
    """
    failure: InputError | OSError | None = None
    if is_first():
        try:
            action()
        except (InputError, OSError) as error:
            failure = error
    if first_says(int(failure is not None)):
        raise failure or InputError(f"the first process could not {what}; its own message says why")


def on_host(tree: Any) -> Any:
    """Returns the whole arrays of a tree as numpy arrays, on every process, wherever their parts lie."""
    if not is_several():
        return jax.device_get(tree)
    return jax.tree.map(lambda leaf: np.asarray(multihost_utils.process_allgather(leaf, tiled=True)), tree)


class Preemption:
    """Notes what asks the run to end: SIGTERM or SIGINT here or, of several processes, SIGTERM at any of them.

    A second SIGINT, Ctrl-C pressed again, interrupts at once. Several processes agree on the step to end at: JAX hands
    the notice on, so its handler of SIGTERM stays.
    """

    def __enter__(self) -> "Preemption":
        self._received = 0
        numbers = () if is_several() else (signal.SIGTERM, signal.SIGINT)
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def _note(self, number: int, _frame: Any) -> None:
        self._received = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def at(self, step: int) -> int:
        """Returns the signal to end for after `step` steps, or 0. Every process asks at every step."""
        if is_several() and multihost_utils.reached_preemption_sync_point(step):
            self._received = signal.SIGTERM
        return self._received

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
