# SPDX-License-Identifier: Apache-2.0
"""Command-line tools. Each is a thin layer over a function of the package."""

import sys
from types import TracebackType


def _say_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints a line in place of a traceback for Ctrl-C, which may come before `cli.run`, while modules are imported."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.excepthook is sys.__excepthook__:  # not in a notebook, which has one of its own
    sys.excepthook = _say_interrupted
