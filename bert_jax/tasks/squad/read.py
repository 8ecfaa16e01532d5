# SPDX-License-Identifier: Apache-2.0
"""Reads questions about paragraphs from SQuAD's JSON, Parquet or TFDS. Errors name the location of malformed data.

A source is one of

    DIR                                       train*.json and dev*.json of the version asked for, compressed or not
    FILE                                      every split, or only the one that its name begins with (train, dev, test)
    TRAIN,DEV  TRAIN,DEV,TEST                 a source for each split in this order, each as above or below
    FILE[:28]  FILE[28:]                      the first 28 articles of a file, the articles after these
    train=FILE[:28],dev=FILE[28:]             the same with the names of the splits
    tfds:squad/v1.1                           prepared by TFDS, without TensorFlow
    Parquet                                   files or directories of it, as on the Hugging Face hub

XQuAD, MLQA and other data sets in this format are read too.
"""

import itertools
import os
import re
from typing import NamedTuple

from bert_jax.errors import InputError
from bert_jax.tasks.columnar import is_parquet, is_tfds
from bert_jax.tasks.readers import (
    SPLITS,
    find_split_file,
    is_one_place,
    part_of,
    read_json_value,
    read_table,
)
from bert_jax.tasks.records import Record, to_record

_ANSWER = ("text", "answer_start")
_OWN_NAME = re.compile(r"(?:.*/)?(train|dev|test)[^/]*")


class Answer(NamedTuple):
    """An annotated answer; in some data the text is not at `start`."""

    text: str
    start: int  # code points of the context before it


class SquadExample(NamedTuple):
    """A question about a paragraph."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] = ()  # by several annotators; () if there is none, or none is known
    impossible: bool = False  # whether the data set says that the context has no answer


def read_squad(source: str, split: str, version: str = "") -> list[SquadExample]:
    """Returns the examples of a split, "train", "dev" or "test", in their order; [] if it is missing.

    Args:
      source: see above.
      split: "train", "dev" or "test".
      version: "1.1" or "2.0"; chooses between the files of a directory.
    Raises: InputError with the file and the location in it.
    """
    place = _find_place(source, split, version)
    if not place:
        return []
    if not is_tfds(place) and not is_parquet(place):
        return read_squad_file(place)
    examples = list(map(_columnar_question, read_table(place).records))
    # Ids matter where predictions are written by them.
    return examples if split == "train" else _told_apart(examples, place)


def read_squad_file(path: str) -> list[SquadExample]:
    """Returns the examples of a file, or with FILE[28:] of a range of its articles. Raises: as `read_squad`."""
    path, wanted = _split_range(path)
    first, _, last = wanted.strip("[]").partition(":")
    chosen = slice(int(first) if first else None, int(last) if last else None)
    articles = to_record(read_json_value(path), path).objects("data")[chosen]
    examples = []
    for paragraph in (each for article in articles for each in article.objects("paragraphs")):
        context = paragraph.get_as("context", str)
        examples += [_question(record, context) for record in paragraph.objects("qas")]
    return _told_apart(examples, path)


def _told_apart(examples: list[SquadExample], path: str) -> list[SquadExample]:
    """Returns the examples. Raises: InputError if two have the same id."""
    seen: set[str] = set()
    for example in examples:
        if example.id in seen:
            raise InputError(
                f"{path}: two questions have the id {example.id!r}; predictions go by ids, so change one"
            )
        seen.add(example.id)
    return examples


def parse_question(value: object, where: str) -> SquadExample:
    """Returns the example of a user's question: {"question":, "context":} with an optional "id", or such a pair.

    Raises: InputError if it is anything else.
    """
    if isinstance(value, (list, tuple)) and len(value) == 2:
        value = {"question": value[0], "context": value[1]}
    record = to_record(value, where)
    record = Record({"id": where, **record, "answers": None}, where)
    return _question(record, record.get_as("context", str))


def _find_place(source: str, split: str, version: str) -> str:
    """Returns the file, with its range, or the data set of a split; "" if the source does not have it."""
    whole = os.path.exists(_split_range(source)[0])  # though its name may have a comma
    part = source if whole else part_of(source, split)
    if not part or split not in SPLITS:
        return ""
    path, wanted = _split_range(part)
    if is_one_place(path):  # of several parts each is taken whatever its name
        own = _OWN_NAME.fullmatch(path) if part == source else None
        return "" if own and own[1] != split else part
    # of the version, or of none
    kinds = [f".*v{version}.*"] if version else []
    kinds.append(r"(?!.*v[12]\.\d).*" if version else ".*")
    names = {
        name: tuple(stem + kind for kind in kinds for stem in stems)
        for name, stems in SPLITS.items()
    }
    found = find_split_file(path, split, names)
    return found and found + wanted


def _split_range(source: str) -> tuple[str, str]:
    """Returns the path, and a suffix such as [28:] or ""."""
    match = re.search(r"\[(-?\d{1,9})?:(-?\d{1,9})?\]$", source)
    return (source[: match.start()], match[0]) if match else (source, "")


# Reading its content


def _question(record: Record, context: str) -> SquadExample:
    """Returns the example of a question; some data sets have numbers as ids, and a test set has no answers."""
    if record.get("answers") is None:
        record["answers"] = []
    answers = [
        Answer(answer.get_as("text", str), answer.get_as("answer_start", int))
        for answer in record.objects("answers")
    ]
    impossible = "is_impossible" in record and record.get_as("is_impossible", bool)
    id_ = str(record["id"]) if type(record.get("id")) is int else record.get_as("id", str)
    return SquadExample(
        id=id_,
        question=record.get_as("question", str),
        context=context,
        answers=tuple(answers),
        impossible=impossible,
    )


def _columnar_question(record: Record) -> SquadExample:
    """Returns the example of a record whose answers are columns. Without is_impossible, no answer means impossible."""
    answers = record.get("answers") or []
    if not isinstance(answers, list):  # of objects, as in JSON
        columns = to_record(answers, record.where)
        pairs = itertools.zip_longest(*(columns.get_as(name, list) for name in _ANSWER))
        answers = [dict(zip(_ANSWER, pair)) for pair in pairs]
    record["answers"] = answers
    record["is_impossible"] = bool(record.get("is_impossible", not answers))
    return _question(record, record.get_as("context", str))
