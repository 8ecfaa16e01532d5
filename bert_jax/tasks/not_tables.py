# SPDX-License-Identifier: Apache-2.0
"""Files that are taken for tables and are none, or tables as other programs write them: what they are, and the fix."""

import re
from collections.abc import Sequence

from bert_jax.data.sources.formats import check_encoding
from bert_jax.errors import InputError

_NAMES = {".arrow": "Arrow", ".xlsx": "Excel", ".xls": "Excel"}
_MAGIC = {b"PAR1": "Parquet", b"ARROW1": "Arrow", b"PK\x03\x04": "Excel or a zip", b"\xd0\xcf\x11\xe0": "Excel"}


def check_names(paths: Sequence[str]) -> None:
    """Raises: InputError if one of these files has the name of something that is not read as a table."""
    for path in paths:
        if kind := _NAMES.get("." + path.rpartition(".")[2].lower()):
            raise _no_table(path, kind)


def check_content(content: bytes, place: str) -> None:
    """Raises: InputError if a file with this content is not text."""
    if kind := next((kind for magic, kind in _MAGIC.items() if content.startswith(magic)), ""):
        raise _no_table(place, kind)
    check_encoding(content, place)


def check_header(columns: Sequence[str], place: str, is_csv: bool) -> None:
    """Raises: InputError if the only column of a header is several that another character parts, or is for Excel."""
    fix = "with commas, or as .tsv with tabs" if is_csv else "with tabs, or as .csv with commas"
    if columns and re.fullmatch("sep=.?", columns[0]):
        raise InputError(
            f"{place}:1 is {columns[0]}, which only Excel reads; remove the line, and save the table {fix}"
        )
    for char, what in ((";", "semicolons"), ("|", "bars"), ("\t", "tabs") if is_csv else (",", "commas")):
        names = columns[0].split(char) if len(columns) == 1 else []
        if sum(bool(name.strip(' "')) for name in names) > 1:
            raise InputError(f"{place}:1 is one column, {columns[0]!r:.60}, parted by {what}; save the table {fix}")


def _no_table(place: str, kind: str) -> InputError:
    return InputError(
        f"{place} is {kind}, which is not read as a table; write JSON lines, with the names of classes and not their "
        "numbers, for example by pandas' to_json(FILE, orient='records', lines=True)"
    )
