# SPDX-License-Identifier: Apache-2.0
"""BEIR's data in the layouts that people have, what of them is left out and counted, and what is refused."""

import gzip
import json

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from builders import message, write

from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.embeddings.beir import NO_PASSAGE, NO_QUERY, OWN_TEXT
from bert_jax.tasks.embeddings.read import read_texts

CONFIG = TaskConfig(name="embeddings")
CORPUS = '{"_id": "d1", "title": "T", "text": "one"}\n{"_id": "d2", "title": "", "text": "two"}\n'
QUERIES = '{"_id": "q1", "text": "find one"}\n{"_id": "q2", "text": "find two"}\n'
HEADER = "query-id\tcorpus-id\tscore\n"
JUDGED = "q2\td2\t2\nq2\td1\t1\n"
QRELS = "qrels/test.tsv"


@pytest.fixture
def beir(tmp_path):
    """Returns BEIR's directory, of which a test says what is other than usual."""

    def beir(corpus=CORPUS, queries=QUERIES, qrels=HEADER + JUDGED):
        for name, content in (("corpus.jsonl", corpus), ("queries.jsonl", queries), (QRELS, qrels)):
            write(tmp_path / "set" / name, content)
        return tmp_path / "set"

    return beir


def read(path, split="test"):
    return read_texts(CONFIG, str(path), split)


def test_directories_of_beir(tmp_path, beir):
    place = beir()
    write(place / "qrels" / "train.tsv", HEADER + "q1\td1\t1\nq2\td2\t0\n")
    assert [each.texts for each in read(place, "train")] == [("find one", "T one")]
    found = read(place, "dev")  # there is none, so it is the test
    assert [each.texts for each in found] == [("find two",), ("T one",), ("two",)]
    assert found[0].relevant == {"d2": 2.0, "d1": 1.0} and found[1].is_passage and not found[1].is_query(0)
    plain = write(tmp_path / "train.tsv", "text\na\n")
    assert read(f"{plain},{place}", "dev")[0].texts == ("find two",)


def as_on_the_hub(path):
    """Leaves the same in folders of Parquet files, with the judgements in data/ and numbers as numbers."""
    judged = {"query_id": ["q2", "q2"], "corpus_id": ["d2", "d1"], "score": [2, 1]}
    tables = {"data/test-00000-of-00001": judged}
    for name, lines in (("corpus", CORPUS), ("queries", QUERIES)):
        (path / f"{name}.jsonl").unlink()
        for number, line in enumerate(lines.splitlines()):
            columns = {key.removeprefix("_"): [value] for key, value in json.loads(line).items()}
            tables[f"{name}/{name}-{number:05}-of-00002"] = columns
    for name, columns in tables.items():
        (path / name).parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(columns), path / f"{name}.parquet")
    (path / QRELS).unlink()


def compressed(path):
    for file in (*path.glob("*.jsonl"), path / QRELS):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()


@pytest.mark.parametrize(
    "change",
    [
        lambda path: None,
        compressed,
        as_on_the_hub,
        lambda path: write(path / QRELS, JUDGED),
        lambda path: write(path / QRELS, "q2\t0\td2\t2\nq2\t0\td1\t1\n"),
        lambda path: write(path / QRELS, "q2 Q0 d2 2\nq2 Q0 d1 1\n"),
        lambda path: write(path / QRELS, HEADER.replace("-", "_") + JUDGED),
        lambda path: (path / QRELS).rename(path / "test.tsv"),
        lambda path: write(path / "queries.train.jsonl", "{"),
        lambda path: (path / "qrels").rename(f"{path}-qrels"),
    ],
)
@pytest.mark.parametrize("is_remote", [False, True])
def test_layouts_of_beir(tmp_path, monkeypatch, beir, change, is_remote):
    path = beir()
    change(path)
    if is_remote:
        monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
        memory = fsspec.filesystem("memory")
        for folder in tmp_path.glob("set*"):
            memory.put(f"{folder}/", f"{folder}/", recursive=True)
        path = f"memory://{path}"
    found = read(path)
    assert [each.texts for each in found] == [("find two",), ("T one",), ("two",)] and not found.counts
    assert found[0].relevant == {"d2": 2, "d1": 1} and [each.id for each in found] == ["q2", "d1", "d2"]


@pytest.mark.parametrize(
    ("changed", "counts", "own"),
    [
        ({"qrels": HEADER + "q2\td2\t2\nq2\tp99\t1\n"}, {NO_PASSAGE: 1}, ()),
        ({"qrels": HEADER + "q2\td2\t2\nq9\td2\t1\n"}, {NO_QUERY: 1}, ()),
        # Of the same text, with or without its title; but not what is relevant.
        ({"corpus": CORPUS + '{"_id": "q2", "title": "U", "text": "find two "}'}, {OWN_TEXT: 1}, ("q2",)),
        ({"corpus": CORPUS + '{"_id": "q2", "title": "find", "text": "two"}'}, {OWN_TEXT: 1}, ("q2",)),
        ({"corpus": CORPUS + '{"_id": "q2", "text": "another"}'}, {}, ()),
        ({"corpus": '{"_id": "d2", "text": "find two"}'}, {NO_PASSAGE: 1}, ()),
        ({"corpus": CORPUS + CORPUS}, {"corpus given twice, with the same text": 2}, ()),
        ({"queries": QUERIES + QUERIES}, {"queries given twice, with the same text": 2}, ()),
    ],
)
def test_what_is_left_out_of_beir_is_counted(beir, changed, counts, own):
    found = read(beir(**changed))
    assert found.counts == counts and tuple(found[0].own) == own


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {"qrels": HEADER + "q2\tp9\t2\n"},
            "test.tsv has no judgement above 0 of a query and a passage that",
        ),
        ({"qrels": HEADER + "q2\t\t2\n"}, "'query-id', 'corpus-id', 'score'"),
        ({"qrels": "a\tb\tc\nq2\td2\t1\n"}, "no column query-id with a value"),
        ({"qrels": "q2\td2\t1\nq2\td1\n"}, "test.tsv:2 has 2 columns, not 3"),
        ({"corpus": CORPUS + '{"_id": "d1", "text": "else"}'}, "corpus.jsonl:3 has the _id 'd1'"),
        ({"queries": QUERIES + '{"_id": "q1", "text": "x"}'}, "queries.jsonl:3 has the _id 'q1'"),
        ({"corpus": '{"_id": true, "text": "x"}'}, "corpus.jsonl:1: '_id' is true, not a text"),
    ],
)
def test_what_cannot_be_of_beir_is_named(beir, changed, problem):
    assert problem in message(read, beir(**changed))


def test_queries_are_missed(beir):
    path = beir()
    (path / "queries.jsonl").unlink()
    assert "has no queries.jsonl; give BEIR" in message(read, path)
