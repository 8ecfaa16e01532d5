# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: SWAG, CODAH and one's own data become rows of packed sequences; choices are chosen and scored."""

import json

import numpy as np
import pytest
from builders import message, write

from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.choice import ChoiceExample, ChoiceTask, Chosen


def task(**settings):
    return ChoiceTask(TaskConfig(name="choice", **settings))


@pytest.fixture
def read(tmp_path):
    """Returns the examples of a file with such a content."""

    def read(content, name="train.jsonl", **settings):
        return task(**settings).read(write(tmp_path / name, content), name.partition(".")[0])

    return read


SWAG = ",video-id,sent1,sent2,ending0,ending1,ending2,ending3,label\n0,x,A b.,She,"
NAMED = '{"id": "q", "question": "a", "choices": {"text": ["b", "c"], "label": ["A", "B"]}, "answerKey": "B"}'
COPA = '{"premise": "I fell.", "choice1": "b", "choice2": "c", "question": "cause", "label": 1}'
OWN = {"text_column": "q", "second_text_column": "c", "label_column": "l"}
IN_COLUMNS = '{"sent1": "a", "sent2": "x", "ending0": "b", "ending10": "e", "ending2": "d", "label": 0}'
DIGITS = f"sent1\tending0\tending1\tending{'9' * 5000}\tlabel\nThe ban\tran\tsat\tis\t\x1c1\n"


@pytest.mark.parametrize(
    ("name", "content", "settings", "context", "choices", "label", "number"),
    [
        # an ending of SWAG goes on after its start
        ("train.csv", SWAG + '"runs, fast.",a.,b.,c.,2\n', {}, "A b.", "She runs, fast.|She a.|She b.|She c.", 2, 0),
        # CODAH has no header
        ("train.tsv", "o\tI am\tone.\ttwo.\tthree.\tfour.\t3\n", {}, "I am", "one.|two.|three.|four.", 3, 0),
        ("train.jsonl", '{"context": "a", "choices": ["b", "c"], "label": 1, "id": "i"}', {}, "a", "b|c", 1, "i"),
        ("train.jsonl", '{"question": "a", "endings": ["b", "c", "d"], "label": "2"}', {}, "a", "b|c|d", 2, 0),
        ("train.jsonl", IN_COLUMNS, {}, "a", "x b|x d|x e", 0, 0),
        ("train.jsonl", '{"q": "a", "c": ["b", "c"], "l": 0}', OWN, "a", "b|c", 0, 0),
        ("train.jsonl", NAMED, {}, "a", "b|c", 1, "q"),
        ("train.jsonl", NAMED.replace("A", "1").replace("B", "2"), {}, "a", "b|c", 1, "q"),
        ("test.jsonl", NAMED.replace('"answerKey": "B"', '"answerKey": ""'), {}, "a", "b|c", None, "q"),
        # COPA asks for the cause or the effect
        ("train.jsonl", COPA, {}, "I fell. cause", "b|c", 1, 0),
        ("train.jsonl", COPA, {"text_column": "premise"}, "I fell.", "b|c", 1, 0),
        # a column of thousands of digits is a column like any
        ("train.tsv", DIGITS, {}, "The ban", "ran|sat", 1, 0),
    ],
)
def test_files(read, name, content, settings, context, choices, label, number):
    (found,) = read(content, name, **settings)
    assert found[:4] == (context, tuple(choices.split("|")), label, number)


def test_columns_that_were_read_are_known(read):
    assert read(COPA).columns == ("premise", "question", "choice1", "choice2", "label")
    assert "question" not in read(COPA, text_column="premise").columns
    assert task().parse(json.loads(COPA), "f:1")[:2] == ("I fell. cause", ("b", "c"))


@pytest.mark.parametrize(("given", "label"), [('"1.0"', 1), ('" 1 "', 1), ('"-1.0"', None), ("null", None)])
def test_a_test_split_needs_no_label(read, given, label):
    (found,) = read(f'{{"context": "a", "choices": ["b", "c"], "label": {given}}}', "test.jsonl")
    assert found.label == label


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"choices": ["b", "c"], "label": 0}', "has no 'context', a text; it has 'choices'"),
        ('{"context": "a", "label": 0}', "has 0 choices; there must be two or more"),
        ('{"context": "a", "choices": "b", "label": 0}', "'choices' is \"b\", not a list of texts"),
        ('{"context": "a", "choices": ["b", "c"], "label": 2}', "label 2 is not the number of a choice, 0 to 1"),
        ('{"context": "a", "choices": ["b", "c"], "label": "b"}', "label 'b' is not the number of a choice"),
        ('{"context": "a", "choices": ["b", "c"]}', "has no label"),
        (NAMED.replace('"answerKey": "B"', '"answerKey": "C"'), "label 'C' is not the number"),
    ],
)
def test_what_is_wrong_is_said(read, line, problem):
    found = message(read, '{"context": "a", "choices": ["b", "c"], "label": 0}\n' + line)
    assert "train.jsonl:2" in found and problem in found


def test_settings_that_cannot_be_used():
    assert "task.metric 'f1' is not one of accuracy" in message(task, metric="f1")


def test_a_row_holds_a_sequence_for_each_choice(tokenizer):
    examples = [ChoiceExample("the", ("of", "and of"), 1), ChoiceExample("the", ("of", "and", "of the"), None)]
    made = task().make_rows(examples, tokenizer, False)
    one, other = made.rows
    assert " ".join(tokenizer.tokens(one.token_ids)) == "[CLS] the [SEP] of [SEP] [CLS] the [SEP] and of [SEP]"
    assert one.type_ids.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert (one.lengths, one.label, other.lengths, other.label) == ((5, 6), 1, (5, 5, 6), None)
    assert made.counts == {}


def test_each_sequence_is_cut_by_itself(tokenizer):
    long = "the of and " * 9
    made = task(max_seq_length=9).make_rows([ChoiceExample(long, ("of", long, ""), 0)], tokenizer, True)
    assert made.rows[0].lengths == (9, 9, 9) and made.counts == {"truncated": 1, "no token": 1}
    assert "has no label; training" in message(task().make_rows, [ChoiceExample("a", ("b", "c"))], tokenizer, True)


def test_predictions(tmp_path, tokenizer):
    examples = [ChoiceExample("a", ("b", "c"), 1, 5), ChoiceExample("a", ("b", "c", "d"), 0, "x")]
    rows = task().make_rows(examples, tokenizer, False).rows
    found = task().decode(examples, rows, [np.array([0, np.log(3)], np.float32), np.array([0, 0, 1], np.float32)])
    assert found[0][:2] == (1, "c") and found[0].probabilities == pytest.approx((0.25, 0.75))
    assert task().score(examples, found) == {"accuracy": 0.5}
    assert json.loads(json.dumps(task().show(found[1])))["choice"] == 2
    task().write(tmp_path, "test", examples, found)
    assert (tmp_path / "test.tsv").read_text() == "index\tprediction\n5\t1\nx\t2\n"
    assert "has no label" in message(task().score, [ChoiceExample("a", ("b", "c"))], [Chosen(0, "b", (1.0, 0.0))])


@pytest.mark.parametrize("value", ["a\tb\tc", ["a", "b", "c"], {"context": "a", "choices": ["b", "c"], "label": 1}])
def test_what_a_user_gives(value):
    assert task().parse(value, "f:1") == ChoiceExample("a", ("b", "c"), None, 0, "f:1")


@pytest.mark.parametrize("value", ["a\tb", {"context": "a"}, ["a", 1, 2], None])
def test_what_a_user_gives_by_mistake(value):
    assert message(task().parse, value, "f:1").startswith("f:1")
