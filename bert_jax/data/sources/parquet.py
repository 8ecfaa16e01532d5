# SPDX-License-Identifier: Apache-2.0
"""Parquet files as documents: a row is a document, and one column of strings holds its text.

Files are read row group by row group, a few rows at a time, so memory does not grow with the file. A row group is
the unit in which a file is divided among processes. Rows without text are left out.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from bert_jax.data.sources import formats
from bert_jax.data.sources.formats import Piece, text_lines
from bert_jax.errors import InputError, not_utf8, package_needed, shown
from bert_jax.storage import files

PARQUET = "Parquet"

_MAGIC = b"PAR1"  # at both ends of a file; "PARE" is that of encrypted ones
_NAME = ".parquet"
_ROWS_AT_ONCE = 16  # in memory at once, however long a text is that a small file repeats
_GROUP = 256  # passages that are decoded where one of them is asked for
_BUFFER_BYTES = 1 << 20  # of the stream of a column, which is otherwise read whole
# Bytes in memory that any file may become: of a column in a row group, and of all rows, each of which has a cost.
_LEAST_CHUNK = 64 << 20
_LEAST_ROWS = 256 << 20
_PLAIN = {"PLAIN", "RLE", "BIT_PACKED"}  # encodings of values and of their levels
_ROW_COST = 192
_VALUE_COST = 64
_NUMBER_BYTES = 8


def is_parquet(path: str, source: str) -> bool:
    """Returns whether a file is Parquet, by its first bytes.

    Raises: InputError if it cannot be read, or if its name alone says so.
    """
    with files.reading(source), open(path, "rb") as stream:
        start = stream.read(len(_MAGIC))
    if start == _MAGIC:
        return True
    if source.lower().endswith(_NAME) or start == b"PARE":
        begin = shown(start.decode("latin-1"))
        raise InputError(
            f"{source} begins with {begin}, not with PAR1; fetch it again (by git lfs pull, in a clone)"
        )
    return False


def plan_row_groups(path: str, source: str, piece_bytes: int, column: str) -> list[Piece]:
    """Returns the pieces of a file, runs of row groups with about `piece_bytes` of text each; without rows, none.

    Raises: InputError if the file is damaged, or has no column of this name with text.
    """
    with _opened(path, source, column) as file:
        _check_chunks(file, path, source)
        leaves = file.metadata.schema  # those of nested columns are among them
        leaf = next(leaf for leaf in range(len(leaves)) if leaves.column(leaf).path == column)
        cuts = [0]
        held = 0
        for group in range(file.num_row_groups):
            held += file.metadata.row_group(group).column(leaf).total_uncompressed_size
            if held >= piece_bytes:
                cuts.append(group + 1)
                held = 0
        if not file.metadata.num_rows:
            return []
        if cuts[-1] < file.num_row_groups:
            cuts.append(file.num_row_groups)
    return [Piece(source, PARQUET, path, start, end, column) for start, end in zip(cuts, cuts[1:])]


def read_row_groups(piece: Piece) -> Iterator[list[str]]:
    """Yields the documents of a piece, without those that are blank.

    Raises: InputError if the file is damaged, or if a text is not UTF-8 or too long to be one.
    """
    with _opened(piece.path, piece.source, piece.column) as file:
        row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
        for group in range(piece.start, piece.end):
            rows = min(_ROWS_AT_ONCE, _rows_at_once(file))
            for batch in file.iter_batches(
                rows, row_groups=[group], columns=[piece.column], use_threads=False
            ):
                for value in batch.column(0):
                    if document := _document(value, piece, row):
                        yield document
                    row += 1


def read_rows(path: str, source: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file as dicts of plain values, a few of which are in memory.

    Raises: InputError if it is damaged or not Parquet, or if it holds far more than text does.
    """
    is_parquet(path, source)
    held = 0
    most = _most_bytes(path, _LEAST_ROWS)
    with _opened(path, source, "") as file:
        _check_chunks(file, path, source)
        has_decimals = any("decimal" in str(kind) for kind in file.schema_arrow.types)
        for batch in file.iter_batches(_rows_at_once(file), use_threads=False):
            read = batch.to_pylist()
            # Counted while they are read: a small file may repeat a long text in every row.
            held += _cost(read)
            if held > most:
                raise _too_much(source, most)
            yield from (_without_decimals(row) for row in read) if has_decimals else read


def _cost(value: Any) -> int:
    """Returns about how many bytes a plain value takes in memory."""
    if isinstance(value, dict):
        return _ROW_COST + sum(map(_cost, value.values()))
    if isinstance(value, list):
        return _VALUE_COST + sum(map(_cost, value))
    return _VALUE_COST + (len(value) if isinstance(value, str | bytes) else 0)


def _most_bytes(path: str, least: int) -> int:
    """Returns the most bytes that a file may become in memory: `least`, or 200 times its own, as `files.read_whole`."""
    return max(least, 200 * os.path.getsize(path))


def _check_chunks(file: Any, path: str, source: str) -> None:
    """Raises: InputError if a column of a row group, which is decompressed at once, is far larger than the file."""
    most = _most_bytes(path, _LEAST_CHUNK)
    for chunk in _chunks(file):
        if max(chunk.total_uncompressed_size, _NUMBER_BYTES * chunk.num_values) > most:
            raise _too_much(source, most)


def _rows_at_once(file: Any) -> int:
    """Returns how many rows to decode at once: but for plain encodings, each may repeat a text of a whole column."""
    sizes = [
        chunk.total_uncompressed_size for chunk in _chunks(file) if set(chunk.encodings) - _PLAIN
    ]
    return min(max(2 * _LEAST_CHUNK // max(*sizes, 1, 1), 2), 1024)


def _chunks(file: Any) -> Iterator[Any]:
    """Yields the metadata of each column of each row group."""
    for group in range(file.num_row_groups):
        for column in range(file.metadata.num_columns):
            yield file.metadata.row_group(group).column(column)


def _too_much(source: str, most: int) -> InputError:
    return InputError(
        f"{source} holds more than {most >> 20} MiB, far more than text does; write it as JSON lines"
    )


def _without_decimals(value: Any) -> Any:
    """Returns a value with its decimals as whole or floating-point numbers, also those inside of it."""
    if isinstance(value, dict):
        return {name: _without_decimals(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_decimals(item) for item in value]
    # neither JSON nor labels know it
    if isinstance(value, Decimal):
        return int(value) if value == int(value) else float(value)
    return value


def read_classes(path: str, source: str) -> dict[str, tuple[str, ...]]:
    """Returns the names of the classes of each column that is a class label, as Hugging Face's datasets write them."""
    with _opened(path, source, "") as file:
        metadata = (file.schema_arrow.metadata or {}).get(b"huggingface", b"{}")
    classes: dict[str, tuple[str, ...]] = {}
    try:
        for column, kind in json.loads(metadata).get("info", {}).get("features", {}).items():
            # Of lists of class labels, too: datasets before version 4 have [kind] for {"feature": kind}.
            while isinstance(kind, list) or (isinstance(kind, dict) and "feature" in kind):
                kind = (kind or [{}])[0] if isinstance(kind, list) else kind["feature"]
            if isinstance(kind, dict) and kind.get("_type", "ClassLabel") == "ClassLabel":
                names = kind.get("names") or range(kind.get("num_classes") or 0)
                classes[column] = tuple(map(str, names))
    except (AttributeError, TypeError, ValueError):
        return {}
    return {column: names for column, names in classes.items() if names}


def write_vectors(path: str, texts: Sequence[str], vectors: Any) -> None:
    """Writes a row for each text, with the columns "text" and "embedding", a list of the float32 numbers of its vector.

    Raises: InputError if pyarrow is not installed.
    """
    with package_needed("pyarrow", f"{path}: writing Parquet", "'bert_jax[parquet]'"):
        import pyarrow
        import pyarrow.parquet
    columns = pyarrow.FixedSizeListArray.from_arrays(
        pyarrow.array(vectors.reshape(-1)), vectors.shape[1]
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "embedding": columns}), path)


def write_passages(path: str, passages: Sequence[tuple[str, str]]) -> None:
    """Writes a row for each passage, with the columns "id" and "text", in groups of which a few can be read.

    Raises: InputError if pyarrow is not installed.
    """
    with package_needed("pyarrow", f"{path}: writing Parquet", "'bert_jax[parquet]'"):
        import pyarrow
        import pyarrow.parquet
    table = pyarrow.table(
        {"id": [id_ for id_, _ in passages], "text": [text for _, text in passages]}
    )
    pyarrow.parquet.write_table(table, path, row_group_size=_GROUP, compression="zstd")


def read_passages(path: str, rows: Sequence[int]) -> list[tuple[str, str]]:
    """Returns the ids and texts of some rows of a file that `write_passages` wrote."""
    groups = sorted({row // _GROUP for row in rows})
    with _opened(path, path, "text") as file:
        table = file.read_row_groups(groups)
    places = [groups.index(row // _GROUP) * _GROUP + row % _GROUP for row in rows]
    return [(row["id"], row["text"]) for row in table.take(places).to_pylist()]


def _document(value: Any, piece: Piece, row: int) -> list[str]:
    """Returns the lines of a value of the column. `row` is its number in the file."""
    where = f"{piece.source}, row {row} (the first is 0)"
    try:
        text = value.as_py()
        if isinstance(text, bytes):  # some writers do not mark strings as such
            text = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(error, f"{where}: {piece.column!r}") from None
    if text is None:
        return []
    if len(text) + formats.LINE_COST * (text.count("\n") + 1) > formats.LONGEST_DOCUMENT:
        raise InputError(
            f"{where}: the document has more than {formats.LONGEST_DOCUMENT >> 20} MiB; part it"
        )
    return text_lines(text)


@contextlib.contextmanager
def _opened(path: str, source: str, column: str) -> Iterator[Any]:
    """Yields pyarrow's reader of a file, closed when the block ends; a `column` of "" asks for none.

    Raises: InputError if the file is damaged, or has no column of this name with text; also for errors in the block.
    """
    with package_needed("pyarrow", f"{source}: reading Parquet", "'bert_jax[parquet]'"):
        import pyarrow
        import pyarrow.parquet
    with (
        files.reading(source),
        pyarrow.parquet.ParquetFile(
            path,
            buffer_size=_BUFFER_BYTES,
            # or a whole column of a row group is read at once, in spite of the buffer
            pre_buffer=False,
            page_checksum_verification=True,  # of files that have such checksums
        ) as file,
    ):
        if column:
            _check_column(file.schema_arrow, source, column)
        yield file


def _check_column(schema: Any, source: str, column: str) -> None:
    """Raises: InputError unless the column is there once and holds strings."""
    from pyarrow import types

    columns = ", ".join(f"{name} ({kind})" for name, kind in zip(schema.names[:30], schema.types))
    columns += ", ..." if len(schema.names) > 30 else ""
    count = schema.names.count(column)
    if count != 1:
        problem = "no column" if not count else f"{count} columns"
        raise InputError(
            f"{source} has {problem} {column!r}; choose one with --text_column: {columns or 'none'}"
        )
    kind = schema.field(column).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    names = "string large_string string_view binary large_binary binary_view"
    if not any(getattr(types, f"is_{name}")(kind) for name in names.split()):
        raise InputError(
            f"{source}: column {column!r} is {kind}, not strings; choose a --text_column: {columns}"
        )
