# SPDX-License-Identifier: Apache-2.0
"""Paragraphs to sentences."""

import pytest

from bert_jax.data.sentences import split_sentences


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
