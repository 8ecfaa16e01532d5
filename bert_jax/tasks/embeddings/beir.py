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
from bert_jax.tasks import readers
from bert_jax.tasks.columnar import is_tfds
from bert_jax.tasks.labels import label_number
from bert_jax.tasks.records import Record, find_column, no_column

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


class TextsExample(NamedTuple):
    """Texts that belong together, or a single query or passage."""

    texts: tuple[str, ...]  # an anchor or query, its positive, hard negatives
    score: float | None = None  # of a graded pair
    id: int | str = 0
    where: str = ""
    relevant: Mapping[str, float] | None = None  # of a query: its relevant passages, id -> grade
    is_passage: bool = False  # whether it is one of the passages to search
    # of a query: ids of passages that are the query itself, and never among its results
    own: Sequence[str] = ()
    scores: tuple[float, ...] = ()  # a teacher's, of each text after the first

    def is_query(self, place: int) -> bool:
        """Returns whether a text takes the query's prompt; both texts of a pair without a direction do."""
        has_none = self.score is not None or self.texts[:1] == self.texts[1:]
        return not self.is_passage and (place == 0 or has_none)


class TextsExamples(readers.Examples):
    """Examples, and of training data the metric that fits the dev set."""

    metric = ""
    is_nli = False  # whether several rows of a table became one example


def beir_place(source: str, split: str) -> str:
    """Returns the directory in BEIR's layout of a split of a source; "" if there is none."""
    place = readers.part_of(source, split)
    is_directory = place and not is_tfds(place) and not readers.is_one_place(place)
    return place if is_directory and texts_files(place, "corpus") else ""


def read_beir(place: str, split: str) -> TextsExamples:
    """Returns pairs to train on, or the queries of a split with their relevant passages, and all passages.

    [] without judgements. Raises: InputError with file and line.
    """
    qrels = _find_qrels(place, split)
    if not qrels:
        return TextsExamples()
    counts: Counter[str] = Counter()
    passages = _read_texts(place, "corpus", counts)
    queries = _read_texts(place, "queries", counts)
    by_text: dict[str, list[str]] = {}
    for name, text in passages.items():
        for form in {text.text.strip(), text.whole}:
            by_text.setdefault(form, []).append(name)
    relevant: dict[str, dict[str, float]] = {}
    for query, passage, grade in (each for path in qrels for each in _judgements(path)):
        if query not in queries or passage not in passages:
            counts[NO_PASSAGE if query in queries else NO_QUERY] += 1
        if query in queries and grade > 0:
            # A passage that cannot be found counts as one that was not, as trec_eval counts it.
            relevant.setdefault(query, {})[passage] = grade
    if not any(grades.keys() & passages.keys() for grades in relevant.values()):
        raise InputError(
            f"{qrels[0]} has no judgement above 0 of a query and a passage that are there: a query's id, a passage's, "
            "the score"
        )
    examples: list[TextsExample] = []
    for name, grades in relevant.items():
        query = TextsExample(
            texts=(queries[name].whole,),
            id=name,
            where=qrels[0],
        )
        if split == "train":
            found = [passages[passage].whole for passage in grades if passage in passages]
            examples += [query._replace(texts=(*query.texts, text)) for text in found]
        else:
            own = [each for each in by_text.get(query.texts[0], ()) if each not in grades]
            counts[OWN_TEXT] += len(own)
            examples.append(query._replace(relevant=grades, own=own))
    for name, text in passages.items() if split != "train" else ():
        examples.append(
            TextsExample(
                texts=(text.whole,),
                id=name,
                where=qrels[0],
                is_passage=True,
            )
        )
    return TextsExamples(examples, counts)


def read_corpus(place: str) -> list[str]:
    """Returns the passages of a directory in BEIR's layout, as pairs to train on have them, without empty ones."""
    texts = _read_texts(place, "corpus", Counter()).values()
    return [text.whole for text in texts if text.whole]


def read_run(path: str) -> dict[str, list[str]]:
    """Returns the ids of the passages that a search has found for each query, best first.

    A line is TREC's `query Q0 passage rank score tag`, whose score gives the order, or `query passage rank`, as for MS
    MARCO. Raises: InputError with file and line.
    """
    found: dict[str, list[tuple[float, str]]] = {}
    for where, line in readers.numbered_lines(path):
        row = line.split()
        if len(row) not in (3, 6):
            raise InputError(
                f"{where} has {len(row)} columns, not TREC's 6 (query, Q0, passage, rank, score, tag) nor 3 (query, "
                "passage, rank)"
            )
        query, passage, number = (row[0], row[2], row[4]) if len(row) == 6 else row
        value = label_number(number, where) or 0.0
        found.setdefault(query, []).append((-value if len(row) == 6 else value, passage))
    # stable: of equals those that stand first
    return {
        query: list(
            dict.fromkeys(passage for _, passage in sorted(ranked, key=lambda each: each[0]))
        )
        for query, ranked in found.items()
    }


def beir_files(place: str, split: str) -> list[str]:
    """Returns the files that `read_beir` reads of a directory, in which there may be others."""
    return [
        *texts_files(place, "corpus"),
        *texts_files(place, "queries"),
        *_find_qrels(place, split),
    ]


def texts_files(place: str, name: str) -> list[str]:
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
    """Returns the files with the judgements of a split, of one kind."""
    # the hub has BEIR's own in a data set beside, such as BeIR/scifact-qrels
    folders = [(place, pattern) for pattern in _QRELS] + [(f"{place.rstrip('/')}-qrels", "*")]
    for folder, pattern in folders:
        paths: list[str] = []
        with contextlib.suppress(InputError):
            paths = readers.files_in(folder, pattern)
        paths = [
            path for path in paths if not readers.plain_name(path).startswith(("corpus", "queries"))
        ]
        paths.sort(key=readers.is_tsv, reverse=True)
        if found := readers.named(paths, _SPLITS[split]):
            is_tsv = readers.is_tsv(found[0])
            return [path for path in found if readers.is_tsv(path) == is_tsv]
    return []


class _Text(NamedTuple):
    """A text of the corpus or of the queries. BEIR's own models read the title before the text."""

    title: str
    text: str
    where: str

    @property
    def whole(self) -> str:
        return f"{self.title} {self.text}".strip()


def _read_texts(place: str, name: str, counts: Counter[str]) -> dict[str, _Text]:
    """Returns the texts by id."""
    paths = texts_files(place, name)
    if not paths:
        raise InputError(f"{place} has no {name}.jsonl; give BEIR's directory with {name} too")
    texts: dict[str, _Text] = {}
    for record in (record for path in paths for record in readers.read_table(path).records):
        key = find_column(_ID, record) or "_id"
        id_ = str(record[key] if type(record.get(key)) is int else record.get_as(key, str)).strip()
        title = record.get("title")
        text = record.get_as("text", str)
        new = _Text(title=title if isinstance(title, str) else "", text=text, where=record.where)
        if id_ in texts:
            if texts[id_][:2] != new[:2]:
                raise InputError(
                    f"{record.where} has the _id {id_!r:.60} of {texts[id_].where}, another text"
                )
            counts[f"{name} {_TWICE}"] += 1
        texts.setdefault(id_, new)
    return texts


def _judgements(path: str) -> Iterator[tuple[str, str, float]]:
    """Yields the ids of a query and a passage, and the grade of the passage."""
    is_tsv = readers.is_tsv(path)
    for record in _rows(path) if is_tsv else readers.read_table(path).records:
        values = []
        for wanted, usual in _JUDGED.items():
            value = record.get(find_column(usual, record))
            if value is None or value == "":
                raise no_column(record.where, f"{wanted} with a value", list(record))
            values.append(value)
        query, passage = (str(value).strip() for value in values[:2])
        yield query, passage, label_number(values[2], record.where) or 0.0


def _rows(path: str) -> Iterator[Record]:
    """Yields the rows of a file with or without a header, separated by tabs or as TREC has them by blanks."""
    columns: list[str] = []
    for where, line in readers.numbered_lines(path):
        row = line.split("\t") if "\t" in line else line.split()
        if not columns:
            # names, and no score
            if not row[-1].strip().lstrip("-").replace(".", "", 1).isdecimal():
                columns = [name.strip() for name in row]
                continue
            columns = ["query-id", *[""] * (len(row) - 3), "corpus-id", "score"]
        if len(row) != len(columns):
            raise InputError(
                f"{where} has {len(row)} columns, not {len(columns)} (query-id, corpus-id, score)"
            )
        yield Record(zip(columns, row), where)
