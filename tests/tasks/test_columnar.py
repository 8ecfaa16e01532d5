# SPDX-License-Identifier: Apache-2.0
"""Every task reads Parquet as the Hugging Face hub has it: parts of splits, names of classes, lists."""

import json

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_jax import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.columnar import classes_in, read_parquet
from bert_jax.tasks.readers import read_table
from bert_jax.tasks.squad.read import read_squad


def write(path, columns, features=None):
    """Writes a file as datasets.Dataset.to_parquet does."""
    table = pa.table(columns)
    if features:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def label(*names):
    return {"names": list(names), "_type": "ClassLabel"}


def task(name, **settings):
    return make_task(TaskConfig(name=name, **settings))


KINDS = {"label": label("no", "yes")}


def test_parts_of_a_split_and_names_of_classes(tmp_path):
    data = tmp_path / "data"
    write(data / "train-00000-of-00002-0fa0.parquet", {"text": ["a", "b"], "label": [0, 0]}, KINDS)
    write(data / "train-00001-of-00002-0fa1.parquet", {"text": ["c"], "label": [1]}, KINDS)
    write(data / "validation-00000-of-00001.parquet", {"text": ["d"], "label": [1]}, KINDS)
    made = task("classification")
    found = made.read(str(data), "train")
    assert [(each.text, each.label) for each in found] == [("a", "no"), ("b", "no"), ("c", "yes")]
    assert found[2].where.endswith("train-00001-of-00002-0fa1.parquet, row 0 (the first is 0)")
    assert [each.label for each in made.read(str(data), "dev")] == ["yes"] and made.read(str(data), "test") == []
    both = f"{data}/train-*.parquet,{data}/validation-00000-of-00001.parquet"
    assert len(made.read(both, "train")) == 3 and len(made.read(both, "dev")) == 1


def test_labels_that_are_hidden(tmp_path):
    made = task("classification")
    found = made.read(str(write(tmp_path / "train.parquet", {"text": ["e", "f"], "label": [-1, 0]}, KINDS)), "train")
    assert [each.text for each in found] == ["f"] and found.counts == {"skipped: no agreed label": 1}
    write(tmp_path / "dev.parquet", {"text": ["e"], "label": [-1]}, KINDS)
    with pytest.raises(InputError, match=r"row 0 .* has no label; training and dev examples need one"):
        made.read(str(tmp_path / "dev.parquet"), "dev")


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_clone_of_a_data_set_has_its_splits_in_a_folder(tmp_path, is_remote):
    """data/ before others; the only one, such as plain_text/; of several none is chosen."""
    root, store = f"{tmp_path}/repo", fsspec.filesystem("memory")

    def put(name):
        path = write(tmp_path / "repo" / name, {"text": [name], "label": ["x"]})
        store.pipe(f"{root}/{name}", path.read_bytes())

    def read():
        return [each.text for each in task("classification").read(f"memory:/{root}" if is_remote else root, "train")]

    put("README.md")
    put("plain_text/train-00000-of-00001.parquet")
    assert read() == ["plain_text/train-00000-of-00001.parquet"]
    put("other/test.parquet")
    with pytest.raises(InputError, match=r"has several folders with data, .*other, .*plain_text; give one of them"):
        read()
    put("data/train-00000-of-00001.parquet")
    assert read() == ["data/train-00000-of-00001.parquet"]
    put("train.parquet")
    assert read() == ["train.parquet"]


def test_lists_of_classes(tmp_path):
    kinds = {"labels": {"feature": label("joy", "anger"), "_type": "Sequence"}}
    place = write(tmp_path / "train.parquet", {"text": ["x", "y"], "labels": [[1, 0], []]}, kinds)
    assert [dict(each.label) for each in task("multilabel").read(str(place), "train")] == [{"anger": 1, "joy": 1}, {}]
    kinds = {"ner_tags": {"feature": label("O", "B-PER"), "_type": "List"}}
    place = write(tmp_path / "ner" / "train.parquet", {"tokens": [["Bo", "ran"]], "ner_tags": [[1, 0]]}, kinds)
    (example,) = task("ner").read(str(place), "train")
    assert (example.words, example.tags) == (["Bo", "ran"], ["B-PER", "O"])
    assert classes_in(str(place)) == {"ner_tags": ("O", "B-PER")}


@pytest.mark.parametrize(
    "kind",
    [
        [label("joy", "anger")],  # a list of one, as datasets < 4 writes it
        {"feature": label("joy", "anger"), "length": -1, "id": None, "_type": "Sequence"},
        [[label("joy", "anger")]],
    ],
)
def test_names_of_classes_in_every_form_of_the_metadata(tmp_path, kind):
    others = {"text": {"dtype": "string", "_type": "Value"}, "odd": [], "other": None, "l": {"_type": "List"}}
    place = write(tmp_path / "train.parquet", {"text": ["x"], "labels": [[1]]}, {**others, "labels": kind})
    assert classes_in(str(place)) == {"labels": ("joy", "anger")}


def test_classes_that_differ_between_parts_and_numbers_with_a_point(tmp_path):
    for part, names in enumerate((("no", "yes"), ("yes", "no"))):
        columns = {"text": ["a", "b"], "label": [1.0, None]}  # as pandas stores integers of which some are missing
        write(tmp_path / "d" / f"test-0000{part}-of-00002.parquet", columns, {"label": label(*names)})
    first = str(tmp_path / "d" / "test-00000-of-00002.parquet")
    assert [each.label for each in task("classification").read(first, "test")] == ["yes", None]
    with pytest.raises(
        InputError, match=r"test-00001-of-00002.parquet has other names of classes than .*test-00000-of"
    ):
        task("classification").read(str(tmp_path / "d"), "test")


def test_choices_and_questions(tmp_path):
    columns = {"ctx": ["He"], "endings": [["sat", "ran"]], "label": ["1"]}
    (example,) = task("choice", text_column="ctx", second_text_column="endings").read(
        str(write(tmp_path / "train.parquet", columns)), "train"
    )
    assert (example.choices, example.label) == (("sat", "ran"), 1)
    answers = [{"text": ["Paris"], "answer_start": [6]}, {"text": [], "answer_start": []}]
    columns = {"id": ["1", "2"], "question": ["Where?", "Who?"], "context": ["It is Paris."] * 2, "answers": answers}
    write(tmp_path / "squad" / "train-00000-of-00001.parquet", columns)
    first, second = read_squad(str(tmp_path / "squad"), "train")
    assert first.answers[0].text == "Paris" and not first.impossible and second.impossible
    assert read_squad(str(tmp_path / "squad"), "dev") == []


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ([{"text": "c", "answer_start": 0}], "c"),  # as JSON has them
        (None, None),
        ({"text": ["c", "d"], "answer_start": [0]}, "'answer_start' is null, not a whole number"),
        ("c", 'is "c", not an object'),
    ],
)
def test_answers_of_any_shape(tmp_path, answers, wanted):
    columns = {"id": ["1"], "question": ["Which?"], "context": ["c d"], "answers": [answers]}
    write(tmp_path / "train.parquet", columns)
    if wanted is None or len(wanted) == 1:
        (example,) = read_squad(str(tmp_path), "train")
        assert [each.text for each in example.answers] == [wanted][: wanted is not None]
        assert example.impossible == (wanted is None)
        return
    with pytest.raises(InputError) as caught:
        read_squad(str(tmp_path), "train")
    assert wanted in str(caught.value) and "row 0" in str(caught.value)


def test_questions_of_the_same_id_cannot_be_scored(tmp_path):
    columns = {"id": ["1", "1"], "question": ["a", "b"], "context": ["c", "d"]}
    columns["answers"] = [{"text": [text], "answer_start": [0]} for text in "cd"]
    for name in ("train", "dev"):
        write(tmp_path / f"{name}.parquet", columns)
    assert len(read_squad(str(tmp_path), "train")) == 2  # these are learnt from, and have no predictions
    with pytest.raises(InputError, match=r"two questions have the id '1'; predictions go by ids"):
        read_squad(str(tmp_path), "dev")


def test_what_is_no_parquet_is_named(tmp_path):
    (tmp_path / "train.parquet").write_text("a,b")
    with pytest.raises(InputError, match="not with PAR1"):
        list(read_parquet(str(tmp_path / "train.parquet")))
    with pytest.raises(InputError, match="matches no file"):
        read_table(f"{tmp_path}/other-*.parquet")


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_header_of_a_csv_says_what_parts_its_columns(tmp_path, separator, end):
    rows = [["text", "label"], [f'"a{separator} b"', "x"], ["c,d;e" if separator == "|" else "c", "y"]]
    for blank in ("", end):
        (tmp_path / "train.csv").write_bytes((blank + end.join(separator.join(row) for row in rows)).encode())
        table = read_table(str(tmp_path / "train.csv"))
        assert table.columns == ("text", "label") and table.records[0]["text"] == f"a{separator} b"
