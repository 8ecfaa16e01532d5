# SPDX-License-Identifier: Apache-2.0
"""Ends a run that hangs, with the stacks of its threads, so that a scheduler can start it again."""

import threading
import time

from bert_jax.devices import cluster
from bert_jax.devices.members import HANG_STATUS, say_stacks


class Watchdog:
    """Ends this process, and those that train with it, if nothing is finished for some seconds; a context manager."""

    def __init__(self, seconds: float) -> None:
        """Watches from when the block begins; 0 seconds is no watch."""
        self.seconds = seconds
        self._finished = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def alive(self) -> None:
        """Says that a step, an evaluation or a save was finished."""
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
