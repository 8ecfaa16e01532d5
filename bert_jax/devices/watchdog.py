# SPDX-License-Identifier: Apache-2.0
"""Ends a run whose work is overdue and prints the stacks of its threads, so that a scheduler can restart it.

`work` records the work under way, and JAX reports its compilations here.
"""

import threading

import jax

from bert_jax.devices import work
from bert_jax.devices.job import this_job
from bert_jax.devices.members import HANG_STATUS, say_stacks


class Watchdog:
    """A context manager that ends all processes of the job if work is overdue."""

    def __init__(self, seconds: float) -> None:
        """`seconds` is the limit of a step, to which others are in proportion; 0 disables the watchdog."""
        self.seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self.seconds:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.seconds / 4)):
            if overdue := work.find_overdue(self.seconds):
                line = f"{overdue} (train.hang_seconds {self.seconds:g})"
                say_stacks(
                    f"hangs: {line}; this run ends, and the same command resumes. What its threads were doing:"
                )
                this_job().leave_hanging(HANG_STATUS, line)


def _hear(event: str, duration_secs: float, **_: object) -> None:
    """Records the events of JAX's compiler: after a program is lowered it is compiled, which may take very long."""
    if event.endswith("backend_compile_duration"):
        work.end_compilation(duration_secs)
    elif event.endswith("jaxpr_to_mlir_module_duration"):
        work.begin_compilation()
    else:
        work.beat()


# JAX has no public function to remove it again
jax.monitoring.register_event_duration_secs_listener(_hear)
