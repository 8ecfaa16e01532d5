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

import glob
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bert_jax.errors import InputError, shown
from bert_jax.storage import files, urls
from bert_jax.tasks.columnar import is_parquet, is_tfds, read_parquet, read_tfds
from bert_jax.tasks.json_values import load_json
from bert_jax.tasks.readers import find_split_file, read_text

_SPLITS = ("train", "dev", "test")
_TFDS_SPLITS = {"train": "train", "dev": "validation"}  # a test split is with SQuAD's authors only


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
    path = _find_place(source, split, version)
    if not path:
        return []
    if is_tfds(path) or is_parquet(path):
        records = read_tfds(path, _TFDS_SPLITS[split]) if is_tfds(path) else read_parquet(path)
        examples = [
            _columnar_question(record, path, f"example {number}")
            for number, record in enumerate(records)
        ]
        return examples if split == "train" else _told_apart(examples, path)
    return read_squad_file(path)


def read_squad_file(path: str) -> list[SquadExample]:
    """Returns the examples of a file, or with FILE[28:] of a range of its articles. Raises: as `read_squad`."""
    path, articles_wanted = _split_range(path)
    content = load_json(read_text(path), path, is_file=True)
    articles = _get(content, "data", list, path, "")
    return _told_apart(list(_read_articles(articles, articles_wanted, path)), path)


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
    if not isinstance(value, Mapping):
        raise InputError(
            f'{where}: {shown(value)} is not like {{"question": "...", "context": "..."}}'
        )
    question, context = (_get(value, name, str, where, "") for name in ("question", "context"))
    return SquadExample(_id(value, where, "") if "id" in value else where, question, context)


# Finding the file


def _find_place(source: str, split: str, version: str) -> str:
    """Returns the file, with its range, or the TFDS data set of a split; "" if the source does not have it."""
    any_name = False  # whether a file is taken whatever its name
    if re.match(rf"({'|'.join(_SPLITS)})=", source):
        sources = dict(
            part.split("=", 1) for part in re.split(rf",(?=(?:{'|'.join(_SPLITS)})=)", source)
        )
        source, any_name = sources.get(split, ""), True
    elif "," in source and not os.path.exists(_split_range(source)[0]):
        source, any_name = _place_in_list(source, split), True
    if not source:
        return ""
    path = _split_range(source)[0]
    if path.startswith("tfds:"):
        if path != source:
            raise InputError(
                f"{source}: TFDS has no ranges of articles; leave out {source[len(path) :]}"
            )
        return path if split in _TFDS_SPLITS else ""
    if urls.is_remote(path) and not re.search(r"\.(json|parquet)(\.gz|\.zst)?$", path):
        return find_split_file(path, split)
    if urls.is_remote(path) or not Path(path).is_dir():
        named = re.match("|".join(_SPLITS), Path(path).name)
        return source if any_name or not named or named[0] == split else ""
    return _find_in_directory(path, split, version) + source[len(path) :]


def _place_in_list(source: str, split: str) -> str:
    """Returns the source of a split in TRAIN,DEV[,TEST]; "" if it is not listed.

    Raises: InputError if it is not such a list.
    """
    parts = files.split_places(source)
    if (
        len(parts) > len(_SPLITS)
        or not all(parts)
        or any(re.match(r"(train|dev|test)=", part) for part in parts)
    ):
        raise InputError(
            f"data {source!r} is not TRAIN,DEV,TEST in this order; write it so, or train=FILE,dev=FILE"
        )
    return next((part for name, part in zip(_SPLITS, parts) if name == split), "")


def _find_in_directory(directory: str, split: str, version: str) -> str:
    names = sorted(Path(name).name for name in glob.glob(f"{glob.escape(directory)}/*.json*"))
    named = [
        name
        for name in names
        if name.startswith(split) and re.search(r"\.json(\.gz|\.zst)?$", name)
    ]
    of_version = [name for name in named if f"v{version}" in name]
    named = of_version or [
        name for name in named if not re.search(r"v[12]\.\d", name) or not version
    ]
    if not names and glob.glob(f"{glob.escape(directory)}/*.parquet"):
        return find_split_file(directory, split)
    if len(named) > 1:
        raise InputError(
            f"{directory} holds {', '.join(named)}; give the one to take: {split}={directory}/{named[0]}"
        )
    if not named and not any(name.startswith(_SPLITS) for name in names):
        but = f" but {', '.join(names)}" if names else ""
        raise InputError(
            f"{directory} holds no file train*.json or dev*.json{but}; give train=FILE,dev=FILE"
        )
    return f"{directory}/{named[0]}" if named else ""


def _split_range(source: str) -> tuple[str, slice]:
    """Returns the path, and the range of articles of a suffix such as [28:]."""
    match = re.fullmatch(r"(.*)\[(-?\d{1,9})?:(-?\d{1,9})?\]", source, re.DOTALL)
    if not match:
        return source, slice(None)
    start, stop = (int(bound) if bound else None for bound in match.groups()[1:])
    return match[1], slice(start, stop)


# Reading its content


def _read_articles(articles: list, wanted: slice, path: str) -> Iterator[SquadExample]:
    for number in range(len(articles))[wanted]:
        article = f"data[{number}]"
        for index, paragraph in enumerate(
            _get(articles[number], "paragraphs", list, path, article)
        ):
            location = f"{article}.paragraphs[{index}]"
            context = _get(paragraph, "context", str, path, location)
            for position, question in enumerate(_get(paragraph, "qas", list, path, location)):
                yield _read_question(question, context, path, f"{location}.qas[{position}]")


def _read_question(
    value: Mapping[str, object], context: str, path: str, location: str
) -> SquadExample:
    question = _get(value, "question", str, path, location)
    answers = []
    if value.get("answers") is not None:  # a test set has none
        for number, answer in enumerate(_get(value, "answers", list, path, location)):
            here = f"{location}.answers[{number}]"
            answers.append(
                Answer(
                    _get(answer, "text", str, path, here),
                    _get(answer, "answer_start", int, path, here),
                )
            )
    impossible = (
        _get(value, "is_impossible", bool, path, location) if "is_impossible" in value else False
    )
    return SquadExample(_id(value, path, location), question, context, tuple(answers), impossible)


Kind = TypeVar("Kind", str, list, int, bool)
_KINDS = {str: "a text", list: "a list", int: "a whole number", bool: "true or false"}


def _get(value: object, name: str, kind: type[Kind], path: str, location: str) -> Kind:
    """Returns `value[name]` if it is of the kind. Raises: InputError with the location."""
    where = f"{path}, {location}" if location else path
    if not isinstance(value, Mapping) or name not in value:
        raise InputError(
            f"{where} is {shown(value)}, not an object with {name!r}; give data in SQuAD's format"
        )
    item = value[name]
    if not isinstance(item, kind) or (kind is int and isinstance(item, bool)):
        raise InputError(f"{where}: {name!r} is {shown(item)}, not {_KINDS[kind]}; correct it")
    if isinstance(item, str):
        with files.reading(f"{where}: {name!r}"):
            item.encode("utf-8")  # half of a character cannot be written to a file
    return item


def _id(value: object, path: str, location: str) -> str:
    """Returns the id of a question; some data sets have numbers."""
    if isinstance(value, Mapping) and isinstance(value.get("id"), int):
        return str(value["id"])
    return _get(value, "id", str, path, location)


def _columnar_question(record: Mapping[str, Any], path: str, location: str) -> SquadExample:
    """Returns the example of a record whose answers are columns. Without is_impossible, no answer means impossible."""
    values = {"is_impossible": False, **record}
    answers = values.get("answers") or []
    if not isinstance(answers, list):  # of objects, as in JSON
        columns = (_get(answers, name, list, path, location) for name in ("text", "answer_start"))
        answers = [
            dict(zip(("text", "answer_start"), answer))
            for answer in itertools.zip_longest(*columns)
        ]
    values["is_impossible"] = bool(values["is_impossible"]) or (
        "is_impossible" not in record and not answers
    )
    context = _get(values, "context", str, path, location)
    return _read_question({**values, "answers": answers}, context, path, location)
