# SPDX-License-Identifier: Apache-2.0
"""Runs independent tasks in several processes, and reports progress on stderr."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import TypeVar

from bert_jax.devices.cores import usable_cores
from bert_jax.errors import StoppedError
from bert_jax.storage.files import allow_many_files

Task = TypeVar("Task")
Result = TypeVar("Result")


@contextlib.contextmanager
def task_runner(
    num_workers: int,
) -> Iterator[Callable[[Callable[[Task], Result], list[Task], str], list[Result]]]:
    """Yields `run(function, tasks, what)`, which returns `function(task)` for each task, in their order.

    `num_workers` processes share the tasks (0 is one for each core that this process may use); with one, all happens
    in this process. `function` must be importable by name, or a `functools.partial` of one that is. `what` names the
    tasks in reports of progress.

    Raises: StoppedError if a process was killed, and whatever a task raises, without waiting for the others. With
    Ctrl-C the processes end at once.
    """
    allow_many_files()
    if not num_workers:
        num_workers = usable_cores()
    if num_workers == 1:
        yield lambda function, tasks, what: _collect(
            enumerate(map(function, tasks)), len(tasks), what
        )
        return
    # not fork: a thread of this process may hold a lock, which the child would wait for
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # starting it later would unblock SIGINT
    alive, ours = context.Pipe(duplex=False)
    pool = concurrent.futures.ProcessPoolExecutor(num_workers, context, _start_worker, (alive,))
    with alive, ours:  # workers end when this process closes `ours`, or is killed
        try:
            yield lambda function, tasks, what: _collect(
                _as_completed(pool, function, tasks), len(tasks), what
            )
        except BrokenProcessPool:
            reason = "a worker process was killed, probably for lack of memory"
            raise StoppedError(
                f"{reason}; run it again with fewer workers: what is finished is kept"
            ) from None
        except KeyboardInterrupt:
            ours.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _as_completed(
    pool: concurrent.futures.Executor, function: Callable[[Task], Result], tasks: list[Task]
) -> Iterator[tuple[int, Result]]:
    """Yields (index of the task, result) of all tasks as they are finished."""
    # Workers begin here, and inherit what is blocked. The terminal sends Ctrl-C to them as well, and they would print
    # tracebacks, even during their imports.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        indices = {pool.submit(function, task): index for index, task in enumerate(tasks)}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for future in concurrent.futures.as_completed(indices):
        yield indices[future], future.result()


def _collect(finished: Iterable[tuple[int, Result]], num_tasks: int, what: str) -> list[Result]:
    """Returns the results in the order of the tasks, reporting every ten seconds and at the end."""
    results: dict[int, Result] = {}
    started = reported = time.monotonic()
    for index, result in finished:
        results[index] = result
        now = time.monotonic()
        if now - reported > 10 or len(results) == num_tasks:
            reported = now
            say(f"{len(results)} of {num_tasks} {what} after {now - started:.0f} s")
    return [results[index] for index in range(num_tasks)]


def say(text: str) -> None:
    """Writes a line on stderr."""
    print(text, file=sys.stderr, flush=True)


def _start_worker(alive: Connection) -> None:
    """Keeps a worker to one core, and makes it end when the process that started it ends or closes the pipe."""
    # there is a worker for each core already
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A library in Rust prints its panics by itself, with a trace. What matters of them comes as an error, which the
    # first process tells; Python's own messages still have a way out.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()


def _end_with(alive: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        alive.recv_bytes()  # nothing is ever sent
    # not sys.exit, which in a thread ends that thread alone
    os._exit(1)
