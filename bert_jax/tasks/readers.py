# SPDX-License-Identifier: Apache-2.0
"""Reads tables, JSON and TFDS data sets as records that know their location, such as "train.tsv:17".

The format of a file follows from its name: .csv, .jsonl (or .ndjson), .json, .parquet; anything else is tab-separated.
A further .gz or .zst is ignored. Tab-separated values have no quoting: a quote is an ordinary character, as in GLUE's
files. The columns of a CSV may be separated by semicolons, bars or tabs, as its header is.
In CSV a quoted value may contain commas and line ends. Everything is UTF-8, with or without a byte order mark.

A source is a file, a directory with a file for each split, itself or in data/ or its only folder (of Parquet also
several, as on the Hugging Face hub: hf://datasets/ORG/NAME), tfds:NAME[:VERSION], or two or three of them separated by
commas, for train, dev and test.
"""

import contextlib
import csv
import glob
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bert_jax.data.sources import tfds_text
from bert_jax.data.sources.formats import check_line_ends
from bert_jax.errors import InputError, not_utf8
from bert_jax.storage import files, urls
from bert_jax.tasks import not_tables
from bert_jax.tasks.columnar import Record, is_parquet, is_tfds, parted, read_parquet, read_tfds
from bert_jax.tasks.json_values import check_characters, load_json, parse_json

# The names of splits in files and in TFDS. A source with commas lists them in this order.
SPLITS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "dev": ("dev", "validation", "valid", "val", "eval"),
    "test": ("test",),
}

_SUFFIXES = (
    ".tsv",
    ".csv",
    ".jsonl",
    ".ndjson",
    ".json",
    ".txt",
    ".conll",
    ".bio",
    ".iob",
    ".iob2",
    ".parquet",
)
# of the parts of a split on the Hugging Face hub
_PART = re.compile(r"-(\d{5})(-of-\d{5})(?:-[0-9a-f]+)?$")
_BYTE_ORDER_MARK = "\ufeff"
_LONGEST_FIELD = 2**31 - 1  # characters; Python's own limit of 131,072 is below a long document


class Table(NamedTuple):
    """The records of a file or split, and their columns."""

    columns: tuple[str, ...]  # in order; for JSON, every name that occurs
    records: list[Record]
    skipped: int = 0  # rows with too few columns


class Examples(list[Any]):
    """Examples of a task, how many records were left out by reason, and the columns that were read."""

    def __init__(
        self,
        examples: Iterable[Any] = (),
        counts: Mapping[str, int] | None = None,
        columns: Iterable[str] = (),
    ):
        super().__init__(examples)
        self.counts = {reason: count for reason, count in (counts or {}).items() if count}
        self.columns = tuple(name for name in columns if name)


def find_column(usual: Iterable[str], columns: Sequence[str]) -> str:
    """Returns the column with the first of the lower-case names that matches, in any case; "" if none does."""
    by_lower = {column.lower(): column for column in reversed(columns)}
    return next((by_lower[name] for name in usual if name in by_lower), "")


def listed_columns(columns: Sequence[str]) -> str:
    """Returns the columns as listed in messages."""
    return ", ".join(repr(name[:40]) for name in columns[:20]) or "nothing"


def no_column(place: str, name: str, columns: Sequence[str]) -> InputError:
    """Returns the error for a column that a file does not have."""
    has = listed_columns(columns)
    return InputError(
        f"{place} has no column {name}; it has {has}: set the column of the task, such as task.text_column"
    )


# Finding


def find_split_file(source: str, split: str, names: Mapping[str, Sequence[str]] = SPLITS) -> str:
    """Returns the file, or tfds:NAME:SPLIT, of a split of a source; "" if it is missing.

    In a directory it is the only file whose name, before its suffix, is one of the split's names or ends with one. A
    single file is the split that it is named after, else the first of `names`, the training data.

    Args:
      source: see the module's docstring.
      split: a key of `names`; any other split is missing.
      names: the possible names of each split, best first.
    Raises: InputError if there is nothing at `source`, or more than one file fits.
    """
    if split not in names:
        return ""
    sources = files.split_places(source)
    if len(sources) == 1:
        first = next(iter(names))
        if not is_one_place(source):
            return (
                _find_tfds_split(source, names[split])
                if is_tfds(source)
                else _find_file(source, split, names)
            )
        called = next((name for name, stems in names.items() if named([source], stems)), first)
        return source if split == called else ""
    # dev_matched and dev_mismatched share one source, a file for the first
    groups: dict[str, str] = {}
    for name in names:
        groups.setdefault(name.partition("_")[0], name)
    if len(sources) > len(groups) or not all(sources):
        raise InputError(
            f"data {source!r} is not {','.join(groups)} in this order; give as many, with commas"
        )
    own_source = dict(zip(groups, sources)).get(split.partition("_")[0], "")
    if not own_source or is_one_place(own_source):
        return own_source if split in groups.values() else ""
    return find_split_file(own_source, split, names)


def is_one_place(path: str) -> bool:
    """Returns whether the source is a single split: a file, or a data set with the name of a split."""
    if is_tfds(path):
        return bool(tfds_text.open_builder(path)[1])
    if is_parquet(path) and "*" in path:
        return True
    if urls.is_remote(path):
        with contextlib.suppress(InputError):
            return files.expand_globs(path) == [path]
        return False
    if not os.path.exists(path):
        raise InputError(
            f"data {path!r} is neither a file nor a directory; give one, or tfds:NAME, or TRAIN,DEV,TEST"
        )
    return not os.path.isdir(path)


def _find_tfds_split(source: str, stems: Sequence[str]) -> str:
    builder, _, _ = tfds_text.open_builder(source)
    name = builder.info.full_name.rpartition("/")[0]
    return next(
        (f"tfds:{name}:{builder.version}:{stem}" for stem in stems if stem in builder.info.splits),
        "",
    )


def _find_file(directory: str, split: str, names: Mapping[str, Sequence[str]]) -> str:
    directory, paths = _in_folder(directory, names)
    found = named(paths, names[split])
    if (
        len(found) > 1
        and len(wholes := {_PART.sub(r"-*\2*", path.removesuffix(".parquet")) for path in found})
        == 1
    ):
        return f"{wholes.pop()}.parquet"
    if len(found) > 1:
        several = ", ".join(map(os.path.basename, found))
        raise InputError(
            f"directory {directory} has several files for {split}: {several}; give TRAIN_FILE,DEV_FILE"
        )
    return found[0] if found else ""


def _in_folder(directory: str, names: Mapping[str, Sequence[str]]) -> tuple[str, list[str]]:
    """Returns the directory that has files for the splits, and its files: this one, its data/ or only other one."""

    def has_splits(paths: Sequence[str]) -> bool:
        return any(named(paths, stems) for stems in names.values())

    paths = files_in(directory)
    if has_splits(paths):
        return directory, paths
    folders: dict[str, list[str]] = {}  # as data sets of the hub have them
    for path in files_in(directory, "*/*"):
        folders.setdefault(path.rpartition("/")[0], []).append(path)
    folders = {folder: inside for folder, inside in folders.items() if has_splits(inside)}
    chosen = next((folder for folder in folders if folder.endswith("/data")), "")
    if len(folders) == 1 or chosen:
        chosen = chosen or next(iter(folders))
        return chosen, folders[chosen]
    if folders:
        several = ", ".join(list(folders)[:8])
        raise InputError(
            f"directory {directory} has several folders with data, {several}; give one of them"
        )
    wanted = ", ".join(f"{stems[0]}.tsv" for stems in names.values() if stems)
    not_tables.check_names(paths)
    raise InputError(
        f"directory {directory} has no file such as {wanted} or .csv, .jsonl; give TRAIN_FILE,DEV_FILE"
    )


def files_in(directory: str, pattern: str = "*") -> list[str]:
    """Returns the files of a directory or URL that match a pattern below it, sorted."""
    if urls.is_remote(directory):
        return sorted(urls.remote_glob(f"{directory.rstrip('/')}/{pattern}"))
    matches = glob.glob(f"{glob.escape(directory.rstrip('/') or '/')}/{pattern}", recursive=True)
    return sorted(path for path in matches if os.path.isfile(path))


def named(paths: Sequence[str], stems: Sequence[str]) -> list[str]:
    """Returns the files named like one of `stems`, or else the files whose names end with one."""
    known = [path for path in paths if plain_name(path).endswith(_SUFFIXES)]
    for before in ("", r"(.*[^a-z])?"):
        for stem in stems:
            if matches := [
                path for path in known if re.fullmatch(before + re.escape(stem), _stem(path))
            ]:
                return matches
    return []


def plain_name(path: str) -> str:
    """Returns the name of a file in lower case, without a compression suffix."""
    name = path.rpartition("/")[2].lower()
    return name.removesuffix(".gz").removesuffix(".zst")


def _stem(path: str) -> str:
    return _PART.sub("", plain_name(path).rpartition(".")[0])


# Reading


def read_table(
    place: str, columns: Sequence[str] = (), lenient: bool = False, json_keys: Sequence[str] = ()
) -> Table:
    """Returns the records of a file in any format, or of tfds:NAME:VERSION:SPLIT.

    Args:
      place: a file or data set, as returned by `find_split_file`.
      columns: the columns of a file without a header; () reads them from its first line.
      lenient: whether rows with too few columns are skipped and counted, and further columns ignored, as
        GLUE's own readers do.
      json_keys: for a JSON file, as in `read_json`.
    Raises: InputError, with file and line, if a row has another number of columns than the header, or cannot be read.
    """
    if is_tfds(place) or is_parquet(place):
        records = list(read_tfds(*parted(place))) if is_tfds(place) else read_parquet(place)
        return Table(tuple(records[0]) if records else (), records)
    name = plain_name(place)
    if name.endswith((".jsonl", ".ndjson")):
        return _json_table(read_json_lines(place))
    if name.endswith(".json"):
        return _json_table(read_json(place, json_keys))
    return _rows_table(
        place, _csv_rows(place) if name.endswith(".csv") else _tsv_rows(place), columns, lenient
    )


def is_tsv(place: str) -> bool:
    """Returns whether `read_table` reads `place` as a tab-separated file."""
    return not is_tfds(place) and not plain_name(place).endswith(
        (".csv", ".jsonl", ".ndjson", ".json", ".parquet")
    )


def read_wide_tsv(place: str, columns: Sequence[str], lenient: bool = False) -> Table:
    """Returns the records of a tab-separated file without a header, whatever its name.

    Further columns are ignored; rows with too few are as in `read_table`.
    """
    return _rows_table(place, _tsv_rows(place), columns, lenient, more=True)


def first_row(place: str) -> list[str]:
    """Returns the columns of the first line of a tab-separated file, [] if it is empty or not text."""
    return (
        []
        if is_tfds(place) or is_parquet(place)
        else next((row for _, row in _tsv_rows(place)), [])
    )


def read_lines(place: str) -> list[str]:
    r"""Returns the lines of a file, split at \n and \r\n, or at \r if there is no \n; not at other Unicode line ends.

    Raises: InputError if it cannot be read, or is not UTF-8, naming the line.
    """
    text = read_text(place)
    lines = text.split("\n" if "\n" in text else "\r")
    if lines[-1] == "":
        lines.pop()
    if lines and "\r" in lines[0].rstrip("\r"):
        check_line_ends("\n".join(lines).encode(), place)
    return [line.removesuffix("\r") for line in lines]


def read_json_lines(place: str) -> list[Record]:
    """Returns the object of each line that is not blank. Raises: InputError if a line is something else."""
    records = []
    for number, line in enumerate(read_lines(place), 1):
        if line.strip():
            where = f"{place}:{number}"
            records.append(_record(parse_json(line, where), where))
    return records


def read_json(place: str, keys: Sequence[str] = ()) -> list[Record]:
    """Returns the objects of a JSON file: its list, or the list under the first of `keys` that it has.

    A file that has an object on each line is read as JSON lines, whatever its name.
    Raises: InputError if it is something else.
    """
    text = read_text(place)
    try:
        value = load_json(text, place, is_file=True)
    except InputError as error:
        if getattr(error.__cause__, "msg", "") == "Extra data" and text.lstrip().startswith("{"):
            return read_json_lines(place)
        raise
    check_characters(text, value, place)
    if isinstance(value, dict):
        lists = [key for key, item in value.items() if isinstance(item, list)]
        if not lists:
            return [_record(value, f"{place}:1")]
        value = next(
            (value[key] for key in keys if key in lists), value[lists[0]] if not keys else []
        )
    if not isinstance(value, list):
        raise InputError(
            f"{place}:1 is {_shown(value)}, not a list of objects; write [{{...}}, {{...}}]"
        )
    return [_record(item, f"{place}, item {number}") for number, item in enumerate(value, 1)]


# Files


def read_text(place: str) -> str:
    """Returns the text of a file or URL, decompressed, without a byte order mark.

    Raises: InputError if it cannot be read, or is not UTF-8, naming the line.
    """
    path = urls.local_copy(place)
    if not os.path.isfile(path):  # a pipe would be waited for
        raise InputError(f"{place} is not a file; check the path")
    content = files.read_whole(path, place)
    not_tables.check_content(content, place)
    try:
        return content.decode("utf-8").removeprefix(_BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise not_utf8(error, f"{place}:{line}") from None


def _tsv_rows(path: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            yield number, line.split("\t")


def _csv_rows(path: str) -> Iterator[tuple[int, list[str]]]:
    # for the whole process: csv has no other limit
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))
    text = read_text(path)
    header = re.split("[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0]
    rows = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=_separator(header))
    number = 1
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            if number == 1:
                not_tables.check_header(text.splitlines()[:1], path, is_csv=True)
            fix = 'put a value with a quote or comma in quotes, and double its own ("")'
            raise InputError(f"{path}:{number} is not a row of CSV ({error}); {fix}") from None
        if row is None:
            return
        if row and any(value.strip() for value in row):
            yield number, row
        number = rows.line_num + 1


def _separator(header: str) -> str:
    """Returns the separator of a CSV: the comma, or if the header has none, its most frequent separator."""
    outside = re.sub(r'"[^"]*"', "", header)
    is_plain = "," in outside or header.startswith("sep=") or not re.search(r"[;\t|]", outside)
    return "," if is_plain else max(";\t|", key=outside.count)


def _rows_table(
    path: str,
    rows: Iterable[tuple[int, list[str]]],
    columns: Sequence[str],
    lenient: bool,
    more: bool = False,
) -> Table:
    rows = iter(rows)
    columns = tuple(columns)
    if not columns:
        columns = tuple(name.strip() for name in next(rows, (1, []))[1])
        not_tables.check_header(columns, path, not is_tsv(path))
    twice = {name for name in columns if name and columns.count(name) > 1}
    if twice:
        raise InputError(
            f"{path}:1 names the column {sorted(twice)[0]!r} twice; a name stands for one column"
        )
    records, skipped = [], 0
    for number, row in rows:
        if len(row) < len(columns) and lenient:
            skipped += 1
        elif not lenient and (len(row) < len(columns) or (len(row) > len(columns) and not more)):
            wanted = f"the {len(columns)} of {_shown(', '.join(columns))}"
            raise InputError(
                f"{path}:{number} has {len(row)} columns, not {wanted}; correct tabs, commas, quotes"
            )
        else:
            records.append(Record(zip(columns, row), f"{path}:{number}"))
    return Table(columns, records, skipped)


# JSON


def _json_table(records: list[Record]) -> Table:
    return Table(tuple(dict.fromkeys(name for record in records for name in record)), records)


def _record(value: object, where: str) -> Record:
    if not isinstance(value, dict):
        raise InputError(
            f'{where} is {_shown(value)}, not an object; write it like {{"text": "...", "label": "..."}}'
        )
    return Record(value, where)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text if len(text) <= 60 else text[:57] + "...")
