# SPDX-License-Identifier: Apache-2.0
"""Command-line tools. Each is a thin layer over a function of the package."""

import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_held_since: list[float] = []  # when Ctrl-C came, and when it was raised again


def _say_interrupted(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints a line in place of a traceback for Ctrl-C, which may come before `cli.run`, while modules are imported."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt as Python's own handler does, but not while a module is imported.

    Libraries swallow it then, or C++ code aborts the process; and parts of the import system run in callbacks, where
    Python prints an exception with its traceback and goes on. So the signal is raised again a moment later, for a
    minute at most: a program may do all its work in a module that it imports.
    """
    _held_since.append(time.monotonic())
    caller = frame
    while caller and not caller.f_code.co_filename.startswith("<frozen importlib"):
        caller = caller.f_back
    # None, if no import is among the calls that led here
    if caller and time.monotonic() - _held_since[0] < 60:
        _raise_again(number)
    else:
        _held_since.clear()
        signal.default_int_handler(number, frame)


def _raise_again(number: int) -> None:
    # to the main thread: a signal of the timer's own would not wake it from a call that blocks
    again = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, number))
    again.daemon = True
    again.start()


def _not_raised(unraisable: Any) -> None:
    """Raises Ctrl-C again that came in a callback, as of the garbage collector, where Python prints it and goes on."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _raise_again(signal.SIGINT)
    else:
        sys.__unraisablehook__(unraisable)


if sys.excepthook is sys.__excepthook__:  # not in a notebook, which has one of its own
    sys.excepthook = _say_interrupted
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _not_raised
