# SPDX-License-Identifier: Apache-2.0
"""Tables, JSON and TFDS as records that know where they stand; what is wrong is said with file and line."""

import gzip
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from builders import message, write

from bert_jax.storage.files import zstd
from bert_jax.tasks import columnar, readers
from bert_jax.tasks.readers import SPLITS, check_header, find_split_file, read_table, read_wide_tsv

TSV = 'id\ttext\n7\tsaid "so\r\n\n8\tä\u2028\x0b \u0085日'
CSV = 'id,text\n7,"said ""so"", and\nleft"\r\n\n8,ä 日\n'
JSON_LINES = '{"id": 7, "text": "a\\nb"}\n\n{"id": 8, "text": "ä \\u65e5"}\n'
JSON_LIST = '[{"id": 7, "text": "a\\nb"},\n {"id": 8, "text": "ä 日"}]'
JSON_ROWS = [{"id": 7, "text": "a\nb"}, {"id": 8, "text": "ä 日"}]


def rows(table) -> list[dict]:
    return [dict(record) for record in table.records]


# Formats


@pytest.mark.parametrize(
    ("name", "content", "expected", "places"),
    [
        # quotes and odd blanks of TSV are characters
        (".tsv", TSV, [{"id": "7", "text": 'said "so'}, {"id": "8", "text": "ä\u2028\x0b \u0085日"}], [":2", ":4"]),
        (".csv", CSV, [{"id": "7", "text": 'said "so", and\nleft'}, {"id": "8", "text": "ä 日"}], [":2", ":5"]),
        (".jsonl", JSON_LINES, JSON_ROWS, [":1", ":3"]),
        (".ndjson", JSON_LINES, JSON_ROWS, [":1", ":3"]),
        (".json", JSON_LINES, JSON_ROWS, [":1", ":3"]),  # a .json may hold lines too
        (".json", JSON_LIST, JSON_ROWS, [", item 1", ", item 2"]),
    ],
)
def test_formats(tmp_path, name, content, expected, places):
    path = write(tmp_path / f"a{name}", content)
    table = read_table(path)
    assert rows(table) == expected and table.columns == ("id", "text")
    assert [record.where for record in table.records] == [path + place for place in places]
    # compression and a byte order mark change nothing
    for suffix, compress in ((".gz", gzip.compress), (".zst", zstd.compress)):
        marked = write(tmp_path / f"b{name}{suffix}", compress(b"\xef\xbb\xbf" + content.encode()))
        assert rows(read_table(marked)) == expected


@pytest.mark.parametrize(("name", "content"), [("a.tsv", TSV), ("a.csv", CSV), ("a.jsonl", JSON_LINES)])
def test_a_table_may_be_read_in_parts(tmp_path, name, content):
    path = write(tmp_path / name, content)
    parts = list(readers.read_tables(path, 1))
    assert [rows(part) for part in parts] == [[row] for row in rows(read_table(path))]
    assert "is not a file; check the path" in message(list, readers.read_tables(f"{tmp_path}/none.tsv", 1))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        # the csv module ends rows at CR alone, and to JSON it is a blank
        ("a.csv", "text,label\ra,x\r", [{"text": "a", "label": "x"}]),
        ("a.json", '[{"text":\r"a"}]\r', [{"text": "a"}]),
        ("a.tsv", "text\tlabel\ra\tx\rb\ty", [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]),
        ("a.jsonl", '{"text": "a"}\r{"text": "b"}\r', [{"text": "a"}, {"text": "b"}]),
        ("a.json", '{"version": 1, "one": [{"a": 1}], "two": [{"a": 2}]}', [{"a": 1}]),
        ("a.csv", f'a,b\n1,"{"x" * 200_000}"\n', [{"a": "1", "b": "x" * 200_000}]),
    ],
)
def test_odd_files_that_are_read(tmp_path, name, content, expected):
    assert rows(read_table(write(tmp_path / name, content))) == expected


def test_json_of_several_lists(tmp_path):
    path = write(tmp_path / "a.json", '{"version": 1, "one": [{"a": 1}], "two": [{"a": 2}, {"a": 3}]}')
    assert readers.read_json(path, ("three", "two")) == [{"a": 2}, {"a": 3}]
    assert readers.read_json(path, ("three",)) == []


def test_files_without_a_header_and_short_or_long_rows(tmp_path):
    path = write(tmp_path / "a.tsv", "a\tb\n1\n2\t3\n4\t5\t6\n")
    table = read_table(path, lenient=True)
    assert rows(table) == [{"a": "2", "b": "3"}, {"a": "4", "b": "5"}] and table.skipped == 1
    wide = write(tmp_path / "a.csv", "1\t2\n3\t4\t5\n")  # called otherwise than it is
    found = read_wide_tsv(wide, ("a", "b")).records
    assert found == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}] and found[0].where == f"{wide}:1"
    assert f"{path}:2 has 1 columns, not the 2" in message(read_wide_tsv, path, ("c", "d"))
    assert read_wide_tsv(path, ("c", "d"), lenient=True).skipped == 1
    assert rows(read_table(write(tmp_path / "b.tsv", "x\ty\n"), ("one", "two"))) == [{"one": "x", "two": "y"}]


ARROW_STREAM = b"\xff\xff\xff\xff\x90\0\0\0\x10\0\0\0\0\0\x0a\0\x0e\0\x06\0\0\0\0\0"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.tsv", "a\tb\n1\n", "a.tsv:2 has 1 columns, not the 2 of 'a, b'; correct tabs"),
        ("a.tsv", "a\tb\ta\n", "a.tsv:1 names the column 'a' twice"),
        ("a.tsv", b"\na\tb\n1\tcaf\xe9\n", "a.tsv:3 is not UTF-8 (byte 0xe9)"),
        ("a.csv", '"a";"b",c\n1;2\n', "parted by ';'; save the table with commas, or as .tsv with tabs"),
        ("a.csv", 'a,b\n1,"open\n2,3\n', "a.csv:2 is not a row of CSV (unexpected end of data)"),
        ("a.csv", 'a,b\n1,2\n1,"x"y\n', "a.csv:3 is not a row of CSV"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl:2 is not JSON (Expecting value"),
        ("a.json", '[{"a": 1},\n{"a": }]', "a.json:2 is not JSON"),
        ("a.json", "5", "a.json, item 1 is 5, not an object"),
        ("a.tsv.gz", gzip.compress(b"a\tb\n1\t2\n" * 99, mtime=0)[:-20], "a.tsv.gz is damaged or another kind of file"),
        # of other programs, with the fix
        ("a.csv", "sep=;\ntext;label\na;pos\n", "a.csv:1 is sep=;, which only Excel reads"),
        ("a.tsv", "text\tlabel\rx\ty\rz\ty\n\n", "a.tsv has lines that end in CR alone"),
        ("a.tsv", "text,label\nx,y\n", "parted by ','; save the table with tabs, or as .csv with commas"),
        ("a.tsv", "a\tb\nx\ty\n".encode("utf-16"), "a.tsv is UTF-16, not UTF-8; convert it with iconv -f utf-16"),
        ("a.csv", ARROW_STREAM, "a.csv is Arrow, as save_to_disk of datasets writes it; write"),
        ("a.tsv", bytes(range(4)) + b"\x01\0\0\0\x00\0\0\0" * 40 + b"\xff", "a.tsv:1 is not UTF-8 (byte 0xff)"),
        (
            "a.tsv",
            "version https://git-lfs.github.com/spec/v1\noid sha256:4\n",
            "a.tsv is a pointer of Git LFS in place",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path, name, content, problem):
    assert problem in message(read_table, write(tmp_path / name, content))


def test_a_file_that_is_not_there(tmp_path):
    assert "is not a file; check the path" in message(read_table, str(tmp_path / "a.tsv"))
    assert "is not a file; check the path" in message(read_table, str(tmp_path))


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl"])
def test_an_empty_file_has_no_records(tmp_path, name):
    table = read_table(write(tmp_path / name, ""))
    assert table.records == []
    assert f"{name} holds no example; give data, a row or object for each" in message(table.filled)


@pytest.mark.parametrize("name", ["text", "a, ", ";"])
def test_a_header_of_one_column_is_no_mistake(name):
    check_header([name], "a.tsv", False)


def test_the_format_of_a_file_is_its_suffix(tmp_path):
    kinds = {"a.tsv": "tsv", "a.CONLL.gz": "tsv", "a.csv": "csv", "a.json": "records", "a.jsonl.zst": "records"}
    kinds |= {"a.parquet": "records", "tfds:a": "records"}
    for name, kind in kinds.items():
        assert (readers.is_records(name), readers.is_tsv(name)) == (kind == "records", kind == "tsv"), name
    assert readers.first_row(write(tmp_path / "a.tsv", "\na\tb\nc\n")) == ["a", "b"]
    assert readers.first_row(write(tmp_path / "b.tsv", "")) == []
    assert readers.first_row("tfds:none") == readers.first_row("none.parquet") == []


# Finding


@pytest.fixture
def find(tmp_path, monkeypatch):
    """Returns the files of train, dev and test among some, in a folder of their own, that a source means."""
    monkeypatch.chdir(tmp_path)

    def find(files, source):
        for name in files:
            write(tmp_path / name, "")
        return [find_split_file(source, split) for split in SPLITS]

    return find


@pytest.mark.parametrize(
    ("files", "source", "expected"),
    [
        (["train.tsv", "dev.tsv", "test.tsv"], ".", ["./train.tsv", "./dev.tsv", "./test.tsv"]),
        (["train.csv.gz", "validation.csv"], ".", ["./train.csv.gz", "./validation.csv", ""]),
        (["Train.JSONL", "val.json", "SOURCE.md"], ".", ["./Train.JSONL", "./val.json", ""]),
        (["wnut17train.conll", "emerging.dev.conll"], ".", ["./wnut17train.conll", "./emerging.dev.conll", ""]),
        (["my_train.tsv", "train.tsv", "latest.tsv"], ".", ["./train.tsv", "", ""]),
        (["train.tsv", "dev_ids.tsv", "dev.tsv"], ".", ["./train.tsv", "./dev.tsv", ""]),
        # one file is the split that it is called
        (["sick_dev.txt"], "sick_dev.txt", ["", "sick_dev.txt", ""]),
        (["test.csv"], "test.csv", ["", "", "test.csv"]),
        # in the order of the splits, or with their names
        (["a", "b"], "a, b", ["a", "b", ""]),
        (["a", "b", "c"], "a,b,c", ["a", "b", "c"]),
        (["a=b.tsv", "c.tsv", "d,e.tsv"], "dev=a=b.tsv,train=c.tsv,test=d,e.tsv", ["c.tsv", "a=b.tsv", "d,e.tsv"]),
        # commas and brackets in names that exist
        (["a,b [1]/train.tsv"], "a,b [1]", ["a,b [1]/train.tsv", "", ""]),
        (["mail, all.csv", "dev[2].csv"], "mail, all.csv,dev[2].csv", ["mail, all.csv", "dev[2].csv", ""]),
        (["mail, all.csv", "dev[2].csv"], "dev[2].csv, mail, all.csv ", ["dev[2].csv", "mail, all.csv", ""]),
    ],
)
def test_files_of_splits(find, files, source, expected):
    assert find(files, source) == expected


@pytest.mark.parametrize(
    ("files", "source", "problem"),
    [
        (["train.tsv", "train.csv"], ".", "has several files for train: train.csv, train.tsv; give"),
        ([], ".", "has no file such as train.tsv, dev.tsv, test.tsv"),
        ([], "x", "is neither a file nor a directory"),
        ([], "none.parquet", "none.parquet' is neither a file nor"),
        ([], "a,b,c,d", "is not train,dev,test in this order"),
        (["a"], "a,none", "is neither a file nor a directory"),
        (["a", "b"], "a,dev=b", "is not train,dev,test in this order"),
    ],
)
def test_files_of_splits_that_are_not_found(find, files, source, problem):
    assert problem in message(find, files, source)


def test_a_file_and_a_directory_behind_a_url(tmp_path):
    memory, url = fsspec.filesystem("memory"), f"memory:///{tmp_path.name}"
    memory.pipe({f"{url}/train.tsv": b"a\n", f"{url}/dev.tsv": b"a\n"})
    for source in (url, f"{url}/"):
        assert [find_split_file(source, split) for split in SPLITS] == [f"{url}/train.tsv", f"{url}/dev.tsv", ""]
    assert [find_split_file(f"{url}/dev.tsv", split) for split in SPLITS] == ["", f"{url}/dev.tsv", ""]
    memory.rm(url, recursive=True)


# TFDS


def build(data_dir: Path, name: str) -> None:
    """Prepares a data set in TFDS's format with random access: texts, classes, numbers and lists of them."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.registered import skip_registration

    class Pairs(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("2.0.0")

        def _info(self):
            kinds = tfds.features
            features = {
                "idx": np.int32,
                "label": kinds.ClassLabel(names=["no", "yes"]),
                "sentence1": kinds.Text(),
                "score": np.float32,
                "words": kinds.Sequence(kinds.Text()),
                "tags": kinds.Sequence(kinds.ClassLabel(names=["O", "B-X"])),
            }
            return tfds.core.DatasetInfo(builder=self, features=kinds.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            numbers = {"train": range(70), "validation": [100, 101], "test": [-1]}
            return {name: self._generate_examples(own) for name, own in numbers.items()}

        def _generate_examples(self, numbers):
            for number in numbers:
                example = {"idx": number, "sentence1": f"ä {number}", "score": number / 2}
                label = -1 if number < 0 else number % 2
                yield number, example | {"label": label, "words": ["ä", str(number)], "tags": [0, 1]}

    with skip_registration():
        builder_class = type(name, (Pairs,), {"name": name, "code_path": None})
    builder_class(data_dir=str(data_dir), file_format="array_record").download_and_prepare()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tfds")
    build(path, "pairs")
    return path


@pytest.fixture
def prepared(data_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))


def test_examples_of_tfds(prepared):
    train = list(columnar.read_tfds("tfds:pairs:train"))
    assert sorted(record["idx"] for record in train) == list(range(70))
    record = next(each for each in train if each["idx"] == 3)
    expected = {"idx": 3, "label": 1, "sentence1": "ä 3", "score": 1.5, "words": ["ä", "3"]}
    assert record == expected | {"tags": [0, 1]} and record.where.startswith("tfds:pairs:train, example ")
    assert columnar.classes_in("tfds:pairs") == {"label": ("no", "yes"), "tags": ("O", "B-X")}
    assert [each["label"] for each in columnar.read_tfds("tfds:pairs:2.0.0:test")] == [-1]


def test_splits_of_tfds(prepared):
    places = [find_split_file("tfds:pairs", split) for split in SPLITS]
    assert places == [f"tfds:pairs:2.0.0:{split}" for split in ("train", "validation", "test")]
    assert len(read_table(places[1]).records) == 2 and "label" in read_table(places[1]).columns
    parts = "tfds:pairs:train[:90%],tfds:pairs:train[90%:]"
    sizes = [len(read_table(find_split_file(parts, split)).records) for split in ("train", "dev")]
    assert sum(sizes) == 70 and 5 <= sizes[1] <= 8
    assert find_split_file("tfds:pairs:test", "train") == "tfds:pairs:test"
    assert "no split 'x'" in message(list, columnar.read_tfds("tfds:pairs:x"))
    assert "peers is not prepared in" in message(find_split_file, "tfds:peers", "train")
    unprepared = message(find_split_file, "tfds:glue/sst2", "train")
    assert "'tfds build glue/sst2 --file_format=array_record'" in unprepared and "bert_jax[tf]" in unprepared


@pytest.mark.slow  # a process of its own
def test_tfds_is_read_without_tensorflow(prepared):
    program = (
        "import sys; from bert_jax.tasks import columnar; assert 'tensorflow_datasets' not in sys.modules; "
        "print(len(list(columnar.read_tfds('tfds:pairs:train')))); assert 'tensorflow' not in sys.modules; "
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("70\n", 0), done.stderr
