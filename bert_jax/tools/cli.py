# SPDX-License-Identifier: Apache-2.0
"""How every command starts and fails."""

import sys
from collections.abc import Callable

from absl import app, flags, logging

from bert_jax.errors import InputError


def run(main: Callable[[], int | None]) -> None:
    """Parses the flags and runs `main()`; bad input ends as one line on stderr and exit status 1.

    `main` returns the exit status, or None for 0.
    """

    def guarded(argv: list[str]) -> int:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax tells every detail of every save
        try:
            if len(argv) > 1:
                raise InputError(f"unexpected argument {argv[1]!r}; options are written --name=value")
            return main() or 0
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except OSError as error:  # a full disk, a missing right
            where = f" {error.filename}" if error.filename else ""
            print(f"error: cannot read or write{where}: {error.strerror or error}", file=sys.stderr)
            return 1

    app.run(guarded, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
    """Returns what is left of the command line; an unusable flag is one line, not a traceback."""
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError, TypeError, ValueError, OSError, InputError) as error:
        reason = " ".join(str(error.args[0] if error.args else error).split())
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(1)


__all__ = ["flags", "run"]
