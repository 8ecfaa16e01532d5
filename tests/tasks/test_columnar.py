# SPDX-License-Identifier: Apache-2.0
"""Every task reads Parquet as the Hugging Face hub has it: parts of splits, names of classes, lists."""

import json

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import message

from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.columnar import classes_in, read_parquet
from bert_jax.tasks.readers import read_table
from bert_jax.tasks.squad.read import read_squad


@pytest.fixture
def write(tmp_path):
    """Returns the path of a file that it writes as datasets.Dataset.to_parquet does."""

    def write(name, features=None, **columns):
        table = pa.table(columns)
        if features:
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
        return str(path)

    return write


def label(*names):
    return {"names": list(names), "_type": "ClassLabel"}


def task(name="classification", **settings):
    return make_task(TaskConfig(name=name, **settings))


KINDS = {"label": label("no", "yes")}


def test_parts_of_a_split_and_names_of_classes(tmp_path, write):
    write("train-00000-of-00002-0fa0.parquet", KINDS, text=["a", "b"], label=[0, 0])
    write("train-00001-of-00002-0fa1.parquet", KINDS, text=["c"], label=[1])
    dev = write("validation-00000-of-00001.parquet", KINDS, text=["d"], label=[1])
    found = task().read(str(tmp_path), "train")
    assert [(each.text, each.label) for each in found] == [("a", "no"), ("b", "no"), ("c", "yes")]
    assert found[2].where.endswith("train-00001-of-00002-0fa1.parquet, row 0 (the first is 0)")
    both = f"{tmp_path}/train-*.parquet,{dev}"
    for source in (str(tmp_path), both):
        assert [len(task().read(source, split)) for split in ("train", "dev", "test")] == [3, 1, 0]


def test_labels_that_are_hidden(write):
    found = task().read(write("train.parquet", KINDS, text=["e", "f"], label=[-1, 0]), "train")
    assert [each.text for each in found] == ["f"] and found.counts == {"skipped: no agreed label": 1}
    dev = write("dev.parquet", KINDS, text=["e"], label=[-1])
    assert "row 0 (the first is 0) has no label; training and dev" in message(task().read, dev, "dev")


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_clone_of_a_data_set_has_its_splits_in_a_folder(tmp_path, write, is_remote):
    """data/ before others; the only one, such as plain_text/; of several none is chosen."""

    def read(name):
        path = write(name, text=[name], label=["x"])
        with open(path, "rb") as stream:
            fsspec.filesystem("memory").pipe(path, stream.read())
        source = f"memory:/{tmp_path}" if is_remote else str(tmp_path)
        return [each.text for each in task().read(source, "train")]

    assert read("plain_text/train-00000-of-00001.parquet") == ["plain_text/train-00000-of-00001.parquet"]
    assert "plain_text; give one of them" in message(read, "other/test.parquet")
    for name in ("data/train-00000-of-00001.parquet", "train.parquet"):
        assert read(name) == [name]


def test_lists_of_classes(write):
    kinds = {"labels": {"feature": label("joy", "anger"), "_type": "Sequence"}}
    place = write("train.parquet", kinds, text=["x", "y"], labels=[[1, 0], []])
    assert [each.label for each in task("multilabel").read(place, "train")] == [{"anger": 1, "joy": 1}, {}]
    kinds = {"ner_tags": {"feature": label("O", "B-PER"), "_type": "List"}}
    place = write("ner.parquet", kinds, tokens=[["Bo", "ran"]], ner_tags=[[1, 0]])
    assert task("ner").read(place, "train")[0].tags == ["B-PER", "O"]


@pytest.mark.parametrize(
    "kind",
    [
        [label("joy", "anger")],  # a list of one, as datasets < 4 writes it
        {"feature": label("joy", "anger"), "length": -1, "id": None, "_type": "Sequence"},
    ],
)
def test_names_of_classes_in_every_form_of_the_metadata(write, kind):
    others = {"text": {"dtype": "string", "_type": "Value"}, "odd": [], "other": None, "l": {"_type": "List"}}
    place = write("train.parquet", {**others, "labels": kind}, text=["x"], labels=[[1]])
    assert classes_in(place) == {"labels": ("joy", "anger")}


def test_classes_that_differ_between_parts_and_numbers_with_a_point(tmp_path, write):
    columns = {"text": ["a", "b"], "label": [1.0, None]}  # as pandas stores integers of which some are missing
    first = write("test-00000-of-00002.parquet", KINDS, **columns)
    write("test-00001-of-00002.parquet", {"label": label("yes", "no")}, **columns)
    assert [each.label for each in task().read(first, "test")] == ["yes", None]
    found = message(task().read, str(tmp_path), "test")
    assert f"test-00001-of-00002.parquet has other names of classes than {first}" in found


@pytest.mark.parametrize(
    ("answers", "texts"),
    [
        ([{"text": "c", "answer_start": 0}], ["c"]),  # as JSON has them
        (None, []),
        ({"text": ["c", "d"], "answer_start": [0]}, "'answer_start' is null, not a whole number"),
        ("c", 'is "c", not an object'),
    ],
)
def test_answers_of_any_shape(tmp_path, write, answers, texts):
    write("train-00000-of-00001.parquet", id=["1"], question=["Which?"], context=["c d"], answers=[answers])
    if isinstance(texts, list):
        (example,) = read_squad(str(tmp_path), "train")
        assert [each.text for each in example.answers] == texts and example.impossible == (not texts)
    else:
        found = message(read_squad, str(tmp_path), "train")
        assert texts in found and "row 0" in found


def test_what_is_no_parquet_is_named(tmp_path):
    (tmp_path / "train.parquet").write_text("a,b")
    assert "not with PAR1" in message(lambda: list(read_parquet(str(tmp_path / "train.parquet"))))
    assert "matches no file" in message(read_table, f"{tmp_path}/other-*.parquet")


@pytest.mark.parametrize(("separator", "end"), [(",", "\n"), (";", "\r\n"), ("\t", "\r"), ("|", "\n")])
@pytest.mark.parametrize("begin", ["", "\n"])
def test_the_header_of_a_csv_says_what_parts_its_columns(tmp_path, separator, end, begin):
    rows = [["text", "label"], [f'"a{separator} b"', "x"], ["c,d;e" if separator == "|" else "c", "y"]]
    path = tmp_path / "train.csv"
    path.write_bytes((begin + end.join(separator.join(row) for row in rows)).encode())
    table = read_table(str(path))
    assert table.columns == ("text", "label") and table.records[0]["text"] == f"a{separator} b"
