# SPDX-License-Identifier: Apache-2.0
"""Classes and numbers of one's own data: columns, labels, rows as Google's code makes them, predictions, metrics."""

import itertools
import json

import numpy as np
import pytest
from builders import message, write

from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.classify import ClassificationTask, RegressionTask
from bert_jax.tasks.classify_read import is_pair
from bert_jax.tasks.labels import ClassifyExample
from bert_jax.tasks.texts import Classified, Scored
from bert_jax.text.fitting import pair_lengths


def classify(labels=(), **settings):
    return ClassificationTask(TaskConfig(name="classification", **settings), labels)


def regression(**settings):
    return RegressionTask(TaskConfig(name="regression", **settings))


def example(text="a", second=None, label=None, id=0):
    return ClassifyExample(text, second, label, id, "f:1")


def labelled(*labels):
    return [example(label=label) for label in labels]


@pytest.fixture
def labels_in(tmp_path):
    """Returns the labels that a task reads from a file."""

    def labels_in(task, name, content):
        found = task.read(write(tmp_path / name, content), name.partition(".")[0])
        return [each.label for each in found]

    return labels_in


# Reading


@pytest.mark.parametrize(
    ("header", "settings", "expected"),
    [
        ("label\tReview", {}, ("two", None, "one")),
        ("gold_label\tpremise\thypothesis", {}, ("two", "three", "one")),
        ("a\tb\tc", {"text_column": "c", "second_text_column": "a", "label_column": "b"}, ("three", "one", "two")),
        ("text\tx\tlabel", {"second_text_column": "x"}, ("one", "two", "three")),
        ("sentence1\tsentence2\tlabel", {"text_column": "sentence2"}, ("two", None, "three")),
    ],
)
def test_columns_are_named_or_guessed(tmp_path, header, settings, expected):
    values = ["one", "two", "three"][: header.count("\t") + 1]
    path = write(tmp_path / "a.tsv", header + "\n" + "\t".join(values) + "\n")
    found = classify(**settings).read(path, "train")
    assert [*found] == [(*expected, 0, f"{path}:2")]
    assert found.columns[0] == header.split("\t")[values.index(expected[0])]


@pytest.mark.parametrize(
    ("task", "name", "content", "labels"),
    [
        # a hidden label of test is unknown, but not a class of that name; of dev it is refused as no class
        (classify(("no", "yes")), "test.csv", "text,label\na,-1\nb,no\n", [None, "no"]),
        (classify(("0", "1")), "test.csv", "text,label\na,-1.0\n", [None]),
        (classify(("0", "1")), "test.jsonl", '{"text": "a", "label": -1}', [None]),
        (regression(), "test.jsonl", '{"text": "a", "label": -1}', [-1.0]),
        (classify(("no", "yes")), "dev.csv", "text,label\na,-1\n", ["-1"]),
        # pairs without an agreed label are left out, as SNLI has them; elsewhere "-" is a name like another
        (classify(), "train.tsv", "gold_label\tpremise\thypothesis\nx\ta\tb\n-\tc\td\n", ["x"]),
        (classify(), "test.tsv", "gold_label\tpremise\thypothesis\nx\ta\tb\n-\tc\td\n", ["x", None]),
        (classify(), "dev.tsv", "label\tpremise\thypothesis\nx\ta\tb\n-\tc\td\n", ["x", "-"]),
    ],
)
def test_labels_that_are_hidden_or_not_agreed(labels_in, task, name, content, labels):
    assert labels_in(task, name, content) == labels


def test_ids_keep_their_zeros(tmp_path):
    path = write(tmp_path / "test.tsv", "id\ttext\n00123\ta\n123\tb\n0\tc\n+5\td\n")
    assert [each.id for each in classify().read(path, "test")] == ["00123", 123, 0, "+5"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.csv", 'id,text,label\n5,"a, b",1\n6,c,0\n'),
        ("train.jsonl", '{"id": 5, "text": "a, b", "label": 1}\n{"id": "6", "text": "c", "label": 0.0}\n'),
        ("train.json", '[{"id": 5, "text": "a, b", "label": "1"}, {"id": 6, "text": "c", "label": "0"}]'),
    ],
)
def test_every_format_gives_the_same_examples(tmp_path, name, content):
    path = write(tmp_path / name, content)
    assert [each[:4] for each in classify().read(path, "train")] == [("a, b", None, "1", 5), ("c", None, "0", 6)]
    assert classify().read(path, "dev") == []


@pytest.mark.parametrize(
    ("name", "content", "settings", "problem"),
    [
        ("a.tsv", "a\tb\n1\t2\n", {}, " has no column 'text'; it has"),
        (
            "a.tsv",
            "text\tb\n1\t2\n",
            {},
            " has no column 'label' or 'gold_label' or 'labels' of labels; it has 'text', 'b': name it in task.label_c",
        ),
        ("a.tsv", "text\tlabel\na\t1\nb\t\n", {}, ":3 has no label; training and dev examples need one"),
        ("a.jsonl", '{"text": 5, "label": "a"}', {}, ":1: 'text' is 5, not a text"),
        ("a.jsonl", '{"text": "x", "label": "b"}\n{"label": "a"}', {}, ":2 has no 'text', a text"),
        ("a.jsonl", '{"text": "x", "label": ["a"]}', {}, ":1: label ['a'] is not a name or a finite number"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, name, content, settings, problem):
    path = write(tmp_path / name, content)
    assert path + problem in message(classify(**settings).read, path, "train")


# Labels


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (("b", "a", "b", "10"), ("10", "a", "b")),
        (("10", "9", "-1"), ("-1", "9", "10")),
        (("10.0", "1", "1.0", "2.0", "10", "2.0"), ("1", "10", "2.0")),  # equal numbers are one class
    ],
)
def test_labels_of_training_data_are_sorted(given, found):
    assert classify().find_labels(labelled(*given)) == found


def test_labels_of_the_settings_or_of_a_model():
    assert classify(("x", "y")).find_labels([]) == ("x", "y")
    config = TaskConfig(name="classification", labels="no, yes")
    assert ClassificationTask(config).labels == ("no", "yes")
    assert ClassificationTask(config, ("yes", "no")).labels == ("yes", "no")  # a trained model's win


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        (["1", "1.0"], "f:1: all examples have the label '1'"),
        ([], "have the label none"),
        ([str(number / 7) for number in range(30)], "numbers are for the task regression"),
    ],
)
def test_labels_that_cannot_be_learnt(labels, problem):
    assert problem in message(classify().find_labels, labelled(*labels))


def test_settings_that_cannot_be_used():
    for labels in ("a", "a,a", "a,,b"):
        assert "task.labels" in message(ClassificationTask, TaskConfig(name="classification", labels=labels))
    assert "one of accuracy, f1, macro_f1, mcc" in message(classify, metric="auc")
    assert "use macro_f1" in message(classify, ("a", "b", "c"), metric="f1")
    assert "one of pearson, spearman, ndcg@10" in message(regression, metric="f1")


@pytest.mark.parametrize(
    ("classes", "given", "numbers"),
    [
        ("2,1", "2,1", [0, 1]),
        ("LABEL_0,LABEL_1,LABEL_2", "2,LABEL_1,0.0", [2, 1, 0]),  # classes without names are counted
        ("1.0,2.0,3.0", "1,2,03,2.0,+1", [0, 1, 2, 1, 0]),
        ("1,1.0", "1.0,1", [1, 0]),  # of an older model
    ],
)
def test_numbers_of_labels(tokenizer, classes, given, numbers):
    made = classify(classes.split(",")).make_rows(labelled(*given.split(",")), tokenizer, True)
    assert [row.label for row in made.rows] == numbers


@pytest.mark.parametrize(
    ("classes", "label", "problem"),
    [
        ("2,1", "0", "f:1: label '0' is not one of '2', '1'"),  # a number is a name, and not the place of a class
        ("ham,spam", "LABEL_0", "label 'LABEL_0' is not"),
        ("LABEL_1,LABEL_2", "1", "label '1' is not"),
        ("1.0,2.0", "1e0", "label '1e0' is not"),
        ("1,1.0", "1.00", "label '1.00' is not"),
    ],
)
def test_labels_that_are_no_class(tokenizer, classes, label, problem):
    assert problem in message(classify(classes.split(",")).make_rows, labelled(label), tokenizer, True)


def test_other_spellings_are_counted_and_scored(tokenizer):
    task = classify(("1.0", "2.0", "3.0"))
    examples = labelled("1", "2", "3", "2", "1.0")
    assert task.make_rows(examples, tokenizer, True).counts == {
        f"labels '{number}' read as '{number}.0':": count for number, count in ((1, 1), (2, 2), (3, 1))
    }
    said = [Classified(each, {}) for each in ("1.0", "2.0", "2.0")]
    assert task.score(examples[:3], said)["accuracy"] == pytest.approx(2 / 3)


# Rows


def test_rows_are_those_of_the_paper(tokenizer):
    task, long = classify(("a", "b"), max_seq_length=8), "the of and " * 5
    expected = [
        (example("the"), "[CLS] the [SEP]", 3),
        (example("the", "of and"), "[CLS] the [SEP] of and [SEP]", 3),
        (example(long), "[CLS] the of and the of and [SEP]", 8),
        (example(long, "of and"), "[CLS] the of and [SEP] of and [SEP]", 5),
        (example(""), "[CLS] [SEP]", 2),
        (example("the", " "), "[CLS] the [SEP] [SEP]", 3),
    ]
    made = task.make_rows([each for each, *_ in expected], tokenizer, False)
    for number, (row, (_, tokens, first)) in enumerate(zip(made.rows, expected)):
        assert " ".join(tokenizer.tokens(row.token_ids)) == tokens and row.token_ids.dtype == np.int32
        assert row.type_ids.tolist() == [place >= first for place in range(len(row.token_ids))]
        assert (row.example, row.lengths, row.label) == (number, (len(row.token_ids),), None)
    assert made.counts == {"truncated": 2, "no token": 2}
    short = classify(max_seq_length=4)
    assert "task.max_seq_length 4 is below 5" in message(short.make_rows, [], tokenizer, False)


def test_pairs_are_cut_one_token_at_a_time_from_the_longer():
    for first, second, room in itertools.product(range(12), range(12), range(2, 14)):
        lengths = [first, second]
        while sum(lengths) > room:
            lengths[0 if lengths[0] > lengths[1] else 1] -= 1
        assert pair_lengths(first, second, room) == tuple(lengths), (first, second, room)


# Input of a user, predictions


@pytest.mark.parametrize(
    ("settings", "value", "expected"),
    [
        ({}, "a b", ("a b", None)),
        ({}, "a\tb", ("a", "b")),
        ({}, {"text": "a", "more": 1}, ("a", None)),
        ({}, {"sentence_A": "a", "sentence_B": "b"}, ("a", "b")),
        ({"second_text_column": "y"}, {"y": "b", "premise": "a"}, ("a", "b")),
        ({"second_text_column": "text"}, {"text": "b", "sentence": "a"}, ("a", "b")),
        ({"text_column": "x"}, "a\tb", ("a\tb", None)),
        ({"text_column": "x", "second_text_column": "y"}, {"x": "a", "y": "b"}, ("a", "b")),
    ],
)
def test_what_a_user_gives(settings, value, expected):
    found = classify(**settings).parse(value, "input:3")
    assert found == ClassifyExample(*expected, None, 0, "input:3")


@pytest.mark.parametrize(
    ("settings", "value", "problem"),
    [
        ({}, [], ""),
        ({"second_text_column": "text"}, {"text": "b"}, ""),
        ({"num_texts": 1}, {"premise": "a", "hypothesis": "b"}, ""),
        ({"num_texts": 2}, "a", ""),
        ({"num_texts": 1}, {"foo": "x"}, " has no column 'text'; it has 'foo'"),
        ({"num_texts": 2}, {"foo": "x"}, " has no column 'sentence1' and 'sentence2'; it has 'foo'"),
        ({}, {}, " has no column 'text'; it has nothing"),
    ],
)
def test_what_a_user_gives_by_mistake(settings, value, problem):
    assert message(classify(**settings).parse, value, "input:3").startswith(f"input:3{problem}")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"num_texts": 1, "second_text_column": "b"}, False),
        ({"second_text_column": "b"}, True),
        ({"text_column": "a"}, False),
    ],
)
def test_the_settings_say_whether_there_are_two_texts(settings, expected):
    assert is_pair(TaskConfig(**settings)) is expected


def test_predictions_of_classes(tmp_path):
    task = classify(("no", "yes"), metric="f1")
    examples = [example(label="yes", id=7), example(label="no", id="x\ty\nz"), example(label="yes")]
    found = task.decode(examples, [], np.array([[0, np.log(3)], [1000, 0], [0, 0]], np.float32))
    assert [each.label for each in found] == ["yes", "no", "no"]
    assert found[0].probabilities == pytest.approx({"no": 0.25, "yes": 0.75})
    assert json.loads(json.dumps(task.show(found[1]))) == {"label": "no", "probabilities": {"no": 1.0, "yes": 0.0}}
    assert task.score(examples, found) == pytest.approx({"accuracy": 2 / 3, "f1": 2 / 3})
    task.write(tmp_path, "test", examples, found)
    assert (tmp_path / "test.tsv").read_text() == "index\tprediction\n7\tyes\nx y z\tno\n0\tno\n"
    assert "f:1 has no label" in message(task.score, [example()], found[:1])


def test_regression(labels_in, tokenizer):
    task, examples = regression(), labelled(1.5, -20.0)
    assert labels_in(task, "test.tsv", "text\tscore\na\t1.5\nb\t-2e1\nc\t\n") == [1.5, -20.0, None]
    assert [row.label for row in task.make_rows(examples, tokenizer, True).rows] == [1.5, -20.0]
    found = task.decode(examples, [], np.array([[1.0], [0.5]]))
    assert found == [Scored(1.0), Scored(0.5)] and task.show(found[1]) == {"value": 0.5}
    assert task.score(examples, found) == pytest.approx({"pearson": 1, "spearman": 1})
    for value in ("nan", "inf", "x"):
        problem = f"train.tsv:2: label '{value}' is not a finite number"
        assert problem in message(labels_in, task, "train.tsv", f"text\tscore\na\t{value}\n")


@pytest.mark.parametrize("data", ["pairs", "single"])
def test_all_splits_have_as_many_texts_as_the_training_data(tmp_path, data):
    pairs = write(tmp_path / "pairs.tsv", "text1\ttext2\tlabel\na\tb\tx\n")
    single = write(tmp_path / "single.tsv", "text1\tlabel\na\tx\n")
    train, dev = (pairs, single) if data == "pairs" else (single, pairs)
    settled = ClassificationTask(classify().settle(classify().read(train, "train")), ("x", "y"))
    if data == "pairs":
        problem = "has no column 'sentence1' and 'sentence2'; it has 'text1', 'label'"
        assert problem in message(settled.read, f"{train},{dev}", "dev")
    else:
        assert settled.read(f"{train},{dev}", "dev")[0][:2] == ("a", None)  # as many as it was trained with


def test_rerankers_are_scored_by_the_order_of_the_candidates_of_each_query():
    examples = [
        ClassifyExample(query, label=grade) for query, grades in zip("abc", ("010", "100", "00")) for grade in grades
    ]
    values = [0.1, 0.5, 0.9, 0.3, 0.3, 0.1, 0.2, 0.1]  # a: its second is second; b: a tie is lost
    found = regression(metric="mrr@10").score(examples, [Scored(value) for value in values])
    assert (found["mrr@10"], found["recall@1"], found["recall@10"]) == (0.5, 0, 1) and "pearson" in found
    said = [Classified("0", {"0": 1 - value, "1": value}) for value in values]
    assert classify(("0", "1"), metric="ndcg@10").score(examples, said)["mrr@10"] == 0.5
