# SPDX-License-Identifier: Apache-2.0
"""SQuAD's files are read from wherever they are, and what is wrong in one is said with its place."""

import gzip

import pytest
from builders import message, write

from bert_jax.tasks.readers import Table
from bert_jax.tasks.records import Record
from bert_jax.tasks.squad import read as squad_read
from bert_jax.tasks.squad.read import Answer, SquadExample, parse_question, read_squad, read_squad_file

ANSWERS = '"question": "What?", "answers": [{"text": "Łódź", "answer_start": 19}]'


def content(articles=4):
    """Returns a file of articles with two questions each."""
    text = '{"context": "Article N is about Łódź.", "qas": [{"id": "N-0", ANSWERS}, {"id": "N-1", ANSWERS}]}'
    text = text.replace("ANSWERS", ANSWERS)
    every = ", ".join(f'{{"paragraphs": [{text.replace("N", str(number))}]}}' for number in range(articles))
    return f'{{"version": "1.1", "data": [{every}]}}'


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with files of one to four articles."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(["own.json", "dev-1.json", "train-3.json", "dev,a.json"], 1):
        write(tmp_path / name, content(number))
    write(tmp_path / "y.json.gz", gzip.compress(content().encode()))
    for number, name in enumerate(["dev-v1.1.json", "dev-v2.0.json", "train-v1.1.json", "notes.json"], 1):
        write(tmp_path / "folder" / name, content(number))
    return tmp_path


@pytest.mark.parametrize(
    ("source", "questions"),
    [
        ("own.json", "0-0 0-1"),
        ("dev,a.json[:1]", "0-0 0-1"),
        ("dev,a.json[1:3]", "1-0 1-1 2-0 2-1"),
        ("y.json.gz[-1:]", "3-0 3-1"),
        ("own.json[9:]", ""),
    ],
)
def test_ranges_of_articles(place, source, questions):
    examples = read_squad_file(source)
    assert [example.id for example in examples] == questions.split()
    for example in examples:
        context = f"Article {example.id[0]} is about Łódź."
        assert example == SquadExample(example.id, "What?", context, (Answer("Łódź", 19),), False)


@pytest.mark.parametrize(
    ("source", "version", "counts"),
    [
        ("train=dev,a.json[:3],dev=dev,a.json[3:]", "", [6, 2, 0]),
        ("train-3.json,own.json", "", [6, 2, 0]),
        ("train-3.json[:1], train-3.json[1:],own.json", "", [2, 4, 2]),
        ("dev,a.json[:1]", "", [0, 2, 0]),  # one file, though its name has a comma
        # a file is every split unless its name says one
        ("own.json", "", [2, 2, 2]),
        ("dev-1.json", "", [0, 4, 0]),
        ("folder", "1.1", [6, 2, 0]),
        ("folder", "2.0", [0, 4, 0]),
    ],
)
def test_a_place_for_each_split(place, source, version, counts):
    assert [len(read_squad(source, split, version)) for split in ("train", "dev", "test")] == counts


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("a,b,c,d", "is not train,dev,test in this order; give as many, or train=FILE"),
        ("a.json,dev=b.json", "is not train,dev,test in this order"),
        ("folder", "several files for dev: dev-v1.1.json, dev-v2.0.json; give"),
        ("own.json[-:]", "neither a file nor"),
    ],
)
def test_places_that_are_none(place, source, problem):
    assert problem in message(read_squad, source, "dev")


def test_tfds(monkeypatch):
    answers = {"text": ["Rome", "in Rome"], "answer_start": [3, 0]}
    empty = {"text": [], "answer_start": []}
    records = [
        {"id": "7", "question": "Où?", "context": "in Rome", "answers": answers, "title": "T"},
        {"id": "8", "question": "?", "context": "x", "answers": empty, "is_impossible": True},
    ]
    found = Table("", (), [Record(record, "x") for record in records])
    monkeypatch.setattr(squad_read, "is_one_place", lambda place: False)
    monkeypatch.setattr(squad_read, "find_split_file", lambda source, split, names: f"{source}:{split}")
    monkeypatch.setattr(squad_read, "read_table", lambda place: found)
    assert read_squad("tfds:squad/v2.0", "dev", "2.0") == [
        SquadExample("7", "Où?", "in Rome", (Answer("Rome", 3), Answer("in Rome", 0)), False),
        SquadExample("8", "?", "x", (), True),
    ]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"question": "q", "context": "c"}, "line 3"),
        (("q", "c"), "line 3"),
        ({"question": "q", "context": "c", "id": 5}, "5"),
    ],
)
def test_questions_to_predict_on(value, name):
    assert parse_question(value, "line 3") == SquadExample(name, "q", "c")


@pytest.mark.parametrize("wrong", ["text", None, {"question": "q"}, ["q", 3]])
def test_what_is_no_question(wrong):
    assert message(parse_question, wrong, "line 3").startswith("line 3")


# Bad files


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"data": [\n{"paragraphs": [', "x.json:2 is not JSON"),
        ("{}", "x.json has no 'data', a list"),
        ("[" * 100_000, "x.json:1 is not JSON (maximum recursion"),
        (b'{"data":\n "\xe9"}', "x.json:2 is not UTF-8 (byte 0xe9)"),
    ],
)
def test_what_is_no_squad_file(tmp_path, text, problem):
    assert problem in message(read_squad_file, write(tmp_path / "x.json", text))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            '"context": "Article 1 is about Łódź."',
            '"context": null',
            "data[1], paragraphs[0]: 'context' is null, not a",
        ),
        ('"id": "1-1"', '"id": []', "data[1], paragraphs[0], qas[1]: 'id' is [], not a text"),
        ('"id": "1-1"', '"id": "0-0"', "two questions have the id '0-0'"),
        ('"text": "Łódź"', '"text": null', "qas[0], answers[0]: 'text' is null, not a text"),
        ('"answer_start": 19', '"answer_start": "19"', "'answer_start' is \"19\", not a whole number"),
        ('"id": "1-1"', '"id": "1-1", "is_impossible": "no"', "'is_impossible' is \"no\", not true or false"),
    ],
)
def test_the_place_of_what_is_wrong(tmp_path, old, new, problem):
    wrong = content().replace(old, new)
    found = message(read_squad_file, write(tmp_path / "x.json", wrong))
    assert problem in found and "x.json" in found
