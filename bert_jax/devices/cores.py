# SPDX-License-Identifier: Apache-2.0
"""The cores of a CPU: how many a process may use, and threads that wake on all of them.

After a pause Linux on a virtual machine may wake all of XLA's threads on one core, since it takes a halted core for one
that the host has taken away, and moves them apart only after tens of milliseconds. A short request has ended by then.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_PAUSE = 0.02  # seconds after which a request finds the threads asleep
_XLA = "tf_XLAEigen"  # the name of the threads

_wanted = False  # whether this process has asked for it
_found: dict[int, list[int]] = {}  # the threads of a process, which a fork does not have
_ended = 0.0  # when the last request ended


def usable_cores() -> int:
    """Returns how many cores this process may use: in a job or container often fewer than there are."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def give_threads_cores() -> None:
    """Has every later `on_all_cores` of this process take effect."""
    global _wanted
    _wanted = True


@contextlib.contextmanager
def on_all_cores() -> Iterator[None]:
    """Gives each thread a core of its own during the block, or the decorated function, if it follows a pause.

    Has no effect before `give_threads_cores`, without Linux, or where there are more or fewer threads than cores.
    """
    global _ended
    moved: dict[int, set[int]] = {}
    if _wanted and time.monotonic() - _ended > _PAUSE:
        with contextlib.suppress(OSError, AttributeError):  # another system, or no right to it
            before = {thread: os.sched_getaffinity(thread) for thread in _threads()}
            cores = sorted(set().union(*before.values()))
            first = os.getpid()  # so that several processes do not all begin with the same core
            if len(cores) == len(before) > 1 and all(
                len(affinity) == len(cores) for affinity in before.values()
            ):
                moved = before
                for number, thread in enumerate(before, first):
                    os.sched_setaffinity(thread, {cores[number % len(cores)]})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            for thread, cores in moved.items():
                os.sched_setaffinity(thread, cores)
        _ended = time.monotonic()


def _threads() -> list[int]:
    """Returns the threads of XLA in this process, none before it has computed."""
    process = os.getpid()
    if not _found.get(process):
        tasks = Path("/proc/self/task").iterdir()
        _found[process] = [
            int(task.name) for task in tasks if (task / "comm").read_text("ascii").strip() == _XLA
        ]
    return _found[process]
