# SPDX-License-Identifier: Apache-2.0
"""Reads passages, queries, and which passages are relevant to which query, in BEIR's layout.

A directory or URL has corpus.jsonl and queries.jsonl, also compressed, or folders corpus/ and queries/ of such or of
Parquet files, as on the Hugging Face hub. The judgements of a split are in qrels/SPLIT.tsv, or a file named after the
split in qrels/, default/, data/, beside the corpus, or in a directory with the same name and -qrels: three columns with
or without a header, TREC's four, JSON lines or Parquet. Source: Thakur et al. 2021.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bert_jax.errors import InputError
from bert_jax.storage import files
from bert_jax.tasks import readers
from bert_jax.tasks.columnar import Record, is_tfds
from bert_jax.tasks.labels import label_number

# best first
_SPLITS = {"train": ("train",), "dev": ("dev", "validation", "test"), "test": ("test",)}
_SUFFIXES = (".jsonl", ".ndjson", ".parquet")
_QRELS = ("qrels/**", "default/*", "data/*", "*")  # where the judgements are, best first
_ID = ("_id", "id")
# Usual names of the columns of judgements.
_JUDGED = {
    "query-id": ("query-id", "query_id", "qid", "query"),
    "corpus-id": (
        "corpus-id",
        "corpus_id",
        "pid",
        "passage-id",
        "passage_id",
        "docid",
        "doc-id",
        "doc_id",
    ),
    "score": ("score", "relevance", "rel", "label", "grade"),
}
NO_PASSAGE, NO_QUERY = (
    "judgements of passages not in the corpus",
    "judgements of queries not in queries",
)
OWN_TEXT = "passages with the text of their query, left out of its results"
_TWICE = "given twice, with the same text"


class Query(NamedTuple):
    """A query, and the passages that are relevant to it."""

    id: str
    text: str
    relevant: Mapping[str, float]  # id -> grade above 0; the corpus may lack the passage
    own: Sequence[str]  # ids of the passages that are the query itself, and not relevant to it
    where: str


class Beir(NamedTuple):
    """The queries of a split, and all passages by their ids."""

    queries: list[Query]
    passages: dict[str, str]
    counts: dict[str, int]


def beir_place(source: str, split: str) -> str:
    """Returns the directory in BEIR's layout of a split of a source; "" if there is none."""
    sources = files.split_places(source)
    place = dict(zip(_SPLITS, sources)).get(split, "") if len(sources) > 1 else source
    is_directory = place and not is_tfds(place) and not readers.is_one_place(place)
    return place if is_directory and _files_of(place, "corpus") else ""


def read_beir(place: str, split: str) -> Beir | None:
    """Returns the data of a split; None without judgements. Raises: InputError with file and line."""
    qrels = _find_qrels(place, split)
    if not qrels:
        return None
    counts: Counter[str] = Counter()
    passages = _read_texts(place, "corpus", counts)
    queries = _read_texts(place, "queries", counts)
    by_text: dict[str, list[str]] = {}
    for name, (title, text) in passages.items():
        for form in {text.strip(), f"{title} {text}".strip()}:
            by_text.setdefault(form, []).append(name)
    relevant: dict[str, dict[str, float]] = {}
    for path in qrels:
        for record in _judgements(path):
            query, passage = (str(record[name]).strip() for name in ("query-id", "corpus-id"))
            score = label_number(record["score"], record.where)
            if query not in queries or passage not in passages:
                counts[NO_PASSAGE if query in queries else NO_QUERY] += 1
            if query in queries and score is not None and score > 0:
                # A passage that cannot be found counts as one that was not, as trec_eval counts it.
                relevant.setdefault(query, {})[passage] = score
    if not any(grades.keys() & passages.keys() for grades in relevant.values()):
        columns = "a query's id, a passage's and the score"
        raise InputError(
            f"{qrels[0]} has no judgement above 0 of a query and a passage that are there: {columns}"
        )
    found = []
    for name, grades in relevant.items():
        title, text = queries[name]
        text = f"{title} {text}".strip()
        own = [passage for passage in by_text.get(text, ()) if passage not in grades]
        counts[OWN_TEXT] += len(own)
        found.append(Query(name, text, grades, own, qrels[0]))
    if split == "train":
        del counts[OWN_TEXT]  # it has no results
    return Beir(
        found,
        {name: f"{title} {text}".strip() for name, (title, text) in passages.items()},
        dict(counts),
    )


def _files_of(place: str, name: str) -> list[str]:
    """Returns the files of the corpus or of the queries."""
    one = [path for path in readers.files_in(place, f"{name}.*") if _plain_stem(path) == name]
    if one:
        return [min(one, key=len)]  # not a compressed copy of it too
    return [path for path in readers.files_in(place, f"{name}/**") if _plain_stem(path)]


def _plain_stem(path: str) -> str:
    """Returns the name of a file of texts without its suffixes; "" if it is another kind of file."""
    stem, dot, suffix = readers.plain_name(path).rpartition(".")
    return stem if dot + suffix in _SUFFIXES else ""


def _find_qrels(place: str, split: str) -> list[str]:
    """Returns the files with the judgements of a split."""
    for pattern in _QRELS:
        if found := _qrels_among(readers.files_in(place, pattern), split):
            return found
    # the hub has BEIR's own in a data set beside, such as BeIR/scifact-qrels
    with contextlib.suppress(InputError):
        return _qrels_among(readers.files_in(f"{place.rstrip('/')}-qrels"), split)
    return []


def _qrels_among(inside: list[str], split: str) -> list[str]:
    paths = [
        path for path in inside if not readers.plain_name(path).startswith(("corpus", "queries"))
    ]
    for stem in _SPLITS[split]:
        found = sorted(readers.named(paths, (stem,)), key=lambda path: not readers.is_tsv(path))
        if found:
            suffix = readers.plain_name(found[0]).rpartition(".")[2]
            return [path for path in found if readers.plain_name(path).endswith(suffix)]
    return []


def _read_texts(place: str, name: str, counts: Counter[str]) -> dict[str, tuple[str, str]]:
    """Returns the title and the text by id. BEIR's own models read the title before the text."""
    paths = _files_of(place, name)
    if not paths:
        raise InputError(
            f"{place} has a corpus, and no {name}.jsonl; give BEIR's directory with {name} too"
        )
    texts: dict[str, tuple[str, str]] = {}
    places: dict[str, str] = {}
    for path in paths:
        for record in readers.read_table(path).records:
            given = record.get(readers.find_column(_ID, list(record)))
            title, text = record.get("title"), record.get("text")
            if (
                not isinstance(given, str | int)
                or isinstance(given, bool)
                or given == ""
                or not isinstance(text, str)
            ):
                raise InputError(
                    f'{record.where} has no _id or no text; write {{"_id": "...", "text": "..."}}'
                )
            both = title if isinstance(title, str) else "", text
            given = str(given).strip()
            if texts.setdefault(given, both) != both:
                raise InputError(
                    f"{record.where} has the _id {given!r:.60} of {places[given]}, another text"
                )
            counts[f"{name} {_TWICE}"] += given in places
            places.setdefault(given, record.where)
    return texts


def _judgements(path: str) -> Iterator[Record]:
    """Yields judgements with the columns "query-id", "corpus-id" and "score"."""
    if readers.is_tsv(path):
        rows = [
            (f"{path}:{number}", line.split("\t") if "\t" in line else line.split())
            for number, line in enumerate(readers.read_lines(path), 1)
            if line.strip()
        ]
        first = rows[0][1] if rows else []
        if first and not _is_number(first[-1]):
            columns, rows = [name.strip() for name in first], rows[1:]
        else:
            columns = (
                ["query-id", "corpus-id", "score"]
                if len(first) == 3
                else ["query-id", "", "corpus-id", "score"]
            )
        for where, row in rows:
            if len(row) != len(columns):
                raise InputError(
                    f"{where} has {len(row)} columns, not {len(columns)} (query-id, corpus-id, score)"
                )
        records = [Record(zip(columns, row), where) for where, row in rows]
    else:
        records = readers.read_table(path).records
    for record in records:
        columns = {
            wanted: readers.find_column(usual, list(record)) for wanted, usual in _JUDGED.items()
        }
        values = {wanted: record.get(name) for wanted, name in columns.items()}
        if missing := [wanted for wanted, value in values.items() if value is None or value == ""]:
            raise readers.no_column(record.where, " and no ".join(missing), list(record))
        yield Record(values, record.where)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
