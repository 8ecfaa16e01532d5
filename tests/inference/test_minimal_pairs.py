# SPDX-License-Identifier: Apache-2.0
"""Minimal pairs: files of three kinds, ties, means and intervals."""

import gzip
import json

import numpy as np
import pytest

from bert_jax.errors import InputError
from bert_jax.inference.minimal_pairs import Pair, accuracies, format_table, read_pairs, wilson


def blimp_line(paradigm, good, bad, term="binding"):
    return json.dumps({"UID": paradigm, "linguistics_term": term, "sentence_good": good, "sentence_bad": bad})


def pairs_of(paradigm, count, phenomenon="one"):
    return [Pair("good", "bad", paradigm, phenomenon, f"x:{index}") for index in range(count)]


def test_blimp_lines_plain_and_gzip(tmp_path):
    lines = [blimp_line("a", f"good {index}", f"bad {index}") for index in range(3)]
    lines += ["", blimp_line("b", "He sees.", "He see.", "s-selection")]
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress((tmp_path / "x.jsonl").read_bytes()))
    plain, packed = (read_pairs(str(tmp_path / name)) for name in ("x.jsonl", "x.jsonl.gz"))
    assert [pair[:4] for pair in plain] == [pair[:4] for pair in packed]
    assert plain[0] == Pair("good 0", "bad 0", "a", "binding", f"{tmp_path / 'x.jsonl'}:1")
    assert plain[3].where.endswith(":5") and plain[3].phenomenon == "argument_structure"  # as the paper counts it
    assert [pair.paradigm for pair in read_pairs(str(tmp_path / "x.jsonl"), limit=1)] == ["a", "b"]


def test_zorro_files_and_directory(tmp_path):
    (tmp_path / "filler-gap-wh_question.txt").write_text("bad one .\ngood one .\nbad two .\ngood two .\n\n")
    (tmp_path / "case-pronoun.txt").write_text("bad\ngood\n")
    (tmp_path / "SOURCE.md").write_text("no pairs\n")
    found = read_pairs(str(tmp_path))
    assert [pair[:4] for pair in found] == [
        ("good", "bad", "case-pronoun", "case"),
        ("good one .", "bad one .", "filler-gap-wh_question", "filler-gap"),
        ("good two .", "bad two .", "filler-gap-wh_question", "filler-gap"),
    ]
    assert read_pairs(str(tmp_path / "case-pronoun.txt")) == found[:1]


def test_two_columns_with_and_without_a_header(tmp_path):
    (tmp_path / "mine.tsv").write_text("good\tbad\nHe sees.\tHe see.\n")
    (tmp_path / "other.tsv").write_text("He sees.\tHe see.\n")
    for number, header in enumerate(("\nGood\tBad", "sentence_good\tSentence_Bad ")):
        (tmp_path / f"{number}.tsv").write_text(f"{header}\nHe sees.\tHe see.\n")
        assert [pair[:2] for pair in read_pairs(str(tmp_path / f"{number}.tsv"))] == [("He sees.", "He see.")]
    (pair,), (other,) = (read_pairs(str(tmp_path / name)) for name in ("mine.tsv", "other.tsv"))
    assert pair[:4] == ("He sees.", "He see.", "mine", "mine") and other[:2] == pair[:2]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", blimp_line("a", "g", "b") + '\n{"UID": "a", "senten\n', r"x.jsonl:2 is not JSON"),
        ("x.jsonl", '{"UID": 1}\n', r"x.jsonl:1 has no 'sentence_good', a text"),
        ("x.jsonl", blimp_line("a", "g", "b") + "\n[1]\n", r"x.jsonl:2 is \[1\], not an object"),
        ("x.jsonl", blimp_line("a", "g", " "), r"x.jsonl:1: a sentence of the pair is empty"),
        ("x.txt", "bad\ngood\nbad\n", r"x.txt:3 is a sentence without a partner"),
        ("x.txt", "bad\n\nbad\ngood", r"x.txt:1: a sentence of the pair is empty"),
        ("x.tsv", "a\tb\na\tb\tc\n", r"x.tsv:2 is not two columns"),
        ("x.txt", "\n \n", "holds no pair"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read_pairs(str(tmp_path / name))


def test_what_is_no_file_of_pairs_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no pair of sentences"):
        read_pairs(str(tmp_path))
    (tmp_path / "case-x.txt~").write_text("an editor's\ncopy\nof three\n")
    with pytest.raises(InputError, match="holds no pair of sentences"):
        read_pairs(str(tmp_path))
    for name in ("case-x.txt", "case-x.txt.gz"):
        (tmp_path / name).write_text("bad\ngood\n")
    with pytest.raises(InputError, match="has two files of the paradigm case-x;"):
        read_pairs(str(tmp_path))
    with pytest.raises(InputError, match=r"none\.tsv"):
        read_pairs(str(tmp_path / "none.tsv"))
    (tmp_path / "x.txt").write_bytes(b"good\n\xff\n")
    with pytest.raises(InputError, match=r"x\.txt:2 is not UTF-8"):
        read_pairs(str(tmp_path / "x.txt"))


def test_a_tie_is_wrong():
    table = accuracies(pairs_of("a", 4), [1.0, 2.0, 2.0, 0.0], [0.0, 2.0, 2.0, 1.0])
    assert (table.overall.right, table.overall.ties, table.overall.accuracy) == (1, 2, 0.25)


def test_means_are_of_paradigms_whatever_their_numbers_of_pairs():
    pairs = pairs_of("a", 10) + pairs_of("b", 30) + pairs_of("c", 20, "two")
    good = np.array([1.0] * 10 + [1.0] * 15 + [0.0] * 15 + [0.0] * 20)
    table = accuracies(pairs, good, np.full(60, 0.5))
    assert [each.accuracy for each in table.paradigms] == [1.0, 0.5, 0.0]
    assert [(each.name, each.accuracy) for each in table.phenomena] == [("one", 0.75), ("two", 0.0)]
    assert table.overall.accuracy == 0.5 and table.overall.pairs == 60
    # Of one paradigm Wilson's interval; of two as wide as the distances of both, put together and halved.
    assert table.phenomena[1].interval == pytest.approx(wilson(0, 20))
    (low_a, _), (low_b, high_b) = wilson(10, 10), wilson(15, 30)
    below, above = np.hypot(1 - low_a, 0.5 - low_b) / 2, (high_b - 0.5) / 2
    assert table.phenomena[0].interval == pytest.approx((0.75 - below, 0.75 + above))
    lines = format_table(table)
    assert lines[-1].startswith("overall") and lines[-1].split()[1:4] == ["60", "0", "50.0"]
    both = accuracies(pairs_of("a", 1) + pairs_of("a", 1, "two"), [1, 1], [0, 2])
    assert [(each.name, each.accuracy) for each in both.phenomena] == [("one", 1), ("two", 0)]


def test_an_interval_of_means_covers_the_truth():
    """Of 1,000 samples of four paradigms, some 950 have an interval with the true mean in it."""
    rng = np.random.default_rng(0)
    truth = np.array([0.5, 0.7, 0.95, 0.99])
    covered = 0
    for _ in range(1000):
        outcomes = [(name, rng.random(50) < share) for name, share in zip("abcd", truth)]
        pairs = [pair for name, _ in outcomes for pair in pairs_of(name, 50)]
        good = np.concatenate([right for _, right in outcomes]).astype(float)
        low, high = accuracies(pairs, good, np.full(200, 0.5)).overall.interval
        covered += low <= truth.mean() <= high
    assert 930 <= covered <= 975


def test_wilson():
    """The figures are those of Newcombe 1998, table I, method 3."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(29, 29) == pytest.approx((0.8830, 1.0), abs=5e-5)


@pytest.mark.slow
def test_real_files(shared_data):
    """All of BLiMP and Zorro is read."""
    if not (shared_data / "blimp").is_dir():
        pytest.skip("no BLiMP there")
    pairs = read_pairs(str(shared_data / "blimp" / "blimp.jsonl.gz"), limit=2)
    table = accuracies(pairs, np.ones(len(pairs)), np.zeros(len(pairs)))
    assert len(table.paradigms) == 67 and len(table.phenomena) == 12
    zorro = read_pairs(str(shared_data / "zorro"))
    assert len(zorro) == 46_000 and len({pair.paradigm for pair in zorro}) == 23
    assert len({pair.phenomenon for pair in zorro}) == 13
