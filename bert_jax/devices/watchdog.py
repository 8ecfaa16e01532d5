# SPDX-License-Identifier: Apache-2.0
"""Ends a run that hangs and prints the stacks of its threads, so that a scheduler can restart it."""

import threading
import time

from bert_jax.devices import cluster
from bert_jax.devices.members import HANG_STATUS, say_stacks


class Watchdog:
    """A context manager that ends all processes of the job if no work finishes for `seconds`."""

    def __init__(self, seconds: float) -> None:
        """Monitoring starts with the block; 0 seconds disables it."""
        self.seconds = seconds
        self._finished = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def alive(self) -> None:
        """Records that a step, a batch of an evaluation, or a save has finished."""
        self._finished = time.monotonic()

    def __enter__(self) -> "Watchdog":
        self.alive()
        if self.seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self.seconds:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.seconds / 4)):
            silence = time.monotonic() - self._finished
            if silence > self.seconds:
                say_stacks(
                    f"nothing was finished for {silence:.0f} s (train.hang_seconds {self.seconds:g}), so this run "
                    "ends; the same command resumes. What its threads were doing:"
                )
                cluster.leave_hanging(HANG_STATUS)
