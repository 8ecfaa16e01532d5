# SPDX-License-Identifier: Apache-2.0
"""Rows of SQuAD: windows cover the context, labels are at the answer, and whatever is left out is counted."""

import tracemalloc

import numpy as np
import pytest

from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.squad.read import Answer, SquadExample
from bert_jax.tasks.squad.windows import _windows, find_answer, make_squad_rows
from bert_jax.text.tokenizer import wordpiece_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCAB = [*SPECIAL, "what", "?", *(f"w{number}" for number in range(40)), "new", "##s", "paper", "##paper", "."]
CONTEXT = " ".join(f"w{number}" for number in range(30))


@pytest.fixture(scope="module")
def tokenizer():
    return wordpiece_tokenizer(VOCAB, lowercase=True)


def rows_of(tokenizer, *examples, training=True, name="squad1", **settings):
    settings = {"max_seq_length": 15, "doc_stride": 4, "max_query_length": 4} | settings
    return make_squad_rows(examples, tokenizer, training, TaskConfig(name=name, **settings))


def question(context=CONTEXT, answer="", start=0, **options):
    answers = (Answer(answer, start),) if answer else ()
    return SquadExample("1", "What?", context, answers, **options)


def test_windows_and_labels(tokenizer):
    rows, counts = rows_of(tokenizer, question(answer="w12 w13", start=CONTEXT.index("w12")))
    labels = [(0, 0), (12, 13), (8, 9), (4, 5), (0, 0), (0, 0)]
    assert len(rows) == 6  # 10 tokens of 30, each 4 on
    for number, (row, label) in enumerate(zip(rows, labels)):
        tokens = tokenizer.tokens(row.token_ids)
        assert tokens == ["[CLS]", "what", "?", "[SEP]", *CONTEXT.split()[4 * number :][:10], "[SEP]"]
        assert row.type_ids.tolist() == [0] * 4 + [1] * (len(tokens) - 4)
        assert row.lengths == (len(tokens),) and row.example == 0 and row.label == label
        assert row.token_ids.dtype == np.int32 and row.type_ids.dtype == np.uint8
    assert counts == {"windows without the answer": 3, "questions of several windows": 1}
    assert len(rows_of(tokenizer, question("w1 " * 12), training=False, doc_stride=1).rows) == 3


def test_long_questions_are_truncated(tokenizer):
    rows, counts = rows_of(tokenizer, SquadExample("1", "what " * 9, "w1"), training=False)
    assert tokenizer.tokens(rows[0].token_ids) == "[CLS] what what what what [SEP] w1 [SEP]".split()
    assert counts == {"questions truncated": 1}


@pytest.mark.parametrize(
    ("context", "answer", "start", "tokens"),
    [
        ("new newspaper.", "newspaper", 4, ["new", "##s", "##paper"]),
        ("the news.", "new", 4, ["new"]),  # Google takes the whole word
        ("w1\u00a0w2 w3", "w1 w2", 0, ["w1", "w2"]),  # another blank
        ("w1 w2", " w2 ", 2, ["w2"]),
    ],
)
def test_answers_by_characters(tokenizer, context, answer, start, tokens):
    rows, _ = rows_of(tokenizer, question(context, answer, start))
    start, end = rows[0].label
    assert tokenizer.tokens(rows[0].token_ids)[start : end + 1] == tokens


@pytest.mark.parametrize(
    ("context", "answer", "start", "place"),
    [
        ("a rome b rome", "rome", 9, (9, 13)),
        ("a rome b rome", "rome", 0, None),  # which one?
        ("a rome", "Rome", 2, None),
        ("a rome", "rome", 10**30, (2, 6)),
        ("a rome", " \n", 1, None),
        ("a  b\nc", "a b c", 0, (0, 6)),
    ],
)
def test_where_an_answer_is(context, answer, start, place):
    assert find_answer(question(context, answer, start)) == place


def test_what_is_left_out_is_counted(tokenizer):
    examples = [
        question("w1 w2", "w2", 3),
        question("w1 w2", "w2", 0),
        question("w1 w2", "w9", 0),
        question("w1 w2"),
        question("w1 w2", impossible=True),
        question(" \u200b\n", "w1", 0),
        question("w1 \u200b w2", "\u200b", 3),
        SquadExample("1", "", "w1", (Answer("w1", 0),)),
        SquadExample("1", "What?", "w1 w2", (Answer("w1", 0), Answer("w2", 3))),
    ]
    rows, counts = rows_of(tokenizer, *examples)
    assert [row.example for row in rows] == [0, 1, 7, 8]
    assert rows[-1].label == (4, 4) and set(counts.values()) == {1}
    assert {*counts} == {
        "answers found elsewhere than given",
        "skipped: answer not in the context",
        "skipped: no answer",
        "skipped: no answer (task squad2 learns from these)",
        "skipped: context without tokens",
        "skipped: answer without tokens",
        "questions without tokens",
        "questions of several answers, the first taken",
    }
    rows, counts = rows_of(tokenizer, *examples, training=False)
    assert [row.example for row in rows] == [0, 1, 2, 3, 4, 6, 7, 8]
    assert counts == {"skipped: context without tokens": 1, "questions without tokens": 1}


def test_no_answer_is_learnt_by_squad2(tokenizer):
    rows, counts = rows_of(tokenizer, question(impossible=True), question("w1"), name="squad2")
    assert {row.label for row in rows} == {(0, 0)} and {row.example for row in rows} == {0}
    assert counts == {"questions of several windows": 1, "skipped: no answer": 1}


def test_windows_of_a_long_context_take_memory_for_its_tokens_once():
    """The array of windows x tokens took 7 GB."""
    tracemalloc.start()
    windows = sum(1 for _ in _windows(200_000, 381, TaskConfig(name="squad1", doc_stride=128)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert windows == -(-(200_000 - 381) // 128) + 1 and peak < 64 * 200_000
