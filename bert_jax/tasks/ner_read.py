# SPDX-License-Identifier: Apache-2.0
"""Reads sentences with a tag for each word: files in columns (CoNLL, WNUT), JSON lines with lists, Parquet, TFDS."""

import re

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks import tagging
from bert_jax.tasks.base import split_names
from bert_jax.tasks.columnar import classes_in
from bert_jax.tasks.labels import check_labelled
from bert_jax.tasks.readers import find_split_file, is_records, plain_name, read_lines, read_table
from bert_jax.tasks.records import Record, find_column, named_class
from bert_jax.tasks.tagging import OUTSIDE, NerExample

WORD_COLUMNS = ("tokens", "words")
_TAGS = ("ner_tags", "ner", "tags", "labels")
_NUMBERS = "tags are numbers; write all tags in task.labels in the order of their numbers, such as O,B-PER,I-PER"


def read_sentences(config: TaskConfig, source: str, split: str) -> list[NerExample]:
    """Returns the sentences of a split; [] if it is missing. Raises: InputError with file and line."""
    path = find_split_file(source, split)
    if not path:
        return []
    examples = _read_records(config, path) if is_records(path) else _read_columns(config, path)
    if not examples:
        raise InputError(f"{path} holds no sentence; give data, a word and its tag a line")
    examples = _with_names(config, examples)
    if split != "test":
        check_labelled(examples, "tags")
    return examples


def _with_names(config: TaskConfig, examples: list[NerExample]) -> list[NerExample]:
    """Returns the examples, with tags of task.labels where they are the numbers of these, in their order.

    Raises: InputError if task.labels are not tags, or too few.
    """
    names = split_names(config.labels)
    given = {tag: example.where for example in examples for tag in example.tags or ()}
    if not names or not given or not all(map(str.isdecimal, given)) or {*given} & {*names}:
        return examples
    if OUTSIDE not in names:
        raise InputError(f"{examples[0].where}: {_NUMBERS}")
    for tag, where in given.items():
        if int(tag) >= len(names):
            raise InputError(
                f"{where}: tag {tag} is beyond the {len(names)} of task.labels; write all of them"
            )
    return [
        example._replace(tags=example.tags and [names[int(tag)] for tag in example.tags])
        for example in examples
    ]


def _read_columns(config: TaskConfig, path: str) -> list[NerExample]:
    header = next(iter(read_lines(path)), "")
    is_csv = plain_name(path).endswith(".csv") and "\t" not in header and re.search("[,;]", header)
    if is_csv or "sentence #" in header.lower():
        raise InputError(
            f"{path} is a table with a word a row; write word, tab and tag, with blank lines between"
        )
    word_column = _number(config.text_column, "text_column")
    tag_column = _number(config.label_column, "label_column")
    if tag_column == (word_column or 1):
        raise InputError(
            f"task.label_column {tag_column} is the column of the words; give that of the tags"
        )
    sentences = tagging.read_conll(path, word_column or 1, tag_column)
    if not word_column and sentences and sentences[0].tags and tagging.are_counts(sentences):
        raise InputError(
            f"{sentences[0].where}: the first column counts the words; set task.text_column to theirs, such as 2"
        )
    return sentences


def _number(column: str, setting: str) -> int:
    """Returns the number of a column, counted from 1, of a file in columns; 0 if not given."""
    if column and not re.fullmatch("0*[1-9][0-9]{,8}", column):
        raise InputError(f"task.{setting} {column!r:.60} is not the number of a column, from 1")
    return int(column or 0)


def _read_records(config: TaskConfig, path: str) -> list[NerExample]:
    classes = classes_in(path)
    examples = []
    first_of: dict[str, tuple[str, str]] = {}  # word and place of each tag
    for record in read_table(path).records:
        words_key = config.text_column or find_column(WORD_COLUMNS, record) or WORD_COLUMNS[0]
        tags_key = config.label_column or find_column(_TAGS, record)
        is_text = any(isinstance(record.get(name), str) for name in ("text", "data", "content"))
        if is_text and words_key not in record:
            for name in ("label", "labels", "entities", "spans", "annotations"):
                if isinstance(record.get(name), list):
                    raise InputError(
                        f"{record.where} is a text with spans in {name!r}, as doccano writes it, and ner reads a tag a "
                        "word: write tokens and ner_tags, for example by spaCy's offsets_to_biluo_tags"
                    )
        words = record.texts(words_key)
        tags = None
        if record.get(tags_key) is not None:
            values = named_class(record[tags_key], classes.get(tags_key))
            if isinstance(values, list) and any(type(value) is int for value in values):
                if not config.labels:
                    raise InputError(f"{record.where}: {_NUMBERS}")
                values = list(map(str, values))
            tags = [tag.strip() for tag in Record({tags_key: values}, record.where).texts(tags_key)]
            if len(tags) != len(words) or not all(tags):
                raise InputError(
                    f"{record.where}: {len(words)} words have {len(tags)} tags, or one is empty; write one for each "
                    "word: O, B-TYPE or I-TYPE"
                )
            for tag, word in zip(tags, words):
                first_of.setdefault(tag, (word, record.where))
        examples.append(NerExample(words, tags, 0, record.where))
    tagging.check_alike(first_of)
    return examples
