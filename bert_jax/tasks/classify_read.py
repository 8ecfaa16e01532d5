# SPDX-License-Identifier: Apache-2.0
"""Reads texts and pairs with labels from tables, CSV and JSON lines, and from TFDS."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks import texts
from bert_jax.tasks.columnar import classes_in
from bert_jax.tasks.labels import UNAGREED, ClassifyExample, as_number, check_labelled, label_number
from bert_jax.tasks.readers import (
    Examples,
    Record,
    find_column,
    find_split_file,
    listed_columns,
    no_column,
    read_table,
)

# Usual column names in lower case; the first one present is used.
_PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2"),
          ("text_a", "text_b"), ("sentence_a", "sentence_b"), ("sent1", "sent2"), ("query", "passage"),
          ("question", "sentence"), ("question", "passage"))  # fmt: skip
_TEXTS = ("text", "sentence", "content", "review", "question", "comment", "comment_text", "body",
          "document")  # fmt: skip
# of a text alone, or of one whose second is named
_FIRSTS = (*_TEXTS, *(first for first, _ in _PAIRS))
_IDS = ("index", "idx", "id", "guid", "pair_id")
# whether a label holds
_HOT = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}


def labels_of(config: TaskConfig) -> tuple[str, ...]:
    """Returns the labels of the settings. Raises: InputError if they are not two or more different names."""
    labels = (
        tuple(label.strip() for label in config.labels.split(",")) if config.labels.strip() else ()
    )
    if labels and (len(set(labels)) != len(labels) or not all(labels) or len(labels) < 2):
        raise InputError(
            f"task.labels {config.labels!r} are not two or more different names; write them with commas"
        )
    return labels


def is_pair(config: TaskConfig) -> bool | None:
    """Returns whether an input has two texts; None if the data decide."""
    if config.num_texts:
        return config.num_texts == 2
    return True if config.second_text_column else False if config.text_column else None


def named_columns(config: TaskConfig) -> list[tuple[str, str]]:
    """Returns the columns of the texts of an input, in the order to try them; "" means no second text."""
    if config.text_column:
        return [(config.text_column, config.second_text_column)]
    pairs = () if config.second_text_column else _PAIRS
    return [*pairs, *((text, config.second_text_column) for text in _FIRSTS)]


# Reading


def read_texts(
    config: TaskConfig,
    usual_labels: Sequence[str],
    convert: Callable[[object, str], Any],
    hidden: str,
    source: str,
    split: str,
) -> list[ClassifyExample]:
    """Returns the examples of a split; [] if it is missing. In test, a label equal to `hidden` is unknown.

    Raises: InputError with file and line.
    """
    path = find_split_file(source, split)
    if not path:
        return []
    table = read_table(path)
    if not table.records:
        raise InputError(f"{path} holds no example; give data, a row or object for each")
    text, second = _text_columns(config, table.columns, path)
    if config.num_texts and config.num_texts != 1 + bool(second):
        actual = f"pairs of {text!r} and {second!r}" if second else f"one text, {text!r}"
        wanted = "pairs" if config.num_texts == 2 else "one text"
        fix = "set task.text_column, and for pairs task.second_text_column"
        raise InputError(f"{path} has {actual}, and the task takes {wanted}; {fix}")
    label = config.label_column or find_column(usual_labels, table.columns)
    label = label if label in table.columns else ""
    # A column for each label: those that the settings name.
    each_label = () if config.label_column else labels_of(config)
    each_label = each_label if set(each_label) <= {*table.columns} else ()
    if not label and not each_label and split != "test":
        hot = [
            name
            for name in table.columns
            if all(_is_hot(record.get(name)) is not None for record in table.records)
        ]
        several = (
            f" (or task.labels, to those with a 0 or 1 a label: {','.join(hot)[:200]})"
            if len(hot) > 1
            else ""
        )
        wanted = f"{config.label_column or ' or '.join(usual_labels[:3])!r} of labels{several}"
        raise no_column(path, wanted, table.columns)
    if label and label in (text, second):
        raise InputError(
            f"{path}: column {label!r} would be text and label; set task.text_column, task.label_column"
        )
    number = find_column(_IDS, table.columns)
    classes = classes_in(path)
    # in SNLI's own files; on the hub it is a class with the number -1
    may_disagree = label.lower() == "gold_label"

    def is_agreed(record: Record) -> bool:
        value = record.get(label)
        return not (may_disagree and value == UNAGREED) and not (label in classes and value == -1)

    agreed = [record for record in table.records if split != "test" and is_agreed(record)]
    records = agreed or table.records

    def label_of(record: Record) -> Any:
        if each_label:
            return convert(_shares_of(each_label, record), record.where)
        value = convert(texts.named_class(record.get(label), classes.get(label)), record.where)
        is_hidden = split == "test" and hidden and as_number(str(value)) == as_number(hidden)
        return None if is_hidden or (may_disagree and value == UNAGREED) else value

    examples = Examples(
        (
            ClassifyExample(
                texts.text_of(record, text),
                texts.text_of(record, second) if second else None,
                label_of(record),
                texts.id_of(record.get(number), position),
                record.where,
            )
            for position, record in enumerate(records)
        ),
        {
            "skipped: too few columns": table.skipped,
            "skipped: no agreed label": len(table.records) - len(records),
        },
        (text, second, *(each_label or (label,))),
    )
    if split != "test":
        check_labelled(examples)
    return examples


def _shares_of(names: Sequence[str], record: Record) -> dict[str, float] | None:
    """Returns the number of each label from its column; None if they are withheld, as by -1.

    Raises: InputError if one is missing, or not a number.
    """
    shares: dict[str, float | None] = {}
    for name in names:
        share = _is_hot(record.get(name))
        shares[name] = label_number(record.get(name), record.where) if share is None else share
    if all(share in (None, -1) for share in shares.values()):
        return None
    if missing := next((name for name, share in shares.items() if share is None), ""):
        raise InputError(
            f"{record.where} has nothing in column {missing!r} of task.labels; write 0 or 1"
        )
    return {name: share for name, share in shares.items() if share is not None}


def _is_hot(value: object) -> float | None:
    """Returns a value that is 0 or 1 in any spelling as a number; None for others."""
    return _HOT.get(str(value).strip().lower())


def _text_columns(config: TaskConfig, columns: Sequence[str], path: str) -> tuple[str, str]:
    """Returns the columns of the first and the second text; "" if there is no second."""
    for name in (config.text_column, config.second_text_column):
        if name and name not in columns:
            raise no_column(path, repr(name), columns)
    if config.text_column and config.text_column == config.second_text_column:
        raise InputError(
            f"{path}: column {config.text_column!r} would be both texts; name two columns"
        )
    if config.text_column:
        return config.text_column, config.second_text_column
    if not config.second_text_column:
        for pair in _PAIRS:
            both = [find_column((name,), columns) for name in pair]
            if all(both):
                return both[0], both[1]
    if not (
        text_column := find_column(
            _FIRSTS, [name for name in columns if name != config.second_text_column]
        )
    ):
        raise no_column(path, "with a usual name for text", columns)
    return text_column, config.second_text_column


def parse_texts(
    columns: Sequence[tuple[str, str]], pair: bool | None, value: object, where: str
) -> ClassifyExample:
    """Returns the example of a user's input: a text, two texts in a list or separated by a tab, or an object.

    Args:
      columns: pairs of keys for the texts of an object; the first complete pair is used.
      pair: whether there must be two texts; None allows both.
      value: the input.
      where: the location of the input, for error messages.
    Raises: InputError if the input has another form.
    """
    parts: list[Any] = [value]
    if isinstance(value, Mapping):
        by_lower = {str(key).lower(): key for key in reversed(value)}
        for names in columns:
            keys = [name if name in value else by_lower.get(name.lower()) for name in names if name]
            if all(key is not None for key in keys) and len(set(keys)) == len(keys):
                parts = [value[key] for key in keys]
                break
        else:
            fitting = (names for names in columns if pair is None or bool(names[1]) == pair)
            wanted = " and ".join(repr(name) for name in next(fitting, columns[0]) if name)
            raise InputError(
                f"{where}: the object has no {wanted}, but {listed_columns(list(map(str, value)))}"
            )
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    elif isinstance(value, str) and pair is not False and value.count("\t") == 1:
        parts = value.split("\t")
    if len(parts) not in (1, 2) or not all(isinstance(text, str) for text in parts):
        raise InputError(f"{where}: {value!r:.60} is not a text, nor two of them; give strings")
    if pair is not None and len(parts) != 1 + pair:
        wanted = (
            "two texts: write them with a tab between them" if pair else "one text, and no second"
        )
        raise InputError(f"{where}: {value!r:.60} has {len(parts)}; the task wants {wanted}")
    return ClassifyExample(parts[0], parts[1] if len(parts) == 2 else None, None, 0, where)
