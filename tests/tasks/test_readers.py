# SPDX-License-Identifier: Apache-2.0
"""Tables, JSON and TFDS as records that know where they stand; what is wrong is said with file and line."""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from builders import message, write

from bert_jax.errors import InputError
from bert_jax.storage.files import expand_globs, zstd
from bert_jax.tasks import columnar, readers
from bert_jax.tasks.readers import SPLITS, find_split_file, read_table

TSV = 'id\ttext\tlabel\n7\tsaid "so\tyes\r\n\n8\tä\u2028\x0b \u0085日\tno'
CSV = 'id,text,label\n7,"said ""so"", and\nleft",yes\r\n\n8,ä 日,no\n'
JSON_LINES = '{"id": 7, "text": "a\\nb", "label": "yes"}\n\n{"id": 8, "text": "ä \\u65e5"}\n'
JSON_LIST = '[{"id": 7, "text": "a\\nb", "label": "yes"},\n {"id": 8, "text": "ä 日"}]'


def rows(table) -> list[dict]:
    return [dict(record) for record in table.records]


def lines(table) -> list[str]:
    return [record.where.rpartition("/")[2] for record in table.records]


# Formats


def test_quotes_and_odd_blanks_of_tsv_are_characters(tmp_path):
    table = read_table(write(tmp_path / "a.tsv", TSV))
    assert table.columns == ("id", "text", "label")
    assert rows(table) == [
        {"id": "7", "text": 'said "so', "label": "yes"},
        {"id": "8", "text": "ä\u2028\x0b \u0085日", "label": "no"},
    ]
    assert lines(table) == ["a.tsv:2", "a.tsv:4"]


def test_csv_has_quotes(tmp_path):
    table = read_table(write(tmp_path / "a.csv", CSV))
    assert [row["text"] for row in rows(table)] == ['said "so", and\nleft', "ä 日"]
    assert lines(table) == ["a.csv:2", "a.csv:5"]


def test_json_lines_and_lists(tmp_path):
    expected = [{"id": 7, "text": "a\nb", "label": "yes"}, {"id": 8, "text": "ä 日"}]
    for name in ("a.jsonl", "a.ndjson", "a.json"):  # a .json may hold lines too
        table = read_table(write(tmp_path / name, JSON_LINES))
        assert rows(table) == expected and table.columns == ("id", "text", "label")
        assert lines(table) == [f"{name}:1", f"{name}:3"]
    table = read_table(write(tmp_path / "b.json", JSON_LIST))
    assert rows(table) == expected and lines(table) == ["b.json, item 1", "b.json, item 2"]


def test_json_of_several_lists(tmp_path):
    path = write(tmp_path / "a.json", '{"version": 1, "one": [{"a": 1}], "two": [{"a": 2}, {"a": 3}]}')
    assert rows(read_table(path)) == [{"a": 1}]
    assert [dict(each) for each in readers.read_json(path, ("three", "two"))] == [{"a": 2}, {"a": 3}]
    assert readers.read_json(path, ("three",)) == []
    assert readers.read_json(write(tmp_path / "b.json", '{"a": 5}')) == [{"a": 5}]


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstd.compress)])
@pytest.mark.parametrize("content", [("tsv", TSV), ("csv", CSV), ("jsonl", JSON_LINES), ("json", JSON_LIST)])
def test_compression_and_byte_order_mark_change_nothing(tmp_path, suffix, compress, content):
    name, text = content
    plain = rows(read_table(write(tmp_path / f"a.{name}", text)))
    marked = write(tmp_path / f"b.{name}{suffix}", compress(b"\xef\xbb\xbf" + text.encode()))
    assert rows(read_table(marked)) == plain


def test_long_values_of_csv(tmp_path):
    text = "x" * 200_000
    assert rows(read_table(write(tmp_path / "a.csv", f'a,b\n1,"{text}"\n'))) == [{"a": "1", "b": text}]


def test_names_for_a_file_without_header(tmp_path):
    table = read_table(write(tmp_path / "a.tsv", "x\ty\nz\tw\n"), ("one", "two"))
    assert rows(table) == [{"one": "x", "two": "y"}, {"one": "z", "two": "w"}] and lines(table)[0] == "a.tsv:1"


def test_short_rows_are_skipped_and_counted_only_when_asked(tmp_path):
    path = write(tmp_path / "a.tsv", "a\tb\n1\n2\t3\n4\t5\t6\n")
    table = read_table(path, lenient=True)
    assert rows(table) == [{"a": "2", "b": "3"}, {"a": "4", "b": "5"}] and table.skipped == 1
    assert f"{path}:2 has 1 columns, not the 2 of 'a, b'; correct tabs" in message(read_table, path)


def test_columns_beyond_the_named_ones(tmp_path):
    path = write(tmp_path / "a.csv", "1\t2\n3\t4\t5\n")  # called otherwise than it is
    table = readers.read_wide_tsv(path, ("a", "b"))
    assert rows(table) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}] and lines(table) == ["a.csv:1", "a.csv:2"]
    path = write(tmp_path / "a.tsv", "1\t2\n3\n")
    assert f"{path}:2 has 1 columns, not the 2" in message(readers.read_wide_tsv, path, ("a", "b"))
    assert readers.read_wide_tsv(path, ("a", "b"), lenient=True).skipped == 1


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.tsv", "a\tb\n1\t2\n1\t2\t3\n", "a.tsv:3 has 3 columns, not the 2 of 'a, b'"),
        ("a.tsv", "a\tb\ta\n", "a.tsv:1 names the column 'a' twice"),
        ("a.tsv", b"a\tb\n1\tcaf\xe9\n", "a.tsv:2 is not UTF-8 (byte 0xe9)"),
        ("a.tsv", b"\na\tb\n1\tcaf\xe9\n", "a.tsv:3 is not UTF-8 (byte 0xe9)"),
        ("a.csv", '"open\n2,3\n', "a.csv:1 is not a row of CSV (unexpected end of data)"),
        ("a.csv", '"a";"b",c\n1;2\n', "parted by ';'; save the table with commas, or as .tsv with tabs"),
        ("a.csv", 'a,b\n1,"open\n2,3\n', "a.csv:2 is not a row of CSV (unexpected end of data)"),
        ("a.csv", 'a,b\n1,2\n1,"x"y\n', "a.csv:3 is not a row of CSV"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl:2 is not JSON (Expecting value"),
        ("a.jsonl", '{"a": 1}\n[1]\n', "a.jsonl:2 is [1], not an object"),
        ("a.jsonl", '{"a": "\\ud83d"}\n', "half of a character"),
        ("a.jsonl", "9" * 5000, "a.jsonl:1 is not JSON (Exceeds the limit"),
        ("a.json", '[{"a": 1},\n{"a": }]', "a.json:2 is not JSON"),
        ("a.json", "[" * 100_000, "a.json:1 is not JSON"),
        ("a.json", "[1]", "a.json, item 1 is 1, not an object"),
        ("a.json", "5", "a.json, item 1 is 5, not an object"),
        ("a.tsv.gz", gzip.compress(b"a\tb\n1\t2\n" * 99, mtime=0)[:-20], "a.tsv.gz is damaged or another kind of file"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, name, content, problem):
    assert problem in message(read_table, write(tmp_path / name, content))


def test_a_file_that_is_not_there(tmp_path):
    assert "is not a file; check the path" in message(read_table, str(tmp_path / "a.tsv"))
    assert "is not a file; check the path" in message(read_table, str(tmp_path))


def test_an_empty_file_has_no_records(tmp_path):
    for name in ("a.tsv", "a.csv", "a.jsonl"):
        table = read_table(write(tmp_path / name, ""))
        assert table.records == []
        assert f"{name} holds no example; give data, a row or object for each" in message(table.filled)


def test_the_format_of_a_file_is_its_suffix(tmp_path):
    kinds = {"a.tsv": "tsv", "a.CONLL.gz": "tsv", "a.csv": "csv", "a.json": "records", "a.jsonl.zst": "records"}
    kinds |= {"a.parquet": "records", "tfds:a": "records"}
    for name, kind in kinds.items():
        assert (readers.is_records(name), readers.is_tsv(name)) == (kind == "records", kind == "tsv"), name
    assert readers.first_row(write(tmp_path / "a.tsv", "\na\tb\nc\n")) == ["a", "b"]
    assert readers.first_row(write(tmp_path / "b.tsv", "")) == []
    assert readers.first_row("tfds:none") == readers.first_row("none.parquet") == []


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Returns a file with some bytes changed, removed, doubled or put in; or only random bytes."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randint(0, 200))
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data) + 1)
        end = min(len(data), place + rng.randint(0, 9))
        new = rng.choice([b"", b"\t", b"\n", b'"', b"\\", b",", b"{", b"]", b"\x00", b"\r", b"NaN", rng.randbytes(2)])
        data[place:end] = new + bytes(data[place:end]) * rng.randint(0, 2)
    return bytes(data)


@pytest.mark.parametrize("content", [("tsv", TSV), ("csv", CSV), ("jsonl", JSON_LINES), ("json", JSON_LIST)])
def test_damaged_files_give_records_or_one_error_with_the_place(tmp_path, content):
    name, text = content
    rng = random.Random(name)
    failures = 0
    for _ in range(60):
        path = write(tmp_path / f"a.{name}", damaged(rng, text.encode()))
        try:
            for record in read_table(path, lenient=rng.random() < 0.2).records:
                json.dumps(record, ensure_ascii=False).encode()
        except InputError as error:
            failures += 1
            assert "\n" not in str(error) and (f"{path}:" in str(error) or f"{path}, item" in str(error)), error
    assert 5 < failures < 60


# Finding


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["train.tsv", "dev.tsv", "test.tsv"], {"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"}),
        (["train.csv.gz", "validation.csv"], {"train": "train.csv.gz", "dev": "validation.csv", "test": ""}),
        (["Train.JSONL", "val.json", "SOURCE.md"], {"train": "Train.JSONL", "dev": "val.json", "test": ""}),
        (["wnut17train.conll", "emerging.dev.conll"], {"train": "wnut17train.conll", "dev": "emerging.dev.conll"}),
        (["my_train.tsv", "train.tsv", "latest.tsv"], {"train": "train.tsv", "dev": "", "test": ""}),
        (["train.tsv", "dev_ids.tsv", "dev.tsv"], {"dev": "dev.tsv"}),
    ],
)
def test_splits_in_a_directory(tmp_path, files, expected):
    for name in files:
        write(tmp_path / name, "")
    for split, name in expected.items():
        found = find_split_file(str(tmp_path), split)
        assert found == (str(tmp_path / name) if name else "")


def test_several_files_for_a_split(tmp_path):
    paths = [write(tmp_path / name, "") for name in ("train.tsv", "train.csv")]
    assert "has several files for train: train.csv, train.tsv; give" in message(find_split_file, str(tmp_path), "train")
    for path in paths:
        Path(path).unlink()
    assert "has no file such as train.tsv, dev.tsv, test.tsv" in message(find_split_file, str(tmp_path), "train")
    assert "is neither a file nor a directory" in message(find_split_file, str(tmp_path / "x"), "train")


def test_one_file_is_the_split_that_it_is_called(tmp_path):
    found = {}
    for name in ("any.tsv", "train.tsv", "sick_dev.txt", "test.csv"):
        path = write(tmp_path / name, "")
        found[name] = [split for split in SPLITS if find_split_file(path, split) == path]
    assert found == {"any.tsv": ["train"], "train.tsv": ["train"], "sick_dev.txt": ["dev"], "test.csv": ["test"]}


def test_files_with_commas(tmp_path):
    one, two, three = (write(tmp_path / f"{name}.tsv", "") for name in "abc")
    source = f"{one}, {two}"
    assert [find_split_file(source, split) for split in SPLITS] == [one, two, ""]
    assert find_split_file(f"{source},{three}", "test") == three
    names = {"train": ("train",), "dev_matched": ("dev_matched",), "dev_mismatched": ("dev_mismatched",)}
    assert [find_split_file(source, split, names) for split in names] == [one, two, ""]
    folder = tmp_path / "folder"
    folder.mkdir()
    mismatched = write(folder / "dev_mismatched.tsv", "")
    assert find_split_file(f"{one},{folder}", "dev_mismatched", names) == mismatched
    assert "is not train,dev,test in this order" in message(find_split_file, "a,b,c,d", "train")
    assert "is neither a file nor a directory" in message(find_split_file, f"{one},{tmp_path}/none", "dev")


def test_files_with_the_names_of_their_splits(tmp_path):
    paths = [write(tmp_path / name, "") for name in ("a=b.tsv", "c.tsv", "d,e.tsv")]
    source = ",".join(f"{split}={path}" for split, path in zip(("dev", "train", "test"), paths))
    assert [find_split_file(source, split) for split in ("dev", "train", "test")] == paths
    assert find_split_file(f"dev={paths[0]}", "train") == ""
    assert "is not train,dev,test in this order" in message(find_split_file, f"{paths[0]},dev={paths[1]}", "dev")
    assert "none.parquet' is neither a file nor" in message(find_split_file, f"{tmp_path}/none.parquet", "dev")


def test_a_file_and_a_directory_behind_a_url(tmp_path):
    memory, url = fsspec.filesystem("memory"), f"memory:///{tmp_path.name}"
    memory.pipe({f"{url}/train.tsv": b"a\n", f"{url}/dev.tsv": b"a\n"})
    for source in (url, f"{url}/"):
        assert [find_split_file(source, split) for split in SPLITS] == [f"{url}/train.tsv", f"{url}/dev.tsv", ""]
    assert [find_split_file(f"{url}/dev.tsv", split) for split in SPLITS] == ["", f"{url}/dev.tsv", ""]
    memory.rm(url, recursive=True)


def test_commas_and_brackets_in_names_that_exist(tmp_path):
    (tmp_path / "a,b [1]").mkdir()
    for name in ("mail, all.csv", "dev[2].csv", "a,b [1]/train.tsv"):
        write(tmp_path / name, "text,label\n")
    train, dev = str(tmp_path / "mail, all.csv"), str(tmp_path / "dev[2].csv")
    assert find_split_file(train, "train") == train
    assert [find_split_file(f"{train},{dev}", split) for split in SPLITS] == [train, dev, ""]
    assert [find_split_file(f"{dev}, {train} ", split) for split in SPLITS] == [dev, train, ""]
    assert find_split_file(f"{tmp_path}/a,b [1]", "train") == f"{tmp_path}/a,b [1]/train.tsv"
    assert expand_globs(f"{train},{dev}") == [train, dev]
    assert expand_globs(f"{tmp_path}/*.csv") == [dev, train]


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
                "sentence2": kinds.Text(),
                "score": np.float32,
                "words": kinds.Sequence(kinds.Text()),
                "tags": kinds.Sequence(kinds.ClassLabel(names=["O", "B-X"])),
            }
            return tfds.core.DatasetInfo(builder=self, features=kinds.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(range(70)), "validation": self._generate_examples([100, 101])} | {
                "test": self._generate_examples([-1])
            }

        def _generate_examples(self, numbers):
            for number in numbers:
                yield (
                    number,
                    {
                        "idx": number,
                        "label": -1 if number < 0 else number % 2,
                        "sentence1": f"ä {number}",
                        "sentence2": "b",
                        "score": number / 2,
                        "words": ["ä", str(number)],
                        "tags": [0, 1],
                    },
                )

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
    expected = {"idx": 3, "label": 1, "sentence1": "ä 3", "sentence2": "b", "score": 1.5, "words": ["ä", "3"]}
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
