# SPDX-License-Identifier: Apache-2.0
"""The data of GLUE: the files of its zip, or TFDS.

Classes are in the order of TFDS and Hugging Face; numbers in data files refer to it. Google's code has another order
for MNLI, contradiction first.

Source: Wang et al. 2018, arXiv 1804.07461.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bert_jax.errors import InputError
from bert_jax.storage.files import split_places
from bert_jax.tasks import base, readers
from bert_jax.tasks.classify_read import WITHHELD, make_examples, text_columns
from bert_jax.tasks.columnar import classes_in
from bert_jax.tasks.labels import (
    HIDDEN,
    UNAGREED,
    Classes,
    as_number,
    label_name,
    label_number,
)
from bert_jax.tasks.records import Record, find_column, named_class, no_column


class GlueTask(NamedTuple):
    """The columns, classes and metrics of one GLUE task."""

    folder: str  # in GLUE's zip, and the name of the submission's file
    texts: tuple[tuple[str, ...], ...]  # the columns of the texts, in the files and elsewhere
    label: tuple[str, ...]  # the column of the label likewise
    classes: tuple[str, ...]  # by number; () for a regression
    metrics: tuple[str, ...]  # that GLUE reports; the best checkpoint is chosen by the first
    names_in_files: bool = False  # whether files have the names of classes, not their numbers


_PAIR = (("sentence1", "sentence2"),)
_MNLI_TEXTS = (*_PAIR, ("premise", "hypothesis"))
_MNLI_CLASSES = ("entailment", "neutral", "contradiction")
_ENTAILED = ("entailment", "not_entailment")

TASKS: Mapping[str, GlueTask] = {
    "cola": GlueTask("CoLA", (("sentence",),), ("label",), ("unacceptable", "acceptable"), ("mcc",)),
    "sst2": GlueTask("SST-2", (("sentence",),), ("label",), ("negative", "positive"), ("accuracy",)),
    "mrpc": GlueTask(
        "MRPC", (("#1 String", "#2 String"), *_PAIR), ("Quality", "label"), ("not_equivalent", "equivalent"),
        ("f1", "accuracy"),
    ),
    "stsb": GlueTask("STS-B", _PAIR, ("score", "label"), (), ("pearson", "spearman")),
    "qqp": GlueTask(
        "QQP", (("question1", "question2"),), ("is_duplicate", "label"), ("not_duplicate", "duplicate"),
        ("f1", "accuracy"),
    ),
    "mnli": GlueTask("MNLI", _MNLI_TEXTS, ("gold_label", "label"), _MNLI_CLASSES, ("accuracy",), True),
    "qnli": GlueTask("QNLI", (("question", "sentence"), *_PAIR), ("label",), _ENTAILED, ("accuracy",), True),
    "rte": GlueTask("RTE", _PAIR, ("label",), _ENTAILED, ("accuracy",), True),
    "wnli": GlueTask("WNLI", _PAIR, ("label",), ("not_entailment", "entailment"), ("accuracy",)),
    "ax": GlueTask("AX", _MNLI_TEXTS, ("label", "gold_label"), _MNLI_CLASSES, ("mcc", "accuracy"), True),
}  # fmt: skip

# The splits of a task, and the names of their files, best first; TFDS has a split or a data set for each.
_SPLITS = {
    "mnli": {
        "train": ("train",),
        "eval": ("dev_matched", "dev_mismatched"),
        "test": ("test_matched", "test_mismatched", "test_ax"),
    },
    "ax": {"train": (), "eval": (), "test": ("test",)},
}
_MNLI_NAMES = {
    "train": ("train",),
    "dev_matched": ("dev_matched", "validation_matched", "dev", "validation"),
    "dev_mismatched": ("dev_mismatched", "validation_mismatched"),
    "test_matched": ("test_matched", "test"),
    "test_mismatched": ("test_mismatched",),
    "test_ax": ("diagnostic", "ax", "diagnostic-full"),
}
_AX_NAMES = {"test": ("test", "diagnostic", "ax", "diagnostic-full")}  # the last has no index
_NAMES = {"mnli": _MNLI_NAMES, "ax": _AX_NAMES}
# Adversarial GLUE has the parts of dev in one JSON file.
_JSON_KEYS = {"dev_matched": ("mnli",), "dev_mismatched": ("mnli-mm",)}
_FOLDERS = {"ax": ("AX", "diagnostic")}
# The columns of the STS benchmark's own files, which have no header; their index restarts every year.
_STS_COLUMNS = ("genre", "filename", "year", "old_index", "score", "sentence1", "sentence2")


def find_glue(name: str) -> GlueTask:
    """Returns the task of that name. Raises: InputError if there is no such task."""
    if name not in TASKS:
        raise InputError(f"task {name!r} is not one of GLUE's: {', '.join(TASKS)}")
    return TASKS[name]


def splits_of(name: str) -> Mapping[str, tuple[str, ...]]:
    """Returns the splits of a task, as `Task.splits`."""
    return _SPLITS.get(name, base.SPLITS)


def read_split(name: str, source: str, split: str) -> readers.Examples:
    """Returns the examples of a split; [] if it is missing."""
    names = _NAMES.get(name, readers.SPLITS)
    if len(split_places(source)) == 1:  # or the folder of the task inside GLUE's zip folder
        folders = [Path(source) / folder for folder in _FOLDERS.get(name, (TASKS[name].folder,))]
        source = next((str(folder) for folder in folders if folder.is_dir()), source)
    path = readers.find_split_file(source, split, names)
    # Adversarial GLUE has both parts of dev in one file.
    if not path and split == "dev_mismatched":
        path = readers.find_split_file(source, "dev_matched", names)
        path = path if readers.plain_name(path).endswith(".json") else ""
    if not path and split == "test_ax":
        path = _find_diagnostic(source)
    if not path:
        return readers.Examples()
    return read_place(name, path, _JSON_KEYS.get(split, ()), split.startswith(("train", "dev")))


def _find_diagnostic(source: str) -> str:
    """Returns the diagnostic set for MNLI data: its folder in or beside the MNLI folder, or TFDS's; "" if not found."""
    candidates = []
    if match := re.fullmatch(r"tfds:glue/mnli(:[\d.]+)?", source):
        candidates = [f"tfds:glue/ax{match[1] or ''}"]
    elif Path(source).is_dir():
        for folder in (Path(source), Path(source).absolute().parent):
            candidates += [str(folder / name) for name in _FOLDERS["ax"]]
    for candidate in candidates:
        # it is not there or not prepared, or the folder is of something else
        with contextlib.suppress(InputError):
            if path := readers.find_split_file(candidate, "test", _AX_NAMES):
                return path
    return ""


def read_place(name: str, place: str, json_keys: Sequence[str], labelled: bool) -> readers.Examples:
    """Returns the examples of a file, or of a split of TFDS.

    If labels are known, rows with too few columns are skipped and counted, as in GLUE's own readers. If labels are to
    be predicted, such rows are an error, since a submission would lack them.
    """
    glue = TASKS[name]
    table = _table(name, place, labelled, json_keys)
    if not table.records and readers.plain_name(place).endswith(".json"):
        return readers.Examples()  # Adversarial GLUE may lack a part
    table = table.filled()
    fix = "give GLUE's files; a table of your own is for finetune:classification or :regression"
    texts = text_columns(glue.texts, len(glue.texts[0]) == 2, table.columns, place, fix)
    label = find_column(glue.label, table.columns)
    if labelled and not label:
        raise no_column(place, repr(glue.label[0]), table.columns, fix)
    classes = classes_in(place).get(label)

    def label_of(record: Record) -> object:
        value = named_class(record.get(label), classes)
        read = label_name if glue.classes else label_number
        value = read(value, record.where)
        is_hidden = value in (UNAGREED, "hidden") or as_number(str(value)) == as_number(HIDDEN)
        return WITHHELD if is_hidden else value

    return make_examples(table, texts, label_of, labelled, (*texts, label), ("index", "idx"))


def _table(name: str, path: str, lenient: bool, json_keys: Sequence[str]) -> readers.Table:
    """Returns the table of a file. Files without a header are recognised."""
    row = [] if readers.is_records(path) else readers.first_row(path)
    if name == "stsb" and _is_sts_benchmark(row):
        return readers.read_wide_tsv(path, _STS_COLUMNS, lenient)
    columns: Sequence[str] = ()
    if readers.is_tsv(path) and name == "cola" and row and "sentence" not in row:
        columns = ("source", "label", "mark", "sentence")
        lenient = False
    if readers.is_tsv(path) and name == "mnli" and len(row) >= 10 and row[-1] in _MNLI_CLASSES:
        # by position, as in Google's code
        columns = [f"column {index}" for index in range(len(row))]
        columns[8:10], columns[-1] = ["sentence1", "sentence2"], "gold_label"
    return readers.read_table(path, columns, lenient, json_keys)


def _is_sts_benchmark(row: Sequence[str]) -> bool:
    """Returns whether a first line is a row of the STS benchmark: seven or nine columns with the score in the fifth.

    GLUE's own rows without their header begin with an index.
    """
    with contextlib.suppress(InputError):
        return (
            7 <= len(row) <= 9
            and label_number(row[4], "") is not None
            and not row[0].strip().isdecimal()
        )
    return False


def official_classes(classes: Sequence[str]) -> Classes:
    """Returns the classes of a GLUE task by name and by number, since its files have either."""
    return Classes(
        {spelled: index for index, name in enumerate(classes) for spelled in (name, str(index))}
    )
