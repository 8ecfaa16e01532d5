# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: SWAG, CODAH and one's own data become rows of packed sequences; choices are chosen and scored."""

import json

import numpy as np
import pytest
from builders import message

from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.choice import ChoiceExample, ChoiceTask, Chosen

SWAG = (
    ",video-id,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
    '0,x,A b. She,A b.,She,gold,"runs, fast.",walks.,stops.,sings.,2\n'
)


def task(**settings):
    return ChoiceTask(TaskConfig(name="choice", **settings))


def read(tmp_path, name, content, split="train", **settings):
    (tmp_path / name).write_text(content, encoding="utf-8")
    return task(**settings).read(str(tmp_path / name), split)


def test_an_ending_of_swag_goes_on_after_its_start(tmp_path):
    (found,) = read(tmp_path, "a.csv", SWAG)
    choices = ("She runs, fast.", "She walks.", "She stops.", "She sings.")
    assert found == ChoiceExample("A b.", choices, 2, 0, f"{tmp_path}/a.csv:2")


def test_codah_has_no_header(tmp_path):
    (found,) = read(tmp_path, "a.tsv", "o\tI am\tone.\ttwo.\tthree.\tfour.\t3\n")
    assert found[:3] == ("I am", ("one.", "two.", "three.", "four."), 3)


def test_json_has_any_number_of_choices(tmp_path):
    lines = [
        {"context": "a", "choices": ["b", "c"], "label": 1, "id": "q1"},
        {"question": "a", "endings": ["b", "c", "d"], "label": "2"},
        {"sent1": "a", "sent2": "x", "ending0": "b", "ending1": "c", "ending10": "e", "ending2": "d", "label": 0},
    ]
    found = read(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines)))
    assert [each.choices for each in found] == [("b", "c"), ("b", "c", "d"), ("x b", "x c", "x d", "x e")]
    assert [each.label for each in found] == [1, 2, 0] and [each.id for each in found] == ["q1", 1, 2]
    (own,) = read(
        tmp_path, "b.jsonl", '{"q": "a", "c": ["b", "c"], "l": 0}',
        text_column="q", second_text_column="c", label_column="l",
    )  # fmt: skip
    assert own[:3] == ("a", ("b", "c"), 0)
    (large,) = read(tmp_path, "c.csv", "Sent1,Sent2,Ending0,Ending1,Label,ID\na,x,b,c,1,7\n")
    assert large[:4] == ("a", ("x b", "x c"), 1, 7)


def test_choices_with_names(tmp_path):
    line = {"id": "q", "question": "a", "choices": {"text": ["b", "c"], "label": ["A", "B"]}, "answerKey": "B"}
    (found,) = read(tmp_path, "a.jsonl", json.dumps(line))
    assert found[:4] == ("a", ("b", "c"), 1, "q")
    numbered = line | {"choices": {"text": ["b", "c"], "label": ["1", "2"]}, "answerKey": "1"}
    assert read(tmp_path, "a.jsonl", json.dumps(numbered))[0].label == 0
    assert read(tmp_path, "test.jsonl", json.dumps(line | {"answerKey": ""}), "test")[0].label is None
    assert "label 'C' is not the number" in message(read, tmp_path, "a.jsonl", json.dumps(line | {"answerKey": "C"}))


def test_copa_asks_for_the_cause_or_the_effect(tmp_path):
    line = '{"premise": "I fell.", "choice1": "b", "choice2": "c", "question": "cause", "label": 1}'
    found = read(tmp_path, "a.jsonl", line)
    assert found[0][:3] == ("I fell. cause", ("b", "c"), 1)
    assert found.columns == ("premise", "question", "choice1", "choice2", "label")
    assert task().parse(json.loads(line), "f:1")[:2] == found[0][:2]
    alone = read(tmp_path, "a.jsonl", line, text_column="premise")
    assert alone[0].context == "I fell." and "question" not in alone.columns


def test_a_test_split_needs_no_label(tmp_path):
    unlabelled = '{"context": "a", "choices": ["b", "c"]}'
    assert read(tmp_path, "test.jsonl", unlabelled, "test")[0].label is None
    assert "a.jsonl:1 has no label" in message(read, tmp_path, "a.jsonl", unlabelled)
    assert read(tmp_path, "test.jsonl", unlabelled.replace("}", ', "label": -1}'), "test")[0].label is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"choices": ["b", "c"], "label": 0}', "has no 'context', a text; it has 'choices'"),
        ('{"context": "a", "label": 0}', "has 0 choices; there must be two or more"),
        ('{"context": "a", "choices": "b", "label": 0}', "'choices' is \"b\", not a list of texts"),
        ('{"context": "a", "choices": ["b", "c"], "label": 2}', "label 2 is not the number of a choice, 0 to 1"),
        ('{"context": "a", "choices": ["b", "c"], "label": "b"}', "label 'b' is not the number of a choice"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, line, problem):
    good = '{"context": "a", "choices": ["b", "c"], "label": 0}\n'
    found = message(read, tmp_path, "a.jsonl", good + line)
    assert f"{tmp_path}/a.jsonl:2" in found and problem in found


def test_settings_that_cannot_be_used():
    assert "task.metric 'f1' is not one of accuracy" in message(ChoiceTask, TaskConfig(name="choice", metric="f1"))


def test_a_row_holds_a_sequence_for_each_choice(tokenizer):
    examples = [ChoiceExample("the", ("of", "and of"), 1), ChoiceExample("the", ("of", "and", "of the"), None)]
    made = task().make_rows(examples, tokenizer, False)
    cls, sep, (the,), (of,), (and_,) = (
        tokenizer.cls_id, tokenizer.sep_id, *(tokenizer.encode(word) for word in ("the", "of", "and")),
    )  # fmt: skip
    row = made.rows[0]
    assert row.token_ids.tolist() == [cls, the, sep, of, sep, cls, the, sep, and_, of, sep]
    assert row.type_ids.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert row.lengths == (5, 6) and row.label == 1
    assert made.rows[1].lengths == (5, 5, 6) and made.rows[1].label is None
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


def test_what_a_user_gives():
    expected = ChoiceExample("a", ("b", "c"), None, 0, "f:1")
    assert task().parse("a\tb\tc", "f:1") == task().parse(["a", "b", "c"], "f:1") == expected
    assert task().parse({"context": "a", "choices": ["b", "c"], "label": 1}, "f:1") == expected
    for value in ("a\tb", 5, {}, {"context": "a"}, ["a", 1, 2], None):
        assert message(task().parse, value, "f:1").startswith("f:1")


def test_swag_and_codah(shared_data):
    found = task().read(str(shared_data / "swag_sample" / "swag.csv"), "train")
    assert len(found) == 11 and found[0].label == 2 and found[0].choices[1] == "She turns with two students."
    table = task().read(str(shared_data / "codah" / "codah.tsv"), "train")
    as_swag = task().read(str(shared_data / "codah" / "codah.swag.csv"), "train")
    assert len(table) == 2221 and [each[:3] for each in table] == [each[:3] for each in as_swag]


def test_a_column_of_thousands_of_digits_is_a_column_like_any(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text(f"sent1\tending0\tending1\tending{'9' * 5000}\tlabel\nThe ban\tran\tsat\tis\t\x1c1\n")
    example = ChoiceTask(TaskConfig(name="choice")).read(str(path), "train")[0]
    assert example.choices == ("ran", "sat") and example.label == 1


def test_a_label_with_a_decimal_point_is_the_same_number(tmp_path):
    line = '{{"context": "a", "choices": ["b", "c"], "label": {}}}\n'
    found = read(tmp_path, "test.jsonl", "".join(map(line.format, ("1.0", '"1.0"', '" 1 "', "-1.0", '"-1.0"'))), "test")
    assert [each.label for each in found] == [1, 1, 1, None, None]
