# SPDX-License-Identifier: Apache-2.0
"""Paragraphs to sentences: the only home of the splitter (docs/decisions/0003-sentence-splitter.md)."""

import functools
from collections.abc import Callable

from bert_jax.errors import package_needed

# The splitter keeps what stands between quotation marks or brackets together. One mark that is never closed
# would then swallow a page, so what comes out longer than this is split again without seeing those marks.
_LONGEST_QUOTATION = 1000  # characters
_PAIRED_MARKS = str.maketrans(dict.fromkeys("\"'()[]{}«»‹›“”„‟‘’‚‛「」『』《》〈〉（）", " "))


def split_sentences(paragraph: str, language: str = "en") -> list[str]:
    """Returns the sentences of a paragraph, stripped; what is left between them is white space only.

    A line that is one sentence stays one. `language` is an ISO 639 code; a language without rules of its own
    gets those of its nearest relative.
    """
    sentences: list[str] = []
    segment = _splitter()
    for sentence in segment(language, paragraph):
        if len(sentence) > _LONGEST_QUOTATION:
            sentences.extend(_split_inside_quotations(sentence, language))
        else:
            sentences.append(sentence.strip())
    return [sentence for sentence in sentences if sentence]


def _split_inside_quotations(text: str, language: str) -> list[str]:
    """Returns the sentences of `text` found as if it had no quotation marks and brackets."""
    sentences = []
    segment = _splitter()
    start = 0
    for hidden in segment(language, text.translate(_PAIRED_MARKS)):  # the same lengths: nothing is dropped
        sentences.append(text[start : start + len(hidden)].strip())
        start += len(hidden)
    return sentences


@functools.cache
def _splitter() -> Callable[[str, str], list[str]]:
    """Returns the splitter's function. Raises: InputError if the library is not installed."""
    with package_needed("sentencex", "splitting text into sentences"):
        from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue]: compiled
    return segment
