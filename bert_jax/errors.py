# SPDX-License-Identifier: Apache-2.0
"""Errors that the user can correct. Each message has the value, the rule that it breaks and the fix."""

import contextlib
import errno
import json
import re
from collections.abc import Iterator
from typing import TypeVar

Value = TypeVar("Value")

NOT_UTF8 = (  # the fix; `iconv -t utf-8` alone stops at the very byte
    "if the file has another encoding, convert it with iconv -f windows-1252 -t utf-8, or what it is; if it is UTF-8 "
    "with damaged bytes, iconv -c -f utf-8 -t utf-8 leaves them out"
)
TOO_MANY_FILES = "raise the limit, for example with ulimit -n 65536, or join small files"

_USER = re.compile(
    r"(?<=://)[^/\s?#'\"]*:[^/\s?#'\"]*@|(?<=https://)[^/\s?#'\"]*@|(?<=http://)[^/\s?#'\"]*@"
)
_QUERY = re.compile(r"(\w://[^\s?#'\"]*[?#])[^\s'\"]*=[^\s'\"]*?(?=[;,:.)\]}>]*(?:[\s'\"]|$))")


def without_secrets(value: Value) -> Value:
    """Returns a text with "..." for the secrets in its URLs: user:password@, and all of ?token=... and #token=...

    Dicts and lists are processed recursively. Every message of an `InputError` passes through here.
    """
    if isinstance(value, str):
        return _QUERY.sub(r"\1...", _USER.sub("...@", value))  # type: ignore[return-value]
    if isinstance(value, dict):
        return {name: without_secrets(item) for name, item in value.items()}  # type: ignore[return-value]
    if isinstance(value, (list, tuple)):
        return type(value)(map(without_secrets, value))  # type: ignore[return-value,call-arg]
    return value


class InputError(ValueError):
    """Input, configuration or files that cannot be used.

    The message is one line with the value, the rule it breaks and the fix. Command-line tools print it
    without a traceback and exit with `STATUS`; nothing has been lost or overwritten when it is raised.
    Characters of a value that would break the line, or that no terminal can show, are written as escapes, and secrets
    of URLs as "...".
    """

    STATUS = 1

    def __init__(self, message: object = "") -> None:
        text = without_secrets(str(message))
        if not text.isprintable():
            text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
        super().__init__(text)


class TextError(InputError):
    """One text with which a library fails. Whoever knows where the text stands raises the error `at` that place."""

    def __init__(self, message: object = "", text: str = "") -> None:
        super().__init__(message)
        self.text = text

    def __reduce__(self) -> tuple:  # it crosses from worker processes
        return type(self), (str(self), self.text)

    def at(self, where: str) -> "TextError":
        """Returns the same error with the place of the text before its message."""
        return TextError(f"{where}: {self}", self.text)


class StoppedError(InputError):
    """Work that stopped for a reason outside of its input, such as a full disk or a killed process.

    Finished parts are kept. The same command continues from them.
    """


class DivergedError(InputError):
    """A loss, a gradient or a parameter is not finite. The run needs other settings."""


class LostProcessError(InputError):
    """Another process of the job died or cannot be reached. The same command on all processes resumes.

    Commands exit with `STATUS`: EX_TEMPFAIL in sysexits.h, a failure after which the user may try again.
    """

    STATUS = 75


@contextlib.contextmanager
def package_needed(package: str, purpose: str, install: str = "") -> Iterator[None]:
    """Turns a failed import of a package inside the block into an `InputError` of one line.

    `purpose` names the feature that needs the package. `install` is the argument of pip install; "" is the package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # it is installed, but one of its own imports fails
        if (error.name or "").partition(".")[0] != package:
            raise
        remedy = f"pip install {install or package}"
        raise InputError(
            f"{purpose} needs the package {package}, which is not installed: {remedy}"
        ) from None


def shown(value: object, most: int = 60) -> str:
    """Returns a value as JSON in ASCII for a message, cut after `most` characters."""
    if isinstance(value, str):
        value = value[: most + 1]
    try:
        text = json.dumps(value, ensure_ascii=True, default=repr)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}..."


def one_line(error: BaseException) -> str:
    """Returns the message of an error on one line, or the name of its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def no_panic() -> Iterator[None]:
    """Turns a panic of a library written in Rust, which is no `Exception`, into a RuntimeError with its message."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError(one_line(error)) from None


def are_too_many(error: Exception) -> bool:
    """Returns whether an error says that too many files are open."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def not_utf8(error: UnicodeDecodeError, where: str) -> InputError:
    """Returns the error for bytes at a place that are not UTF-8."""
    return InputError(f"{where} is not UTF-8 (byte 0x{error.object[error.start]:02x}); {NOT_UTF8}")


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns every error of the block into an `InputError` of one line, with the name of the file that it reads.

    A file may be damaged in more ways than anybody can list, and the library that reads it has its own words for each:
    they are told, and the error is the cause of ours. Only what has a better fix is refused beside its reader.
    """
    try:
        with no_panic():
            yield
    except InputError as error:
        if type(error) is not InputError or name in str(error):
            raise
        raise InputError(f"{name}: {error}") from None
    except OSError as error:
        if error.errno is None:  # of a library that reads the content
            raise _damaged(name, error) from error
        fix = TOO_MANY_FILES if are_too_many(error) else "check the path and its permissions"
        raise InputError(f"cannot read {name}: {error.strerror or error}; {fix}") from error
    except MemoryError as error:
        raise InputError(
            f"{name} is damaged, or needs more memory than there is ({one_line(error)})"
        ) from error
    except Exception as error:
        raise _damaged(name, error) from error


def _damaged(name: str, error: Exception) -> InputError:
    reason = (
        one_line(error)
        if isinstance(error, ValueError)
        else f"{type(error).__name__}: {one_line(error)}"
    )
    return InputError(f"{name} is damaged or another kind of file ({reason[:300]}); copy it again")
