# SPDX-License-Identifier: Apache-2.0
"""Rejects files that are not tables, or are written as other programs write them, with errors that name the fix."""

import re
from collections.abc import Sequence

from bert_jax.data.sources.formats import check_encoding
from bert_jax.errors import InputError

_NAMES = {".arrow": "Arrow", ".xlsx": "Excel", ".xls": "Excel"}
_MAGIC = {b"PAR1": "Parquet", b"PK\x03\x04": "Excel or a zip", b"\xd0\xcf\x11\xe0": "Excel"}


def check_names(paths: Sequence[str]) -> None:
    """Raises: InputError if the name of a file is that of a format that is not read as a table."""
    for path in paths:
        if kind := _NAMES.get("." + path.rpartition(".")[2].lower()):
            raise _no_table(path, kind)


def check_content(content: bytes, place: str) -> None:
    """Raises: InputError if a file with this content is not text."""
    if kind := next((kind for magic, kind in _MAGIC.items() if content.startswith(magic)), ""):
        raise _no_table(place, kind)
    check_encoding(content, place)


def check_header(columns: Sequence[str], place: str, is_csv: bool) -> None:
    """Raises: InputError if a header is one column with another separator in it, or a line for Excel."""
    fix = "with commas, or as .tsv with tabs" if is_csv else "with tabs, or as .csv with commas"
    if columns and re.fullmatch("sep=.?", columns[0]):
        raise InputError(f"{place}:1 is {columns[0]}, which only Excel reads; save the table {fix}")
    for char, plural in (
        (";", "semicolons"),
        ("|", "bars"),
        ("\t", "tabs") if is_csv else (",", "commas"),
    ):
        names = columns[0].split(char) if len(columns) == 1 else []
        if sum(bool(name.strip(' "')) for name in names) > 1:
            raise InputError(
                f"{place}:1 is one column, {columns[0]!r:.60}, parted by {plural}; save the table {fix}"
            )


def _no_table(path: str, kind: str) -> InputError:
    fix = "to_json(FILE, orient='records', lines=True)"
    return InputError(
        f"{path} is {kind}, which is not read as a table; write JSON lines, in pandas by {fix}"
    )
