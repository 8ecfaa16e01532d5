# SPDX-License-Identifier: Apache-2.0
"""Records give values of a kind, or say where they stand and what is wrong; columns are found by their usual names."""

import pytest

from bert_jax.errors import InputError
from bert_jax.tasks.records import Record, find_column, find_columns, id_of, named_class, to_record


def test_values_of_a_kind():
    record = Record({"text": "a", "n": 3, "words": ["a", "b"], "parts": [{"n": 4}]}, "x:1")
    assert (record.get_as("text", str), record.get_as("n", int)) == ("a", 3)
    assert record.texts("words") == ["a", "b"]
    (part,) = record.objects("parts")
    assert part == {"n": 4} and part.where == "x:1, parts[0]"


@pytest.mark.parametrize(
    ("get", "problem"),
    [
        (lambda record: record.get_as("text", str), "x:1: 'text' is 5, not a text; correct it"),
        (lambda record: record.get_as("is", int), "x:1: 'is' is true, not a whole number"),
        (lambda record: record.get_as("label", str), "x:1 has no 'label', a text; it has 'text', 'is', 'words'"),
        (lambda record: record.texts("words"), "x:1: 'words' is [\"a\", 1], not a list of texts"),
        (lambda record: record.objects("words"), 'x:1, words[0] is "a", not an object'),
        (lambda record: to_record([1], "x:2"), "x:2 is [1], not an object"),
    ],
)
def test_what_is_wrong_is_said(get, problem):
    with pytest.raises(InputError) as caught:
        get(Record({"text": 5, "is": True, "words": ["a", 1]}, "x:1"))
    assert problem in str(caught.value)


def test_columns_by_their_usual_names():
    assert find_columns([("a", "b"), ("c",)], ["C", "A", "B"]) == ("A", "B")
    assert find_columns([("a", "a"), ("c",)], ["a", "c"]) == ("c",)  # one column is not both
    assert find_columns([("x",)], ["a"]) == () and find_column(["x", "a"], ["A", "a"]) == "a"
    assert find_column(["a"], []) == ""


def test_names_of_classes_and_ids():
    assert named_class([1, -1, 0.0], ("no", "yes")) == ["yes", None, "no"] and named_class(1, None) == 1
    assert [id_of(value, 9) for value in ("7", "07", 7, None, True, "")] == [7, "07", 7, 9, 9, 9]
