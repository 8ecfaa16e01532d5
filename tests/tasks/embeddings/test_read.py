# SPDX-License-Identifier: Apache-2.0
"""What data of texts that belong together are read as, and what is said of data that cannot be."""

import dataclasses
import json

import pytest

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.embeddings.beir import OWN_TEXT
from bert_jax.tasks.embeddings.read import NO_TEXT, SAME, read_texts

CONFIG = TaskConfig(name="embeddings")


def table(path, *rows):
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return str(path)


def texts(found):
    return [example.texts for example in found]


def test_pairs_and_hard_negatives_of_any_number(tmp_path):
    own = read_texts(
        CONFIG, table(tmp_path / "dev.tsv", ("query", "positive"), ("a", "b"), ("b", "a"), ("c", "c")), "dev"
    )
    assert own.counts == {OWN_TEXT: 2}
    rows = [
        ("query", "positive", "negative", "negative_2"),
        ("a", "b", "c", "d"),
        ("e", "f", "", "g"),
        ("h", "i", "i", ""),
    ]
    found = read_texts(CONFIG, table(tmp_path / "train.tsv", *rows), "train")
    assert texts(found) == [("a", "b", "c", "d"), ("e", "f", "g"), ("h", "i")]
    assert found.counts == {SAME: 1} and found.metric == "ndcg@10" and found.columns == rows[0]
    lines = [
        {"anchor": "a", "positive": "b", "negatives": ["c", "d", "b"]},
        {"anchor": "e", "positive": "f", "negatives": []},
    ]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_texts(CONFIG, str(tmp_path / "l.jsonl"), "train")
    assert texts(found) == [("a", "b", "c", "d"), ("e", "f")] and found.counts == {SAME: 1}
    lists = {"query": "a", "pos": ["b", "c"], "neg": ["d"]}  # as FlagEmbedding has them
    (tmp_path / "l.jsonl").write_text(json.dumps(lists))
    assert texts(read_texts(CONFIG, str(tmp_path / "l.jsonl"), "train")) == [("a", "b", "d"), ("a", "c", "d")]
    (tmp_path / "l.jsonl").write_text(json.dumps(lists | {"pos": []}))
    with pytest.raises(InputError, match="in all 1 rows query or pos is empty"):
        read_texts(CONFIG, str(tmp_path / "l.jsonl"), "train")


def test_columns_by_setting(tmp_path):
    source = table(tmp_path / "train.tsv", ("x", "y", "z", "w"), ("a", "b", "c", "3"))
    named = TaskConfig(name="embeddings", text_column="y", second_text_column="x", label_column="w")
    (example,) = read_texts(named, table(tmp_path / "test.tsv", ("x", "y", "z", "w"), ("a", "b", "c", "3")), "test")
    assert example.texts == ("b", "a") and example.score == 3
    negatives = dataclasses.replace(named, label_column="", embedding=EmbeddingConfig(negative_columns="z, w"))
    assert texts(read_texts(negatives, source, "train")) == [("b", "a", "c", "3")]


def test_a_text_a_line(tmp_path):
    def read(content, name="train.txt", split="train", config=CONFIG):
        (tmp_path / name).write_text(content)
        return read_texts(config, str(tmp_path / name), split)

    found = read("First .\nSecond .\n\nThe third has\ta tab .\n")
    assert texts(found) == [(text, text) for text in ("First .", "Second .", "The third has\ta tab .")]
    assert found[2].where.endswith("train.txt:4") and found.columns == ("lines",)
    assert texts(read("text\nFirst .\n")) == [("First .", "First .")]  # a column, as before
    assert texts(read("anchor\tpositive\na\tb\n")) == [("a", "b")]
    with pytest.raises(InputError, match=r"train\.txt: all lines have tabs"):
        read("a\tb\nc\td\n")
    with pytest.raises(InputError, match=r"train.tsv has no column anchor, positive"):
        read("First .\nSecond .\n", "train.tsv")
    with pytest.raises(InputError, match="single texts score no vectors"):
        read("First .\nSecond .\n", "dev.txt", "dev")


def test_labels_that_are_not_used_are_said(tmp_path):
    found = read_texts(CONFIG, table(tmp_path / "train.tsv", ("text", "label"), ("a", "x"), ("b", "y")), "train")
    assert texts(found) == [("a", "a"), ("b", "b")] and found.counts == {"'label' is not used with texts alone:": 2}
    rows = [("anchor", "positive", "negative", "score"), ("a", "b", "c", "1")]
    found = read_texts(CONFIG, table(tmp_path / "train.tsv", *rows), "train")
    assert texts(found) == [("a", "b", "c")] and found.counts == {"'score' is not used with negatives:": 1}


def test_scores_of_a_teacher_stay_with_their_texts(tmp_path):
    def read(*rows):
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_texts(CONFIG, str(tmp_path / "train.jsonl"), "train")

    row = {"query": "a", "positive": ["b", "c"], "negative": ["d", "b", ""], "scores": [4, 3.5, 1, -2, 0]}
    with pytest.raises(InputError, match=r"train\.jsonl:1 has 5 scores for 4 positives and negatives"):
        read(row)
    found = read(row | {"negative": ["d", "b", " "]})
    assert texts(found) == [("a", "b", "d"), ("a", "c", "d", "b")] and found.counts["negatives equal to the positive"]
    assert [each.scores for each in found] == [(4.0, 1.0), (3.5, 1.0, -2.0)]
    task = make_task(dataclasses.replace(CONFIG, embedding=EmbeddingConfig(loss="kl")))
    assert task.settle(found).embedding.loss == "kl"
    with pytest.raises(InputError, match="not all examples have them"):
        task.settle(read({"query": "a", "positive": "b", "negative": "c"}, row | {"negative": ["d", "b", " "]}))
    with pytest.raises(InputError, match=r"train\.jsonl:1"):
        read({"query": "a", "positive": "b", "negative": "c", "scores": ["x", 1]})


def test_graded_pairs_choose_the_metric_of_dev(tmp_path):
    rows = [("sentence_A", "sentence_B", "relatedness_score"), ("a", "b", "3.5"), ("c", "d", "1")]
    graded = table(tmp_path / "dev.tsv", *rows)
    found = read_texts(CONFIG, graded, "dev")
    assert [example.score for example in found] == [3.5, 1.0] and all(found[0].is_query(place) for place in (0, 1))
    plain = table(tmp_path / "train.tsv", ("text",), ("a",), ("b",), (" ",))
    found = read_texts(CONFIG, f"{plain},{graded}", "train")
    assert texts(found) == [("a", "a"), ("b", "b")] and found.metric == "spearman"
    assert found[0].is_query(1)


def test_pairs_of_nli(tmp_path):
    rows = [
        ("premise", "hypothesis", "label"),
        ("a", "b", "entailment"),
        ("a", "c", "contradiction"),
        ("a", "d", "neutral"),
    ]
    rows += [("e", "f", "entailment"), ("a", "g", "entailment"), ("h", "i", "contradiction")]
    found = read_texts(CONFIG, table(tmp_path / "train.tsv", *rows), "train")
    assert texts(found) == [("a", "b", "c"), ("a", "g", "c"), ("e", "f")]
    assert found.counts == {"pairs that are not entailment": 3}
    numbers = [("premise", "hypothesis", "label"), ("a", "b", "0"), ("a", "c", "2")]
    source = table(tmp_path / "numbers.tsv", *numbers)
    with pytest.raises(InputError, match=r"numbers.tsv:2: label '0' is not one of entailment, .*task.labels"):
        read_texts(CONFIG, source, "train")
    named = TaskConfig(name="embeddings", labels="entailment,neutral,contradiction")
    assert texts(read_texts(named, source, "train")) == [("a", "b", "c")]


def test_questions_and_their_paragraphs(tmp_path):
    def article(n):
        return {
            "title": "t",
            "paragraphs": [{"context": f"text {n}", "qas": [{"id": str(n), "question": f"q{n}", "answers": []}]}],
        }

    path = tmp_path / "all.json"
    path.write_text(json.dumps({"data": [article(number) for number in range(3)]}))
    assert texts(read_texts(CONFIG, f"{path}[:2],{path}[2:]", "train")) == [("q0", "text 0"), ("q1", "text 1")]
    assert texts(read_texts(CONFIG, f"{path}[:2],{path}[2:]", "dev")) == [("q2", "text 2")]
    assert len(read_texts(CONFIG, str(path), "train")) == 3


@pytest.mark.parametrize(
    ("rows", "split", "problem"),
    [
        (
            [("x", "y"), ("a", "b")],
            "train",
            r"such as task\.text_column",
        ),
        ([("sentence1", "sentence2", "score"), ("a", "b", "")], "train", r":2 has no 'score'; give each pair a score"),
        ([("sentence1", "sentence2", "score"), ("a", "b", "x")], "train", r":2: label 'x' is not a finite number"),
        ([("text",), ("a",)], "dev", "give a dev set of pairs"),
        (
            [("premise", "hypothesis", "label"), ("a", "b", "entailment"), ("a", "b", "both")],
            "train",
            r":3: label 'both'",
        ),
        ([("anchor", "positive")], "train", r"holds no example"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, rows, split, problem):
    with pytest.raises(InputError, match=problem):
        read_texts(CONFIG, table(tmp_path / f"{split}.tsv", *rows), split)


def test_columns_that_are_missing_and_sides_that_are_empty(tmp_path):
    source = table(tmp_path / "train.tsv", ("anchor", "positive"), ("", "b"), ("c", " "), ("d", "e"))
    found = read_texts(CONFIG, source, "train")
    assert texts(found) == [("d", "e")] and found.counts == {NO_TEXT: 2}
    nothing = table(tmp_path / "dev.tsv", ("anchor", "positive"), ("a", ""), ("b", ""))
    with pytest.raises(InputError, match="in all 2 rows anchor or positive is empty"):
        read_texts(CONFIG, nothing, "dev")
    named = TaskConfig(name="embeddings", embedding=EmbeddingConfig(negative_columns="bad"))
    with pytest.raises(InputError, match="has no column bad; it has 'anchor', 'positive': set the column of the task"):
        read_texts(named, source, "train")
    (tmp_path / "a.jsonl").write_text('{"anchor": null, "positive": "b"}\n{"anchor": 5, "positive": "b"}\n')
    with pytest.raises(InputError, match=r"a.jsonl:2: 'anchor' is 5, not a text"):
        read_texts(CONFIG, str(tmp_path / "a.jsonl"), "train")
