# SPDX-License-Identifier: Apache-2.0
"""GLUE: files of its zip, of TFDS and of models with classes of their own; submissions, and scores of files."""

import importlib

import numpy as np
import pytest
from builders import message, write

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks import readers
from bert_jax.tasks.glue import read as glue
from bert_jax.tasks.glue.read import TASKS
from bert_jax.tasks.glue.score import score_files
from bert_jax.tasks.glue.tasks import glue_task
from bert_jax.tasks.labels import ClassifyExample
from bert_jax.tasks.records import Record

PAIRS = "index\tsentence1\tsentence2\tlabel\n0\tA\tB\t{}\n1\tC\tD\t{}\n"
MNLI_ROW = "{}\ta\tb\tc\td\te\tf\tg\tP{}\tH{}\tneutral\t{}\n"
MNLI_HEADER = "index\tpromptID\tpairID\tgenre\tp1\tp2\tp3\tp4\tsentence1\tsentence2\tlabel1\tgold_label\n"
# A file of each task, and the texts and the numbers of the classes of its two rows.
FILES = {
    "cola": ("gj04\t1\t\tA b.\ngj04\t0\t*\tB c.\n", [("A b.", None), ("B c.", None)], [1, 0]),
    "sst2": ("sentence\tlabel\nfine \t1\nbad\t0\n", [("fine ", None), ("bad", None)], [1, 0]),
    "mrpc": (
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t5\t6\tA "b\tC\n0\t5\t6\tD\tE\n',
        [('A "b', "C"), ("D", "E")],
        [1, 0],
    ),
    "stsb": (PAIRS.format("5.000", "0.25").replace("label", "score"), [("A", "B"), ("C", "D")], [5.0, 0.25]),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tA\tB 1\n2\t3\t4\tC\tD\t1\n3\t4\t5\tE\tF\t0\n",
        [("C", "D"), ("E", "F")],
        [1, 0],
    ),
    "mnli": (
        MNLI_HEADER
        + MNLI_ROW.format(0, 0, 0, "contradiction")
        + MNLI_ROW.format(1, 1, 1, "-")
        + MNLI_ROW.format(2, 2, 2, "entailment"),
        [("P0", "H0"), ("P2", "H2")],
        [2, 0],
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel\n0\tA\tB\tentailment\n5\tC\tD\tnot_entailment\n",
        [("A", "B"), ("C", "D")],
        [0, 1],
    ),
    "rte": (PAIRS.format("not_entailment", "entailment"), [("A", "B"), ("C", "D")], [1, 0]),
    "wnli": (PAIRS.format("1", "0"), [("A", "B"), ("C", "D")], [1, 0]),
}
# Classes in the order of their numbers, as TFDS (tensorflow_datasets/text/glue.py) and Hugging Face's glue have them.
CLASSES = {
    "cola": ("unacceptable", "acceptable"),
    "sst2": ("negative", "positive"),
    "mrpc": ("not_equivalent", "equivalent"),
    "qqp": ("not_duplicate", "duplicate"),
    "mnli": ("entailment", "neutral", "contradiction"),
    "qnli": ("entailment", "not_entailment"),
    "rte": ("entailment", "not_entailment"),
    "wnli": ("not_entailment", "entailment"),
    "ax": ("entailment", "neutral", "contradiction"),
    "stsb": (),
}


def task(name, labels=(), **settings):
    return glue_task(TaskConfig(name=name, **settings), labels)


def logits(*rows):
    return [np.array(row, np.float32) for row in rows]


def found(examples):
    return [each[:4] for each in examples]


# Labels and their order


def test_classes_are_numbered_as_tfds_and_hugging_face_do():
    for name, classes in CLASSES.items():
        assert task(name).labels == classes == TASKS[name].classes
    assert (task("stsb").num_outputs, task("mnli").num_outputs) == (1, 3)


def test_the_installed_tfds_has_the_same_classes_and_columns():
    builder = importlib.import_module("tensorflow_datasets.text.glue").Glue
    for name, mine in TASKS.items():
        theirs = builder.builder_configs[name]
        assert tuple(theirs.label_classes or ()) == mine.classes
        assert tuple(theirs.text_features) in mine.texts and "label" in mine.label


@pytest.mark.parametrize("name", FILES)
def test_files_give_texts_and_the_right_class(tmp_path, tokenizer, name):
    content, texts, numbers = FILES[name]
    write(tmp_path / "train.tsv", content)
    examples = task(name).read(str(tmp_path), "train")
    made = task(name).make_rows(examples, tokenizer, True)
    assert [each[:2] for each in examples] == texts and [row.label for row in made.rows] == numbers
    skipped = {"qqp": {"skipped: too few columns": 1}, "mnli": {"skipped: no agreed label": 1}}
    assert made.counts == skipped.get(name, {})


MNLI_OF_THE_HUB = '{{"promptID": "x", "genre": "x", "premise": "P", "hypothesis": "H", "label": {}}}\n'


@pytest.mark.parametrize(
    ("name", "file", "content", "expected"),
    [
        ("mnli", "train.tsv", "4\ta\tb\tc\td\te\tf\tg\tP\tH\tx\tneutral\n", ("P", "H", "neutral", 0)),
        ("mnli", "train.jsonl", MNLI_OF_THE_HUB.format(1) + MNLI_OF_THE_HUB.format(-1), ("P", "H", "1", 0)),
        ("cola", "test.tsv", "index\tsentence\n5\tA b.\n", ("A b.", None, None, 5)),
        ("cola", "test.csv", 'idx,sentence,label\n7,"A, b.",-1\n', ("A, b.", None, None, 7)),
        ("cola", "test.tsv", "idx\tsentence\tlabel\n0\tA, b.\t-1 \n", ("A, b.", None, None, 0)),
        # the STS benchmark's own files have no header; the authors call them csv
        ("stsb", "sts-dev.tsv", "main-news\tx\t2012test\t1\t4.000\tA\tB\tx\ty\n", ("A", "B", 4.0, 0)),
        ("stsb", "sts-dev.csv", 'main-news\tx\t2012test\t1\t0.25\tA\tB, "b\n', ("A", 'B, "b', 0.25, 0)),
    ],
)
def test_files_of_other_forms(tmp_path, name, file, content, expected):
    path = write(tmp_path / file, content)
    split = "train" if "train" in file else "dev" if "dev" in file else "test"
    assert found(task(name).read(path, split)) == [expected]


@pytest.mark.parametrize(
    ("name", "split", "content", "problem"),
    [
        # a submission would lack the row
        ("qqp", "test", FILES["qqp"][0].replace("is_duplicate", "more"), ":2 has 5 columns"),
        ("cola", "train", "a\tb\n", ":1 has 2 columns, not the 4 of "),
        ("stsb", "test", "main-news\tx\t2012test\t1\t4.000\tA\tB\nx\n", ":2 has 1 columns, not the 7"),
        # GLUE's rows of test without their header have a number there too, but no score
        ("stsb", "train", "0\tnews\tx\t2012\t0001\ty\tz\tA\tB\n" * 2, " has no column 'sentence1' and 'sentence2'"),
        (
            "rte",
            "train",
            "index\tsentence1\tsentence2\n0\tA\tB\n",
            " has no column 'label'; it has 'index', 'sentence1', 'sentence2': give GLUE's files; a",
        ),
        ("cola", "dev", "gj04\t1\t\tA b.\ngj04\t \t*\tB c.\n", ":2 has no label; training and dev"),
        ("mnli", "dev_matched", MNLI_HEADER + MNLI_ROW.format(0, 0, 0, " "), ":2 has no label; training and dev"),
        ("stsb", "dev", PAIRS.format("1", " ").replace("label", "score"), ":3 has no label; training and dev"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, name, split, content, problem):
    path = write(tmp_path / f"{split}.tsv", content)
    assert path + problem in message(task(name).read, path, split)


def test_a_model_keeps_the_order_of_its_own_classes(tmp_path, tokenizer):
    google = ("contradiction", "entailment", "neutral")
    mine, path = task("mnli", google), write(tmp_path / "dev_matched.tsv", FILES["mnli"][0])
    examples = mine.read(path, "dev_matched")
    assert [row.label for row in mine.make_rows(examples, tokenizer, True).rows] == [0, 1]
    said = mine.decode(examples, [], logits([9, 0, 0], [0, 9, 0]))
    assert [each.label for each in said] == ["contradiction", "entailment"]
    assert mine.score(examples, said) == {"accuracy": 1.0} and mine.find_labels(examples) == google


@pytest.mark.parametrize(
    ("name", "own"), [("cola", ("LABEL_1", "LABEL_0")), ("sst2", ("POSITIVE", "NEGATIVE")), ("wnli", ("1", "0"))]
)
def test_classes_may_be_spelled_in_other_ways(name, own):
    examples = [ClassifyExample("a", label=label) for label in "10"]
    mine = task(name, own)
    assert mine.score(examples, mine.decode([], [], logits([1, 0], [0, 1])))[mine.metric] == 1


@pytest.mark.parametrize(
    "labels", [("entailment", "neutral"), ("a", "b", "c"), ("neutral", "neutral", "entailment"), ("x",) * 4]
)
def test_classes_of_another_task_are_refused(labels):
    assert "are not those of mnli: entailment, neutral, contradiction" in message(task, "mnli", labels)


def test_settings_that_cannot_be_used():
    assert "task 'x' is not one of GLUE's: cola, sst2" in message(task, "x")
    assert "one of pearson, spearman" in message(task, "stsb", metric="f1")
    assert "use macro_f1" in message(task, "mnli", metric="f1")
    assert task("rte", metric="mcc").metric == "mcc"


# Splits


def test_splits_of_mnli_and_the_diagnostic(tmp_path):
    mnli = task("mnli")
    assert mnli.splits["eval"] == ("dev_matched", "dev_mismatched") and mnli.splits["train"] == ("train",)
    for split in ("dev_matched", "dev_mismatched", "test_matched"):
        write(tmp_path / "MNLI" / f"{split}.tsv", FILES["mnli"][0].replace("P0", split))
        assert mnli.read(str(tmp_path), split)[0].text == split  # in the zip's own folder
    assert mnli.read(str(tmp_path), "test_mismatched") == mnli.read(str(tmp_path), "test_ax") == []
    assert task("ax").splits == {"train": (), "eval": (), "test": ("test",)}
    assert task("ax").read(str(tmp_path), "train") == []


@pytest.mark.parametrize(
    ("source", "place"),
    [("", "AX/AX.tsv"), ("MNLI", "AX/diagnostic-full.tsv"), ("AX/..", "diagnostic/diagnostic.tsv")],
)
def test_the_diagnostic_is_found_beside_mnli(tmp_path, source, place):
    train = write(tmp_path / "MNLI" / "train.tsv", FILES["mnli"][0])
    write(tmp_path / "AX" / "SOURCE.md", "")  # a folder of something else is none
    write(tmp_path / place, "index\tPremise\tHypothesis\n4\tA\tB\n")
    assert found(task("mnli").read(str(tmp_path / source), "test_ax")) == [("A", "B", None, 4)]
    assert task("mnli").read(train, "test_ax") == []


@pytest.fixture
def tables(monkeypatch):
    """Tables of TFDS by their places, as `read_tfds` gives them; test_readers reads real ones."""
    tables = {}

    def find(source, split, names):
        if source.startswith("tfds:glue/ax:2"):
            raise InputError("glue/ax is not prepared")
        return next((place for stem in names[split] if (place := f"{source}:{stem}") in tables), "")

    def read_table(place, *how):
        records = [
            Record({"premise": "P", "hypothesis": "H", "label": label, "idx": 9 - index}, place)
            for index, label in enumerate(tables[place])
        ]
        return readers.Table(place, tuple(records[0]), records)

    monkeypatch.setattr(readers, "find_split_file", find)
    monkeypatch.setattr(readers, "read_table", read_table)
    monkeypatch.setattr(glue, "classes_in", lambda place: {"label": CLASSES["mnli"]})
    return tables


@pytest.mark.parametrize("version", ["", ":1.0.0"])
def test_the_diagnostic_of_tfds_is_a_data_set_of_its_own(tables, version):
    tables[f"tfds:glue/ax{version}:test"] = [-1]
    (example,) = task("mnli").read(f"tfds:glue/mnli{version}", "test_ax")
    assert example == ("P", "H", None, 9, f"tfds:glue/ax{version}:test")
    for source in ("tfds:glue/mnli:2.0.0", "tfds:other/mnli"):
        assert task("mnli").read(source, "test_ax") == []
    assert task("mnli").read("tfds:glue/mnli", "test_matched") == []


def test_tfds_is_read_by_the_names_of_its_classes(tables):
    place, mnli = "tfds:glue/mnli", task("mnli")
    tables |= {f"{place}:train": [2, 0], f"{place}:validation_matched": [1], f"{place}:test_matched": [-1]}
    assert found(mnli.read(place, "train")) == [("P", "H", "contradiction", 9), ("P", "H", "entailment", 8)]
    assert [mnli.read(place, split)[0].label for split in ("dev_matched", "test_matched")] == ["neutral", None]


@pytest.mark.parametrize("source", ["adv_dev.json", ".", "train.tsv,adv_dev.json"])
def test_adversarial_glue_is_dev_of_mnli(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    row = '{"idx": 4, "premise": "P", "hypothesis": "H", "label": %d}'
    write(tmp_path / "adv_dev.json", f'{{"mnli": [{row % 2}], "mnli-mm": [{row % 0}, {row % 1}]}}')
    write(tmp_path / "train.tsv", FILES["mnli"][0])
    assert found(task("mnli").read(source, "dev_matched")) == [("P", "H", "2", 4)]
    assert [each.label for each in task("mnli").read(source, "dev_mismatched")] == ["0", "1"]


# Submissions and scores


@pytest.mark.parametrize(
    ("name", "split", "file", "lines"),
    [
        ("cola", "test", "CoLA.tsv", "3 1 7 0"),
        ("sst2", "test", "SST-2.tsv", "3 1 7 0"),
        ("mrpc", "test", "MRPC.tsv", "3 1 7 0"),
        ("qqp", "test", "QQP.tsv", "3 1 7 0"),
        ("mnli", "test_matched", "MNLI-m.tsv", "3 neutral 7 entailment"),
        ("mnli", "test_mismatched", "MNLI-mm.tsv", "3 neutral 7 entailment"),
        ("mnli", "test_ax", "AX.tsv", "3 neutral 7 entailment"),
        ("ax", "test", "AX.tsv", "3 neutral 7 entailment"),
        ("qnli", "test", "QNLI.tsv", "3 not_entailment 7 entailment"),
        ("rte", "test", "RTE.tsv", "3 not_entailment 7 entailment"),
        ("wnli", "test", "WNLI.tsv", "3 1 7 0"),
        ("wnli", "dev", "WNLI-dev.tsv", "3 1 7 0"),
        ("stsb", "test", "STS-B.tsv", "3 0.000 7 5.000"),
    ],
)
def test_submissions(tmp_path, name, split, file, lines):
    mine = task(name)
    examples = [ClassifyExample("a", id=index) for index in (7, 3)]
    outputs = [row[: mine.num_outputs] for row in logits([9, -3, -3], [-3, 9, -3])]
    mine.write(tmp_path, split, examples, mine.decode(examples, [], outputs))
    assert (tmp_path / file).read_text().split() == f"index prediction {lines}".split()


def test_metrics_are_those_of_glue():
    expected = {
        "cola": ("mcc",), "sst2": ("accuracy",), "mrpc": ("f1", "accuracy"), "qqp": ("f1", "accuracy"),
        "stsb": ("pearson", "spearman"), "mnli": ("accuracy",), "qnli": ("accuracy",), "rte": ("accuracy",),
        "wnli": ("accuracy",), "ax": ("mcc", "accuracy"),
    }  # fmt: skip
    assert {name: glue.metrics for name, glue in TASKS.items()} == expected
    assert {name: task(name).metric for name in TASKS} == {name: first for name, (first, *_) in expected.items()}


@pytest.mark.parametrize("name", ["sst2", "mrpc", "mnli", "qnli", "stsb"])
def test_prediction_files_are_scored(tmp_path, name):
    data = write(tmp_path / "dev.tsv", FILES[name][0])
    examples = task(name).read(data, task(name).splits["eval"][0])
    by_index = "".join(f"{each.id}\t{each.label}\n" for each in reversed(examples))
    counted = "".join(f"{place}\t{each.label}\n" for place, each in enumerate(examples))  # if the index has gaps
    for lines, source in ((by_index, data), (counted, str(tmp_path))):
        path = write(tmp_path / "predictions.tsv", "index\tprediction\n" + lines)
        assert score_files(name, source, path) == pytest.approx(dict.fromkeys(TASKS[name].metrics, 1.0))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("0\tentailment\n", "predictions.tsv has no row of index 0"),
        ("index\tprediction\n0\tentailment\n", "predictions.tsv has no row of index 1, which"),
        ("index\tprediction\n0\t0\n1\t1\n2\t1\n", "dev.tsv has no row of index 2, which"),
        ("index\tprediction\n0\t0\n0\t1\n", "predictions.tsv:3: index 0 has a prediction already"),
        ("index\tprediction\n0\t0\n1\tno\n", "predictions.tsv:3: label 'no' is not one of 'entailment'"),
        ("index\tprediction\n0\t0\n1\t\n", "predictions.tsv:3: there is no prediction"),
    ],
)
def test_what_is_wrong_with_predictions_is_said(tmp_path, content, problem):
    data = write(tmp_path / "dev.tsv", FILES["rte"][0])
    path = write(tmp_path / "predictions.tsv", content)
    assert problem in message(score_files, "rte", data, path)


def test_an_index_that_two_rows_have(tmp_path):
    data = write(tmp_path / "dev.tsv", FILES["rte"][0].replace("1\tC", "0\tC"))
    path = write(tmp_path / "predictions.tsv", "index\tprediction\n0\tentailment\n")
    problem = f"{data}:2 and {data}:3 have the same index 0; give each its own"
    assert problem in message(score_files, "rte", data, path)
