# SPDX-License-Identifier: Apache-2.0
"""GLUE: files of its zip, of TFDS and of models with classes of their own; submissions, and scores of files."""

import importlib
import json

import numpy as np
import pytest
from builders import message, write

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks import readers, scores
from bert_jax.tasks.glue import read as glue
from bert_jax.tasks.glue.read import TASKS
from bert_jax.tasks.glue.score import score_files
from bert_jax.tasks.glue.tasks import glue_task
from bert_jax.tasks.labels import ClassifyExample
from bert_jax.tasks.records import Record

MNLI_HEADER = "\t".join(
    ["index", "promptID", "pairID", "genre", "parse1", "parse2", "parse3", "parse4", "sentence1", "sentence2", "label1"]
)
FILES = {
    "cola": ("gj04\t1\t\tA b.\ngj04\t0\t*\tB c.\n", [("A b.", None, "acceptable"), ("B c.", None, "unacceptable")]),
    "sst2": ("sentence\tlabel\nfine \t1\nbad\t0\n", [("fine ", None, "positive"), ("bad", None, "negative")]),
    "mrpc": (
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t5\t6\tA "b\tC\n0\t5\t6\tD\tE\n',
        [('A "b', "C", "equivalent"), ("D", "E", "not_equivalent")],
    ),
    "stsb": (
        "index\tgenre\tsentence1\tsentence2\tscore\n0\tx\tA\tB\t5.000\n1\tx\tC\tD\t0.25\n",
        [("A", "B", 5.0), ("C", "D", 0.25)],
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tA\tB 1\n2\t3\t4\tC\tD\t1\n3\t4\t5\tE\tF\t0\n",
        [("C", "D", "duplicate"), ("E", "F", "not_duplicate")],
    ),
    "mnli": (
        f"{MNLI_HEADER}\tgold_label\n" + "".join(
            "\t".join([str(index), *"abcdefg", f"P{index}", f"H{index}", "neutral", label]) + "\n"
            for index, label in enumerate(["contradiction", "entailment", "-", "neutral"])
        ),
        [("P0", "H0", "contradiction"), ("P1", "H1", "entailment"), ("P3", "H3", "neutral")],
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel\n0\tA\tB\tentailment\n5\tC\tD\tnot_entailment\n",
        [("A", "B", "entailment"), ("C", "D", "not_entailment")],
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel\n0\tA\tB\tnot_entailment\n1\tC\tD\tentailment\n",
        [("A", "B", "not_entailment"), ("C", "D", "entailment")],
    ),
    "wnli": (
        "index\tsentence1\tsentence2\tlabel\n0\tA\tB\t1\n1\tC\tD\t0\n",
        [("A", "B", "entailment"), ("C", "D", "not_entailment")],
    ),
}  # fmt: skip
# The number of each class, as TFDS (tensorflow_datasets/text/glue.py) and Hugging Face's glue have them.
NUMBERS = {
    "cola": {"unacceptable": 0, "acceptable": 1},
    "sst2": {"negative": 0, "positive": 1},
    "mrpc": {"not_equivalent": 0, "equivalent": 1},
    "qqp": {"not_duplicate": 0, "duplicate": 1},
    "mnli": {"entailment": 0, "neutral": 1, "contradiction": 2},
    "qnli": {"entailment": 0, "not_entailment": 1},
    "rte": {"entailment": 0, "not_entailment": 1},
    "wnli": {"not_entailment": 0, "entailment": 1},
    "ax": {"entailment": 0, "neutral": 1, "contradiction": 2},
}
ROWS = {"cola": 8551, "sst2": 67349, "mrpc": 3668, "stsb": 5749, "qqp": 19999, "rte": 2490, "wnli": 635}


def task(name, labels=(), **settings):
    return glue_task(TaskConfig(name=name, **settings), labels)


def logits(*rows):
    return [np.array(row, np.float32) for row in rows]


# Labels and their order


def test_classes_are_numbered_as_tfds_and_hugging_face_do():
    for name, numbers in NUMBERS.items():
        assert dict(zip(task(name).labels, range(9))) == numbers == dict(zip(TASKS[name].classes, range(9)))
    assert (task("stsb").labels, task("stsb").num_outputs, task("mnli").num_outputs) == ((), 1, 3)


def test_the_installed_tfds_has_the_same_classes_and_columns():
    builder = importlib.import_module("tensorflow_datasets.text.glue").Glue
    for name, mine in TASKS.items():
        theirs = builder.builder_configs[name]
        assert tuple(theirs.label_classes or ()) == mine.classes
        assert tuple(theirs.text_features) in mine.texts and "label" in mine.label


@pytest.mark.parametrize("name", FILES)
def test_files_give_texts_and_the_right_class(tmp_path, tokenizer, name):
    content, expected = FILES[name]
    write(tmp_path / "train.tsv", content)
    examples = task(name).read(str(tmp_path), "train")
    rows = task(name).make_rows(examples, tokenizer, True).rows
    assert [each[:2] for each in examples] == [each[:2] for each in expected]
    assert [row.label for row in rows] == [
        NUMBERS[name][label] if name != "stsb" else label for _, _, label in expected
    ]


def test_rows_that_are_skipped_are_counted(tmp_path, tokenizer):
    for name, reason in (("qqp", "skipped: too few columns"), ("mnli", "skipped: no agreed label")):
        write(tmp_path / name / "train.tsv", FILES[name][0])
        made = task(name).make_rows(task(name).read(str(tmp_path / name), "train"), tokenizer, True)
        assert made.counts == {reason: 1}
    unlabelled = FILES["qqp"][0].replace("is_duplicate", "more")
    write(tmp_path / "qqp" / "test.tsv", unlabelled)  # a submission would lack the row
    assert "test.tsv:2 has 5 columns" in message(task("qqp").read, str(tmp_path / "qqp"), "test")


def test_mnli_without_a_header(tmp_path):
    rows = [[str(index), *"abcdefg", f"P{index}", f"H{index}", "x", "neutral"] for index in range(2)]
    expected = [("P0", "H0", "neutral"), ("P1", "H1", "neutral")]
    write(tmp_path / "train.tsv", "".join("\t".join(row) + "\n" for row in rows))
    found = task("mnli").read(str(tmp_path), "train")
    assert [(each.text, each.second_text, each.label) for each in found] == expected


def test_mnli_as_hugging_face_has_it(tmp_path):
    names = "promptID pairID premise premise_binary_parse premise_parse hypothesis hypothesis_binary_parse"
    columns = f"{names} hypothesis_parse genre label".split()
    rows = [dict.fromkeys(columns, "x") | {"premise": "P", "hypothesis": "H", "label": label} for label in (1, -1)]
    write(tmp_path / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert [each[:3] for each in task("mnli").read(str(tmp_path), "train")] == [("P", "H", "1")]


def test_a_model_keeps_the_order_of_its_own_classes(tmp_path, tokenizer):
    google = ("contradiction", "entailment", "neutral")
    mine = task("mnli", google)
    write(tmp_path / "dev_matched.tsv", FILES["mnli"][0])
    examples = mine.read(str(tmp_path), "dev_matched")
    assert [row.label for row in mine.make_rows(examples, tokenizer, True).rows] == [0, 1, 2]
    found = mine.decode(examples, [], logits([9, 0, 0], [0, 9, 0], [0, 0, 9]))
    assert [each.label for each in found] == ["contradiction", "entailment", "neutral"]
    assert mine.score(examples, found) == {"accuracy": 1.0} and mine.find_labels(examples) == google
    examples = [ClassifyExample("a", None, "1", 0, "f:1"), ClassifyExample("a", None, "0", 1, "f:2")]
    unnamed, capitals = task("cola", ("LABEL_0", "LABEL_1")), task("sst2", ("POSITIVE", "NEGATIVE"))
    assert [row.label for row in unnamed.make_rows(examples, tokenizer, True).rows] == [1, 0]
    assert capitals.score(examples, capitals.decode([], [], logits([1, 0], [0, 1]))) == {"accuracy": 1.0}


@pytest.mark.parametrize(
    "labels", [("entailment", "neutral"), ("a", "b", "c"), ("neutral", "neutral", "entailment"), ("x",) * 4]
)
def test_classes_of_another_task_are_refused(labels):
    assert "are not those of mnli: entailment, neutral, contradiction" in message(task, "mnli", labels)


def test_settings_that_cannot_be_used():
    assert "task 'x' is not one of GLUE's: cola, sst2" in message(task, "x")
    assert "one of pearson, spearman" in message(lambda: task("stsb", metric="f1"))
    assert "use macro_f1" in message(lambda: task("mnli", metric="f1"))
    assert task("rte", metric="mcc").metric == "mcc"


# Splits


def test_splits_of_mnli_and_the_diagnostic(tmp_path):
    mnli, splits = task("mnli"), ("dev_matched", "dev_mismatched", "test_matched")
    assert mnli.splits["eval"] == ("dev_matched", "dev_mismatched") and mnli.splits["train"] == ("train",)
    for split in splits:
        write(tmp_path / "MNLI" / f"{split}.tsv", FILES["mnli"][0].replace("P0", split))
    assert [mnli.read(str(tmp_path), split)[0].text for split in splits] == [*splits]  # in the zip's own folder
    assert mnli.read(str(tmp_path), "test_mismatched") == mnli.read(str(tmp_path), "test_ax") == []
    assert task("ax").splits == {"train": (), "eval": (), "test": ("test",)}
    assert task("ax").read(str(tmp_path), "train") == []


@pytest.mark.parametrize("place", ["AX/AX.tsv", "AX/diagnostic-full.tsv", "diagnostic/diagnostic.tsv", "AX/test.tsv"])
@pytest.mark.parametrize("source", ["", "MNLI", "AX/.."])
def test_the_diagnostic_is_found_beside_mnli(tmp_path, source, place):
    write(tmp_path / "MNLI" / "train.tsv", FILES["mnli"][0])
    write(tmp_path / "AX" / "SOURCE.md", "")  # a folder of something else is none
    usual = "index\tsentence1\tsentence2\tmore\n0\tA\tB\tneutral\n"
    full = "Domain\tPremise\tHypothesis\tLabel\nx\tA\tB\tneutral\n"
    write(tmp_path / place, full if "full" in place else usual)
    mnli = task("mnli")
    examples = mnli.read(str(tmp_path / source), "test_ax")
    assert [each[:4] for each in examples] == [("A", "B", "neutral" if "full" in place else None, 0)]
    mnli.write(tmp_path, "test_ax", examples, mnli.decode(examples, [], logits([0, 9, 0])))
    assert (tmp_path / "AX.tsv").read_text() == "index\tprediction\n0\tneutral\n"
    assert mnli.read(str(tmp_path / "MNLI" / "train.tsv"), "test_ax") == []


def test_the_diagnostic_of_tfds_is_a_data_set_of_its_own(monkeypatch):
    def find(source, split, names):
        if source.startswith("tfds:glue/ax:2"):
            raise InputError("glue/ax is not prepared")
        return f"{source}:{split}" if source.startswith("tfds:glue/ax") else ""

    def read_table(place, *how):
        record = Record({"premise": "P", "hypothesis": "H", "label": -1, "idx": 4}, place)
        return readers.Table(place, tuple(record), [record])

    monkeypatch.setattr(readers, "find_split_file", find)
    monkeypatch.setattr(readers, "read_table", read_table)
    monkeypatch.setattr(glue, "classes_in", lambda place: {"label": TASKS["ax"].classes})
    for version in ("", ":1.0.0"):
        (found,) = task("mnli").read(f"tfds:glue/mnli{version}", "test_ax")
        assert found[:4] == ("P", "H", None, 4) and found.where == f"tfds:glue/ax{version}:test"
    assert task("mnli").read("tfds:glue/mnli:2.0.0", "test_ax") == []
    assert task("mnli").read("tfds:other/mnli", "test_ax") == [] == task("mnli").read("tfds:glue/mnli", "test_matched")


def test_adversarial_glue_is_dev_of_mnli(tmp_path):
    row = '{"idx": 4, "premise": "P", "hypothesis": "H", "label": %d}'
    path = write(tmp_path / "adv_dev.json", f'{{"mnli": [{row % 2}], "mnli-mm": [{row % 0}, {row % 1}]}}')
    train = write(tmp_path / "train.tsv", FILES["mnli"][0])
    for source in (path, str(tmp_path), f"{train},{path}"):
        found = {split: task("mnli").read(source, split) for split in ("dev_matched", "dev_mismatched")}
        assert {split: [each.label for each in examples] for split, examples in found.items()} == {
            "dev_matched": ["2"],
            "dev_mismatched": ["0", "1"],
        }
    assert found["dev_matched"][0][:4] == ("P", "H", "2", 4)
    assert len(task("mnli").read(f"{train},{path}", "train")) == 3


def test_cola_test_has_a_header(tmp_path):
    write(tmp_path / "test.tsv", "index\tsentence\n0\tA b.\n")
    assert task("cola").read(str(tmp_path), "test")[0][:4] == ("A b.", None, None, 0)
    write(tmp_path / "train.tsv", "a\tb\n")
    assert "train.tsv:1 has 2 columns, not the 4 of " in message(task("cola").read, str(tmp_path), "train")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("test.csv", 'idx,sentence,label\n0,"A, b.",-1\n'),
        ("test.jsonl", '{"idx": 0, "sentence": "A, b.", "label": -1}\n'),
        ("test.json", '[{"idx": 0, "sentence": "A, b.", "label": "-1"}]'),
        ("test.tsv", "idx\tsentence\tlabel\n0\tA, b.\t-1 \n"),
    ],
)
def test_cola_with_named_columns_and_hidden_labels(tmp_path, tokenizer, name, content):
    examples = task("cola").read(write(tmp_path / name, content), "test")
    assert [each[:4] for each in examples] == [("A, b.", None, None, 0)] and examples.columns == ("sentence", "label")
    assert task("cola").make_rows(examples, tokenizer, False).rows[0].label is None


@pytest.mark.parametrize("name", ["sts-dev.tsv", "sts-dev.csv", "dev.tsv"])  # the second is what the authors call it
def test_the_sts_benchmark_has_no_header(tmp_path, name):
    row = 'main-news\tMSRpar\t2012test\t{0}\t{1}\tA {0}\tB, "b\n'
    rows = [row.format("0001", "4.000"), row.format("0005", "0.25").replace("\n", "\tx\ty\n")]
    path = write(tmp_path / name, "".join(rows))
    assert [each[:4] for each in task("stsb").read(path, "dev")] == [
        ("A 0001", 'B, "b', 4.0, 0),
        ("A 0005", 'B, "b', 0.25, 1),
    ]
    test = write(tmp_path / name.replace("dev", "test"), "".join(reversed(rows)) + "x\n")
    assert f"{test}:3 has 1 columns, not the 7" in message(task("stsb").read, test, "test")
    # GLUE's rows of test without their header have a number there too, but no score.
    unlabelled = write(tmp_path / "train.tsv", "0\tmain-news\tMSRpar\t2012\t0001\tx\ty\tA\tB\n" * 2)
    assert "has no column 'sentence1' and 'sentence2'" in message(task("stsb").read, unlabelled, "train")


@pytest.mark.parametrize("name", FILES)
def test_a_row_of_dev_without_a_label_is_named(tmp_path, name):
    content, expected = FILES[name]
    split = "dev_matched" if name == "mnli" else "dev"
    lines = content.rstrip("\n").split("\n")
    cells = lines[-1].split("\t")
    cells[{"cola": 1, "mrpc": 0}.get(name, -1)] = " "
    path = write(tmp_path / f"{split}.tsv", "\n".join([*lines[:-1], "\t".join(cells)]) + "\n")
    assert f"{path}:{len(lines)} has no label; training and dev" in message(task(name).read, path, split)


def test_a_file_of_another_task_is_refused(tmp_path, tokenizer):
    path = write(tmp_path / "train.tsv", FILES["rte"][0])
    assert "has no column 'question1' and 'question2'; it has 'index'" in message(task("qqp").read, path, "train")
    assert "holds no example" in message(task("rte").read, write(tmp_path / "train.tsv", ""), "train")
    unknown = write(tmp_path / "train.tsv", FILES["rte"][0].replace("\tentailment", "\tmaybe"))
    examples = task("rte").read(unknown, "train")
    problem = f"{unknown}:3: label 'maybe' is not one of 'entailment', 'not_entailment'"
    assert problem in message(task("rte").make_rows, examples, tokenizer, True)


def test_tfds_is_read_by_the_names_of_its_classes(monkeypatch, tokenizer):
    """The data set of two tasks as `read_tfds` gives it; test_readers reads real ones."""
    tables = {"train": [2, 0], "validation_matched": [1], "test_matched": [-1]}
    names = {"label": ("entailment", "neutral", "contradiction")}

    def read(place, *how):
        values = tables[place.rpartition(":")[2]]
        records = [
            Record({"premise": "P", "hypothesis": "H", "label": label, "idx": 9 - index}, f"{place}, {index}")
            for index, label in enumerate(values)
        ]
        return readers.Table(place, tuple(records[0]), records)

    monkeypatch.setattr(readers, "find_split_file", lambda source, split, stems: next(
        (f"{source}:{stem}" for stem in stems[split] if stem in tables), ""
    ))  # fmt: skip
    monkeypatch.setattr(readers, "read_table", read)
    monkeypatch.setattr(glue, "classes_in", lambda place: names)
    mnli = task("mnli")
    found = {split: mnli.read("tfds:glue/mnli", split) for split in ("train", "dev_matched", "test_matched")}
    assert [each.label for each in found["train"]] == ["contradiction", "entailment"]
    assert [row.label for row in mnli.make_rows(found["train"], tokenizer, True).rows] == [2, 0]
    assert (found["dev_matched"][0].label, found["test_matched"][0].label) == ("neutral", None)
    assert found["train"][0].id == 9


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
        ("stsb", "test", "STS-B.tsv", "3 5.000 7 0.000"),
    ],
)
def test_submissions(tmp_path, name, split, file, lines):
    mine = task(name)
    examples = [ClassifyExample("a", "b", None, index, "") for index in (7, 3)]
    outputs = (
        logits([-3], [8]) if name == "stsb" else logits([1, 0, 0][: mine.num_outputs], [0, 1, 0][: mine.num_outputs])
    )
    mine.write(tmp_path, split, examples, mine.decode(examples, [], outputs))
    assert (tmp_path / file).read_text().split() == f"index prediction {lines}".split()


def test_metrics_are_those_of_glue(tmp_path):
    expected = {
        "cola": ("mcc",), "sst2": ("accuracy",), "mrpc": ("f1", "accuracy"), "qqp": ("f1", "accuracy"),
        "stsb": ("pearson", "spearman"), "mnli": ("accuracy",), "qnli": ("accuracy",), "rte": ("accuracy",),
        "wnli": ("accuracy",), "ax": ("mcc", "accuracy"),
    }  # fmt: skip
    assert {name: mine.metrics for name, mine in TASKS.items()} == expected
    assert {name: task(name).metric for name in TASKS} == {name: metrics[0] for name, metrics in expected.items()}
    rng = np.random.default_rng(0)
    labels, said = rng.integers(0, 2, 50), rng.integers(0, 2, 50)
    mine = task("mrpc")
    examples = [ClassifyExample("a", "b", str(label), 0, "") for label in labels]
    found = mine.score(examples, mine.decode(examples, [], logits(*np.eye(2)[said])))
    assert found == {"f1": scores.f1(labels, said), "accuracy": scores.accuracy(labels, said)}


@pytest.mark.parametrize("name", FILES)
def test_prediction_files_are_scored(tmp_path, name):
    data = write(tmp_path / "dev.tsv", FILES[name][0])
    examples = task(name).read(data, task(name).splits["eval"][0])
    by_index = "".join(f"{each.id}\t{each.label}\n" for each in reversed(examples))
    counted = "".join(f"{place}\t{each.label}\n" for place, each in enumerate(examples))  # if the index has gaps
    for lines in (by_index, counted):
        path = write(tmp_path / "predictions.tsv", "index\tprediction\n" + lines)
        for source in (data, str(tmp_path)):
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
        ("", "predictions.tsv has no row of index 0"),
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


# Real data


def test_real_files(shared_data, tokenizer):
    for name in ("mrpc", "rte", "wnli", "stsb"):
        mine = task(name)
        train, dev = (mine.read(str(shared_data / "glue"), split) for split in ("train", "dev"))
        assert len(train) == ROWS[name]
        made = mine.make_rows(dev, tokenizer, True)
        assert len(made.rows) == len(dev) and all(len(row.token_ids) <= 128 for row in made.rows)
    adversarial = str(shared_data / "advglue_mnli")
    assert [len(task("mnli").read(adversarial, split)) for split in task("mnli").splits["eval"]] == [121, 162]
