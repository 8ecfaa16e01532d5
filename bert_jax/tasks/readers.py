# SPDX-License-Identifier: Apache-2.0
"""Reads tables, JSON and TFDS data sets as records that know their location, such as "train.tsv:17".

The format of a file follows from its name: .csv, .jsonl (or .ndjson), .json, .parquet; anything else is tab-separated.
A further .gz or .zst is ignored. Tab-separated values have no quoting: a quote is an ordinary character, as in GLUE's
files. The columns of a CSV may be separated by semicolons, bars or tabs, as its header is.
In CSV a quoted value may contain commas and line ends. Everything is UTF-8, with or without a byte order mark.

A source is a file, a directory with a file for each split, itself or in data/ or its only folder (of Parquet also
several, as on the Hugging Face hub: hf://datasets/ORG/NAME), tfds:NAME[:VERSION], or two or three of them separated by
commas, for train, dev and test, or with these names: train=FILE,dev=FILE.
"""

import contextlib
import csv
import glob
import io
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from bert_jax.data.sources import tfds_text
from bert_jax.data.sources.formats import check_encoding, check_line_ends, decoded_lines
from bert_jax.errors import InputError, not_utf8, reading
from bert_jax.storage import files, urls
from bert_jax.tasks.columnar import is_parquet, is_tfds, read_parquet, read_tfds
from bert_jax.tasks.json_values import parse_json
from bert_jax.tasks.records import Record, to_record

Splits: TypeAlias = Mapping[str, Sequence[str]]  # to names of files, best first
Lines: TypeAlias = Iterator[tuple[str, list[str]]]  # where each row stands, and its columns
# The names of splits in files and in TFDS. A source with commas lists them in this order.
SPLITS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "dev": ("dev", "validation", "valid", "val", "eval"),
    "test": ("test",),
}

_JSON_LINES = (".jsonl", ".ndjson")
_COLUMNS = (".tsv", ".txt", ".conll", ".bio", ".iob", ".iob2")
_SUFFIXES = (*_COLUMNS, *_JSON_LINES, ".csv", ".json", ".parquet")
# of the parts of a split on the Hugging Face hub
_PART = re.compile(r"-(\d{5})(-of-\d{5})(?:-[0-9a-f]+)?$")
_NAMED_SPLIT = re.compile(rf"({'|'.join(SPLITS)})=")
_BYTE_ORDER_MARK = "\ufeff"
_LONGEST_FIELD = 2**31 - 1  # characters; Python's own limit of 131,072 is below a long document


class Table(NamedTuple):
    """The records of a file or split, and their columns."""

    place: str
    columns: tuple[str, ...]  # in order; for JSON, every name that occurs
    records: list[Record]
    skipped: int = 0  # rows with too few columns

    def filled(self) -> "Table":
        """Returns the table. Raises: InputError if it has no record."""
        if not self.records:
            raise InputError(f"{self.place} holds no example; give data, a row or object for each")
        return self


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


# Finding


def part_of(source: str, split: str, names: Iterable[str] = SPLITS) -> str:
    """Returns the part of a source that is for a split: one of TRAIN,DEV,TEST or of train=FILE,dev=FILE, or all of it.

    "" if the source has parts, and none for the split. Raises: InputError if it has more parts than there are splits.
    """
    if _NAMED_SPLIT.match(source):
        # every second: the names, a group of the pattern, come between
        parts = re.split(rf",(?={_NAMED_SPLIT.pattern})", source)[::2]
        return dict(part.split("=", 1) for part in parts).get(split, "")
    parts = files.split_places(source)
    if len(parts) == 1:
        return source
    # dev_matched and dev_mismatched share one source, a file for the first
    groups = list(dict.fromkeys(name.partition("_")[0] for name in names))
    if len(parts) > len(groups) or not all(parts) or any(map(_NAMED_SPLIT.match, parts)):
        raise InputError(
            f"data {source!r} is not {','.join(groups)} in this order; give as many, or train=FILE,dev=FILE"
        )
    return dict(zip(groups, parts)).get(split.partition("_")[0], "")


def find_split_file(source: str, split: str, names: Splits = SPLITS) -> str:
    """Returns the file, or tfds:NAME:SPLIT, of a split of a source; "" if it is missing.

    In a directory it is the only file whose name, before its suffix, is one of the split's names or ends with one. A
    single file is the split that it is named after, else the first of `names`, the training data.

    Args:
      source: see the module's docstring.
      split: a key of `names`; any other split is missing.
      names: the possible names of each split, best first, as regular expressions.
    Raises: InputError if there is nothing at `source`, or more than one file fits.
    """
    if split not in names:
        return ""
    place = part_of(source, split, names)
    if not place:
        return ""
    is_one = is_one_place(place)
    if is_tfds(place) and not is_one:
        builder, _, _ = tfds_text.open_builder(place)
        prepared = builder.info.full_name.rpartition("/")[0]
        stems = [stem for stem in names[split] if stem in builder.info.splits][:1]
        return "".join(f"tfds:{prepared}:{builder.version}:{stem}" for stem in stems)
    if not is_one:
        found = named(_files_of_splits(place, names), names[split])
        # Files of Parquet that are parts of one split, as on the hub, are named by one pattern.
        patterns = found if urls.is_remote(place) else map(glob.escape, found)
        wholes = {_PART.sub(r"-*\2*", path.removesuffix(".parquet")) for path in patterns}
        if len(found) > 1 and len(wholes) > 1:
            several = ", ".join(map(os.path.basename, found))
            raise InputError(
                f"directory {place} has several files for {split}: {several}; give TRAIN_FILE,DEV_FILE"
            )
        return f"{wholes.pop()}.parquet" if len(found) > 1 else "".join(found)
    if place == source:
        splits = (name for name, stems in names.items() if named([source], stems))
    else:
        splits = (name for name in names if name.partition("_")[0] == split.partition("_")[0])
    return place if split == next(splits, next(iter(names))) else ""


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


def _files_of_splits(directory: str, names: Splits) -> list[str]:
    """Returns the files of a directory that has some for the splits: this one, its data/ or only other one."""
    stems = [stem for stems in names.values() for stem in stems]
    paths = files_in(directory)
    if named(paths, stems):
        return paths
    folders: dict[str, list[str]] = {}  # as data sets of the hub have them
    for path in files_in(directory, "*/*"):
        folders.setdefault(path.rpartition("/")[0], []).append(path)
    folders = {folder: inside for folder, inside in folders.items() if named(inside, stems)}
    chosen = [folder for folder in folders if folder.endswith("/data")] or list(folders)
    if len(chosen) == 1:
        return folders[chosen[0]]
    if chosen:
        raise InputError(
            f"directory {directory} has several folders with data, {', '.join(chosen[:8])}; give one of them"
        )
    wanted = ", ".join(f"{name}.tsv" for name in names)
    raise InputError(
        f"directory {directory} has no file such as {wanted} or .csv, .json, .jsonl; give TRAIN_FILE,DEV_FILE"
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
    # A name that is exactly the split's first: "train.tsv" is meant where "old_train.tsv" lies
    # beside it.
    for before in ("", r"(.*[^a-z])?"):
        for stem in stems:
            if matches := [path for path in known if re.fullmatch(before + stem, _stem(path))]:
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
    place: str,
    columns: Sequence[str] = (),
    lenient: bool = False,
    json_keys: Sequence[str] = (),
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
    if is_tfds(place):
        records = list(read_tfds(place))
    elif is_parquet(place):
        records = list(read_parquet(place))
    elif plain_name(place).endswith(_JSON_LINES):
        records = read_json_lines(place)
    elif plain_name(place).endswith(".json"):
        records = read_json(place, json_keys)
    else:
        is_csv = plain_name(place).endswith(".csv")
        return _rows_table(
            place, _csv_rows(place) if is_csv else _tsv_rows(place), columns, lenient
        )
    return _table_of(place, records)


def read_tables(place: str, most: int) -> Iterator[Table]:
    """Yields the records of a file in any format as tables of at most `most`, one of which is in memory.

    A JSON file, which is one value, and a TFDS data set are read at once. Raises: InputError as `read_table`.
    """
    if is_parquet(place):
        records = read_parquet(place)
    elif plain_name(place).endswith(_JSON_LINES):
        records = (to_record(parse_json(line, where), where) for where, line in _open_lines(place))
    elif is_records(place):
        yield read_table(place)
        return
    else:
        is_csv = plain_name(place).endswith(".csv")
        lines = _open_lines(place)
        rows = _csv_rows(place) if is_csv else ((where, line.split("\t")) for where, line in lines)
        columns, records = _rows_records(place, rows, ())
        while part := list(itertools.islice(records, most)):
            yield Table(place=place, columns=columns, records=part)
        return
    while part := list(itertools.islice(records, most)):
        yield _table_of(place, part)


def _table_of(place: str, records: list[Record]) -> Table:
    columns = tuple(dict.fromkeys(name for each in records for name in each))
    return Table(place=place, columns=columns, records=records)


def is_records(place: str) -> bool:
    """Returns whether `read_table` reads `place` as objects or typed columns, not as lines of text."""
    return is_tfds(place) or plain_name(place).endswith((*_JSON_LINES, ".json", ".parquet"))


def is_tsv(place: str) -> bool:
    """Returns whether `read_table` reads `place` as a tab-separated file."""
    return not is_records(place) and not plain_name(place).endswith(".csv")


def read_wide_tsv(place: str, columns: Sequence[str], lenient: bool = False) -> Table:
    """Returns the records of a tab-separated file without a header, whatever its name.

    Further columns are ignored; rows with too few are as in `read_table`.
    """
    return _rows_table(place, _tsv_rows(place), columns, lenient, more=True)


def first_row(place: str) -> list[str]:
    """Returns the columns of the first line of a tab-separated file, [] if it is empty or not text."""
    if is_tfds(place) or is_parquet(place):
        return []
    return next((row for _, row in _tsv_rows(place)), [])


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


def numbered_lines(place: str) -> list[tuple[str, str]]:
    """Returns where each line of a file that is not blank stands, and the line."""
    lines = enumerate(read_lines(place), 1)
    return [(f"{place}:{number}", line) for number, line in lines if line.strip()]


def _open_lines(place: str) -> Iterator[tuple[str, str]]:
    """Yields what `numbered_lines` returns, a line at a time, of a file whose lines end as usual."""
    path = urls.local_copy(place)
    if not os.path.isfile(path):  # a pipe would be waited for
        raise InputError(f"{place} is not a file; check the path")
    with reading(place), files.open_binary(path) as stream:
        for where, text in decoded_lines(stream, place, f"{place}:"):
            if text.strip():
                yield where, text.removesuffix("\n").removesuffix("\r")


def read_json_lines(place: str) -> list[Record]:
    """Returns the object of each line that is not blank. Raises: InputError if a line is something else."""
    return [to_record(parse_json(line, where), where) for where, line in numbered_lines(place)]


def read_json(place: str, keys: Sequence[str] = ()) -> list[Record]:
    """Returns the objects of a JSON file: its list, or the list under the first of `keys` that it has.

    A file that has an object on each line is read as JSON lines, whatever its name.
    Raises: InputError if it is something else.
    """
    try:
        value = read_json_value(place)
    except InputError as error:
        if getattr(error.__cause__, "msg", "") == "Extra data":
            return read_json_lines(place)
        raise
    lists = {}
    if isinstance(value, dict):
        lists = {key: item for key, item in value.items() if isinstance(item, list)}
    if lists:
        value = next((lists[key] for key in keys or lists if key in lists), [])
    items = value if isinstance(value, list) else [value]
    return [to_record(item, f"{place}, item {number}") for number, item in enumerate(items, 1)]


def read_json_value(place: str) -> Any:
    """Returns the value of a JSON file. Raises: InputError if it is not JSON, naming the line."""
    return parse_json(read_text(place), place, is_file=True)


def read_text(place: str) -> str:
    """Returns the text of a file or URL, decompressed, without a byte order mark.

    Raises: InputError if it cannot be read, or is not UTF-8, naming the line.
    """
    path = urls.local_copy(place)
    if not os.path.isfile(path):  # a pipe would be waited for
        raise InputError(f"{place} is not a file; check the path")
    content = files.read_whole(path, place)
    check_encoding(content, place)
    try:
        return content.decode("utf-8").removeprefix(_BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise not_utf8(error, f"{place}:{line}") from None


# Rows


def _tsv_rows(path: str) -> Lines:
    return ((where, line.split("\t")) for where, line in numbered_lines(path))


def _csv_rows(path: str) -> Lines:
    # for the whole process: csv has no other limit
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))
    text = read_text(path)
    header = re.split("[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0]
    outside = re.sub(r'"[^"]*"', "", header)
    separator = ","  # or if the header has none, its most frequent separator
    if "," not in outside and not header.startswith("sep="):
        separator = max(",;\t|", key=outside.count)
    # newline="" keeps the line ends inside of quoted values; csv finds the others itself
    rows = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
    number = 1
    try:
        for row in rows:
            if any(value.strip() for value in row):
                yield f"{path}:{number}", row
            number = rows.line_num + 1
    except csv.Error as error:
        if number == 1:
            check_header(text.splitlines()[:1], path, is_csv=True)
        fix = 'put a value with a quote or comma in quotes, and double its own ("")'
        raise InputError(f"{path}:{number} is not a row of CSV ({error}); {fix}") from None


def check_header(columns: Sequence[str], place: str, is_csv: bool) -> None:
    """Raises: InputError if a header is one column with another separator in it, or a line for Excel."""
    fix = "with commas, or as .tsv with tabs" if is_csv else "with tabs, or as .csv with commas"
    if columns and re.fullmatch("sep=.?", columns[0]):
        raise InputError(f"{place}:1 is {columns[0]}, which only Excel reads; save the table {fix}")
    for char in ";|\t" if is_csv else ";|,":
        names = columns[0].split(char) if len(columns) == 1 else []
        if sum(bool(name.strip(' "')) for name in names) > 1:
            raise InputError(
                f"{place}:1 is one column, {columns[0]!r:.60}, parted by {char!r}; save the table {fix}"
            )


def _rows_table(
    path: str,
    rows: Lines,
    columns: Sequence[str],
    lenient: bool,
    more: bool = False,
) -> Table:
    skipped: list[str] = []
    columns, records = _rows_records(path, rows, columns, skipped if lenient else None, more)
    return Table(place=path, columns=columns, records=list(records), skipped=len(skipped))


def _rows_records(
    path: str,
    rows: Lines,
    columns: Sequence[str],
    skipped: list[str] | None = None,
    more: bool = False,
) -> tuple[tuple[str, ...], Iterator[Record]]:
    """Returns the columns of a table, and its records as they are read.

    With `skipped` rows with too few columns are added to it, by where they stand, and not refused.
    """
    columns = tuple(columns)
    has_header = not columns
    if has_header:
        columns = tuple(name.strip() for name in next(rows, ("", []))[1])
        check_header(columns, path, not is_tsv(path))
        has_header = not any(map(str.isdecimal, columns))  # or the first row may be data
    twice = {name for name in columns if name and columns.count(name) > 1}
    if twice:
        raise InputError(
            f"{path}:1 names the column {sorted(twice)[0]!r} twice; a name stands for one column"
        )

    def records() -> Iterator[Record]:
        for where, row in rows:
            # of files that were put together; in a single column a text may be like its name
            may_be_header = has_header and len(row) > 1 and row[0].strip() == columns[0]
            if may_be_header and columns == tuple(map(str.strip, row)):
                raise InputError(f"{where} has the names of the columns in line 1 again; remove it")
            if len(row) < len(columns) and skipped is not None:
                skipped.append(where)
            elif len(row) == len(columns) or (
                len(row) > len(columns) and (more or skipped is not None)
            ):
                yield Record(zip(columns, row), where)
            else:
                wanted = f"the {len(columns)} of {', '.join(columns)!r:.60}"
                raise InputError(
                    f"{where} has {len(row)} columns, not {wanted}; correct tabs, commas, quotes"
                )

    return columns, records()
