# SPDX-License-Identifier: Apache-2.0
"""Passages of a corpus, from every kind of file; a BEIR directory gives its corpus."""

import gzip
import json

import pytest

from bert_jax import InputError
from bert_jax.data.sources.parquet import write_passages
from bert_jax.tasks.embeddings.corpus import corpus_files, passage_of, read_corpus


def read(source, column="text"):
    return [get() for get in read_corpus(corpus_files(str(source)), column)]


def test_every_kind_of_file_gives_ids_and_texts(tmp_path):
    (tmp_path / "a.txt").write_text('one\n\n{"id": 7, "title": "t", "text": "two "}\n')
    assert read(tmp_path / "a.txt") == [("1", "one"), ("7", "t two")]
    (tmp_path / "b.csv").write_text('_id,body\nx,"a, b"\ny,\n')
    assert read(tmp_path / "b.csv", "body") == [("x", "a, b"), ("y", "")]
    (tmp_path / "c.tsv").write_text("text\none\ntwo\n")
    # numbers go on through all files
    assert read(f"{tmp_path}/a.txt,{tmp_path}/c.tsv")[2:] == [("4", "one"), ("5", "two")]
    write_passages(str(tmp_path / "d.parquet"), [("p", "one"), ("q", "two")])
    assert read(tmp_path / "d.parquet") == [("p", "one"), ("q", "two")]
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(b'{"_id": ["k"], "text": "one"}\n'))
    assert read(tmp_path) == [('["k"]', "one")]
    with pytest.raises(InputError, match="matches no file"):
        read(tmp_path / "e.jsonl")


def test_a_line_is_looked_at_when_its_passage_is_asked_for(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": \n{"body": "two"}\n')
    first, second, third = read_corpus([str(tmp_path / "a.jsonl")], "text")
    assert first() == ("1", "one")
    with pytest.raises(InputError, match=r"a\.jsonl:2 is not JSON"):
        second()
    with pytest.raises(InputError, match=r'a\.jsonl:3: the object has no "text" that is a text'):
        third()
    line = json.dumps({"_id": 5, "text": "x"})
    assert passage_of(1, "here", line, is_json=False) == (5, "x")
