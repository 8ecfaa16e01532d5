# SPDX-License-Identifier: Apache-2.0
"""Reads sentences with a tag for each word: files in columns (CoNLL, WNUT), JSON lines with lists, Parquet, TFDS."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks import tagging
from bert_jax.tasks.base import split_names
from bert_jax.tasks.columnar import Record, classes_in, is_tfds
from bert_jax.tasks.readers import find_column, find_split_file, plain_name, read_lines, read_table
from bert_jax.tasks.tagging import OUTSIDE
from bert_jax.tasks.texts import named_class

WORD_COLUMNS = ("tokens", "words")
_TAGS = ("ner_tags", "ner", "tags", "labels")
_NUMBERS = "tags are numbers; write all tags in task.labels in the order of their numbers, such as O,B-PER,I-PER"


class NerExample(NamedTuple):
    """A sentence."""

    words: Sequence[str]
    tags: Sequence[str] | None = None
    document: int | None = None  # consecutive sentences with the same number belong to one document
    where: str = ""
    text: str = ""  # the original text; "" means the words joined by blanks
    starts: Sequence[int] = ()  # of the words in the text, in characters


def read_sentences(config: TaskConfig, source: str, split: str) -> list[NerExample]:
    """Returns the sentences of a split; [] if it is missing. Raises: InputError with file and line."""
    path = find_split_file(source, split)
    if not path:
        return []
    if is_tfds(path) or plain_name(path).endswith((".json", ".jsonl", ".ndjson", ".parquet")):
        examples = _read_records(config, path)
    else:
        examples = _read_columns(config, path)
    if not examples:
        raise InputError(f"{path} holds no sentence; give data, a word and its tag a line")
    examples = _with_names(config, examples)
    if split != "test" and (
        missing := next((example for example in examples if example.tags is None), None)
    ):
        raise InputError(
            f"{missing.where} has no tags; write word, tab and tag, or correct task.label_column"
        )
    return examples


def _with_names(config: TaskConfig, examples: list[NerExample]) -> list[NerExample]:
    """Returns the examples, with tags of task.labels where they are the numbers of these, in their order.

    Raises: InputError if task.labels are not tags, or too few.
    """
    names = split_names(config.labels)
    given = {tag: example.where for example in examples for tag in example.tags or ()}
    if (
        not given
        or not names
        or not all(tag.isdecimal() for tag in given)
        or set(given) & set(names)
    ):
        return examples
    if OUTSIDE not in names:
        raise InputError(f"{examples[0].where}: {_NUMBERS}")
    if beyond := next((tag for tag in given if int(tag) >= len(names)), None):
        raise InputError(
            f"{given[beyond]}: tag {beyond} is beyond the {len(names)} of task.labels; write all of them"
        )
    return [
        example
        if example.tags is None
        else example._replace(tags=[names[int(tag)] for tag in example.tags])
        for example in examples
    ]


def _read_columns(config: TaskConfig, path: str) -> list[NerExample]:
    header = next(iter(read_lines(path)), "")
    is_csv = plain_name(path).endswith(".csv") and "\t" not in header and re.search("[,;]", header)
    if is_csv or "sentence #" in header.lower():
        raise InputError(
            f"{path} is a table with a word a row; write word, tab and tag, with blank lines between"
        )
    word_column, tag_column = (
        _number(config.text_column, "text_column"),
        _number(config.label_column, "label_column"),
    )
    if tag_column == (word_column or 1):
        raise InputError(
            f"task.label_column {tag_column} is the column of the words; give that of the tags"
        )
    sentences = tagging.read_conll(path, word_column or 1, tag_column)
    if (
        not word_column
        and sentences
        and sentences[0].tags is not None
        and tagging.are_counts(sentences)
    ):
        where = sentences[0].where
        raise InputError(
            f"{where}: the first column counts the words; set task.text_column to theirs, such as 2"
        )
    return [
        NerExample(sentence.words, sentence.tags, sentence.document, sentence.where)
        for sentence in sentences
    ]


def _number(column: str, setting: str) -> int:
    """Returns the number of a column, counted from 1, of a file in columns; 0 if not given."""
    if column and not re.fullmatch("0*[1-9][0-9]{,8}", column):
        raise InputError(f"task.{setting} {column!r:.60} is not the number of a column, from 1")
    return int(column or 0)


def _read_records(config: TaskConfig, path: str) -> list[NerExample]:
    classes = classes_in(path)
    examples = []
    for record in read_table(path).records:
        words_key = config.text_column or find_column(WORD_COLUMNS, list(record)) or WORD_COLUMNS[0]
        tags_key = config.label_column or find_column(_TAGS, list(record)) or _TAGS[0]
        if words_key not in record:
            _check_no_spans(record)
        words, tags = _strings(record, words_key), None
        if record.get(tags_key) is not None:
            values = named_class(record[tags_key], classes.get(tags_key))
            if isinstance(values, list) and values and all(type(value) is int for value in values):
                if not config.labels:
                    raise InputError(f"{record.where}: {_NUMBERS}")
                values = list(map(str, values))
            tags = [
                tag.strip() for tag in _strings(Record({tags_key: values}, record.where), tags_key)
            ]
            if len(tags) != len(words) or not all(tags):
                problem = (
                    f"{len(words)} words have {len(tags)} tags" if all(tags) else "a tag is empty"
                )
                raise InputError(
                    f"{record.where}: {problem}; write one for each word: O, B-TYPE or I-TYPE"
                )
        examples.append(NerExample(words, tags, 0, record.where))
    if (
        wrong := tagging.find_unlike(tag for example in examples for tag in example.tags or ())
    ) is not None:
        where = next(example.where for example in examples if wrong in (example.tags or ()))
        raise InputError(
            f"{where}: tag {wrong!r:.60} is not one of an entity; write O, B-TYPE or I-TYPE"
        )
    return examples


def _check_no_spans(record: Record) -> None:
    """Raises: InputError if a record is a text with spans of characters, as doccano and others write them."""
    is_text = any(isinstance(record.get(name), str) for name in ("text", "data", "content"))
    for name in ("label", "labels", "entities", "spans", "annotations") if is_text else ():
        if isinstance(record.get(name), list):
            raise InputError(
                f"{record.where} is a text with spans in {name!r}, as doccano writes it, and ner reads a tag a word: "
                "write tokens and ner_tags, for example by spaCy's offsets_to_biluo_tags"
            )


def _strings(record: Mapping[str, object], key: str) -> list[str]:
    values = record.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        where = record.where if isinstance(record, Record) else ""
        raise InputError(f"{where}: {key!r} is {values!r:.60}, not a list of strings; write it so")
    return values
