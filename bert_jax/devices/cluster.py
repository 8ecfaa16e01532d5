# SPDX-License-Identifier: Apache-2.0
"""Training in several processes: how they join, agree and fail together, and work for the first process only.

Only this module uses jax.distributed and multihost_utils. All functions also work in a single process. Processes agree
by the coordination service of JAX, not by collectives of devices, which on CPUs wait for half a minute and then fail.
"""

import atexit
import contextlib
import ctypes
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # its client, which has no public name: Orbax takes it from here too
from jax.experimental import multihost_utils

from bert_jax.batch import PyTree
from bert_jax.devices.members import Members, leave
from bert_jax.devices.tpu_hosts import is_pod
from bert_jax.errors import InputError, one_line
from bert_jax.settings.rules import changed_keys, value_at

# Variables in which schedulers give the number of processes of a job.
_JOB_SIZES = (
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_SIZE",
    "MEGASCALE_NUM_SLICES",
)
_HOST_LISTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")


_members: Members | None = None  # set once this process has joined others


def join(
    how: str = "auto",
    coordinator: str = "",
    num_processes: int = 0,
    process_id: int = -1,
    join_seconds: int = 60,
    lost_seconds: int = 60,
) -> None:
    """Joins the processes of a job. Call it before any other use of JAX, in each process; all run the same command.

    `how` is "off", "on" (JAX finds the other processes through the scheduler or the TPU) or "auto": on if variables of
    a scheduler or the metadata of a TPU VM name several processes. If `coordinator` (HOST:PORT of the first process),
    `num_processes` and `process_id` are given, they are used instead. Joining fails after `join_seconds`. Afterwards
    the job ends if one process gives no sign of life for `lost_seconds`.

    Raises: InputError if only some of the three are given, or if the other processes cannot be reached.
    """
    given = (bool(coordinator), num_processes > 0, process_id >= 0)
    if any(given) != all(given):
        raise InputError("--coordinator, --num_processes and --process_id go together; give all three or none")
    for name, seconds in (("join_seconds", join_seconds), ("lost_seconds", lost_seconds)):
        if seconds < 1:
            raise InputError(f"--{name} {seconds} is below 1; use 1 or more")
    if not any(given) and (how == "off" or (how == "auto" and not is_job(os.environ) and not is_pod())):
        return
    if any(given) and process_id >= num_processes:
        raise InputError(f"--process_id {process_id} is not below --num_processes {num_processes}; they count from 0")
    asked: dict[str, Any] = {
        "coordinator_address": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    limits: dict[str, Any] = {
        "initialization_timeout": join_seconds,
        # `Members` notices a lost process first, and reports more. JAX's heartbeat is for a process that is frozen.
        "heartbeat_timeout_seconds": max(100, 10 * lost_seconds),
        "shutdown_timeout_seconds": 30,
    }
    try:
        with _failing_calmly():
            jax.distributed.initialize(**(asked if any(given) else {}), **limits)
    except (ValueError, RuntimeError, OSError) as error:  # the last is of a metadata server that does not answer
        _leave_at_exit(1)
        reason = " ".join(str(error).split())[:300]
        if "bad_cast" in reason:  # JAX lost the text of the coordination service's error
            where = f"at {coordinator} " if coordinator else ""
            others = f"of {num_processes} processes " if num_processes else ""
            reason = f"not all {others}came together {where}within {join_seconds} s (--join_seconds)"
        raise InputError(f"the processes cannot join: {reason}; see docs/launching.md, or --distributed=off") from None
    state = distributed.global_state
    if state.num_processes > 1:
        assert state.client is not None  # initialize() has made it
        global _members
        _members = Members(state.client, state.process_id, state.num_processes, lost_seconds)
        _end_where_jax_aborts(_members)


def _end_where_jax_aborts(members: Members) -> None:
    """Ends this process with a line where JAX's client learns first that the coordination service is gone.

    So it is when this process was suspended until the others had ended. The client wants to call the function that
    `_failing_calmly` gave it, cannot convert the error for Python, and ends by std::terminate.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C++ library: JAX aborts, with a dump
        handler = ctypes.CFUNCTYPE(None)(members.leave_lost)
        ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(handler)
        _kept.append(handler)


_kept: list[object] = []  # C++ has no reference to it


@contextlib.contextmanager
def _failing_calmly() -> Iterator[None]:
    """Makes JAX's client raise an error if the processes cannot join, instead of aborting with a stack dump.

    jax.distributed has no argument for that, but its client has one. With versions of JAX without it, JAX aborts.
    """
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
    module.get_distributed_runtime_client = make_calm  # type: ignore[union-attr]
    try:
        yield
    finally:
        module.get_distributed_runtime_client = make  # type: ignore[union-attr]


def _others() -> Members | None:
    """Returns the other processes of the job; None if there are none.

    A program that has called jax.distributed.initialize itself agrees with the others too. How it ends is its own
    business, so the others are not watched.
    """
    global _members
    state = distributed.global_state
    if _members is None and state.client is not None and state.num_processes > 1:
        _members = Members(state.client, state.process_id, state.num_processes, 0)
    return _members


@contextlib.contextmanager
def one_fate() -> Iterator[None]:
    """Runs the block; an error in one process ends the block in all, and each reports which process failed.

    Raises: InputError with the message of another process that failed; LostProcessError if a collective failed because
    another process died.
    """
    if _members is None:
        yield
        return
    try:
        jax.devices()  # starts the backend in all processes now; JAX does not wait for one that starts minutes later
        _members.exchange("ready")
        multihost_utils.sync_global_devices("ready")  # CPUs connect in their first collective, for which they wait 30 s
        yield
        _members.exchange("done")
        _members.close()
    except BaseException as error:
        status = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "STATUS", 1)
        if isinstance(error, Exception) and not isinstance(error, (InputError, OSError)):
            cause = _members.find_cause()  # collectives break off with errors of many types
            if cause:
                _leave_at_exit(cause.STATUS)
                _members.tell_failure(str(cause), cause.STATUS)  # collectives of others may not break off
                raise cause from None
        _leave_at_exit(status)
        _members.tell_failure(" ".join(str(error).split()) or type(error).__name__, status)
        raise


def ends_all() -> bool:
    """Returns whether an error in this process ends the others, if there are any: not where a program joined them."""
    others = _others()
    return others is None or others.lost_seconds > 0


def leave_hanging(status: int) -> None:
    """Ends this process with an exit status, and then the other processes of the job."""
    if others := _others():
        others.tell_hang()
    leave(status)


def end_job(status: int, line: str) -> None:
    """Ends this process with an error line and an exit status, from any thread; the other processes end too."""
    if _members is not None:
        _members.tell_failure(line, status)
        with contextlib.suppress(Exception):  # of JAX's client, without a type
            _members.outlast()
    leave(status, line)


def _leave_at_exit(status: int) -> None:
    """Skips JAX's shutdown at exit, which would wait for the other processes.

    The first process holds the key-value store, from which the others read the cause. So it exits last.
    """

    def end() -> None:
        if _members is not None:
            with contextlib.suppress(Exception):  # of JAX's client, without a type
                _members.outlast()
        leave(status)

    atexit.register(end)


def check_same(what: Mapping[str, object]) -> None:
    """Checks that all processes have the same code and the same values. `what` maps names to values, also nested ones.

    Raises: InputError, on every process, with the process that differs, the name and both values.
    """
    others = _others()
    if others is None and is_several():
        raise InputError(
            f"there are {jax.process_count()} processes, which cannot tell each other what they do; call "
            "jax.distributed.initialize() before JAX is used"
        )
    if others is None:
        return
    what = {"code of bert_jax": _code_digest(), "jax": jax.__version__, **what}
    text = json.dumps(what, sort_keys=True, default=str)
    # Compare digests first: the values of hundreds of processes would be too much for the first process to send.
    if len(set(others.exchange(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    said = [json.loads(each) for each in others.exchange(text)]
    for number, other in enumerate(said):
        names = changed_keys(said[0], other)
        if names:
            name = names[0]
            theirs, ours = (value_at(each, name) for each in (other, said[0]))
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(
                f"{others.name(number)} has {name} {theirs!r}, and {others.name(0)} has {ours!r}{more}; run the "
                "same command with the same code and data on all"
            )


def _code_digest() -> str:
    """Returns a digest of the source files of this package."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def check_shared(directory: Any) -> None:
    """Checks that all processes see the first one's directory and can write there.

    Raises: InputError, on every process, with the first process that cannot.
    """
    others = _others()
    if others is None:
        return
    name = f".seen-{others.exchange(uuid.uuid4().hex)[0]}"
    own, first = (directory / f"{name}_{number}" for number in (others.index, 0))
    try:
        all_do(f"write into {directory}", own.touch)
        deadline = time.monotonic() + 30  # some file systems show a new file late
        while not (seen := first.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        answers = others.exchange("yes" if seen else "no")
    finally:
        with contextlib.suppress(InputError, OSError):
            own.unlink(missing_ok=True)
    if "no" in answers:
        raise InputError(
            f"{others.name(answers.index('no'))} does not see what {others.name(0)} writes into {directory}; give a "
            "directory that all processes share"
        )


def is_job(environment: Mapping[str, str]) -> bool:
    """Returns whether the variables of a scheduler name several processes."""
    sizes = (environment.get(name, "") for name in _JOB_SIZES)
    hosts = (environment.get(name, "") for name in _HOST_LISTS)
    return any(size.isdecimal() and int(size) > 1 for size in sizes) or any("," in names for names in hosts)


def is_several() -> bool:
    """Returns whether there are other processes."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Returns whether this is the first process, which writes all files that are written once."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Waits until every process has called this; `what` names the barrier."""
    if others := _others():
        others.exchange(what)


def first_says(value: int) -> int:
    """Returns the first process's value, on every process."""
    return int(first_tells(str(int(value))))


def first_tells(text: str) -> str:
    """Returns the first process's text, on every process."""
    others = _others()
    return text if others is None else others.hear_first(text)


def anyone_says(value: bool) -> bool:
    """Returns whether `value` is true on any process."""
    others = _others()
    return value if others is None else "yes" in others.exchange("yes" if value else "no")


def first_does(what: str, action: Callable[[], None]) -> None:
    """Runs `action` on the first process; every process waits until it is done.

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


def all_do(what: str, action: Callable[[], object]) -> None:
    """Runs `action` on every process, and waits for all.

    `what` completes "process 1 could not ...". Raises: the error, or with several processes InputError on every one,
    with the first process that failed and its reason.
    """
    failure: InputError | OSError | None = None
    try:
        action()
    except (InputError, OSError) as error:
        failure = error
    others = _others()
    if others is None:
        if failure is not None:
            raise failure
        return
    reason = "" if failure is None else getattr(failure, "strerror", None) or one_line(failure)
    for number, problem in enumerate(others.exchange(reason)):
        if problem:
            raise InputError(
                f"{others.name(number)} could not {what}: {problem}; all processes write there, so permit it to all"
            ) from failure


def agree_to_stop(count: int) -> bool:
    """Returns whether a process was asked to end, on all at the same `count`, which grows with every call."""
    return is_several() and multihost_utils.reached_preemption_sync_point(count)


def on_host(tree: PyTree) -> PyTree:
    """Returns a tree of global arrays as whole numpy arrays, on every process."""
    if not is_several():
        return jax.device_get(tree)
    return jax.tree.map(lambda leaf: np.asarray(multihost_utils.process_allgather(leaf, tiled=True)), tree)
