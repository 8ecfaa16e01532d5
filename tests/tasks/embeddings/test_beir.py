# SPDX-License-Identifier: Apache-2.0
"""BEIR's data in the layouts that people have, what of them is left out and counted, and what is refused."""

import gzip
import json

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.embeddings.beir import NO_PASSAGE, NO_QUERY, OWN_TEXT
from bert_jax.tasks.embeddings.read import read_texts

CONFIG = TaskConfig(name="embeddings")


def table(path, *rows):
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return str(path)


def texts(found):
    return [example.texts for example in found]


def beir(path, test="test"):
    (path / "qrels").mkdir(parents=True)
    corpus = [
        {"_id": "d1", "title": "T", "text": "one"},
        {"_id": "d2", "title": "", "text": "two"},
        {"_id": "q1", "text": "x"},
    ]
    queries = [{"_id": "q1", "text": "find one"}, {"_id": "q2", "text": "find two"}]
    for name, lines in (("corpus", corpus), ("queries", queries)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, rows in (
        ("train", [("q1", "d1", "1"), ("q2", "d2", "0")]),
        (test, [("q2", "d2", "2"), ("q2", "d1", "1")]),
    ):
        table(path / "qrels" / f"{name}.tsv", ("query-id", "corpus-id", "score"), *rows)
    return str(path)


def test_directories_of_beir(tmp_path):
    place = beir(tmp_path / "set")
    assert texts(read_texts(CONFIG, place, "train")) == [("find one", "T one")]
    found = read_texts(CONFIG, place, "dev")  # there is none, so it is the test
    assert texts(found) == [("find two",), ("T one",), ("two",), ("x",)]
    assert found[0].relevant == {"d2": 2.0, "d1": 1.0} and found[1].is_passage and not found[1].is_query(0)
    plain = table(tmp_path / "train.tsv", ("text",), ("a",))
    assert texts(read_texts(CONFIG, f"{plain},{place}", "dev"))[0] == ("find two",)


CORPUS = [{"_id": "d1", "title": "T", "text": "one"}, {"_id": "d2", "title": "", "text": "two"}]
QUERIES = [{"_id": "q1", "text": "find one"}, {"_id": "q2", "text": "find two"}]
JUDGED = ("query-id", "corpus-id", "score")


def beir_files(path, corpus=CORPUS, queries=QUERIES, qrels=(("q2", "d2", "2"), ("q2", "d1", "1"))):
    """Writes what a test changes of BEIR's layout: rows of judgements, or no file."""
    (path / "qrels").mkdir(parents=True)
    for name, lines in (("corpus", corpus), ("queries", queries)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table(path / "qrels" / "test.tsv", *([JUDGED, *qrels] if isinstance(qrels, tuple) else qrels))
    return path


def as_on_the_hub(path):
    """Leaves the same in folders of Parquet files, with the judgements in data/ and numbers as numbers."""
    for name, lines in (("corpus", CORPUS), ("queries", QUERIES)):
        (path / f"{name}.jsonl").unlink()
        (path / name).mkdir()
        for number, line in enumerate(lines):
            rows = {"id" if key == "_id" else key: [value] for key, value in line.items()}
            where = path / name / f"{name}-{number:05}-of-00002.parquet"
            pyarrow.parquet.write_table(pyarrow.table(rows), where)
    (path / "qrels" / "test.tsv").unlink()
    (path / "data").mkdir()
    rows = {"query_id": ["q2", "q2"], "corpus_id": ["d2", "d1"], "score": [2, 1]}
    pyarrow.parquet.write_table(pyarrow.table(rows), path / "data" / "test-00000-of-00001.parquet")


def compressed(path):
    for file in (*path.glob("*.jsonl"), path / "qrels" / "test.tsv"):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()


@pytest.mark.parametrize(
    "change",
    [
        lambda path: None,
        compressed,
        as_on_the_hub,
        lambda path: table(path / "qrels" / "test.tsv", ("q2", "d2", "2"), ("q2", "d1", "1")),
        lambda path: table(path / "qrels" / "test.tsv", ("q2", "0", "d2", "2"), ("q2", "0", "d1", "1")),
        lambda path: (path / "qrels" / "test.tsv").write_text("q2 Q0 d2 2\nq2 Q0 d1 1\n"),
        lambda path: table(
            path / "qrels" / "test.tsv", ("query_id", "corpus_id", "score"), ("q2", "d2", "2"), ("q2", "d1", "1")
        ),
        lambda path: (path / "qrels" / "test.tsv").rename(path / "test.tsv"),
        lambda path: (path / "queries.train.jsonl").write_text("{"),
        lambda path: (path / "qrels").rename(f"{path}-qrels"),
    ],
)
@pytest.mark.parametrize("is_remote", [False, True])
def test_layouts_of_beir(tmp_path, monkeypatch, change, is_remote):
    path = beir_files(tmp_path / "set")
    change(path)
    place = str(path)
    if is_remote:
        monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
        place = f"memory://{tmp_path}/set"
        memory = fsspec.filesystem("memory")
        for folder in tmp_path.glob("set*"):
            memory.put(f"{folder}/", f"{folder}/", recursive=True)
    found = read_texts(CONFIG, place, "test")
    assert texts(found) == [("find two",), ("T one",), ("two",)] and not found.counts
    assert found[0].relevant == {"d2": 2, "d1": 1} and [each.id for each in found] == ["q2", "d1", "d2"]


@pytest.mark.parametrize(
    ("changed", "counts", "own"),
    [
        ({"qrels": (("q2", "d2", "2"), ("q2", "p99", "1"))}, {NO_PASSAGE: 1}, []),
        ({"qrels": (("q2", "d2", "2"), ("q9", "d2", "1"))}, {NO_QUERY: 1}, []),
        # Of the same text, with or without its title; but not what is relevant.
        ({"corpus": [*CORPUS, {"_id": "q2", "title": "U", "text": "find two "}]}, {OWN_TEXT: 1}, ["q2"]),
        ({"corpus": [*CORPUS, {"_id": "q2", "title": "find", "text": "two"}]}, {OWN_TEXT: 1}, ["q2"]),
        ({"corpus": [*CORPUS, {"_id": "q2", "text": "another"}]}, {}, []),
        ({"corpus": [{"_id": "d2", "text": "find two"}]}, {NO_PASSAGE: 1}, []),
        ({"corpus": [*CORPUS, CORPUS[1]]}, {"corpus given twice, with the same text": 1}, []),
        ({"queries": [*QUERIES, QUERIES[1]]}, {"queries given twice, with the same text": 1}, []),
    ],
)
def test_what_is_left_out_of_beir_is_counted(tmp_path, changed, counts, own):
    found = read_texts(CONFIG, str(beir_files(tmp_path / "set", **changed)), "test")
    assert found.counts == counts and list(found[0].own) == own


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"qrels": (("q2", "p9", "2"),)}, "test.tsv has no judgement above 0 of a query and a passage that are there"),
        ({"qrels": (("q2", "", "2"),)}, "'query-id', 'corpus-id', 'score'"),
        ({"qrels": [("a", "b", "c"), ("q2", "d2", "1")]}, "no column query-id with a value"),
        ({"qrels": [("q2", "d2", "1"), ("q2", "d1")]}, r"test\.tsv:2 has 2 columns, not 3"),
        (
            {"corpus": [*CORPUS, {"_id": "d1", "text": "else"}]},
            r"corpus\.jsonl:3 has the _id 'd1'",
        ),
        ({"queries": [*QUERIES, {"_id": "q1", "text": "x"}]}, r"queries\.jsonl:3 has the _id 'q1'"),
        ({"corpus": [{"_id": True, "text": "x"}]}, r"corpus.jsonl:1: '_id' is true, not a text"),
    ],
)
def test_what_cannot_be_of_beir_is_named(tmp_path, changed, problem):
    with pytest.raises(InputError, match=problem):
        read_texts(CONFIG, str(beir_files(tmp_path / "set", **changed)), "test")
    (tmp_path / "set" / "queries.jsonl").unlink()
    with pytest.raises(InputError, match=r"has no queries.jsonl; give BEIR|_id"):
        read_texts(CONFIG, str(tmp_path / "set"), "test")
