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

from bert_jax.data.sources import tfds_text
from bert_jax.errors import InputError
from bert_jax.storage.files import split_places
from bert_jax.tasks import base, readers
from bert_jax.tasks.columnar import classes_in
from bert_jax.tasks.labels import (
    HIDDEN,
    UNAGREED,
    Classes,
    ClassifyExample,
    as_number,
    check_labelled,
    label_name,
    label_number,
)
from bert_jax.tasks.texts import id_of, named_class, text_of


class GlueTask(NamedTuple):
    """The columns, classes and metrics of one GLUE task."""

    folder: str  # in GLUE's zip, and the name of the submission's file
    texts: tuple[tuple[str, ...], ...]  # the columns of the texts, in the files and elsewhere
    label: tuple[str, ...]  # the column of the label likewise
    classes: tuple[str, ...]  # by number; () for a regression
    metrics: tuple[str, ...]  # that GLUE reports; the best checkpoint is chosen by the first
    names_in_files: bool = False  # whether files have the names of classes, not their numbers


_PAIR = (("sentence1", "sentence2"),)
_MNLI_TEXTS = (*_PAIR, ("premise", "hypothesis"), ("Premise", "Hypothesis"))
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
    "ax": GlueTask("AX", _MNLI_TEXTS, ("Label", "label", "gold_label"), _MNLI_CLASSES, ("mcc", "accuracy"), True),
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


def read_split(name: str, source: str, split: str) -> list[ClassifyExample]:
    """Returns the examples of a split; [] if it is missing."""
    names = _NAMES.get(name, readers.SPLITS)
    if len(split_places(source)) == 1:
        source = _own_folder(name, source)
    path = readers.find_split_file(source, split, names)
    if not path and split == "dev_mismatched":
        path = readers.find_split_file(source, "dev_matched", names)
        path = path if readers.plain_name(path).endswith(".json") else ""
    if not path and split == "test_ax":
        path = _find_diagnostic(source)
    if not path:
        return []
    examples = read_place(
        name, path, _JSON_KEYS.get(split, ()), split == "train" or split.startswith("dev")
    )
    if not examples and not readers.plain_name(path).endswith(".json"):
        raise InputError(f"{path} holds no example; copy it again from GLUE's zip")
    return examples


def _own_folder(name: str, source: str) -> str:
    """Returns the folder of the task inside GLUE's zip folder, or `source` itself."""
    folders = [Path(source) / folder for folder in _FOLDERS.get(name, (TASKS[name].folder,))]
    return next((str(folder) for folder in folders if folder.is_dir()), source)


def _find_diagnostic(source: str) -> str:
    """Returns the diagnostic set for MNLI data: its folder in or beside the MNLI folder, or TFDS's; "" if not found."""
    candidates = []
    if match := re.fullmatch(r"tfds:glue/mnli(:[\d.]+)?", source):
        candidates = [f"tfds:glue/ax{match[1] or ''}"]
    elif Path(source).is_dir():
        folders = (Path(source), Path(source).absolute().parent)
        candidates = [
            str(folder / name)
            for folder in folders
            for name in _FOLDERS["ax"]
            if (folder / name).is_dir()
        ]
    for candidate in candidates:
        # it is not prepared, or the folder is of something else
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
    classes = classes_in(place)
    texts = next((list(names) for names in glue.texts if set(names) <= set(table.columns)), [])
    label = next((column for column in glue.label if column in table.columns), "")
    if table.records and (not texts or (labelled and not label)):
        wanted = glue.texts[0] if not texts else glue.label[:1]
        has = readers.listed_columns(table.columns)
        raise InputError(
            f"{place} has no column {' and no '.join(map(repr, wanted))}; it has {has}"
        )
    number = next((column for column in ("index", "idx") if column in table.columns), "")
    examples, unagreed = [], 0
    for position, record in enumerate(table.records):
        value = named_class(record.get(label), classes.get(label))
        value = (
            label_name(value, record.where) if glue.classes else label_number(value, record.where)
        )
        if value in (UNAGREED, "hidden") or as_number(str(value)) == as_number(HIDDEN):
            unagreed += labelled
            if labelled:
                continue
            value = None
        examples.append(
            ClassifyExample(
                text_of(record, texts[0]),
                text_of(record, texts[1]) if len(texts) == 2 else None,
                value,
                id_of(record.get(number), position),
                record.where,
            )
        )
    if labelled:
        check_labelled(examples)
    skipped = {"skipped: too few columns": table.skipped, "skipped: no agreed label": unagreed}
    return readers.Examples(examples, skipped, (*texts, label))


def _table(name: str, path: str, lenient: bool, json_keys: Sequence[str]) -> readers.Table:
    """Returns the table of a file. Files without a header, or with other column names, are recognised."""
    if (
        name == "cola"
        and readers.is_tsv(path)
        and "sentence" not in (row := readers.first_row(path))
    ):
        if row and len(row) != 4:
            raise InputError(
                f"{path}:1 has {len(row)} columns; a file of CoLA has a header, or four columns"
            )
        return readers.read_table(path, ("source", "label", "mark", "sentence"))
    if (
        name == "stsb"
        and not path.startswith(tfds_text.PREFIX)
        and _is_sts_benchmark(readers.first_row(path))
    ):
        return readers.read_wide_tsv(path, _STS_COLUMNS, lenient)
    table = readers.read_table(path, (), lenient, json_keys)
    if (
        name == "mnli"
        and readers.is_tsv(path)
        and len(table.columns) >= 10
        and "sentence1" not in table.columns
    ):
        # by position, as in Google's code
        columns = [f"column {index}" for index in range(len(table.columns))]
        columns[8:10], columns[-1] = ["sentence1", "sentence2"], "gold_label"
        if table.columns[-1] in TASKS[name].classes:
            return readers.read_table(path, columns, lenient)  # there is no header
        records = [
            readers.Record(zip(columns, record.values()), record.where) for record in table.records
        ]
        return table._replace(columns=tuple(columns), records=records)
    return table


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
