# SPDX-License-Identifier: Apache-2.0
"""Paragraphs to sentences."""

import random
import re
import string
import time

import pytest

from bert_jax.data import sentences as module
from bert_jax.data.sentences import split_lines


def split_sentences(paragraph: str, language: str = "en") -> list[str]:
    return split_lines([paragraph], language)[0]


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        (
            "en",
            ["Dr. Smith met Mr. J. R. R. Tolkien on Jan. 5, 1990.", "It cost $3.50!", "See Fig. 3, e.g. the first."],
        ),
        ("en", ["Yahoo! Inc. grew.", "Did it?", "Yes."]),
        ("de", ["Er kam am 3. Oktober 1990 nach Berlin.", "Das war z. B. ein Fehler.", "Dr. Meier ging."]),
    ],
)
def test_sentences_of_a_paragraph(language, sentences):
    assert split_sentences("  ".join(sentences), language) == sentences


def test_japanese_has_no_blanks():
    assert split_sentences("吾輩は猫である。名前はまだ無い。", "ja") == ["吾輩は猫である。", "名前はまだ無い。"]


@pytest.mark.parametrize(
    "line", ["This is one sentence.", "A heading without an end", "The U.S. Army attacked at 3 p.m. in the rain."]
)
def test_one_sentence_stays_one(line):
    assert split_sentences(line) == [line]


@pytest.mark.parametrize("text", ["", " ", "\t \u00a0"])
def test_nothing_has_no_sentence(text):
    assert split_sentences(text) == []


def test_nothing_is_lost():
    text = 'He said "Stop. Go home." (Twice. Or so.) Then\u2028 he left... What?! 3.5 % of 2.000 "open. ' * 40
    joined = "".join("".join(split_sentences(text)).split())
    assert joined == "".join(text.split())


def test_an_open_quotation_mark_does_not_swallow_the_page():
    page = "She said nothing at all to him. " * 300
    assert len(split_sentences('He said "this. ' + page)) > 290
    assert len(split_sentences("He said (this. " + page)) > 290


WIDE_BLANKS = [chr(code) for code in range(128, 0x3001) if chr(code).isspace()]


@pytest.mark.parametrize("blank", WIDE_BLANKS, ids=[f"U+{ord(blank):04X}" for blank in WIDE_BLANKS])
def test_a_blank_that_is_not_ascii_before_a_full_stop(blank):
    """At these the splitter panics, unless they are shown to it as ASCII."""
    assert split_sentences(f"It is vitamin C{blank}. Next came B.") == [f"It is vitamin C{blank}.", "Next came B."]
    assert split_lines([f"The U.S.{blank}\u00a0. It"], "en")[1] == 0
    assert len(split_sentences(f"C{blank}. He said (this. " + "She said nothing at all to him. " * 300)) > 290


class PanicException(BaseException):
    """What compiled code raises when it panics."""


PanicException.__module__ = "pyo3_runtime"


def test_a_line_at_which_the_splitter_panics_is_one_sentence_and_counted(monkeypatch):
    def segment(language: str, text: str) -> list[str]:
        if "!" in text:
            raise PanicException("byte index 10 is not a char boundary")
        return text.split("_")

    monkeypatch.setattr(module, "_splitter", lambda: segment)
    assert split_lines([" One. Two! ", "  ", " !a ", "Three."], "en") == (["One. Two!", "!a", "Three."], 2)
    assert split_sentences("One. Two!") == ["One. Two!"]
    assert split_lines(["a._b"], "en") == (["a._b"], 1)  # it lost a character


@pytest.mark.parametrize(
    ("language", "parts"), [("zh", "这是一个句子，它很短。"), ("ja", "彼は「そう。」と言った！？"), ("th", "คือ!")]
)
def test_the_time_for_a_line_without_blanks_is_in_proportion_to_its_length(language, parts):
    times = 200_000 // len(parts)
    started = time.thread_time()
    found = split_sentences(parts * times, language)
    assert time.thread_time() - started < 2  # of a whole line it would be 5 to 12 s
    assert found == split_sentences(parts * 20, language)[: len(found) // times] * times


def test_windows_change_no_sentence(monkeypatch):
    """A line of Japanese is cut as the splitter cuts it whole; quotations may be longer than half a window."""
    parts = "吾輩は猫である。 「名前は。まだ無い。」 どこで生れたか！？ （とんと）見当が『つかぬ。」 A.B".split()
    parts.append("「" + "何でも。" * 90 + "」")
    line = "".join(parts[number * number % 31 % len(parts)] for number in range(700))
    found = split_sentences(line, "ja")
    monkeypatch.setattr(module, "_LONGEST_WORD", len(line))
    assert found == split_sentences(line, "ja") and len(found) > 300


@pytest.mark.parametrize("language", ["en", "de", "fr", "ru", "el", "hy", "am", "ja", "hi"])
def test_lines_that_the_splitter_is_not_asked_for_are_those_that_it_does_not_split(language, monkeypatch):
    rng = random.Random(0)
    kinds = [string.ascii_letters + string.digits] * 4 + [
        " " * 8 + string.punctuation.translate(dict.fromkeys(b".:;!?"))
    ]
    lines = ["".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randrange(40))) for _ in range(500)]
    lines += [line + end for line, end in zip(lines, ".?!:;" * 100)]
    ours = split_lines(lines, language)
    assert len(ours[0]) == sum(bool(line.strip()) for line in lines)
    monkeypatch.setattr(module, "_ASCII_END", re.compile(""))
    assert split_lines(lines, language) == ours
