# SPDX-License-Identifier: Apache-2.0
"""Parquet: a row is a document, whatever the row groups, the encoding, the place or the number of processes."""

import os
from pathlib import Path
from types import SimpleNamespace

import fsspec
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import message, write_corpus, write_vocab
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from bert_jax.data import prepare
from bert_jax.data.prepare import PrepareOptions
from bert_jax.data.sources import corpus, formats, parquet
from bert_jax.errors import NOT_UTF8
from bert_jax.storage import files

TEXTS = [f"first {number}\n\n  second {number} äöü " for number in range(50)]
DOCUMENTS = [[f"first {number}", f"second {number} äöü"] for number in range(50)]


def write(path: Path, texts: list, kind: pa.DataType | None = None, column: str = "text", **options) -> str:
    """Writes a file whose other columns are a number and a nested one, which has a leaf of the same name."""
    numbers = list(range(len(texts)))
    nested = pa.array([{column: number} for number in numbers], pa.struct([(column, pa.int64())]))
    table = pa.table({"id": pa.array(numbers, pa.int64()), "meta": nested, column: pa.array(texts, kind)})
    pq.write_table(table, path, **options)
    return str(path)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "x.parquet"


def read(path: str, piece_bytes: int = corpus.PIECE_BYTES) -> list[list[str]]:
    return [document for piece in corpus.plan_pieces(path, piece_bytes) for document in corpus.read_piece(piece)]


@pytest.mark.parametrize(
    ("kind", "compression"),
    [
        (pa.string(), "zstd"),
        (pa.string_view(), "none"),
        (pa.binary(), "none"),
        (pa.dictionary(pa.int32(), pa.string()), "zstd"),
    ],
    ids=str,
)
def test_a_row_is_a_document(tmp_path, kind, compression):
    path = write(tmp_path / "x", TEXTS, kind, compression=compression, row_group_size=7)  # the name says nothing
    assert list(corpus.iterate_documents(path)) == DOCUMENTS


def test_rows_without_text_are_left_out(file):
    texts = [None, TEXTS[0], "", " \n\t\n", None, TEXTS[1], None]
    path = write(file, texts, row_group_size=2)
    assert list(corpus.iterate_documents(path)) == DOCUMENTS[:2]


def test_row_groups_are_the_pieces_and_together_the_whole(file, monkeypatch):
    path = write(file, TEXTS, row_group_size=7)
    counts = []
    for piece_bytes in (1, 500, 10**6):
        counts.append(len(corpus.plan_pieces(path, piece_bytes)))
        assert read(path, piece_bytes) == DOCUMENTS
    assert counts[0] == 8 > counts[1] > counts[2] == 1
    monkeypatch.setattr(parquet, "_ROWS_AT_ONCE", 3)
    assert read(path, 1) == DOCUMENTS


@pytest.mark.parametrize(("name", "differ"), [("x.parquet", True), ("x.jsonl", True), ("x.txt", False)])
def test_another_column_is_another_input(tmp_path, name, differ):
    path = str(tmp_path / name)
    if name == "x.parquet":
        pq.write_table(pa.table({"text": TEXTS, "body": TEXTS[::-1]}), path)
    else:
        (tmp_path / name).write_text('{"text": "a", "body": "b"}\n' if name == "x.jsonl" else "one\n")
    assert (corpus.contents_of(path)[0][1] != corpus.contents_of(path, "body")[0][1]) == differ
    assert corpus.fingerprint_source(path, path)[1] == files.sha256_file(path)


def fails(path: str, column: str = "text") -> str:
    return message(lambda: list(corpus.iterate_documents(path, column)))


def test_a_missing_column_names_those_that_are_there(file):
    path = write(file, TEXTS)
    assert fails(path, "content") == (
        f"{path} has no column 'content'; choose one with --text_column: id (int64), meta (struct<text: int64>), "
        "text (string)"
    )
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]), path)
    assert "has 2 columns 'text'" in fails(path)
    pq.write_table(pa.table({f"c{number}": [1] for number in range(99)}), path)
    assert "c29 (int64), ..." in fails(path) and "c30" not in fails(path)


@pytest.mark.parametrize(
    ("values", "kind", "shown"), [([1], pa.int64(), "int64"), ([["a"]], pa.list_(pa.string()), "list<element: string>")]
)
def test_a_column_that_is_no_text_is_refused(file, values, kind, shown):
    pq.write_table(pa.table({"text": pa.array(values, kind), "title": ["x"]}), file)
    told = fails(str(file))
    assert f"column 'text' is {shown}, not strings; choose a --text_column: text" in told


def test_text_that_is_not_utf8_is_named_by_its_row(file):
    path = write(file, [b"a", b"b", b"c", b"d\xff"], pa.binary(), row_group_size=2)
    assert fails(path) == (f"{path}, row 3 (the first is 0): 'text' is not UTF-8 (byte 0xff); {NOT_UTF8}")


def test_a_document_has_a_bound(file, monkeypatch):
    monkeypatch.setattr(formats, "LONGEST_DOCUMENT", 1000)
    path = write(file, ["short", "a b\n" * 20])
    assert "x.parquet, row 1 (the first is 0): the document has more than 0 MiB" in fails(path)


def test_memory_has_a_bound_however_large_the_rows_become(file):
    """A few kB that hold 4 GB: a thousand rows of one text. Arrow's own memory is what counts."""
    text = "a b\n" * (1 << 20)
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array([text]))
    path = file
    pq.write_table(pa.table({"text": repeated}), path, compression="zstd", dictionary_pagesize_limit=1 << 30)
    before = pa.total_allocated_bytes()
    documents = iter(corpus.iterate_documents(str(path)))
    assert len(next(documents)) == len(next(documents)) == 1 << 20
    assert pa.total_allocated_bytes() - before < 32 * len(text)


def test_memory_does_not_grow_with_the_file(file):
    path, pool = str(file), pa.default_memory_pool()
    held = []
    for rows in (400, 8000):
        texts = [f"{row} " + "a sentence of a few words\n" * 400 for row in range(rows)]
        pq.write_table(pa.table({"text": texts}), path, use_dictionary=False, compression="none", row_group_size=200)
        del texts
        before = pool.bytes_allocated()
        held.append(max(pool.bytes_allocated() - before for _ in corpus.iterate_documents(path)))
    assert held[1] < 1.5 * held[0] < 16 << 20


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", 'x.parquet begins with "", not with PAR1'),
        (b"PAR1", "x.parquet is damaged or"),
        (b"PAR1" + bytes(40) + b"PAR1", "x.parquet is damaged or"),
    ],
)
def test_what_is_no_parquet_is_said(file, content, problem):
    file.write_bytes(content)
    assert problem in fails(str(file))


def test_a_file_without_rows_is_like_an_empty_one(tmp_path, file):
    path, other = write(file, [], pa.string()), write(tmp_path / "y.parquet", TEXTS)
    assert corpus.plan_pieces(f"{path},{other}") == corpus.plan_pieces(other)
    assert "holds no document" in fails(path)


# Data sets


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Returns a directory with a corpus as text and, in several row groups, as Parquet, and a vocabulary."""
    folder = tmp_path_factory.mktemp("parquet")
    write_corpus(folder / "text.txt", 60)
    write_vocab(folder / "vocab.txt")
    texts = (folder / "text.txt").read_text().split("\n\n")
    (folder / "datasets" / "org" / "name").mkdir(parents=True)
    for number, part in enumerate((texts[:25], texts[25:])):
        write(folder / "datasets" / "org" / "name" / f"{number}.parquet", part, column="content", row_group_size=4)
    return folder


OPTIONS = PrepareOptions(max_seq_length=32, duplicates=2, holdout_rate=0.1, shards=2)


def made(folder: Path, output: Path, inputs: str) -> dict[str, bytes]:
    """Returns the files of the data set of some inputs, but for the manifest, which has a checksum of the input."""
    prepare.prepare(inputs, str(folder / "vocab.txt"), str(output), OPTIONS, 1, "content")
    return {path.name: path.read_bytes() for path in output.rglob("*.npy")}


def test_a_data_set_of_parquet_is_that_of_the_text(tmp_path, text, monkeypatch):
    monkeypatch.setattr(corpus.plan_pieces, "__defaults__", (2000,))
    paths = f"{text}/datasets/org/name/*.parquet"
    assert len(corpus.plan_pieces(paths, text_column="content")) > 5
    assert made(text, tmp_path / "parquet", paths) == made(text, tmp_path / "text", f"{text}/text.txt")


class Hub(DirFileSystem):
    """The files of the hub as its fsspec file system shows them, out of a directory of this machine."""

    protocol = "hf"

    def __init__(self, **options):
        super().__init__(os.environ["HUB_FOR_TESTS"], LocalFileSystem(), **options)


def test_the_hub_is_read_by_its_file_system(tmp_path, text, cache, monkeypatch):
    assert fsspec.get_filesystem_class("hf") is huggingface_hub.HfFileSystem
    fsspec.register_implementation("hf", Hub, clobber=True)
    monkeypatch.setenv("HUB_FOR_TESTS", str(text))
    try:
        of_hub = made(text, tmp_path / "hub", "hf://datasets/org/name/*.parquet")
        told = fails("hf://datasets/org/name/*.parquet")
        assert told.startswith("hf://datasets/org/name/0.parquet has no column 'text'; choose one")
        assert "'hf://datasets/org/none/*.parquet' matches no file" in fails("hf://datasets/org/none/*.parquet")
    finally:
        fsspec.register_implementation("hf", huggingface_hub.HfFileSystem, clobber=True)
        fsspec.get_filesystem_class("hf").clear_instance_cache()
    assert of_hub == made(text, tmp_path / "local", f"{text}/datasets/org/name/*.parquet")


@pytest.mark.parametrize(
    ("columns", "options", "is_corpus"),
    [
        ({"text": ["a" * 100_000] * 3}, {"use_dictionary": False}, True),  # a page that is large once decompressed
        ({"text": ["a"], "ids": pa.array([[1] * 60_000], pa.list_(pa.int32()))}, {}, True),  # a run of numbers
        ({"text": ["b c " * 200] * 1000}, {}, False),  # a text of a dictionary in each row
        ({"text": ["a"] * 5000}, {}, False),  # rows of nearly nothing
    ],
)
def test_a_small_file_that_would_fill_the_memory_is_refused(file, monkeypatch, columns, options, is_corpus):
    """Limits as for gzip and zstd; a corpus is read a few rows at a time, so that only its pages have one."""
    path = str(file)
    pq.write_table(pa.table(columns), path, compression="zstd", **options)
    number = len(columns["text"])
    assert len(list(parquet.read_rows(path, path))) == number
    monkeypatch.setattr(os.path, "getsize", lambda path: 1)
    monkeypatch.setattr(parquet, "_LEAST_CHUNK", 1 << 18)
    monkeypatch.setattr(parquet, "_LEAST_ROWS", 1 << 20)
    assert "x.parquet holds more than" in message(list, parquet.read_rows(path, path))
    if is_corpus:
        assert "far more than" in fails(path)
    else:
        assert len(list(corpus.iterate_documents(path))) == number


@pytest.mark.parametrize(("megabytes", "rows"), [(0, 1024), (1, 128), (64, 2), (2000, 2)])
def test_few_rows_are_decoded_at_once_where_each_may_be_a_whole_dictionary(monkeypatch, megabytes, rows):
    chunk = SimpleNamespace(total_uncompressed_size=megabytes << 20, encodings=("PLAIN", "RLE_DICTIONARY"))
    plain = SimpleNamespace(total_uncompressed_size=1 << 30, encodings=("PLAIN", "RLE"))
    monkeypatch.setattr(parquet, "_chunks", lambda file: [chunk, plain])
    assert parquet._rows_at_once(None) == rows
