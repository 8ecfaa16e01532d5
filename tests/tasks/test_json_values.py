# SPDX-License-Identifier: Apache-2.0
"""JSON that somebody has written is read, or refused in one line with its place."""

import pytest

from bert_jax.errors import InputError
from bert_jax.tasks.json_values import parse_json


@pytest.mark.parametrize(
    ("text", "value"),
    [('{"a": [1, null]}', {"a": [1, None]}), ('"\\ud83d\\ude00"', "\U0001f600"), ("1e400", float("inf"))],
)
def test_values_are_read(text, value):
    assert parse_json(text, "here") == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1', "a.jsonl:3 is not JSON (Expecting ',' delimiter at column 8); correct or remove it"),
        ('["\\ud83d"]', "a.jsonl:3 holds half of a character (surrogates not allowed); correct the text"),
        ("[" * 100_000, "a.jsonl:3 is not JSON (maximum recursion depth exceeded"),
        ("1" * 10_000, "a.jsonl:3 is not JSON (Exceeds the limit"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text, problem):
    with pytest.raises(InputError) as caught:
        parse_json(text, "a.jsonl:3")
    assert str(caught.value).startswith(problem) and "\n" not in str(caught.value)
