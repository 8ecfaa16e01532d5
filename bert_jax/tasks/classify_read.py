# SPDX-License-Identifier: Apache-2.0
"""Reads texts and pairs with labels from tables, CSV and JSON lines, and from TFDS."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.columnar import classes_in
from bert_jax.tasks.labels import UNAGREED, ClassifyExample, as_number, check_labelled, label_number
from bert_jax.tasks.readers import Examples, Table, find_split_file, read_table
from bert_jax.tasks.records import (
    Record,
    find_column,
    find_columns,
    id_of,
    named_class,
    no_column,
)

# Usual column names in lower case; the first one present is used.
_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("sentence_a", "sentence_b"),
    ("sent1", "sent2"),
    ("query", "passage"),
    ("question", "sentence"),
    ("question", "passage"),
)
_TEXTS = (
    "text",
    "sentence",
    "content",
    "review",
    "question",
    "comment",
    "comment_text",
    "body",
    "document",
)
# of a text alone, or of one whose second is named
_FIRSTS = (*_TEXTS, *(first for first, _ in _PAIRS))
_IDS = ("index", "idx", "id", "guid", "pair_id")
# whether a label holds
_HOT = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}
WITHHELD: Any = object()  # a label on which annotators did not agree, or that is hidden


def labels_of(config: TaskConfig) -> tuple[str, ...]:
    """Returns the labels of the settings. Raises: InputError if they are not two or more different names."""
    if not config.labels.strip():
        return ()
    labels = tuple(label.strip() for label in config.labels.split(","))
    if len(set(labels)) != len(labels) or not all(labels) or len(labels) < 2:
        raise InputError(
            f"task.labels {config.labels!r} are not two or more different names; write them with commas"
        )
    return labels


def is_pair(config: TaskConfig) -> bool | None:
    """Returns whether an input has two texts; None if the data decide."""
    if config.num_texts:
        return config.num_texts == 2
    return True if config.second_text_column else False if config.text_column else None


def named_columns(config: TaskConfig) -> list[tuple[str, ...]]:
    """Returns the names that the columns of the texts may have, a text or a pair, in the order to try them."""
    firsts = [config.text_column] if config.text_column else _FIRSTS
    if config.second_text_column:
        return [(first, config.second_text_column) for first in firsts]
    return [*(() if config.text_column else _PAIRS), *((first,) for first in firsts)]


def text_columns(
    names: Sequence[tuple[str, ...]],
    pair: bool | None,
    columns: Sequence[str],
    where: str,
    fix: str = "name it in task.text_column",
) -> tuple[str, ...]:
    """Returns the columns of the text or pair, the first of `names` that is there. Raises: InputError if none is."""
    if found := find_columns(names, columns):
        return found
    wanted = next((one for one in names if (len(one) == 2) == bool(pair)), names[0])
    raise no_column(where, " and ".join(map(repr, wanted)), columns, fix)


# Reading


def read_texts(
    config: TaskConfig,
    usual_labels: Sequence[str],
    convert: Callable[[object, str], Any],
    hidden: str,
    source: str,
    split: str,
) -> Examples:
    """Returns the examples of a split; [] if it is missing. In test, a label equal to `hidden` is unknown.

    Raises: InputError with file and line.
    """
    path = find_split_file(source, split)
    if not path:
        return Examples()
    table = read_table(path).filled()
    names = [each for each in named_columns(config) if config.num_texts in (0, len(each))]
    texts = text_columns(names, is_pair(config), table.columns, path)
    usual = [config.label_column] if config.label_column else usual_labels
    label = find_column(usual, table.columns)
    # A column for each label: those that the settings name.
    each_label = () if config.label_column else labels_of(config)
    each_label = each_label if {*each_label} <= {*table.columns} else ()
    if not label and not each_label and split != "test":
        values = {name: {_hot(each.get(name)) for each in table.records} for name in table.columns}
        hot = ",".join(name for name in values if None not in values[name])
        advice = f" (or task.labels, to those with a 0 or 1 a label: {hot[:200]})"
        wanted = f"{' or '.join(map(repr, usual[:3]))} of labels{advice if ',' in hot else ''}"
        raise no_column(path, wanted, table.columns, "name it in task.label_column")
    if label in texts:
        raise InputError(
            f"{path}: column {label!r} would be text and label; set task.text_column, task.label_column"
        )
    classes = classes_in(path).get(label)

    def label_of(record: Record) -> Any:
        if each_label:
            return convert(_shares_of(each_label, record), record.where)
        given = record.get(label)
        # in SNLI's own files; on the hub it is a class with the number -1
        if (given == UNAGREED and label.lower() == "gold_label") or (classes and given == -1):
            return WITHHELD
        value = convert(named_class(given, classes), record.where)
        is_hidden = split == "test" and hidden and as_number(str(value)) == as_number(hidden)
        return None if is_hidden else value

    columns = (*texts, *(each_label or (label,)))
    return make_examples(table, texts, label_of, split != "test", columns, _IDS)


def make_examples(
    table: Table,
    texts: Sequence[str],
    label_of: Callable[[Record], Any],
    labelled: bool,
    columns: Sequence[str],
    ids: Sequence[str],
) -> Examples:
    """Returns an example for each record of a table.

    Of labelled data, examples whose label is `WITHHELD` are left out and counted; else their label is None.

    Raises: InputError if a text is missing or, of labelled data, a label.
    """
    number = find_column(ids, table.columns)
    examples = []
    withheld = []
    for record in table.records:
        first, *second = (record.get_as(name, str) for name in texts)
        label = label_of(record)
        id_ = id_of(record.get(number), len(examples))
        is_known = label is not WITHHELD
        example = ClassifyExample(
            text=first,
            second_text="".join(second) if second else None,
            label=label if is_known else None,
            id=id_,
            where=record.where,
        )
        (examples if is_known or not labelled else withheld).append(example)
    if labelled:
        check_labelled(examples or withheld)
    counts = {
        "skipped: too few columns": table.skipped,
        "skipped: no agreed label": len(withheld),
    }
    return Examples(examples, counts, columns)


def _shares_of(names: Sequence[str], record: Record) -> dict[str, float] | None:
    """Returns the number of each label from its column; None if they are withheld, as by -1.

    Raises: InputError if one is missing, or not a number.
    """
    shares: dict[str, float] = {}
    for name in names:
        share = _hot(record.get(name))
        if share is None:
            share = label_number(record.get(name), record.where)
        if share is not None and share != -1:
            shares[name] = share
    for name in names if shares else ():
        if name not in shares:
            raise InputError(
                f"{record.where} has nothing in column {name!r} of task.labels; write 0 or 1"
            )
    return shares or None


def _hot(value: object) -> float | None:
    """Returns a value that is 0 or 1 in any spelling as a number; None for others."""
    return _HOT.get(str(value).strip().lower())


def parse_texts(
    names: Sequence[tuple[str, ...]],
    pair: bool | None,
    value: object,
    where: str,
) -> ClassifyExample:
    """Returns the example of a user's input: a text, two texts in a list or separated by a tab, or an object.

    Args:
      names: of the texts of an object, as in `text_columns`.
      pair: whether there must be two texts; None allows both.
      value: the input.
      where: the location of the input, for error messages.
    Raises: InputError if the input has another form.
    """
    parts: list[Any] = [value]
    if isinstance(value, Mapping):
        parts = [value[name] for name in text_columns(names, pair, list(value), where)]
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    elif isinstance(value, str) and pair is not False and value.count("\t") == 1:
        parts = value.split("\t")
    allowed = (1, 2) if pair is None else (1 + pair,)
    if len(parts) not in allowed or not all(isinstance(text, str) for text in parts):
        wanted = {None: "a text or two", False: "one text", True: "two texts, a tab between them"}
        raise InputError(f"{where}: {value!r:.60} is not {wanted[pair]}; give strings")
    return ClassifyExample(
        text=parts[0],
        second_text=parts[1] if len(parts) == 2 else None,
        where=where,
    )
