# SPDX-License-Identifier: Apache-2.0
"""Instances are those of google-research/bert (nsp) and google-research/albert (sop), number by number."""

import hashlib
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from bert_jax.data import instances
from bert_jax.data.records import row_dtype, unpack_word_starts
from bert_jax.text.normalize import Normalizer
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.vocab import Template
from bert_jax.text.wordpiece import WordPiece

GOLDENS = json.loads((Path(__file__).parents[1] / "golden" / "instances.json").read_text())["cases"]


def bounds_of(documents: list[list[int]]) -> list[list[int]]:
    """Returns the documents as positions in a flat array, from the lengths of their sentences."""
    position, bounds = 0, []
    for document in documents:
        bounds.append([position + length for length in itertools.accumulate(document, initial=0)])
        position = bounds[-1][-1]
    return bounds


def make(golden: dict, **changes) -> np.ndarray:
    options = {
        name: golden[name] for name in ("max_seq_length", "short_seq_rate", "duplicates", "next_sentence")
    } | changes
    return instances.create_instances(bounds_of(golden["documents"]), rng=random.Random(golden["seed"]), **options)


@pytest.mark.parametrize("name", GOLDENS)
def test_instances_are_the_references(name):
    golden = GOLDENS[name]
    order = ["label", "first_start", "first_stop", "second_start", "second_stop"]
    lines = [" ".join(map(str, made)) for made in make(golden)[order].tolist()]
    assert lines[:5] == golden["first_instances"]
    assert len(lines) == golden["num_instances"]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == golden["sha256"]


@pytest.mark.parametrize("name", ["nsp_usual", "nsp_never_short", "nsp_sentences_too_long"])
def test_none_covers_every_token_once_with_whole_sentences(name):
    golden = GOLDENS[name]
    limit = golden["max_seq_length"] - 2
    made = np.sort(make(golden, next_sentence="none", duplicates=1), order="first_start")
    starts, stops = made["first_start"], made["first_stop"]
    assert (made["label"] == -1).all() and (made["second_start"] == made["second_stop"]).all()
    bounds = bounds_of(golden["documents"])
    assert starts[0] == 0 and (starts[1:] == stops[:-1]).all() and stops[-1] == bounds[-1][-1]
    assert (stops - starts).min() >= 1 and (stops - starts).max() == limit
    homes = np.searchsorted([document[-1] for document in bounds], starts, side="right")
    assert (np.searchsorted([document[-1] for document in bounds], stops) == homes).all()
    if name == "nsp_never_short":  # no sentence is longer than a row: none is cut, and each row is as full as can be
        for start, stop, home in zip(starts, stops, homes):
            following = [end for end in bounds[home] if end > stop]
            assert stop in bounds[home] and (not following or following[0] - start > limit)


def test_short_spans_have_any_length_from_two_on():
    made = instances.create_instances(bounds_of([[1] * 12] * 50), 5, 1.0, 1, random.Random(0), "none")
    assert set(made["first_stop"] - made["first_start"]) == {2, 3}


def instances_of(*spans: tuple[int, int, int, int]) -> np.ndarray:
    return np.array([(*span, label) for label, span in enumerate(spans)], instances.INSTANCE)


PAIRS = instances_of((1, 3, 3, 4), (0, 1, 5, 6), (1, 3, 6, 10))
SINGLES = instances_of((1, 3, 3, 3), (0, 1, 1, 1), (6, 10, 10, 10))


@pytest.mark.parametrize(
    ("made", "template", "expected", "first_lengths"),
    [
        (PAIRS, {}, ["a ##b / c /", "##d / ##d /", "a ##b / a ##b ##b c /"], [4, 3, 4]),
        (PAIRS, {"second_type": 0}, ["a ##b / c /", "##d / ##d /", "a ##b / a ##b ##b c /"], [6, 5, 9]),
        (PAIRS, {"separators": 2}, ["a ##b / / c /", "##d / / ##d /", "a ##b / / a ##b ##b c /"], [5, 4, 5]),
        (SINGLES, {"separators": 2}, ["a ##b /", "##d /", "a ##b ##b c /"], [4, 3, 6]),
    ],
)
def test_rows_hold_the_spans_of_instances(made, template, expected, first_lengths):
    vocab = ["[PAD]", "[UNK]", "[CLS]", "/", "[MASK]", "a", "##b", "c", "##d"]
    tokenizer = Tokenizer(WordPiece(vocab, Normalizer(True), template=Template((*vocab[:5],), **template)))
    tokens, numbers = np.array([8, 5, 6, 7, 7, 8, 5, 6, 6, 7]), np.array([10, 20, 30])
    separators = template.get("separators", 1)
    row_length = 8 + separators  # the third pair fills it
    rows = instances.make_rows(made, numbers, tokens, tokenizer, row_dtype(row_length, 1, len(vocab)))
    for row, text in zip(rows, expected, strict=True):
        words = ["[CLS]", *text.split()]
        padded = words + ["[PAD]"] * (row_length - len(words))
        assert [vocab[token] for token in row["token_ids"]] == padded and row["lengths"] == len(words)
        starts = unpack_word_starts(row["word_starts"], row_length)
        assert starts.tolist() == [word[:2] != "##" and word != "[PAD]" for word in padded]
    assert (instances.sequence_lengths(made, separators=separators) == rows["lengths"][:, 0]).all()
    assert rows["first_lengths"][:, 0].tolist() == first_lengths
    assert (rows["labels"][:, 0] == made["label"]).all() and (rows["numbers"][:, 0] == numbers).all()


def test_tokens_in_no_instance_are_counted_once():
    assert instances.count_dropped(PAIRS, 10) == 1  # the fifth token
    assert instances.count_dropped(instances_of((5, 9, 0, 2), (1, 6, 20, 22), (7, 8, 8, 12)), 30) == 16
