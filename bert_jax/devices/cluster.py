# SPDX-License-Identifier: Apache-2.0
"""Training in several processes: how they join, and fail together. `job` is for what they agree on."""

import atexit
import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.devices.job import AGREE_SECONDS, Several, open_job, this_job
from bert_jax.devices.members import Members, leave
from bert_jax.devices.tpu_hosts import count_hosts
from bert_jax.errors import InputError

# Variables in which schedulers give the number of processes of a job.
_JOB_SIZES = (
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_SIZE",
    "MEGASCALE_NUM_SLICES",
)
_HOST_LISTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")


def join(
    how: str = "auto",
    coordinator: str = "",
    num_processes: int = 0,
    process_id: int = -1,
    join_seconds: int = 60,
    lost_seconds: int = 60,
    agree_seconds: int = int(AGREE_SECONDS),
) -> None:
    """Joins the processes of a job. Call it before any other use of JAX, in each process; all run the same command.

    `how` is "off", "on" (JAX finds the other processes through the scheduler or the TPU) or "auto": on if variables of
    a scheduler or the metadata of a TPU VM name several processes. If `coordinator` (HOST:PORT of the first process),
    `num_processes` and `process_id` are given, they are used instead. Joining fails after `join_seconds`. Afterwards
    the job ends if one process gives no sign of life for `lost_seconds`, or if the others wait `agree_seconds` for one
    that works on nothing.

    Raises: InputError if only some of the three are given, or if the other processes cannot be reached.
    """
    given = (bool(coordinator), num_processes > 0, process_id >= 0)
    if any(given) != all(given):
        raise InputError(
            "--coordinator, --num_processes and --process_id go together; give all three or none"
        )
    if not any(given) and (
        how == "off" or (how == "auto" and not is_job(os.environ) and count_hosts(os.environ) < 2)
    ):
        return
    if any(given) and process_id >= num_processes:
        raise InputError(
            f"--process_id {process_id} is not below --num_processes {num_processes}; they count from 0"
        )
    asked: dict[str, Any] = {
        "coordinator_address": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    options: dict[str, Any] = {
        "initialization_timeout": join_seconds,
        # `Members` notices a lost process first, and reports more. JAX's heartbeat is for a process that is frozen.
        "heartbeat_timeout_seconds": max(100, 10 * lost_seconds),
        "shutdown_timeout_seconds": 30,
    }
    try:
        with _failing_calmly():
            jax.distributed.initialize(**(asked if any(given) else {}), **options)
    # the last is of a metadata server that does not answer
    except (ValueError, RuntimeError, OSError) as error:
        _leave_at_exit(1)
        reason = " ".join(str(error).split())[:300]
        if "bad_cast" in reason:  # JAX lost the text of the coordination service's error
            where = f"at {coordinator} " if coordinator else ""
            others = f"of {num_processes} processes " if num_processes else ""
            reason = (
                f"not all {others}came together {where}within {join_seconds} s (--join_seconds)"
            )
        raise InputError(
            f"the processes cannot join: {reason}; see docs/launching.md, or --distributed=off"
        ) from None
    if job := open_job(lost_seconds, agree_seconds):
        _end_where_jax_aborts(job.members)


def _end_where_jax_aborts(members: Members) -> None:
    """Ends this process with a line if JAX's client is the first to learn that the coordination service is gone.

    This happens if this process was suspended until the others had ended. The client wants to call the function that
    `_failing_calmly` gave it, cannot convert the error for Python, and ends by std::terminate.
    """
    # another C++ library: JAX aborts, with a dump
    with contextlib.suppress(OSError, AttributeError):
        handler = ctypes.CFUNCTYPE(None)(members.leave_lost)
        ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(handler)
        _kept.append(handler)


_kept: list[object] = []  # C++ has no reference to it


@contextlib.contextmanager
def _failing_calmly() -> Iterator[None]:
    """Makes JAX's client raise an error if the processes cannot join, instead of aborting with a stack dump.

    jax.distributed has no argument for that, but its client has one. With versions of JAX without it, JAX aborts.
    """
    module: Any = None
    with contextlib.suppress(ImportError):
        from jax._src import distributed

        module = getattr(distributed, "_jax", None)
    make = getattr(module, "get_distributed_runtime_client", None)

    def make_calm(*arguments: object, **options: object) -> object:
        try:
            return make(*arguments, **options, missed_heartbeat_callback=lambda _: None)  # type: ignore[misc]
        except TypeError:
            return make(*arguments, **options)  # type: ignore[misc]

    if make is None:
        yield
        return
    module.get_distributed_runtime_client = make_calm
    try:
        yield
    finally:
        module.get_distributed_runtime_client = make


@contextlib.contextmanager
def one_fate() -> Iterator[None]:
    """Runs the block; an error in one process ends the block in all, and each reports which process failed.

    Raises: InputError with the message of another process that failed; LostProcessError if a collective failed because
    another process died.
    """
    job = this_job()
    if not isinstance(job, Several) or not job.ends_all:
        yield
        return
    members = job.members
    try:
        # starts the backend in all processes now; JAX does not wait for one that starts minutes later
        jax.devices()
        job.exchange("ready")
        _connect()
        yield
        # The first process holds the store: if it ended while others work, JAX would abort them.
        job.exchange("done")
        members.close()
    except BaseException as error:
        status = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "STATUS", 1)
        if isinstance(error, Exception) and not isinstance(error, (InputError, OSError)):
            cause = members.find_cause()  # collectives break off with errors of many types
            if cause:
                _leave_at_exit(cause.STATUS, members)
                # collectives of others may not break off
                members.tell_failure(str(cause), cause.STATUS)
                raise cause from None
        _leave_at_exit(status, members)
        members.tell_failure(" ".join(str(error).split()) or type(error).__name__, status)
        raise


def _connect() -> None:
    """Runs a small program on all devices: CPUs connect in their first one, for which they wait 30 s."""
    mesh = Mesh(jax.devices(), ("all",))
    where = NamedSharding(mesh, PartitionSpec("all"))
    ones = jax.make_array_from_callback(
        (jax.device_count(),), where, lambda _: np.ones(1, np.int32)
    )
    jax.block_until_ready(
        jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(ones)
    )


def _leave_at_exit(status: int, members: Members | None = None) -> None:
    """Skips JAX's shutdown at exit, which would wait for the other processes.

    The first process holds the key-value store, from which the others read the cause. So it exits last.
    """

    def end() -> None:
        with contextlib.suppress(Exception):  # of JAX's client, without a type
            if members is not None:
                members.outlast()
        leave(status)

    atexit.register(end)


def is_job(environment: Mapping[str, str]) -> bool:
    """Returns whether the variables of a scheduler name several processes."""
    sizes = (environment.get(name, "") for name in _JOB_SIZES)
    hosts = (environment.get(name, "") for name in _HOST_LISTS)
    return any(size.isdecimal() and int(size) > 1 for size in sizes) or any(
        "," in names for names in hosts
    )
