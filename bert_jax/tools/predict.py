# SPDX-License-Identifier: Apache-2.0
"""Fills in the blanks: reads texts with [MASK] in them, one a line, and prints the likeliest words.

python -m bert_jax.tools.predict --checkpoint=DIR --input=FILE
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import TextIO

from absl import flags

from bert_jax.errors import InputError
from bert_jax.tools import cli

CHECKPOINT = flags.DEFINE_string("checkpoint", "", "a work directory of train.py, or an exported model")
INPUT = flags.DEFINE_string("input", "-", "a file with a text a line, each with [MASK] in it; - is standard input")
GUESSES = flags.DEFINE_integer("guesses", 5, "words to print for each [MASK]", lower_bound=1)


def main() -> None:
    """Prints the likeliest words for every [MASK] of the input."""
    if not CHECKPOINT.value:
        raise InputError("--checkpoint is needed: a work directory of train.py, or an exported model")
    with _open(INPUT.value) as stream:
        from bert_jax.predict import fill_masks
        from bert_jax.pretrained import load_pretrained

        bert = load_pretrained(CHECKPOINT.value)
        if stream.isatty():
            print("Write a text with [MASK] in it; end with Ctrl-D.")
        for text in _lines(stream, INPUT.value):
            print(text)
            for guesses in fill_masks(bert, [text], GUESSES.value)[0]:
                print("   ", "  ".join(f"{guess.token} {guess.probability:.0%}" for guess in guesses), flush=True)


def _open(path: str) -> contextlib.AbstractContextManager[TextIO]:
    if path == "-":
        return contextlib.nullcontext(sys.stdin)
    try:
        return open(path, encoding="utf-8")
    except OSError as error:
        raise InputError(f"input {path} cannot be read: {error.strerror}") from None


def _lines(stream: TextIO, path: str) -> Iterator[str]:
    try:
        for line in stream:
            if line.strip():
                yield line.strip()
    except UnicodeDecodeError as error:
        raise InputError(f"input {path} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from None


if __name__ == "__main__":
    cli.run(main)
