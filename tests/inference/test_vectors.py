# SPDX-License-Identifier: Apache-2.0
"""Directories of vectors: as vectors in memory, stopped anywhere and gone on with, searched; and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from builders import message, write
from commands import run_python

from bert_jax import nearest_vectors, open_vectors, quantize, sentence_embeddings, write_vectors
from bert_jax.data.vectors import unit
from bert_jax.inference import vectors as module
from bert_jax.inference.search import Passage, search

TEXTS = [f"{one} {two} {end}" for one in ("ban", "dar", "lin") for two in ("bes", "kut") for end in ("the", "gen", ".")]
ROWS = 4  # of a shard: 18 texts make five


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    lines = [json.dumps({"_id": f"d{number}", "text": text}) for number, text in enumerate(TEXTS)]
    path.write_text("\n".join([*lines[:5], "", json.dumps({"text": " "}), *lines[5:]]) + "\n")
    return str(path)


@pytest.fixture
def embedded(monkeypatch):
    """The texts of each call of the model; the call after `limit` of them is a kill."""
    calls, limit = [], []

    def counted(bert, texts, **options):
        if limit and texts and len(calls) == limit[0]:
            raise KeyboardInterrupt
        calls.extend([texts] if texts else [])
        return sentence_embeddings(bert, texts, **options)

    monkeypatch.setattr(module, "sentence_embeddings", counted)
    return calls, limit


def stop_after(count, embedded, bert, corpus, output, **options):
    calls, limit = embedded
    limit[:] = [count]
    with pytest.raises(KeyboardInterrupt):
        write_vectors(bert, corpus, output, shard_rows=ROWS, **options)
    limit.clear()
    calls.clear()


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != ".lock"}


def test_a_directory_holds_the_vectors_and_the_passages_of_a_corpus(bert, corpus, tmp_path):
    manifest = write_vectors(bert, corpus, tmp_path / "out", kind="", shard_rows=ROWS)
    opened = open_vectors(tmp_path / "out")
    assert manifest == opened.manifest and manifest["rows"] == 18 and manifest["dimensions"] == bert.config.hidden_size
    assert [shard["rows"] for shard in manifest["shards"]] == [4, 3, 4, 4, 3]  # one object has no text
    expected = unit(sentence_embeddings(bert, TEXTS))
    np.testing.assert_allclose(np.concatenate(opened.shards), expected, atol=1e-6)
    assert [block.shape[0] for block in opened.blocks(3)] == [3, 1, 3, 3, 1, 3, 1, 3]
    found = opened.passages(np.array([[17, 4], [5, 4]]))
    assert found == {number: (f"d{number}", TEXTS[number]) for number in (4, 5, 17)}
    low, high = opened.ranges
    np.testing.assert_allclose([low, high], [expected.min(axis=0), expected.max(axis=0)], atol=1e-6)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_stopped_command_goes_on_and_makes_no_shard_twice(bert, corpus, tmp_path, embedded, precision):
    calls, _ = embedded
    options = {"precision": precision, "kind": ""}
    write_vectors(bert, corpus, tmp_path / "whole", shard_rows=ROWS, **options)
    whole = contents(tmp_path / "whole")
    calls.clear()
    out = tmp_path / "out"
    stop_after(3, embedded, bert, corpus, out, **options)
    (out / ".vectors-00003.npy.7-00.tmp").write_bytes(b"half")
    damaged = out / ("unfinished" if precision == "int8" else "") / "vectors-00001.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    write_vectors(bert, corpus, out, shard_rows=ROWS, **options)
    assert [texts[0] for texts in calls] == [TEXTS[4], TEXTS[11], TEXTS[15]]  # the damaged one, and the missing
    assert contents(out) == whole
    calls.clear()
    write_vectors(bert, corpus, out, shard_rows=ROWS, **options)
    assert not calls and contents(out) == whole


def test_a_command_that_was_stopped_in_its_first_shard_goes_on(bert, corpus, tmp_path, embedded):
    whole = write_vectors(bert, corpus, tmp_path / "whole", shard_rows=ROWS)
    embedded[0].clear()
    stop_after(0, embedded, bert, corpus, tmp_path / "out")
    (tmp_path / "out" / "texts-00000.parquet").write_bytes(b"whose record is missing")
    assert "shard_rows 4, not 5" in message(write_vectors, bert, corpus, tmp_path / "out", shard_rows=5)
    assert write_vectors(bert, corpus, tmp_path / "out", shard_rows=ROWS) == whole
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_codes_of_8_bits_are_those_of_all_vectors_however_they_were_stopped(bert, corpus, tmp_path, monkeypatch):
    write_vectors(bert, corpus, tmp_path / "floats", kind="", shard_rows=ROWS)
    codes = quantize(np.concatenate(open_vectors(tmp_path / "floats").shards), "uint8")
    out, made, most = tmp_path / "out", [], [3]  # the first looks at the precision

    def counted(vectors, *rest):
        if len(made) == most[0]:
            raise KeyboardInterrupt
        made.append(len(vectors))
        return quantize(vectors, *rest)

    monkeypatch.setattr(module.stored, "quantize", counted)
    with pytest.raises(KeyboardInterrupt):
        write_vectors(bert, corpus, out, "uint8", "", shard_rows=ROWS)
    most[0] = 99
    write_vectors(bert, corpus, out, "uint8", "", shard_rows=ROWS)
    assert made[4:] == [4, 4, 3]  # two shards had theirs
    opened = open_vectors(out)
    assert (np.concatenate(opened.shards) == codes).all()
    names = [f"{kind}-0000{n}.{end}" for kind, end in (("vectors", "npy"), ("texts", "parquet")) for n in range(5)]
    assert {child.name for child in out.iterdir()} == {"manifest.json", *names, ".lock"}


def test_another_model_or_input_or_option_is_refused(bert, corpus, tmp_path, embedded):
    out = tmp_path / "out"
    stop_after(1, embedded, bert, corpus, out)
    changed = dataclasses.replace(bert, params=jax.tree.map(lambda leaf: leaf * 2, bert.params))
    other = write(tmp_path / "other.txt", "ban\n")
    for _ in ("unfinished", "finished"):
        for change, told in (
            ({"precision": "int8"}, "precision 'float32', not 'int8'"),
            ({"shard_rows": 5}, "shard_rows 4, not 5"),
            ({"kind": "query"}, "kind 'passage', not 'query'"),
            ({"corpus": other}, "another input"),
            ({"bert": changed}, "another model"),
        ):
            options = {"bert": bert, "corpus": corpus, "output": out, "shard_rows": ROWS} | change
            found = message(write_vectors, **options)
            assert found == f"{out} was begun with {told}; choose another output directory, or delete this one"
        write_vectors(bert, corpus, out, shard_rows=ROWS)
    assert "has vectors of another model" in message(search, changed, ["ban"], open_vectors(out))


@pytest.mark.parametrize(
    ("name", "content", "precision", "told"),
    [
        ("a.txt", "ban", "int4", "precision 'int4' is unknown"),
        ("a.txt", "\n", "float32", "has no text"),
        ("a.csv", "text,n\n,1\n,2\n", "float32", "none of 2 lines or rows"),
        ("out/a.txt", "ban", "float32", "holds something else; choose a new"),
        ("out", "ban", "float32", "cannot write"),
    ],
)
def test_what_makes_no_directory_is_refused(bert, tmp_path, name, content, precision, told):
    assert told in message(write_vectors, bert, write(tmp_path / name, content), tmp_path / "out", precision)


def test_lines_without_a_text_make_no_shard(bert, tmp_path, embedded):
    """Also the last lines, and where a stopped command goes on."""
    lines = [json.dumps({"text": text}) for text in ("ban", " ", "", "", "bes kut", "")]
    corpus, out = write(tmp_path / "a.jsonl", "\n".join(lines)), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        embedded[1][:] = [1]
        write_vectors(bert, corpus, out, shard_rows=2)
    embedded[1].clear()
    assert write_vectors(bert, corpus, out, shard_rows=2)["rows"] == 2
    assert embedded[0] == [["ban"], ["bes kut"]]
    opened = open_vectors(out)
    assert list(opened.passages(np.arange(2)).values()) == [("1", "ban"), ("5", "bes kut")]
    np.testing.assert_array_equal(np.concatenate(opened.shards), unit(sentence_embeddings(bert, ["ban", "bes kut"])))


def test_a_vector_that_is_not_finite_is_told_with_its_text(bert, tmp_path, monkeypatch):
    monkeypatch.setattr(
        module, "sentence_embeddings", lambda bert, texts, **options: np.array([[1, 2], [3, np.inf]][: len(texts)])
    )
    corpus = write(tmp_path / "a.txt", "ban\nbes\n")
    assert "the vector of passage 2 ('bes') is not finite" in message(write_vectors, bert, corpus, tmp_path / "out")


def test_shards_of_other_processes_that_are_not_seen_are_told(bert, corpus, tmp_path, monkeypatch):
    class Job(type(module.this_job())):
        def exchange(self, topic, value=""):
            return [value, *(["1"] if value.isdecimal() else [])]  # of a process with a disk of its own

    monkeypatch.setattr(module, "_LATE", 0.2)
    monkeypatch.setattr(module, "this_job", Job)
    said = message(write_vectors, bert, corpus, tmp_path / "out", shard_rows=ROWS)
    assert said == f"5 of 6 shards are seen in {tmp_path / 'out'}; run the command again"


def test_a_directory_is_searched_as_its_corpus_is(bert, corpus, tmp_path):
    queries = ["ban kut", "lin", "dar bes gen"]
    passages = [Passage(f"d{number}", text) for number, text in enumerate(TEXTS)]
    expected = search(bert, queries, passages, 5)
    for precision, most in (("float32", 1e-6), ("float16", 1e-3), ("int8", 0.01)):
        write_vectors(bert, corpus, tmp_path / precision, precision, "", shard_rows=ROWS)
        found = search(bert, queries, open_vectors(tmp_path / precision), 5)
        for hits, wanted in zip(found, expected):
            np.testing.assert_allclose([hit.score for hit in hits], [hit.score for hit in wanted], atol=most)
            if precision == "float32":
                assert [hit.passage for hit in hits] == [hit.passage for hit in wanted]
    write_vectors(bert, corpus, tmp_path / "bits", "ubinary", "", shard_rows=ROWS)
    assert len(search(bert, queries, open_vectors(tmp_path / "bits"), 30)[0]) == 18
    assert search(bert, [], open_vectors(tmp_path / "bits")) == []


def test_what_is_searched_for_is_vectors_of_that_size(bert, corpus, tmp_path):
    write_vectors(bert, corpus, tmp_path / "out", shard_rows=ROWS)
    opened = open_vectors(tmp_path / "out")
    for queries in (np.zeros(32), np.zeros((2, 31)), np.full((1, 32), np.nan)):
        said = f"queries of the shape {list(queries.shape)} are not finite vectors of 32 numbers"
        assert said in message(nearest_vectors, queries, opened)
    assert "k 0 is below 1" in message(nearest_vectors, np.ones((1, 32)), opened, 0)
    assert "k -1 is below 1" in message(search, bert, ["ban"], [Passage("a", "ban")], -1)


def test_damage_is_told_when_a_directory_is_opened(bert, corpus, tmp_path):
    out = tmp_path / "out"
    write_vectors(bert, corpus, out, shard_rows=ROWS)
    shard = out / "vectors-00002.npy"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert f"{shard} is damaged: its sha256 is not the manifest's" in message(open_vectors, out)
    assert len(open_vectors(out, verify=False).shards) == 5
    shard.write_bytes(whole[:-1])
    assert f"{shard} has {len(whole) - 1} bytes, the manifest says" in message(open_vectors, out, verify=False)
    shard.write_bytes(whole)
    texts = (out / "texts-00001.parquet").read_bytes()
    (out / "texts-00001.parquet").unlink()
    assert "texts-00001.parquet is missing" in message(open_vectors, out)
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "texts-00001.parquet").write_bytes(texts)
    for change in ({"rows": 19}, {"shards": manifest["shards"][1:]}, {"ranges": [[0.0]] * 2}, {"dimensions": 31}):
        (out / "manifest.json").write_text(json.dumps(manifest | change))
        assert "manifest.json contradicts itself; copy" in message(open_vectors, out)
    for change in ({"precision": "float16"}, {"precision": "int8"}):
        (out / "manifest.json").write_text(json.dumps(manifest | change))
        assert "vectors-00000.npy is not as manifest.json says; copy" in message(open_vectors, out)
    (out / "manifest.json").write_text(json.dumps(manifest | {"format": "bert_jax rows"}))
    assert "give a directory that extract_features --output=DIR/ has written" in message(open_vectors, out)


@pytest.mark.slow
def test_the_commands(pretrained, corpus, tmp_path):
    extract = ["-m", "bert_jax", "extract_features", f"--checkpoint={pretrained}", f"--input={corpus}"]
    done = run_python([*extract, f"--output={tmp_path}/out/", "--pooling=mean", "--precision=int8", "--shard_rows=4"])
    assert done.returncode == 0 and "18 vectors in 5 shards" in done.stderr, done.stderr
    find = ["-m", "bert_jax", "search", f"--checkpoint={pretrained}", f"--corpus={tmp_path}/out", "--k=2"]
    done = run_python([*find, "--format=json"], text=f"{TEXTS[3]}\n")
    best, _ = json.loads(done.stdout)["found"]
    assert (best["id"], best["text"]) == ("d3", TEXTS[3]) and best["cosine"] == pytest.approx(1, abs=0.02)
    for wrong, said in (
        (["--output=x.npz", "--precision=int8"], "--precision=int8 is of a directory; write --output=DIR/"),
        (["--output=x/"], "--output=x/ holds a vector for each text; give --pooling too"),
    ):
        done = run_python([*extract, *wrong])
        assert done.returncode == 1 and said in done.stderr
