# SPDX-License-Identifier: Apache-2.0
"""Passages of a corpus, from every kind of file; a BEIR directory gives its corpus."""

import gzip

import pyarrow
import pyarrow.parquet
import pytest
from builders import message, write

from bert_jax.data.sources.parquet import write_passages
from bert_jax.tasks.embeddings.corpus import corpus_files, passage_of, read_corpus


def read(source, column="text"):
    return [get() for get in read_corpus(corpus_files(str(source)), column)]


@pytest.mark.parametrize(
    ("name", "content", "column", "passages"),
    [
        ("a.txt", 'one\n\n{"id": 7, "title": "t", "text": "two "}\n', "text", [("1", "one"), ("7", "t two")]),
        ("b.csv", '_id,body\nx,"a, b"\ny,\n', "body", [("x", "a, b"), ("y", "")]),
        ("corpus.jsonl.gz", gzip.compress(b'{"_id": ["k"], "text": "one"}\n', mtime=0), "text", [('["k"]', "one")]),
    ],
)
def test_every_kind_of_file_gives_ids_and_texts(tmp_path, name, content, column, passages):
    path = write(tmp_path / name, content)
    assert read(tmp_path if "corpus" in name else path, column) == passages


def test_numbers_go_on_through_all_files(tmp_path):
    one, two = (write(tmp_path / f"{name}.tsv", f"text\n{name}\n") for name in "ab")
    assert read(f"{one},{two}") == [("1", "a"), ("2", "b")]
    write_passages(str(tmp_path / "d.parquet"), [("p", "one"), ("q", "two")])
    assert read(tmp_path / "d.parquet") == [("p", "one"), ("q", "two")]
    assert "matches no file" in message(read, tmp_path / "e.jsonl")
    columns = {"_id": [b"p", b"q", b"r"], "text": ["one", "two", None]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "f.parquet")
    assert read(tmp_path / "f.parquet") == [("\"b'p'\"", "one"), ("\"b'q'\"", "two"), ("\"b'r'\"", "")]


def test_a_line_is_looked_at_when_its_passage_is_asked_for(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n{"text": \n{"body": "two"}\n')
    first, second, third = read_corpus([path], "text")
    assert first() == ("1", "one")
    assert "a.jsonl:2 is not JSON" in message(second)
    assert 'a.jsonl:3: the object has no "text" that is a text' in message(third)
    assert passage_of(1, "here", '{"_id": 5, "text": "x"}', is_json=False) == (5, "x")
