# SPDX-License-Identifier: Apache-2.0
"""Signals that ask a run to end, in one process or in several."""

import contextlib
import os
import signal
import threading
import types

from bert_jax.devices.job import this_job
from bert_jax.devices.members import leave


class Preemption:
    """Records signals that ask the run to end: SIGTERM, SIGINT or SIGHUP, sent to any process of the job.

    A second SIGINT (Ctrl-C) ends the process at once, without Python's shutdown, because XLA may be compiling. Several
    processes agree on the step to end at. JAX's handler of SIGTERM tells the other processes, so it stays, and every
    other signal is sent on as SIGTERM: such a run ends with status 143 whatever the signal was. SIGHUP stays ignored
    where it is ignored, as with nohup. Only the main thread of a program may handle signals: a run in
    another one leaves them to the program.
    """

    def __enter__(self) -> "Preemption":
        self._received = 0
        self._interrupts = 0
        if threading.current_thread() is not threading.main_thread():
            self._previous = {}
            return self
        numbers = [signal.SIGINT] if this_job().is_several else [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            numbers.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def _note(self, number: int, _frame: types.FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            leave(
                128 + signal.SIGINT, "stopped by Ctrl-C twice; what was saved before is untouched"
            )
        if this_job().is_several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._received = number
        if self._interrupts:
            # Ctrl-C has ended the reader too, as in `train.py 2>&1 | tee log`
            with contextlib.suppress(OSError):
                # Not print: the signal may have interrupted one, and a stream cannot be entered
                # twice.
                os.write(
                    2,
                    b"\nstopping after the steps under way, with the state saved; Ctrl-C again ends at once\n",
                )

    def received(self) -> int:
        """Returns the received signal, or 0. If there are several processes, all must call this before every step."""
        if this_job().should_stop():
            self._received = signal.SIGTERM
        return self._received

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # The command that was asked to end shuts down now. Another Ctrl-C must still end it at once, and not raise
            # KeyboardInterrupt somewhere in the shutdown. A program that calls the library has Python's own handler.
            if (
                number == signal.SIGINT
                and self._received
                and handler is not signal.default_int_handler
            ):
                continue
            signal.signal(number, handler)
