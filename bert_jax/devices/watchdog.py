# SPDX-License-Identifier: Apache-2.0
"""Ends a run that hangs and prints the stacks of its threads, so that a scheduler can restart it.

Whoever works says so with `beat`: steps, batches, files. Work that says nothing for long has limits of its own: the
compiler, and disks and networks in a block of `slow`.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

import jax

from bert_jax.devices.job import this_job
from bert_jax.devices.members import HANG_STATUS, say_stacks

# How long slow work may say nothing: so many times the limit of a step, and no less than so many seconds.
_TIMES, _LEAST, _LEAST_COMPILING = 5, 120.0, 3600.0
_SLOWEST = 1e6  # bytes per second of a disk or a network

_running: list["Watchdog"] = []


class Watchdog:
    """A context manager that ends all processes of the job if no work finishes for `seconds`."""

    def __init__(self, seconds: float) -> None:
        """Monitoring starts with the block; 0 seconds disables it."""
        self.seconds = seconds
        self.longer: list[float] = []  # the limits of the blocks of `slow`
        self.compiling: set[int] = set()  # the threads that wait for the compiler
        self.finished = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self.finished = time.monotonic()
        _running.append(self)
        if self.seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        _running.remove(self)
        self._ended.set()
        if self.seconds:
            self._thread.join()

    def limit(self) -> float:
        """Returns the seconds that may pass without a sign of life from what is done now."""
        compiling = [max(_LEAST_COMPILING, _TIMES * self.seconds)] if self.compiling else []
        return max([self.seconds, *self.longer, *compiling])

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.seconds / 4)):
            silence, limit = time.monotonic() - self.finished, self.limit()
            if silence > limit:
                here = f"; {limit:g} s for what is done now" if limit > self.seconds else ""
                say_stacks(
                    f"nothing was finished for {silence:.0f} s (train.hang_seconds {self.seconds:g}{here}), so this "
                    "run ends; the same command resumes. What its threads were doing:"
                )
                this_job().leave_hanging(HANG_STATUS)


def beat() -> None:
    """Records, for the watchdogs that run, that something was finished: a step, a batch, a file, a program."""
    for one in list(_running):
        one.compiling.discard(threading.get_ident())
        one.finished = time.monotonic()


@contextlib.contextmanager
def slow(num_bytes: float = 0, compiles: bool = False) -> Iterator[None]:
    """Allows the block more time without a sign of life: it waits for a disk, a network or, on any host, the compiler.

    `num_bytes` is how much is read or written.
    """
    least = _LEAST_COMPILING if compiles else _LEAST
    allowed = [(one, max(least, _TIMES * one.seconds, num_bytes / _SLOWEST)) for one in _running]
    for one, limit in allowed:
        one.longer.append(limit)
    try:
        yield
    finally:
        beat()
        for one, limit in allowed:
            one.longer.remove(limit)


def _hear(event: str, *_: object, **__: object) -> None:
    """Notes what JAX tells of its compiler: after a program is lowered it is compiled, which may take very long."""
    beat()
    if event.endswith("jaxpr_to_mlir_module_duration"):
        for one in list(_running):
            one.compiling.add(threading.get_ident())


jax.monitoring.register_event_duration_secs_listener(_hear)  # JAX has no public function to remove it again
