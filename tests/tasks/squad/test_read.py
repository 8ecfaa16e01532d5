# SPDX-License-Identifier: Apache-2.0
"""SQuAD's files are read from wherever they are, and what is wrong in one is said with its place."""

import gzip
import json

import pytest

from bert_jax import InputError
from bert_jax.tasks.readers import Table
from bert_jax.tasks.records import Record
from bert_jax.tasks.squad import read as squad_read
from bert_jax.tasks.squad.read import Answer, SquadExample, parse_question, read_squad, read_squad_file


def article(number, questions=2):
    context = f"Article {number} is about Łódź."
    return {
        "title": f"T{number}",
        "paragraphs": [
            {
                "context": context,
                "qas": [
                    {"id": f"{number}-{q}", "question": "What?", "answers": [{"text": "Łódź", "answer_start": 19}]}
                    for q in range(questions)
                ],
            }
        ],
    }


def content(articles=4):
    return {"version": "1.1", "data": [article(number) for number in range(articles)]}


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return str(path)


def ids(examples):
    return [example.id for example in examples]


def test_a_file(tmp_path):
    examples = read_squad_file(write(tmp_path / "x.json", content(1)))
    assert examples[1] == SquadExample("0-1", "What?", "Article 0 is about Łódź.", (Answer("Łódź", 19),), False)


def test_ranges_of_articles(tmp_path):
    path = write(tmp_path / "x.json", content())
    assert ids(read_squad_file(f"{path}[:1]")) == ["0-0", "0-1"]
    assert ids(read_squad_file(f"{path}[1:3]")) == ["1-0", "1-1", "2-0", "2-1"]
    assert ids(read_squad_file(f"{path}[-1:]")) == ["3-0", "3-1"]
    assert read_squad_file(f"{path}[9:]") == []
    with pytest.raises(InputError, match="is not a file"):
        read_squad_file(f"{path}[-:]")


def test_a_place_for_each_split(tmp_path):
    path = write(tmp_path / "dev,a.json", content())
    source = f"train={path}[:3],dev={path}[3:]"
    assert ids(read_squad(source, "train")) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    assert ids(read_squad(source, "dev")) == ["3-0", "3-1"]
    assert read_squad(source, "test") == []


def test_places_in_the_order_of_the_splits(tmp_path):
    one, two = write(tmp_path / "dev-1.json", content(3)), write(tmp_path / "b.json", content(1))
    assert [len(read_squad(f"{one},{two}", split)) for split in ("train", "dev", "test")] == [6, 2, 0]
    source = f"{one}[:1], {one}[1:],{two}"
    assert [len(read_squad(source, split)) for split in ("train", "dev", "test")] == [2, 4, 2]
    comma = write(tmp_path / "a,b.json", content(1))  # one file, though its name has a comma
    assert len(read_squad(f"{comma}[:1]", "train")) == len(read_squad(comma, "dev")) == 2
    for wrong in ("a,b,c,d", "a,,b", "a.json,dev=b.json"):
        with pytest.raises(InputError, match="is not train,dev,test in this order; give as many, or train=FILE"):
            read_squad(wrong, "dev")


def test_a_file_is_every_split_unless_its_name_says_one(tmp_path):
    path = write(tmp_path / "own.json", content(1))
    assert len(read_squad(path, "train")) == len(read_squad(path, "dev")) == 2
    path = write(tmp_path / "dev-v1.1.json", content(1))
    assert len(read_squad(path, "dev")) == 2 and read_squad(path, "train") == []


def test_a_directory(tmp_path):
    for name, number in {"train-v1.1.json": 3, "dev-v1.1.json": 1, "dev-v2.0.json": 2, "notes.json": 4}.items():
        write(tmp_path / name, content(number))
    lengths = [len(read_squad(str(tmp_path), split, "1.1")) for split in ("train", "dev", "test")]
    assert lengths == [6, 2, 0]
    assert len(read_squad(str(tmp_path), "dev", "2.0")) == 4
    assert read_squad(str(tmp_path), "train", "2.0") == []
    with pytest.raises(InputError, match=r"several files for dev: dev-v1.1.json, dev-v2.0.json; give"):
        read_squad(str(tmp_path), "dev")


def test_tfds(monkeypatch):
    answers = {"text": ["Rome", "in Rome"], "answer_start": [3, 0]}
    empty = {"text": [], "answer_start": []}
    records = [
        {"id": "7", "question": "Où?", "context": "in Rome", "answers": answers, "title": "T"},
        {"id": "8", "question": "?", "context": "x", "answers": empty, "is_impossible": True},
    ]
    monkeypatch.setattr(squad_read, "is_one_place", lambda place: False)
    monkeypatch.setattr(squad_read, "find_split_file", lambda source, split, names: f"{source}:{split}")
    found = Table("", (), [Record(record, "x") for record in records])
    monkeypatch.setattr(squad_read, "read_table", lambda place: found)
    assert read_squad("tfds:squad/v2.0", "dev", "2.0") == [
        SquadExample("7", "Où?", "in Rome", (Answer("Rome", 3), Answer("in Rome", 0)), False),
        SquadExample("8", "?", "x", (), True),
    ]


def test_questions_to_predict_on():
    assert parse_question({"question": "q", "context": "c"}, "line 3") == SquadExample("line 3", "q", "c")
    assert parse_question(("q", "c"), "line 3").context == "c"
    assert parse_question({"question": "q", "context": "c", "id": 5}, "line 3").id == "5"
    for wrong in ("text", 5, None, ["q"], {"question": "q"}, ["q", 3]):
        with pytest.raises(InputError, match=r"^line 3"):
            parse_question(wrong, "line 3")


# Bad files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"data": [\n{"paragraphs": [', r"x.json:2 is not JSON"),
        ("{}", r"x.json has no 'data', a list"),
        ("[" * 100_000, r"x.json:1 is not JSON \(maximum recursion"),
    ],
)
def test_what_is_no_squad_file(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read_squad_file(write(tmp_path / "x.json", text))


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(InputError, match=r"none.json"):
        read_squad_file(str(tmp_path / "none.json"))
    (tmp_path / "x.json").write_bytes(b'{"data":\n "\xe9"}')
    with pytest.raises(InputError, match=r"x.json:2 is not UTF-8 \(byte 0xe9\)"):
        read_squad_file(str(tmp_path / "x.json"))
    (tmp_path / "y.json.gz").write_bytes(gzip.compress(json.dumps(content()).encode()))
    assert len(read_squad_file(str(tmp_path / "y.json.gz"))) == 8


QUESTION = ("data", 1, "paragraphs", 0, "qas", 1)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("data", 1, "paragraphs", 0, "context"), None, r"data\[1\], paragraphs\[0\]: 'context' is null, not a text"),
        ((*QUESTION, "question"), 5, r"qas\[1\]: 'question' is 5, not a text"),
        ((*QUESTION, "id"), [], r"'id' is \[\], not a text"),
        ((*QUESTION, "id"), "0-0", "two questions have the id '0-0'"),
        ((*QUESTION, "answers", 0, "text"), None, r"qas\[1\], answers\[0\]: 'text' is null, not a text"),
        ((*QUESTION, "answers", 0, "answer_start"), "19", "'answer_start' is \"19\", not a whole number"),
        ((*QUESTION, "is_impossible"), "no", "'is_impossible' is \"no\", not true or false"),
    ],
)
def test_the_place_of_what_is_wrong(tmp_path, path, value, message):
    wrong = content()
    place = wrong
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(InputError, match=message) as error:
        read_squad_file(write(tmp_path / "x.json", wrong))
    assert "x.json" in str(error.value) and "\n" not in str(error.value)
