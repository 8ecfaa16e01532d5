# SPDX-License-Identifier: Apache-2.0
"""Reads the passages of a corpus one at a time: lines of text, JSON lines, tables, or those of BEIR's directory."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

from bert_jax.data.sources.formats import TEXT_COLUMN, decoded_lines, is_json_lines
from bert_jax.errors import InputError, reading
from bert_jax.storage import files, urls
from bert_jax.tasks import readers
from bert_jax.tasks.embeddings.beir import texts_files
from bert_jax.tasks.json_values import parse_json

_TABLES = (".csv", ".tsv", ".json", ".parquet")
_ROWS = 1024  # of a table that are in memory
ToRead: TypeAlias = Callable[[], tuple[str, str]]  # the id and the text of a passage


def corpus_files(source: str) -> list[str]:
    """Returns the files of a corpus: those named, by paths or globs with commas between, or of BEIR's directory.

    Raises: InputError if there is none.
    """
    found: list[str] = []
    with contextlib.suppress(InputError):
        found = texts_files(source, "corpus")
    return found or files.expand_globs(source)


def read_corpus(paths: list[str], column: str) -> Iterator[ToRead]:
    """Yields, of each line or row of files that is not blank, a function that returns `passage_of` it.

    So those of other processes cost little. Raises: InputError if a file cannot be read.
    """
    number = 0
    for path in paths:
        for where, value in table_rows(path) if is_table(path) else _lines(path):
            number += 1
            if not isinstance(value, str) or value.strip():
                yield partial(_passage, number, where, value, is_json_lines(path), column)


def _lines(path: str) -> Iterator[tuple[str, str]]:
    """Yields where each line of a file stands, and the line, of which one is in memory."""
    with reading(path), files.open_binary(urls.local_copy(path)) as stream:
        yield from decoded_lines(stream, path, f"{path}:")


def is_table(path: str) -> bool:
    """Returns whether a file has columns, by its name."""
    return readers.plain_name(path).endswith(_TABLES)


def table_rows(path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields where each row of a table stands, and its values by column; a few rows are in memory."""
    for table in readers.read_tables(path, _ROWS):
        yield from ((record.where, record) for record in table.records)


def _passage(*line: Any) -> tuple[str, str]:
    """Returns the id, as a text, and the text."""
    given, text = passage_of(*line)
    # a table may have dates and bytes
    return given if isinstance(given, str) else json.dumps(
        given, ensure_ascii=False, default=str
    ), text


def passage_of(
    number: int,
    where: str,
    value: str | Mapping[str, Any],
    is_json: bool,
    column: str = TEXT_COLUMN,
) -> tuple[Any, str]:
    """Returns the id and the text of a line: a text, or an object or row with the `column`, an id and a title.

    The id is "_id" or "id" as given, or else the number of the line, as a text; a title is put before the text.

    Raises: InputError, with its line, if an object or row has no text, or the line has to be JSON (`is_json`) and is
    not; elsewhere that is a text.
    """
    record: Any = value
    if isinstance(value, str):
        text = value.strip()
        record = None
        if text.startswith("{"):
            with contextlib.nullcontext() if is_json else contextlib.suppress(InputError):
                record = parse_json(text, where)
        if record is None:
            return str(number), text
    # a table may lack the text of a row
    found = "" if column in record and record[column] is None else record.get(column)
    if not isinstance(found, str):
        kind, fix = "object", f'write {{"{column}": "..."}}'
        if not isinstance(value, str):
            kind, fix = "row", "call the column of texts so"
        raise InputError(f'{where}: the {kind} has no "{column}" that is a text; {fix}')
    title = record.get("title")
    given = record.get("_id", record.get("id"))
    text = f"{title} {found}" if isinstance(title, str) else found
    return str(number) if given is None else given, text.strip()
