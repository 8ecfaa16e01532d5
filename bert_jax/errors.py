# SPDX-License-Identifier: Apache-2.0
"""Errors that the user can correct, and the words for them.

The message of each carries the value, the rule that it breaks, and the fix.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any


class InputError(ValueError):
    """Input, configuration or files that cannot be used.

    The message is one line with the value, the rule it breaks and the fix. Command-line tools print it
    without a traceback and exit with `STATUS`; nothing has been lost or overwritten when it is raised.
    Characters of a value that would break the line, or that no terminal can show, are written as escapes.
    """

    STATUS = 1

    def __init__(self, message: object = "") -> None:
        text = str(message)
        if not text.isprintable():
            text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
        super().__init__(text)


class StoppedError(InputError):
    """Work that could not go on for a reason outside of its input: a full disk, a killed process.

    What is finished is kept, and the same command continues.
    """


class DivergedError(InputError):
    """A loss, a gradient or a parameter that is not finite: other settings are needed."""


class LostProcessError(InputError):
    """Another process of the job died or cannot be reached. The same command on all resumes.

    Commands exit with `STATUS`, which sysexits.h has for what is worth another try.
    """

    STATUS = 75


@contextlib.contextmanager
def package_needed(package: str, purpose: str, install: str = "") -> Iterator[None]:
    """Turns a failed import of an installable package, inside the block, into an `InputError` of one line.

    `purpose` is what needs the package; `install` is what pip is to install, if it is not the package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:  # the package is there, and lacks something itself
            raise
        remedy = f"pip install {install or package}"
        raise InputError(f"{purpose} needs the package {package}, which is not installed: {remedy}") from None


def shown(value: Any, most: int = 60) -> str:
    """Returns a value as JSON in ASCII, cut to what fits in a message."""
    if isinstance(value, str):
        value = value[: most + 1]
    try:
        text = json.dumps(value, ensure_ascii=True, default=repr)
    except ValueError:  # Python writes no number of more than some thousand digits
        text = "a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}..."


def one_line(error: BaseException) -> str:
    """Returns what an error says, on one line; its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
