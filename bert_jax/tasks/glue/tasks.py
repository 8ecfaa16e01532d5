# SPDX-License-Identifier: Apache-2.0
"""The nine tasks of GLUE and its diagnostic set: the files of its zip or of TFDS, and those of a submission.

Classes are in the order of TFDS and Hugging Face; numbers in data files refer to it. Google's code has another order
for MNLI, contradiction first. A model with its own class names keeps its own order.

Source: Wang et al. 2018, arXiv 1804.07461; gluebenchmark.com/faq for the format of submissions.
"""

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_jax.data.sources import tfds_text
from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.storage.files import split_places
from bert_jax.storage.places import Place
from bert_jax.tasks.base import Task
from bert_jax.tasks.classify import id_of, named_class, parse_texts, text_of
from bert_jax.tasks.readers import (
    SPLITS,
    Examples,
    Record,
    Table,
    find_split_file,
    first_row,
    is_tsv,
    read_json,
    read_table,
    read_wide_tsv,
    tfds_classes,
)
from bert_jax.tasks.texts import (
    CLASS_METRICS,
    HIDDEN,
    NUMBER_METRICS,
    Classes,
    Classified,
    ClassifyExample,
    Scored,
    as_number,
    check_labelled,
    decode_classes,
    decode_numbers,
    label_name,
    label_number,
    make_class_rows,
    make_rows,
    number_of,
    score_classes,
    score_numbers,
    show,
    write_predictions,
)


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

# The splits of a task, and what their files are called, best first; TFDS has a split for each, or a data set.
_USUAL = {"train": ("train",), "eval": ("dev",), "test": ("test",)}
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
_SUBMISSIONS = {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm", "test_ax": "AX"}
_FOLDERS = {"ax": ("AX", "diagnostic")}
_UNAGREED = "-"  # MNLI's annotators did not agree
# The columns of the STS benchmark's own files, which have no header; their index counts anew for each year.
_STS_COLUMNS = ("genre", "filename", "year", "old_index", "score", "sentence1", "sentence2")


def glue_task(config: TaskConfig, labels: Sequence[str] = ()) -> Task:
    """Returns the GLUE task named `config.name`.

    Args:
      config: its settings.
      labels: the classes of a model that has its own, in its order; their names must be those of the task.
    Raises: InputError if the name, the metric or the labels cannot be used.
    """
    if config.name not in TASKS:
        raise InputError(f"task {config.name!r} is not one of GLUE's: {', '.join(TASKS)}")
    glue = TASKS[config.name]
    metrics = CLASS_METRICS if glue.classes else NUMBER_METRICS
    if config.metric and config.metric not in metrics:
        raise InputError(f"task.metric {config.metric!r} of {config.name} is not one of {', '.join(metrics)}; use one")
    if config.metric == "f1" and len(glue.classes) != 2:
        raise InputError(f"task.metric f1 is of two classes, {config.name} has {len(glue.classes)}; use macro_f1")
    own = tuple(labels) or tuple(each.strip() for each in config.labels.split(",") if each.strip()) or glue.classes
    order = _own_order(config.name, glue.classes, own)
    numbers = {spelled: order[number] for spelled, number in official_classes(glue.classes).numbers.items()}
    numbers |= {name: index for index, name in enumerate(own) if name not in numbers}
    metric = config.metric or glue.metrics[0]
    reported = (*glue.metrics, *({metric} - set(glue.metrics)))
    task = Task(
        config=config,
        head="sequence_classification",
        labels=own,
        num_outputs=len(own),
        metric=metric,
        splits=_SPLITS.get(config.name, _USUAL),
        read=partial(_read, config.name),
        parse=partial(
            parse_texts,
            [(names[0], names[1] if len(names) == 2 else "") for names in glue.texts],
            len(glue.texts[0]) == 2,
        ),
        make_rows=partial(make_class_rows, config, Classes(numbers)),
        decode=partial(decode_classes, own),
        score=partial(_score, glue.classes, order, reported),
        show=show,
        write=partial(_write, config.name, order),
        find_labels=lambda examples: own,
    )
    if glue.classes:
        return task
    return dataclasses.replace(
        task, labels=(), num_outputs=1, make_rows=partial(make_rows, config, number_of), decode=decode_numbers,
        score=score_numbers, find_labels=lambda examples: (),
    )  # fmt: skip


def _own_order(name: str, classes: Sequence[str], own: Sequence[str]) -> list[int]:
    """Returns the index of each GLUE class among the classes of a model.

    Names may differ in case, or be numbers, with or without the LABEL_ that transformers puts before them.
    """
    spelled = [label.lower().removeprefix("label_").replace(" ", "_").replace("-", "_") for label in own]
    order = [
        next((place for place, label in enumerate(spelled) if label in (each, str(index))), -1)
        for index, each in enumerate(classes)
    ]
    if len(own) != len(classes) or sorted(order) != list(range(len(classes))):
        raise InputError(
            f"the model's classes {', '.join(own)} are not those of {name}: {', '.join(classes)}; use a model of that "
            "task, or set task.labels to their order in the model"
        )
    return order


# Reading


def _read(name: str, source: str, split: str) -> list[ClassifyExample]:
    """Returns the examples of a split; [] if it is not there."""
    names = _NAMES.get(name, SPLITS)
    if len(split_places(source)) == 1:
        source = _own_folder(name, source)
    place = find_split_file(source, split, names)
    if not place and split == "dev_mismatched":
        place = find_split_file(source, "dev_matched", names)
        place = place if _is_json(place) else ""
    if not place and split == "test_ax":
        place = _find_diagnostic(source)
    if not place:
        return []
    examples = read_place(name, place, _JSON_KEYS.get(split, ()), split == "train" or split.startswith("dev"))
    if not examples and not _is_json(place):
        raise InputError(f"{place} holds no example; copy it again from GLUE's zip")
    return examples


def _is_json(place: str) -> bool:
    return place.lower().removesuffix(".gz").removesuffix(".zst").endswith(".json")


def _own_folder(name: str, source: str) -> str:
    """Returns the folder of the task inside GLUE's zip folder, or `source` itself."""
    folders = [Path(source) / folder for folder in _FOLDERS.get(name, (TASKS[name].folder,))]
    return next((str(folder) for folder in folders if folder.is_dir()), source)


def _find_diagnostic(source: str) -> str:
    """Returns the diagnostic set for MNLI data: its folder in or beside theirs, or that of TFDS; "" if not found."""
    places = []
    if of_tfds := re.fullmatch(r"tfds:glue/mnli(:[\d.]+)?", source):
        places = [f"tfds:glue/ax{of_tfds[1] or ''}"]
    elif Path(source).is_dir():
        folders = (Path(source), Path(source).absolute().parent)
        places = [str(folder / name) for folder in folders for name in _FOLDERS["ax"] if (folder / name).is_dir()]
    for place in places:
        with contextlib.suppress(InputError):  # it is not prepared, or the folder is of something else
            if found := find_split_file(place, "test", _AX_NAMES):
                return found
    return ""


def read_place(name: str, place: str, json_keys: Sequence[str], labelled: bool) -> Examples:
    """Returns the examples of a file, or of a split of TFDS.

    Rows with too few columns are skipped and counted where labels are known, as GLUE's own readers do; where they
    are to be predicted, a submission would lack them, so there they are an error.
    """
    glue = TASKS[name]
    table = _json_table(place, json_keys) if _is_json(place) else _table(name, place, labelled)
    classes = tfds_classes(place) if place.startswith(tfds_text.PREFIX) else {}
    texts = next((list(names) for names in glue.texts if set(names) <= set(table.columns)), [])
    label = next((column for column in glue.label if column in table.columns), "")
    if table.records and (not texts or (labelled and not label)):
        wanted = glue.texts[0] if not texts else glue.label[:1]
        raise InputError(
            f"{place} has no column {' and no '.join(map(repr, wanted))}; it has "
            f"{', '.join(repr(each[:40]) for each in table.columns[:20])}: is it a file of {glue.folder}?"
        )
    number = next((column for column in ("index", "idx") if column in table.columns), "")
    examples, unagreed = [], 0
    for place_in_data, record in enumerate(table.records):
        value = named_class(record.get(label), classes.get(label))
        value = label_name(value, record.where) if glue.classes else label_number(value, record.where)
        if value in (_UNAGREED, "hidden") or as_number(str(value)) == as_number(HIDDEN):
            unagreed += labelled
            if labelled:
                continue
            value = None
        examples.append(
            ClassifyExample(
                text_of(record, texts[0]),
                text_of(record, texts[1]) if len(texts) == 2 else None,
                value,
                id_of(record.get(number), place_in_data),
                record.where,
            )
        )
    if labelled:
        check_labelled(examples)
    skipped = {"skipped: too few columns": table.skipped, "skipped: no agreed label": unagreed}
    return Examples(examples, skipped, (*texts, label))


def _json_table(place: str, keys: Sequence[str]) -> Table:
    records = read_json(place, keys)
    return Table(tuple(dict.fromkeys(key for record in records for key in record)), records)


def _table(name: str, place: str, lenient: bool) -> Table:
    """Returns the table of a file. Files without a header, or with other column names, are recognised."""
    if name == "cola" and is_tsv(place) and "sentence" not in (row := first_row(place)):
        if row and len(row) != 4:
            raise InputError(f"{place}:1 has {len(row)} columns; a file of CoLA has a header, or four columns")
        return read_table(place, ("source", "label", "mark", "sentence"))
    if name == "stsb" and not place.startswith(tfds_text.PREFIX) and _is_sts_benchmark(first_row(place)):
        return read_wide_tsv(place, _STS_COLUMNS, lenient)
    table = read_table(place, (), lenient)
    if name == "mnli" and len(table.columns) >= 10 and "sentence1" not in table.columns:
        columns = [f"column {index}" for index in range(len(table.columns))]  # by their places, as Google's code does
        columns[8:10], columns[-1] = ["sentence1", "sentence2"], "gold_label"
        if table.columns[-1] in TASKS[name].classes:
            return read_table(place, columns, lenient)  # there is no header
        return table._replace(
            columns=tuple(columns), records=[Record(zip(columns, each.values()), each.where) for each in table.records]
        )
    return table


def _is_sts_benchmark(row: Sequence[str]) -> bool:
    """Returns whether a first line is a row of the STS benchmark: seven or nine columns with the score in the fifth.

    GLUE's own rows without their header begin with an index.
    """
    with contextlib.suppress(InputError):
        return 7 <= len(row) <= 9 and label_number(row[4], "") is not None and not row[0].strip().isdecimal()
    return False


# Predictions


def _score(
    classes: Sequence[str],
    order: Sequence[int],
    metrics: Sequence[str],
    examples: Sequence[ClassifyExample],
    predictions: Sequence[Classified],
) -> dict[str, float]:
    """Returns the metrics, computed with GLUE's class numbers, independent of the order of the model's classes."""
    canonical = [prediction._replace(label=classes[_canonical(order, prediction)]) for prediction in predictions]
    return score_classes(metrics, official_classes(classes), examples, canonical)


def official_classes(classes: Sequence[str]) -> Classes:
    """Returns the classes of GLUE by their names and by their numbers, as its files have either."""
    return Classes({spelled: index for index, name in enumerate(classes) for spelled in (name, str(index))})


def _canonical(order: Sequence[int], prediction: Classified) -> int:
    """Returns GLUE's class number of a prediction."""
    return order.index(list(prediction.probabilities).index(prediction.label))


def _write(
    name: str,
    order: Sequence[int],
    directory: Place,
    split: str,
    examples: Sequence[ClassifyExample],
    predictions: Sequence[Classified | Scored],
) -> None:
    """Writes the file for the leaderboard. For splits other than test, the name of the split is appended."""
    values: list[str] = []
    for prediction in predictions:
        if isinstance(prediction, Scored):
            values.append(f"{min(5.0, max(0.0, prediction.value)):.3f}")
        else:
            index = _canonical(order, prediction)
            values.append(TASKS[name].classes[index] if TASKS[name].names_in_files else str(index))
    stem = _SUBMISSIONS.get(split, TASKS[name].folder) + ("" if split.startswith("test") else f"-{split}")
    ids = [example.id for example in examples]
    if all(isinstance(each, int) for each in ids):  # those of TFDS are shuffled
        places = np.argsort(np.array(ids, np.int64), kind="stable")
        ids, values = [ids[place] for place in places], [values[place] for place in places]
    write_predictions(directory / f"{stem}.tsv", ids, values)
