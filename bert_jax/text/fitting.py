# SPDX-License-Identifier: Apache-2.0
"""Texts as [CLS] A [SEP] or [CLS] A [SEP] B [SEP], within the tokens that there is room for.

A longer text is cut, and the caller is told how many were: by a warning in Python, by a line in a command. Or it is
refused.
"""

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.errors import InputError
from bert_jax.text.tokenizer import Tokenizer

LONG_TEXTS = ("cut", "refuse")  # how texts that are too long are handled; the first is the default


class Fitted(NamedTuple):
    """The tokens of a text or a pair of texts."""

    token_ids: np.ndarray  # [L] int32
    type_ids: np.ndarray  # [L] uint8
    was_cut: bool


class CutWarning(UserWarning):
    """Some texts were longer than there is room for, and were cut."""

    def __init__(self, count: int, most: int) -> None:
        super().__init__(
            f"{count:,} {'text has' if count == 1 else 'texts have'} more than {most} tokens with [CLS] and [SEP]; the "
            "rest was cut off: split them, or refuse such with long_texts='refuse'"
        )
        self.count = count
        self.most = most


def tell_cut(count: int, most: int) -> None:
    """Warns of texts that were cut, if there are any."""
    if count:
        frame = sys._getframe()
        level = 1
        # which decorates our functions: the warning names the line of their caller
        ours = ("bert_jax.", "contextlib")
        while frame.f_back and frame.f_globals.get("__name__", "").startswith(ours):
            frame, level = frame.f_back, level + 1
        warnings.warn(CutWarning(count, most), stacklevel=level)


def check_long_texts(long_texts: str) -> None:
    """Raises: InputError if it is not one of `LONG_TEXTS`."""
    if long_texts not in LONG_TEXTS:
        raise InputError(
            f"long_texts {long_texts!r} is not one of {', '.join(LONG_TEXTS)}; use one of them"
        )


def too_long(where: str, most: int, count: int = 0) -> InputError:
    """Returns the error for a text that shall not be cut, of `count` tokens if that is known."""
    tokens = f"{count} tokens" if count else f"more than {most} tokens"
    return InputError(
        f"{where} has {tokens} with [CLS] and [SEP], and there is room for {most}; shorten or split it, or have it cut "
        "(long_texts=cut)"
    )


@contextlib.contextmanager
def cuts_in_one_line() -> Iterator[None]:
    """Prints the number of texts that were cut to stderr, once at the end, in place of warnings."""
    counts = Counter[int]()
    with warnings.catch_warnings():
        warnings.simplefilter("always", CutWarning)
        show = warnings.showwarning

        def note(message: Warning | str, *args, **kwargs) -> None:
            if isinstance(message, CutWarning):
                counts[message.most] += message.count
            else:
                show(message, *args, **kwargs)

        warnings.showwarning = note
        try:
            yield
        finally:
            for most, count in counts.items():
                line = str(CutWarning(count, most)).replace(
                    "long_texts='refuse'", "--long_texts=refuse"
                )
                print(f"warning: {line}", file=sys.stderr)


def listed(texts: Iterable[Any]) -> Sequence[Any]:
    """Returns texts as a sequence; a generator is read to its end.

    Raises: InputError if they are a single one, whose characters would be taken for texts.
    """
    if isinstance(texts, str):
        raise InputError("this is a single text; give a list of them, such as [text]")
    return texts if isinstance(texts, Sequence) else list(texts)


def fit_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    most: int,
    long_texts: str = "cut",
    before: int = 0,
) -> list[Fitted]:
    """Returns the tokens of texts, or of pairs of texts, at most `most` of each. `before` texts came before them.

    Raises: InputError if one is neither a text nor a pair, or is too long and not to be cut.
    """
    check_long_texts(long_texts)
    results = []
    for number, text in enumerate(texts, before + 1):
        parts = (text,) if isinstance(text, str) else text
        # a list may be words or a pair
        are_texts = isinstance(parts, tuple) and all(isinstance(part, str) for part in parts)
        if not are_texts or len(parts) not in (1, 2):
            raise InputError(
                f"text {number} is {text!r:.60}, not a text and not a pair of them; give a string, or a tuple of two"
            )
        first, *second = (tokenizer.encode(part) for part in parts)
        fitted = join_texts(tokenizer, first, second[0] if second else None, most)
        if fitted.was_cut and long_texts == "refuse":
            count = len(first) + sum(map(len, second)) + 2 + len(tokenizer.between) * len(second)
            raise too_long(f"text {number}", most, count)
        results.append(fitted)
    return results


def join_texts(
    tokenizer: Tokenizer, first: list[int], second: list[int] | None, max_length: int
) -> Fitted:
    """Returns [CLS] A [SEP] or [CLS] A [SEP] B [SEP], by the names and with the separators of the tokenizer.

    Tokens are removed from the end of the longer text one at a time, from B if both have the same length.
    Source: google-research/bert run_classifier.py, _truncate_seq_pair. A tokenizer of the hub may leave the last odd
    token to B: see `Template`.
    """
    if second is None:
        cut = len(first) > max_length - 2
        ids = [tokenizer.cls_id, *first[: max_length - 2], tokenizer.sep_id]
        return Fitted(np.array(ids, np.int32), np.zeros(len(ids), np.uint8), cut)
    between = tokenizer.between
    room = max_length - 2 - len(tokenizer.between)
    first_length, second_length = pair_lengths(
        len(first), len(second), room, tokenizer.template.odd_to_longer
    )
    cut = first_length + second_length < len(first) + len(second)
    ids = [
        tokenizer.cls_id,
        *first[:first_length],
        *between,
        *second[:second_length],
        tokenizer.sep_id,
    ]
    type_ids = np.zeros(len(ids), np.uint8)
    type_ids[first_length + 1 + len(between) :] = tokenizer.template.second_type
    return Fitted(np.array(ids, np.int32), type_ids, cut)


def pair_lengths(
    first: int, second: int, room: int, odd_to_longer: bool = False
) -> tuple[int, int]:
    """Returns two lengths reduced to fit, by taking 1 from the larger, or from the second if equal.

    With `odd_to_longer` the second has one more in place of the first where both are cut, it is not the shorter one,
    and the room is odd.
    """
    excess = first + second - room
    if excess <= 0:
        return first, second
    if odd_to_longer and second >= first > room // 2:
        return room // 2, room - room // 2
    # What the reference does token by token: the longer one shrinks to the other, then both in
    # turn.
    cut = min(excess, abs(first - second))
    first, second = (first - cut, second) if first > second else (first, second - cut)
    excess -= cut
    return first - excess // 2, second - (excess + 1) // 2
