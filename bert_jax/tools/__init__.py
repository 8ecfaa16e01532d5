# SPDX-License-Identifier: Apache-2.0
"""Command-line tools. Each is a thin layer over a function of the package."""

import signal
import sys
import threading
from types import FrameType, TracebackType


def _say_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints a line in place of a traceback for Ctrl-C, which may come before `cli.run`, while modules are imported."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt as Python's own handler does, but not within the import system.

    Some of it runs in callbacks, where Python prints an exception with its traceback and goes on. So the signal is
    raised again a moment later.
    """
    if frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        again = threading.Timer(0.01, signal.raise_signal, (number,))
        again.daemon = True
        again.start()
    else:
        signal.default_int_handler(number, frame)


if sys.excepthook is sys.__excepthook__:  # not in a notebook, which has one of its own
    sys.excepthook = _say_interrupted
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _interrupt)
