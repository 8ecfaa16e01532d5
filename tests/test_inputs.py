# SPDX-License-Identifier: Apache-2.0
"""Data sets from every place: the same rows whatever it is, and which texts are there twice."""

import dataclasses
import json
import os
import random
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pytest
from commands import run_python

from bert_jax.data import pieces, prepare, records
from bert_jax.data.prepare import PrepareOptions
from bert_jax.data.sources import corpus
from bert_jax.errors import InputError
from bert_jax.storage.files import zstd
from bert_jax.tokenizing import load_tokenizer

WORDS = [left + right for left in "ba be bi do du ka".split() for right in "la lo ra ro sa ta".split()]
OPTIONS = PrepareOptions(max_seq_length=32, duplicates=2, holdout_rate=0.1, shards=2)


def make_documents(num_documents: int) -> list[list[str]]:
    rng = random.Random(num_documents)

    def line() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(2, 9))).capitalize() + " & co."

    return [[line() for _ in range(rng.randint(2, 9))] for _ in range(num_documents)]


DOCUMENTS = make_documents(60)


@pytest.fixture(scope="module")
def vocab(tmp_path_factory) -> str:
    """Returns a vocabulary file for the words of these tests."""
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "&", "co", *WORDS]) + "\n")
    return str(path)


def as_text(documents: list[list[str]]) -> bytes:
    return "\n\n".join("\n".join(lines) for lines in documents).encode()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, vocab) -> Path:
    """Returns the data set of `DOCUMENTS` as text."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "text").write_bytes(as_text(DOCUMENTS))
    prepare.prepare(str(folder / "text"), vocab, str(folder / "data"), OPTIONS, num_workers=1)
    return folder / "data"


def contents(path: Path, manifest: bool = True) -> dict[str, bytes]:
    """Returns all files below a directory; the manifest, which has a checksum of the input, only if asked."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and (manifest or file.name != records.MANIFEST)
    }


# Exact copies


def copies_of(path: Path) -> dict:
    return records.open_dataset(path).manifest["exact_copies"]


def test_exact_copies_are_counted_over_all_inputs(tmp_path, vocab, capsys, monkeypatch):
    other = make_documents(30)
    other[3] = DOCUMENTS[7]  # a document of the other input
    other[4] = other[5] = other[6]
    other[8] = [*other[9], other[9][0]]  # other documents of the same lines
    texts = [DOCUMENTS, other]
    for number, documents in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(as_text(documents))
    lines = [line for documents in texts for document in documents for line in document]
    num_copies = len(lines) - len(set(lines))
    assert num_copies > len(other[3]) + 2 * len(other[6])
    manifest = prepare.prepare(f"{tmp_path}/*.txt", vocab, str(tmp_path / "data"), OPTIONS, num_workers=1)
    assert manifest["exact_copies"] == {
        "documents": 3,
        "documents_share": round(3 / 90, 4),
        "lines": num_copies,
        "lines_share": round(num_copies / len(lines), 4),
    }
    said = capsys.readouterr().err
    assert f"exact copies: 3 documents (3.3%) and {num_copies} lines ({num_copies / len(lines):.1%})\n" in said
    assert "warning" not in said
    (tmp_path / "copy").write_bytes(as_text(DOCUMENTS))
    prepare.prepare(f"{tmp_path}/0.txt,{tmp_path}/copy", vocab, str(tmp_path / "twice"), OPTIONS, num_workers=1)
    (warning,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:"))
    assert "50% of the documents are exact copies" in warning
    assert "is a text among the inputs twice? Remove" in warning

    monkeypatch.setattr(corpus.plan_pieces, "__defaults__", (1500,))
    monkeypatch.setattr(prepare, "LINES_AT_ONCE", 50)
    assert len(prepare._hash_ranges(len(lines))) > 5
    prepare.prepare(f"{tmp_path}/*.txt", vocab, str(tmp_path / "again"), OPTIONS, num_workers=1)
    assert contents(tmp_path / "again") == contents(tmp_path / "data")


def test_ranges_of_hashes_cover_all_without_overlap(monkeypatch):
    monkeypatch.setattr(prepare, "LINES_AT_ONCE", 10)
    assert prepare._hash_ranges(0) == [] and prepare._hash_ranges(10) == [(0, 2**64 - 1)]
    ranges = prepare._hash_ranges(67)
    assert len(ranges) == 7 and ranges[0][0] == 0 and ranges[-1][1] == 2**64 - 1
    assert all(first[1] + 1 == second[0] for first, second in zip(ranges, ranges[1:]))


def test_lines_are_compared_across_pieces_at_the_ends_of_ranges(tmp_path):
    ends = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)
    for index, hashes in enumerate([ends, ends[:0], ends[[1, 1, 3]]]):
        np.save(tmp_path / f"lines-{index:06d}.npy", hashes)
    assert pieces.count_lines(tmp_path, 3) == 8
    assert pieces.count_different_lines(tmp_path, 3, (0, 2**64 - 1)) == 5
    assert [pieces.count_different_lines(tmp_path, 3, stretch) for stretch in ((0, 2**63 - 1), (2**63, 2**64 - 1))] == [
        3,
        2,
    ]
    assert pieces.count_different_lines(tmp_path, 3, (2, 5)) == 0


# Behind URLs


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """Returns fsspec's file system in memory, empty, and a cache that is empty too."""
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    files.store.clear()
    return files


def at(url: str, path: Path) -> dict[str, bytes]:
    """Returns the files below a directory by where they would be below the URL."""
    return {f"{url}/{name}": content for name, content in contents(path).items()}


def test_text_behind_a_url_gives_the_same_bytes(tmp_path, prepared, vocab, bucket):
    bucket.pipe("/b/text", as_text(DOCUMENTS))
    prepare.prepare("memory://b/*", vocab, str(tmp_path / "data"), OPTIONS, num_workers=1)
    assert contents(tmp_path / "data", manifest=False) == contents(prepared, manifest=False)
    ours, theirs = (json.loads((path / records.MANIFEST).read_text()) for path in (tmp_path / "data", prepared))
    assert ours.pop("inputs")["names"] == ["memory://b/*"] and theirs.pop("inputs")["names"] != ["memory://b/*"]
    assert ours == theirs
    bucket.pipe("/b/text", b"one\n\xff\n")
    with pytest.raises(InputError, match=r"^memory:///b/text, line 2 is not UTF-8"):
        list(corpus.iterate_documents("memory://b/*"))


def test_a_data_set_behind_a_url_opens(tmp_path, prepared, vocab, bucket):
    bucket.pipe(at("/b/data", prepared))
    bucket.pipe("/b/data/unrelated", b"x")
    local, remote = records.open_dataset(prepared), records.open_dataset("memory://b/data/")
    assert remote.path.is_relative_to(tmp_path / "cache") and not (remote.path / "unrelated").exists()
    everything = np.arange(local.train.num_rows)
    assert np.array_equal(local.train.gather(everything), remote.train.gather(everything))
    assert load_tokenizer(remote.tokenizer_path).fingerprint == load_tokenizer(local.tokenizer_path).fingerprint
    bucket.rm("/b/data/token_counts.npy")
    assert records.open_dataset("memory://b/data/").fingerprint == local.fingerprint  # all is in the cache
    # A changed one is copied again.
    (tmp_path / "text").write_bytes(as_text(make_documents(61)))
    prepare.prepare(str(tmp_path / "text"), vocab, str(tmp_path / "other"), OPTIONS, num_workers=1)
    bucket.pipe(at("/b/data", tmp_path / "other"))
    after = records.open_dataset("memory://b/data")
    assert after.fingerprint == records.open_dataset(tmp_path / "other").fingerprint != local.fingerprint


def test_what_a_data_set_behind_a_url_lacks_is_said(prepared, bucket):
    with pytest.raises(InputError, match=r"memory://b/data does not exist; give a data set"):
        records.open_dataset("memory://b/data")
    bucket.pipe(at("/b/data", prepared))
    bucket.rm("/b/data/train-00001-of-00002.npy")
    with pytest.raises(InputError, match=r"memory://b/data/train-00001-of-00002.npy does not exist"):
        records.open_dataset("memory://b/data")
    bucket.pipe("/b/data/train-00001-of-00002.npy", b"short")
    with pytest.raises(InputError, match=r"train-00001-of-00002.npy has 5 bytes, the manifest says"):
        records.open_dataset("memory://b/data")


def test_a_data_set_is_written_behind_a_url_as_to_a_disk(tmp_path, prepared, vocab, bucket, monkeypatch):
    (tmp_path / "text").write_bytes(as_text(DOCUMENTS))
    arguments = (str(tmp_path / "text"), vocab)
    manifest = prepare.prepare(*arguments, str(tmp_path / "here"), OPTIONS, num_workers=1)
    with monkeypatch.context() as patch:  # killed before its upload
        patch.setattr("bert_jax.data.building.places.upload_directory", mock.Mock(side_effect=SystemExit))
        with pytest.raises(SystemExit):
            prepare.prepare(*arguments, "memory://b/new/", OPTIONS, num_workers=1)
    assert bucket.find("/b/new") == []
    for _ in range(2):  # made, and found to be there
        assert prepare.prepare(*arguments, "memory://b/new/", OPTIONS, num_workers=1) == manifest
    ours = {path.relative_to(tmp_path / "here").as_posix(): path for path in (tmp_path / "here").rglob("*")}
    files = {name: path for name, path in ours.items() if path.is_file()}
    assert {path.removeprefix("/b/new/") for path in bucket.find("/b/new")} == set(files)
    assert all(bucket.cat_file(f"/b/new/{name}") == path.read_bytes() for name, path in files.items())
    other = dataclasses.replace(OPTIONS, max_seq_length=40)
    with pytest.raises(InputError, match=r"memory://b/new was begun with max_seq_length \d+, not 40"):
        prepare.prepare(*arguments, "memory://b/new", other, num_workers=1)
    bucket.pipe_file("/b/mine/x", b"")
    with pytest.raises(InputError, match="output memory://b/mine exists and is not a data set of this program"):
        prepare.prepare(*arguments, "memory://b/mine", OPTIONS, num_workers=1)


# The commands


def test_bad_input_is_one_line_and_leaves_nothing_half_written(tmp_path, vocab):
    (tmp_path / "text.zst").write_bytes(zstd.compress(as_text(DOCUMENTS))[:-4])
    places = [f"--input={tmp_path}/text.zst", f"--output={tmp_path}/made", f"--tokenizer={vocab}"]
    done = run_python(["-m", "bert_jax.tools.prepare_corpus", *places, "--workers=1"])
    assert done.returncode == 1 and not done.stdout and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and "text.zst is damaged or another kind of file" in done.stderr
    left = {path.name for path in (tmp_path / "made").rglob("*") if path.is_file()}
    assert left <= {"options.json", "vocab.txt", "tokenizer_config.json"}


def test_a_missing_tfds_data_set_is_one_line(tmp_path, vocab):
    command = ["-m", "bert_jax.tools.prepare_corpus", "--input=tfds:lm1b", f"--tokenizer={vocab}"]
    environment = {**os.environ, "TFDS_DATA_DIR": str(tmp_path)}
    done = run_python([*command, f"--output={tmp_path}/data"], environment=environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: tfds:lm1b is not prepared in") and not (tmp_path / "data").exists()


def test_a_work_directory_that_holds_no_checkpoints_is_one_line(repository):
    done = run_python(["train.py", "--config=configs/pretrain.py:tiny", "--workdir=s3://bucket/run"], repository)
    assert done.returncode == 1 and "workdir s3://bucket/run cannot hold checkpoints" in done.stderr
    assert done.stderr.count("\n") == 1 and not (repository / "s3:").exists()
