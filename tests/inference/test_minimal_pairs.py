# SPDX-License-Identifier: Apache-2.0
"""Minimal pairs: files of three kinds, ties, means and intervals."""

import gzip
import json

import numpy as np
import pytest
from builders import message, write

from bert_jax.inference.minimal_pairs import Pair, accuracies, format_table, read_pairs, wilson


def blimp_line(paradigm, good, bad, term="binding"):
    return json.dumps({"UID": paradigm, "linguistics_term": term, "sentence_good": good, "sentence_bad": bad})


def pairs_of(paradigm, count, phenomenon="one"):
    return [Pair("good", "bad", paradigm, phenomenon, f"x:{index}") for index in range(count)]


def test_blimp_lines_plain_and_gzip(tmp_path):
    lines = [blimp_line("a", "good", "bad"), blimp_line("a", "x", "y"), "", blimp_line("b", "He", "Hi", "s-selection")]
    text = "\n".join(lines) + "\n"
    plain, packed = write(tmp_path / "x.jsonl", text), write(tmp_path / "x.jsonl.gz", gzip.compress(text.encode()))
    found = read_pairs(plain)
    assert found[0] == Pair("good", "bad", "a", "binding", f"{plain}:1")
    assert found[2] == Pair("He", "Hi", "b", "argument_structure", f"{plain}:4")  # as the paper counts it
    assert [pair[:4] for pair in found] == [pair[:4] for pair in read_pairs(packed)] and len(found) == 3
    assert read_pairs(plain, limit=1) == [found[0], found[2]]


def test_zorro_files_and_directory(tmp_path):
    write(tmp_path / "filler-gap-wh_question.txt", "bad one .\ngood one .\nbad two .\ngood two .\n\n")
    write(tmp_path / "case-pronoun.txt", "bad\ngood\n")
    write(tmp_path / "SOURCE.md", "no pairs\n")
    found = read_pairs(str(tmp_path))
    assert [pair[:4] for pair in found] == [
        ("good", "bad", "case-pronoun", "case"),
        ("good one .", "bad one .", "filler-gap-wh_question", "filler-gap"),
        ("good two .", "bad two .", "filler-gap-wh_question", "filler-gap"),
    ]
    assert read_pairs(str(tmp_path / "case-pronoun.txt")) == found[:1]


@pytest.mark.parametrize("header", ["", "good\tbad\n", "\nGood\tBad\n", "sentence_good\tSentence_Bad \n"])
def test_two_columns_with_and_without_a_header(tmp_path, header):
    (pair,) = read_pairs(write(tmp_path / "mine.tsv", f"{header}He sees.\tHe see.\n"))
    assert pair[:4] == ("He sees.", "He see.", "mine", "mine")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.jsonl", blimp_line("a", "g", "b") + '\n{"UID": "a", "senten\n', "x.jsonl:2 is not JSON"),
        ("x.jsonl", blimp_line("a", "g", "b") + "\n[1]\n", "x.jsonl:2 is [1], not an object"),
        ("x.jsonl", '{"UID": 1}\n', "x.jsonl:1 has no 'sentence_good', a text"),
        ("x.jsonl", blimp_line("a", "g", " "), "x.jsonl:1: a sentence of the pair is empty"),
        ("x.txt", "bad\ngood\nbad\n", "x.txt:3 is a sentence without a partner"),
        ("x.txt", "bad\n\nbad\ngood", "x.txt:1: a sentence of the pair is empty"),
        ("x.txt", b"good\n\xff\n", "x.txt:2 is not UTF-8"),
        ("x.tsv", "a\tb\na\tb\tc\n", "x.tsv:2 is not two columns"),
        ("x.txt", "\n \n", "holds no pair"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, name, content, told):
    assert told in message(read_pairs, write(tmp_path / name, content))


def test_what_is_no_file_of_pairs_is_refused(tmp_path):
    write(tmp_path / "case-x.txt~", "an editor's\ncopy\nof three\n")
    assert "holds no pair of sentences" in message(read_pairs, str(tmp_path))
    for name in ("case-x.txt", "case-x.txt.gz"):
        write(tmp_path / name, "bad\ngood\n")
    assert "has two files of the paradigm case-x;" in message(read_pairs, str(tmp_path))
    assert "none.tsv" in message(read_pairs, str(tmp_path / "none.tsv"))


def test_means_are_of_paradigms_whatever_their_numbers_of_pairs():
    """A tie is wrong."""
    pairs = pairs_of("a", 10) + pairs_of("b", 30) + pairs_of("c", 20, "two")
    good = np.array([1.0] * 10 + [1.0] * 15 + [0.0] * 15 + [0.5] * 20)
    table = accuracies(pairs, good, np.full(60, 0.5))
    assert [(each.right, each.ties, each.accuracy) for each in table.paradigms] == [
        (10, 0, 1),
        (15, 0, 0.5),
        (0, 20, 0),
    ]
    assert [(each.name, each.accuracy) for each in table.phenomena] == [("one", 0.75), ("two", 0.0)]
    overall = table.overall
    assert (overall.accuracy, overall.pairs, overall.right, overall.ties) == (0.5, 60, 25, 20)
    # Of one paradigm Wilson's interval; of two as wide as the distances of both, put together and halved.
    assert table.phenomena[1].interval == pytest.approx(wilson(0, 20))
    (low_a, _), (low_b, high_b) = wilson(10, 10), wilson(15, 30)
    low, high = 0.75 - np.hypot(1 - low_a, 0.5 - low_b) / 2, 0.75 + (high_b - 0.5) / 2
    assert table.phenomena[0].interval == pytest.approx((low, high))
    assert format_table(table)[1].split() == ["one", "40", "0", "75.0", f"{100 * low:.1f}", "-", f"{100 * high:.1f}"]
    assert format_table(table)[-1].split()[:4] == ["overall", "60", "20", "50.0"]
    assert table.as_json()["overall"] == overall._asdict()
    both = accuracies(pairs_of("a", 1) + pairs_of("a", 1, "two"), [1, 1], [0, 2])
    assert [(each.name, each.accuracy) for each in both.phenomena] == [("one", 1), ("two", 0)]


def test_wilson():
    """The figures are those of Newcombe 1998, table I, method 3."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(29, 29) == pytest.approx((0.8830, 1.0), abs=5e-5)


@pytest.mark.slow
def test_all_of_zorro_is_read(shared_data):
    pairs = read_pairs(str(shared_data / "zorro"))
    assert len(pairs) == 46_000 and len({pair.paradigm for pair in pairs}) == 23
    assert len({pair.phenomenon for pair in pairs}) == 13
