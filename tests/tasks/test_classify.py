# SPDX-License-Identifier: Apache-2.0
"""Classes and numbers of one's own data: columns, labels, rows as Google's code makes them, predictions, metrics."""

import json
import random
import time
from functools import partial

import numpy as np
import pytest
from builders import message, write

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.classify import ClassificationTask, RegressionTask
from bert_jax.tasks.classify_read import is_pair
from bert_jax.tasks.labels import ClassifyExample
from bert_jax.tasks.texts import Classified, Scored, write_predictions
from bert_jax.text.fitting import pair_lengths


def classify(labels=(), **settings):
    return ClassificationTask(TaskConfig(name="classification", **settings), labels)


def example(text="a", second=None, label=None):
    return ClassifyExample(text, second, label, 0, "f:1")


# Reading


@pytest.mark.parametrize(
    ("header", "settings", "expected"),
    [
        ("text\tlabel", {}, ("one", None, "two")),
        ("label\tReview", {}, ("two", None, "one")),
        ("sentence_A\tsentence_B\tentailment_judgment", {}, ("one", "two", "three")),
        ("gold_label\tpremise\thypothesis", {}, ("two", "three", "one")),
        ("question\tpassage\tlabel", {}, ("one", "two", "three")),
        ("a\tb\tc", {"text_column": "b", "label_column": "a"}, ("two", None, "one")),
        ("a\tb\tc", {"text_column": "c", "second_text_column": "a", "label_column": "b"}, ("three", "one", "two")),
        ("text\tx\tlabel", {"second_text_column": "x"}, ("one", "two", "three")),
        ("sentence1\tsentence2\tlabel", {"text_column": "sentence2"}, ("two", None, "three")),
    ],
)
def test_columns_are_named_or_guessed(tmp_path, header, settings, expected):
    values = ["one", "two", "three"][: header.count("\t") + 1]
    path = write(tmp_path / "a.tsv", header + "\n" + "\t".join(values) + "\n")
    (found,) = classify(**settings).read(path, "train")
    assert found[:3] == expected and found.id == 0 and found.where == f"{path}:2"


def test_the_columns_that_were_read_are_known(tmp_path):
    path = write(tmp_path / "test.tsv", "id\tquestion\tpassage\n1\ta\tb\n")
    assert classify().read(path, "test").columns == ("question", "passage")


def test_a_hidden_label_of_test_is_unknown(tmp_path):
    path = write(tmp_path / "test.csv", "text,label\na,-1\nb,no\n")
    assert [each.label for each in classify(("no", "yes")).read(path, "test")] == [None, "no"]
    numbers = write(tmp_path / "test.jsonl", '{"text": "a", "label": -1}')
    assert classify(("0", "1")).read(numbers, "test")[0].label is None
    assert classify(("-1", "1")).read(numbers, "test")[0].label == "-1"  # a class
    assert RegressionTask(TaskConfig(name="regression")).read(numbers, "test")[0].label == -1.0
    dev = write(tmp_path / "dev.csv", "text,label\na,-1\n")
    assert classify(("no", "yes")).read(dev, "dev")[0].label == "-1"  # which is refused as no class


def test_pairs_without_an_agreed_label_are_left_out(tmp_path):
    rows = "gold_label\tsentence1\tsentence2\nneutral\ta\tb\n-\tc\td\n"  # as SNLI has them
    found = classify().read(write(tmp_path / "train.tsv", rows), "train")
    assert [each.label for each in found] == ["neutral"] and found.counts == {"skipped: no agreed label": 1}
    assert [each.label for each in classify().read(write(tmp_path / "test.tsv", rows), "test")] == ["neutral", None]
    named = write(tmp_path / "dev.tsv", rows.replace("gold_label", "label"))
    assert [each.label for each in classify().read(named, "dev")] == ["neutral", "-"]  # a name like another


def test_ids_keep_their_zeros(tmp_path):
    path = write(tmp_path / "test.tsv", "id\ttext\n00123\ta\n123\tb\n0\tc\n+5\td\n")
    assert [each.id for each in classify().read(path, "test")] == ["00123", 123, 0, "+5"]


def test_every_format_gives_the_same_examples(tmp_path):
    write(tmp_path / "train.csv", 'id,text,label\n5,"a, b",1\n6,c,0\n')
    write(tmp_path / "dev.jsonl", '{"id": 5, "text": "a, b", "label": 1}\n{"id": "6", "text": "c", "label": 0.0}\n')
    write(tmp_path / "test.json", json.dumps([{"id": 5, "text": "a, b"}, {"id": 6, "text": "c", "label": None}]))
    task = classify()
    found = {split: [each[:4] for each in task.read(str(tmp_path), split)] for split in ("train", "dev", "test")}
    assert found["train"] == found["dev"] == [("a, b", None, "1", 5), ("c", None, "0", 6)]
    assert found["test"] == [("a, b", None, None, 5), ("c", None, None, 6)]
    assert task.read(write(tmp_path / "own.tsv", "text\tlabel\na\tb\n"), "dev") == []


@pytest.mark.parametrize(
    ("content", "settings", "problem"),
    [
        ("a\tb\n1\t2\n", {}, "a.tsv has no column 'text'; it has"),
        ("a\tb\n1\t2\n", {"text_column": "c"}, "a.tsv has no column 'c'; it has 'a', 'b'"),
        ("text\tb\n1\t2\n", {}, "a.tsv has no column 'label or gold_label or labels' of labels; it has 'text', 'b'"),
        ("text\tb\n1\t2\n", {"label_column": "lab"}, "a.tsv has no column 'lab' of labels; it has 'text', 'b'"),
        (
            "text\tlabel\n1\t2\n",
            {"text_column": "text", "second_text_column": "text"},
            "a.tsv has no column 'text' and 'text'; it has",
        ),
        ("", {}, "a.tsv holds no example"),
        ("text\tlabel\n", {}, "a.tsv holds no example"),
        ("text\tlabel\nx\n", {}, "a.tsv:2 has 1 columns"),
    ],
)
def test_what_is_wrong_with_columns_is_said(tmp_path, content, settings, problem):
    path = write(tmp_path / "a.tsv", content)
    assert problem.removeprefix(":1 ") in message(classify(**settings).read, path, "train")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": 5, "label": "a"}', ":2: 'text' is 5, not a text"),
        ('{"label": "a"}', ":2 has no 'text', a text"),
        ('{"text": "x", "label": ["a"]}', ":2: label ['a'] is not a name or a finite number"),
        ('{"text": "x", "label": NaN}', ":2: label nan is not a name or a finite number"),
    ],
)
def test_a_bad_object_is_named(tmp_path, line, problem):
    path = write(tmp_path / "a.jsonl", '{"text": "x", "label": "b"}\n' + line + "\n")
    assert path + problem in message(classify().read, path, "train")


@pytest.mark.parametrize("task", [classify(), RegressionTask(TaskConfig(name="regression"))])
def test_labels_are_missed_when_data_are_read(tmp_path, task):
    for split in ("train", "dev"):
        path = write(tmp_path / f"{split}.tsv", "text\tlabel\na\t1\nb\t\nc\t\n")
        assert f"{path}:3 has no label; training and dev examples need one" in message(task.read, path, split)
    path = write(tmp_path / "test.tsv", "text\tlabel\na\t1\nb\t\n")
    assert task.read(path, "test")[1].label is None


# Labels


def test_labels_of_training_data_are_sorted():
    assert classify().find_labels([example(label=each) for each in ("b", "a", "b", "10")]) == ("10", "a", "b")
    assert classify().find_labels([example(label=each) for each in ("10", "9", "-1")]) == ("-1", "9", "10")
    assert classify(labels=("x", "y")).find_labels([]) == ("x", "y")
    assert classify(labels=(), metric="mcc").labels == ()
    task = ClassificationTask(TaskConfig(name="classification", labels="no, yes"))
    assert task.labels == ("no", "yes") and task.num_outputs == 2
    assert ClassificationTask(task.config, ("yes", "no")).labels == ("yes", "no")  # a trained model's win


def test_labels_that_cannot_be_learnt():
    task = classify()
    assert "f:1: all examples have the label 'a'" in message(task.find_labels, [example(label="a")] * 3)
    assert "have the label none" in message(task.find_labels, [])
    numbers = [example(label=str(number / 7)) for number in range(30)]
    assert "numbers are for the task regression" in message(task.find_labels, numbers)
    for labels in ("a", "a,a", "a,,b"):
        assert "task.labels" in message(ClassificationTask, TaskConfig(name="classification", labels=labels))
    assert "one of accuracy, f1, macro_f1, mcc" in message(lambda: classify(metric="auc"))
    assert "use macro_f1" in message(lambda: classify(("a", "b", "c"), metric="f1"))


def numbers_of(tokenizer, task, *values):
    return [row.label for row in task.make_rows([example(label=each) for each in values], tokenizer, True).rows]


def test_a_number_is_a_name_and_not_the_place_of_a_class(tokenizer):
    labels = partial(numbers_of, tokenizer)
    assert labels(classify(("2", "1")), "2", "1") == [0, 1]
    assert "f:1: label '0' is not one of '2', '1'" in message(labels, classify(("2", "1")), "0")
    stars = classify(("1 star", "2 stars", "3 stars"))
    assert "label '1' is not one of '1 star', '2 stars', '3 stars'" in message(labels, stars, "1")
    assert "label '0' is not one of 'ham', 'spam'" in message(labels, classify(("ham", "spam")), "0")
    by_user = ClassificationTask(TaskConfig(name="classification", labels="good,bad,odd"))
    assert "label '1' is not one of 'good', 'bad', 'odd'" in message(labels, by_user, "1")
    assert "label 'LABEL_0'" in message(labels, classify(("ham", "spam")), "LABEL_0")
    assert "f:1 has no label; training" in message(labels, classify(("no", "yes")), None)
    rows = classify(("no", "yes")).make_rows([example()], tokenizer, False).rows
    assert rows[0].label is None


def test_classes_without_names_are_counted(tokenizer):
    assert numbers_of(tokenizer, classify(("LABEL_0", "LABEL_1", "LABEL_2")), "2", "LABEL_1", "0.0") == [2, 1, 0]
    assert numbers_of(tokenizer, classify(("LABEL_1", "LABEL_0")), "1", "0") == [0, 1]
    assert "label '1'" in message(numbers_of, tokenizer, classify(("LABEL_1", "LABEL_2")), "1")


def test_equal_numbers_are_one_class(tokenizer):
    task = classify(("1.0", "2.0", "3.0"))
    made = task.make_rows([example(label=each) for each in ("1", "2", "03", "2.0", "+1")], tokenizer, True)
    assert [row.label for row in made.rows] == [0, 1, 2, 1, 0]
    assert made.counts["labels '2' read as '2.0':"] == 1 and made.counts["labels '+1' read as '1.0':"] == 1
    assert "label '1.5'" in message(numbers_of, tokenizer, task, "1.5")
    assert "label '1e0'" in message(numbers_of, tokenizer, task, "1e0")
    said = [Classified(each, {}) for each in ("1.0", "2.0", "2.0")]
    assert task.score([example(label=each) for each in ("1", "2", "3")], said)["accuracy"] == pytest.approx(2 / 3)
    examples = [example(label=each) for each in ("10.0", "1", "1.0", "2.0", "10", "2.0")]
    assert classify().find_labels(examples) == ("1", "10", "2.0")
    assert "all examples have the label '1'" in message(classify().find_labels, examples[1:3])
    assert numbers_of(tokenizer, classify(("1", "1.0")), "1.0", "1") == [1, 0]  # of an older model
    assert "label '1.00'" in message(numbers_of, tokenizer, classify(("1", "1.0")), "1.00")


def test_a_hidden_label_is_any_spelling_of_minus_one(tmp_path):
    path = write(tmp_path / "test.csv", "text,label\na,-1.0\nb,1.0\n")
    assert [each.label for each in classify(("0", "1")).read(path, "test")] == [None, "1.0"]
    assert [each.label for each in classify(("-1.0", "1.0")).read(path, "test")] == ["-1.0", "1.0"]


# Rows


def test_rows_are_those_of_the_paper(tokenizer):
    task = classify(("a", "b"))
    one, pair = task.make_rows([example("the cat"), example("the", "of and")], tokenizer, False).rows
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    assert one.token_ids.tolist() == [cls, *tokenizer.encode("the cat"), sep]
    assert pair.token_ids.tolist() == [cls, *tokenizer.encode("the"), sep, *tokenizer.encode("of and"), sep]
    assert pair.type_ids.tolist() == [0, 0, 0, 1, 1, 1] and not one.type_ids.any()
    assert pair.lengths == (6,) and pair.example == 1
    assert (pair.token_ids.dtype, pair.type_ids.dtype) == (np.int32, np.uint8)


def test_pairs_are_cut_one_token_at_a_time_from_the_longer():
    for first in range(12):
        for second in range(12):
            for room in range(2, 14):
                lengths = [first, second]
                while sum(lengths) > room:
                    lengths[0 if lengths[0] > lengths[1] else 1] -= 1
                assert pair_lengths(first, second, room) == tuple(lengths), (first, second, room)


def test_what_is_cut_or_empty_is_counted(tokenizer):
    task = classify(("a", "b"), max_seq_length=8)
    long = "the of and " * 5
    examples = [example(long), example(long, "the of"), example(""), example("the", " "), example("the")]
    made = task.make_rows(examples, tokenizer, False)
    assert made.counts == {"truncated": 2, "no token": 2}
    ids = tokenizer.encode(long)
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    assert made.rows[0].token_ids.tolist() == [cls, *ids[:6], sep]
    assert made.rows[1].token_ids.tolist() == [cls, *ids[:3], sep, *tokenizer.encode("the of"), sep]
    assert made.rows[2].token_ids.tolist() == [cls, sep]
    assert made.rows[3].token_ids.tolist() == [cls, *tokenizer.encode("the"), sep, sep]
    assert "task.max_seq_length 4 is below 5" in message(classify(max_seq_length=4).make_rows, [], tokenizer, False)


# Input of a user, predictions


@pytest.mark.parametrize(
    ("settings", "value", "expected"),
    [
        ({}, "a b", ("a b", None)),
        ({}, "a\tb", ("a", "b")),
        ({}, ["a", "b"], ("a", "b")),
        ({}, {"text": "a", "more": 1}, ("a", None)),
        ({}, {"premise": "a", "hypothesis": "b"}, ("a", "b")),
        ({}, {"sentence_A": "a", "sentence_B": "b"}, ("a", "b")),
        ({}, {"premise": "a"}, ("a", None)),
        ({}, {"question": "a", "passage": "b"}, ("a", "b")),
        ({"second_text_column": "y"}, {"y": "b", "premise": "a"}, ("a", "b")),
        ({"second_text_column": "text"}, {"text": "b", "sentence": "a"}, ("a", "b")),
        ({"text_column": "x"}, "a\tb", ("a\tb", None)),
        ({"text_column": "x"}, {"x": "a"}, ("a", None)),
        ({"text_column": "x", "second_text_column": "y"}, {"x": "a", "y": "b"}, ("a", "b")),
    ],
)
def test_what_a_user_gives(settings, value, expected):
    found = classify(**settings).parse(value, "input:3")
    assert found == ClassifyExample(*expected, None, 0, "input:3")


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({}, 5),
        ({}, ["a", "b", "c"]),
        ({}, {"text": 5}),
        ({}, {"x": "a"}),
        ({}, {}),
        ({}, []),
        ({}, None),
        ({"second_text_column": "text"}, {"text": "b"}),
        ({"text_column": "x"}, ["a", "b"]),
        ({"num_texts": 1}, ["a", "b"]),
        ({"num_texts": 1}, {"premise": "a", "hypothesis": "b"}),
        ({"num_texts": 2}, "a"),
        ({"text_column": "x", "second_text_column": "y"}, "a"),
        ({"text_column": "x", "second_text_column": "y"}, {"x": "a"}),
    ],
)
def test_what_a_user_gives_by_mistake(settings, value):
    assert message(classify(**settings).parse, value, "input:3").startswith("input:3")


def test_predictions_of_classes(tmp_path, tokenizer):
    task = classify(("no", "yes"), metric="f1")
    examples = [example(label="yes")._replace(id=7), example(label="no"), example(label="yes")]
    rows = task.make_rows(examples, tokenizer, False).rows
    outputs = [np.array(each, np.float32) for each in ([0, np.log(3)], [1000, 0], [0, 0])]
    found = task.decode(examples, rows, outputs)
    assert [each.label for each in found] == ["yes", "no", "no"]
    assert found[0].probabilities == pytest.approx({"no": 0.25, "yes": 0.75})
    assert json.loads(json.dumps(task.show(found[1]))) == {"label": "no", "probabilities": {"no": 1.0, "yes": 0.0}}
    assert task.score(examples, found) == pytest.approx({"accuracy": 2 / 3, "f1": 2 / 3})
    task.write(tmp_path, "test", examples, found)
    assert (tmp_path / "test.tsv").read_text() == "index\tprediction\n7\tyes\n0\tno\n0\tno\n"
    assert "f:1 has no label" in message(task.score, [example()], found[:1])
    assert task.decode([], [], []) == []


def test_regression(tmp_path, tokenizer):
    task = RegressionTask(TaskConfig(name="regression"))
    path = write(tmp_path / "test.tsv", "text\tscore\na\t1.5\nb\t-2e1\nc\t\n")
    examples = task.read(path, "test")
    assert [each.label for each in examples] == [1.5, -20.0, None]
    rows = task.make_rows(examples, tokenizer, False).rows
    assert [row.label for row in rows] == [1.5, -20.0, None] and (task.num_outputs, task.labels) == (1, ())
    assert f"{path}:4 has no label" in message(task.make_rows, examples, tokenizer, True)
    found = task.decode(examples, rows, [np.array([each], np.float32) for each in (1, 0.5, 2)])
    assert found[0] == Scored(1.0) and task.show(found[1]) == {"value": 0.5}
    assert task.score(examples[:2], found[:2]) == pytest.approx({"pearson": 1, "spearman": 1})
    for value in ("nan", "inf", "x"):
        path = write(tmp_path / "b.tsv", f"text\tscore\na\t{value}\n")
        assert f"{path}:2: label '{value}' is not a finite number" in message(task.read, path, "train")
    assert "one of pearson, spearman" in message(RegressionTask, TaskConfig(name="regression", metric="f1"))


# Real data


def test_sick_as_classes_and_as_numbers(shared_data, tokenizer):
    source = f"{shared_data}/sick/SICK_train.txt,{shared_data}/sick/SICK_trial.txt"
    columns = {"text_column": "sentence_A", "second_text_column": "sentence_B"}
    task = classify(label_column="entailment_judgment", **columns)
    train, dev = task.read(source, "train"), task.read(source, "dev")
    assert (len(train), len(dev), task.read(source, "test")) == (4500, 500, [])
    labels = task.find_labels(train)
    assert labels == ("CONTRADICTION", "ENTAILMENT", "NEUTRAL")
    rows = ClassificationTask(task.config, labels).make_rows(dev, tokenizer, True).rows
    assert len(rows) == 500 and {row.label for row in rows} == {0, 1, 2}
    config = TaskConfig(name="regression", label_column="relatedness_score", **columns)
    numbers = [each.label for each in RegressionTask(config).read(source, "train")]
    assert (min(numbers), max(numbers), len(numbers)) == (1.0, 5.0, 4500)


@pytest.mark.slow
def test_a_hundred_thousand_pairs_take_seconds(tokenizer):
    rng = random.Random(0)
    words = "the of and cat dog house tree river stone light".split()
    texts = [" ".join(rng.choices(words, k=20)) for _ in range(100_000)]
    task = classify(("a", "b"))
    start = time.perf_counter()
    made = task.make_rows([example(text, text, "a") for text in texts], tokenizer, True)
    outputs = np.zeros((len(made.rows), 2), np.float32)
    assert len(task.decode([], made.rows, list(outputs))) == 100_000
    assert time.perf_counter() - start < 30
    assert isinstance(task.decode([], made.rows[:1], list(outputs[:1]))[0], Classified)


def test_all_splits_have_as_many_texts_as_the_training_data(tmp_path):
    pairs = write(tmp_path / "pairs.tsv", "text1\ttext2\tlabel\na\tb\tx\nc\td\ty\n")
    single = write(tmp_path / "single.tsv", "text1\tlabel\na\tx\nc\ty\n")
    task = classify()
    settled = ClassificationTask(task.settle(task.read(pairs, "train")), ("x", "y"))
    assert len(settled.read(pairs, "train")) == 2
    problem = "has no column 'sentence1' and 'sentence2'; it has 'text1', 'label'"
    assert problem in message(settled.read, f"{pairs},{single}", "dev")
    settled = ClassificationTask(task.settle(task.read(single, "train")), ("x", "y"))
    (first, _) = settled.read(f"{single},{pairs}", "dev")  # as many as it was trained with
    assert first[:2] == ("a", None)


def test_an_id_with_a_tab_or_a_line_end_keeps_the_rows_of_predictions_apart(tmp_path):
    examples = [example()._replace(id=each) for each in ("x\ty\nz", 2)]
    write_predictions(tmp_path / "dev.tsv", zip(examples, ["a", "b c\t"]))
    assert (tmp_path / "dev.tsv").read_text() == "index\tprediction\nx y z\ta\n2\tb c\n"


def test_an_object_without_a_text_is_told_the_names_that_the_task_has():
    assert "f:1 has no column 'text'; it has 'foo'" in message(classify(num_texts=1).parse, {"foo": "x"}, "f:1")
    assert "has no column 'sentence1' and 'sentence2'; it" in message(classify(num_texts=2).parse, {"foo": "x"}, "f:1")
    assert "f:1 has no column 'text'; it has nothing" in message(classify(num_texts=1).parse, {}, "f:1")


def test_rerankers_are_scored_by_the_order_of_the_candidates_of_each_query():
    examples = [ClassifyExample(query, str(n), grade) for query, grades in (("a", "010"), ("b", "100"), ("c", "00"))
                for n, grade in enumerate(grades)]  # fmt: skip
    values = [0.1, 0.5, 0.9, 0.3, 0.3, 0.1, 0.2, 0.1]  # a: its second is second; b: a tie is lost
    regression = RegressionTask(TaskConfig(name="regression", metric="mrr@10"))
    found = regression.score(examples, [Scored(value) for value in values])
    assert found["mrr@10"] == 0.5 and found["recall@1"] == 0 and found["recall@10"] == 1 and "pearson" in found
    classes = ClassificationTask(TaskConfig(name="classification", metric="ndcg@10"), ("0", "1"))
    said = [Classified("0", {"0": 1 - value, "1": value}) for value in values]
    assert classes.metric == "ndcg@10" and classes.score(examples, said)["mrr@10"] == 0.5
    with pytest.raises(InputError, match=r"task\.metric .x. is not one of pearson, spearman, ndcg@10"):
        RegressionTask(TaskConfig(name="regression", metric="x"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"num_texts": 1, "second_text_column": "b"}, False),
        ({"num_texts": 2}, True),
        ({"second_text_column": "b"}, True),
        ({"text_column": "a"}, False),
    ],
)
def test_the_settings_say_whether_there_are_two_texts(settings, expected):
    assert is_pair(TaskConfig(**settings)) is expected
