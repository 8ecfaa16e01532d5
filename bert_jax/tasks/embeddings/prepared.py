# SPDX-License-Identifier: Apache-2.0
"""Pairs that were prepared: read from disk when a batch has them, so that they need not fit in memory.

`prepare` makes them. They are the same rows, in the same order, as those of the tables that they were made of.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np

from bert_jax.batch import Row
from bert_jax.batches.pack import StoredRows
from bert_jax.batches.stream import StreamedSplit, is_large, open_streamed
from bert_jax.data import records
from bert_jax.data.blocks import RowSource
from bert_jax.errors import InputError
from bert_jax.settings.finetuning import OF_SCORES, FinetuneDataConfig, TaskConfig
from bert_jax.settings.pretraining import DataConfig
from bert_jax.storage import files, schema, urls
from bert_jax.storage.resolve import MANIFEST, resolve
from bert_jax.storage.schema import Count, FileName, Meta, Sha256
from bert_jax.text.tokenizer import Tokenizer

# Of the settings of a task, what prepared pairs were made with, and a run must have too.
MADE_WITH = ("max_seq_length", "query_prompt", "passage_prompt")


_REMEDY = "it is damaged, so copy it again or prepare the pairs again"


class Source(NamedTuple):
    """Pairs of one origin: a stretch of the rows."""

    name: str
    rows: int
    weight: float  # 0: as many as there are


class _Source(TypedDict):
    name: str
    rows: Annotated[int, Meta(ge=1)]
    weight: Annotated[float, Meta(ge=0)]


class _File(TypedDict):
    name: FileName
    bytes: Count
    sha256: Sha256


class _Options(TypedDict):
    max_seq_length: Annotated[int, Meta(ge=5)]
    query_prompt: str
    passage_prompt: str


class _Identity(TypedDict):
    options: _Options


class _Manifest(TypedDict):
    """What the manifest of pairs has beside that of any data set."""

    identity: _Identity
    lengths: _File
    sources: Annotated[list[_Source], Meta(min_length=1)]
    graded: bool
    alone: bool
    taught: bool
    largest_score: float
    smallest_score: float


class PairRows(StoredRows):
    """The rows of prepared pairs."""

    def __init__(
        self,
        rows: RowSource | Sequence[StreamedSplit],
        lengths: np.ndarray,
        sources: list[Source],
        fingerprint: str,
        has_scores: bool = False,
    ) -> None:
        """Makes the rows, of all sources together, or streamed, of each.

        Those that `has_scores` have a label of a teacher's scores in place of a pair's.
        """
        self.lengths = lengths
        self.fingerprint = fingerprint
        self._rows = rows
        if isinstance(rows, Sequence):
            self.streams = rows
        self._has_scores = has_scores
        self.stretches = tuple(source.rows for source in sources)
        weights = tuple(source.weight for source in sources)
        self.weights = weights if any(weights) else ()

    def take(self, numbers: np.ndarray) -> list[Row]:
        """Returns the rows with these numbers. Among them, equal texts have equal numbers, from 0 on."""
        found = self._gather(np.asarray(numbers, np.int64))
        # numbers of 32 bits, as batches have them, in place of the hashes
        _, known = np.unique(found["texts"], return_inverse=True)
        known = known.reshape(found["texts"].shape)
        rows = []
        for number, record, texts in zip(np.asarray(numbers).tolist(), found, known):
            lengths = tuple(length for length in record["lengths"].tolist() if length)
            token_ids = record["token_ids"][: sum(lengths)].astype(np.int32)
            rows.append(
                Row(
                    example=number,
                    token_ids=token_ids,
                    type_ids=np.zeros(len(token_ids), np.uint8),
                    lengths=lengths,
                    label=(self._score(record, len(lengths)), *texts[: len(lengths)].tolist()),
                )
            )
        return rows

    def _gather(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the records of rows, in their order."""
        if not isinstance(self._rows, Sequence):
            return self._rows.gather(numbers)
        records = np.empty(len(numbers), self._rows[0].dtype)
        ends = np.cumsum(self.stretches)
        homes = np.searchsorted(ends, numbers, side="right")
        for home in np.unique(homes):
            inside = homes == home
            start = ends[home] - self.stretches[home]
            records[inside] = self._rows[home].gather(numbers[inside] - start)
        return records

    def _score(self, record: Any, count: int) -> Any:
        scores = tuple(record["scores"][: count - 1].tolist())
        return scores if self._has_scores else scores[0]

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return self.take(np.arange(*number.indices(len(self))))
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        return self.take(np.array([number % len(self)]))[0]


class PreparedPairs:
    """The examples of prepared pairs, as far as they are known without reading them."""

    def __init__(self, place: str, about: records.About, has_scores: bool, verify: bool) -> None:
        self.place = place
        manifest = about.manifest
        self._about = about
        self._has_scores = has_scores
        self._verify = verify
        self._data = FinetuneDataConfig()
        self.sources = [Source(**source) for source in manifest["sources"]]
        self.is_graded = manifest["graded"]
        self.are_alone = manifest["alone"]
        self.are_taught = manifest["taught"]
        self.smallest_score, self.largest_score = (
            manifest[name] for name in ("smallest_score", "largest_score")
        )
        self.tokenizer = manifest["tokenizer"]["fingerprint"]
        self.metric = "spearman" if self.is_graded else "ndcg@10"

    def __len__(self) -> int:
        return sum(source.rows for source in self.sources)

    def as_set(self, data: FinetuneDataConfig) -> None:
        """Has rows be read as the settings of a run say, before they are asked for."""
        self._data = data

    @functools.cached_property
    def rows(self) -> PairRows:
        """The rows. Raises: InputError if they cannot be read, or are damaged."""
        about = self._about
        data = self._data
        fingerprint = records.fingerprint_of(about.manifest)
        if any(source.weight for source in self.sources):  # they change the order of a run
            fingerprint += f" {[source.weight for source in self.sources]}"
        config = DataConfig(data.path, seed=data.seed, verify=self._verify)
        config = dataclasses.replace(config, window_mb=data.window_mb, cache_gb=data.cache_gb)
        rows: RowSource | Sequence[StreamedSplit]
        if data.stream == "on" or (data.stream == "auto" and is_large(about, config)):
            rows = _streams(about, self.sources, config)
            count = sum(stream.num_rows for stream in rows)
        else:
            rows = records.open_rows(about, self._verify).train
            count = rows.num_rows
        lengths = _lengths(about.path / about.manifest["lengths"]["name"])
        shape = len(self), about.manifest["row"]["max_sequences"]
        if lengths.shape != shape or count != len(self):
            raise InputError(
                f"{about.path / MANIFEST} has {len(self)} rows, and its files others; {_REMEDY}"
            )
        return PairRows(rows, lengths, self.sources, fingerprint, self._has_scores)

    @property
    def has_negatives(self) -> bool:
        """Whether an example may have hard negatives."""
        return self._about.manifest["row"]["max_sequences"] > 2

    def check(self, tokenizer: Tokenizer) -> None:
        """Raises: InputError if a run has another tokenizer than the one that made the pairs."""
        if tokenizer.fingerprint != self.tokenizer:
            made = f"{self.place} was prepared with tokenizer {self.tokenizer[:12]}"
            raise InputError(
                f"{made}, and the model has {tokenizer.fingerprint[:12]}; prepare the pairs with the model's, and with "
                "--prompt_tokens where its prompts are tokens"
            )


def is_prepared(place: str) -> bool:
    """Returns whether a place is a directory or URL of prepared pairs, or of a corpus, which `open_pairs` refuses."""
    if not place or place.startswith(("tfds:", "hf:")) or "data" not in resolve(place).kinds:
        return False
    manifest = files.read_json(urls.local_copy(f"{place.rstrip('/')}/{MANIFEST}"))
    known = records.FORMAT, records.PAIRS
    return isinstance(manifest, dict) and manifest.get("format") in known


def open_pairs(place: str, config: TaskConfig, verify: bool = True) -> PreparedPairs:
    """Returns the prepared pairs at a place.

    Raises: InputError if they are damaged, or were made with other settings than a task's.
    """
    about = records.open_about(resolve(place), verify=verify, form=records.PAIRS)
    manifest = about.manifest
    where = about.path / MANIFEST
    schema.check(manifest, _Manifest, where, _REMEDY)
    options = manifest["identity"]["options"]
    run = {name: getattr(config.embedding, name) for name in MADE_WITH[1:]}
    run["max_seq_length"] = config.max_seq_length
    if config.name == "reranking":  # which predicts without prompts
        run |= {"query_prompt": "", "passage_prompt": ""}
    for name in MADE_WITH:
        if options[name] != run[name]:
            made = (
                f"{place} was prepared with {name} {options[name]!r}, and the run has {run[name]!r}"
            )
            if name == "max_seq_length":
                fix = f", or set task.{name}"
            elif config.name == "reranking":
                fix = ", as a reranker has none"
            else:
                fix = f", or set task.embedding.{name}"
            raise InputError(f"{made}; prepare it again with --{name}={run[name]!r}{fix}")
    if about.url:
        urls.copy_beside(str(where), about.url, [manifest["lengths"]["name"]])
    files.check_sizes(about.path, [manifest["lengths"]], _REMEDY)
    if verify:
        files.check_sums(about.path, [manifest["lengths"]], _REMEDY)
    has_scores = config.name == "reranking" or config.embedding.loss in OF_SCORES
    return PreparedPairs(place, about, has_scores, verify)


def _streams(
    about: records.About, sources: Sequence[Source], config: DataConfig
) -> list[StreamedSplit]:
    """Returns the rows of each source, which has shards of its own, in an order in which they can be streamed."""
    config = dataclasses.replace(
        config,
        window_mb=config.window_mb / len(sources),
        cache_gb=config.cache_gb / len(sources),
    )
    shards = iter(about.shards)
    streams = []
    for source in sources:
        own = []
        left = source.rows
        while left > 0 and (shard := next(shards, None)):
            own.append(shard)
            left -= shard["rows"]
        if left:
            raise InputError(
                f"{about.path / MANIFEST} has no shards of its own for {source.name}; {_REMEDY}"
            )
        train = {"sequences": source.rows, "shards": own}
        splits = about.manifest["splits"] | {"train": train}
        part = about._replace(manifest=about.manifest | {"splits": splits})
        stream = open_streamed(part, config, num_streams=1).train
        assert isinstance(stream, StreamedSplit)
        streams.append(stream)
    return streams


def _lengths(path: Path) -> np.ndarray:
    with files.reading(str(path)):
        return np.lib.format.open_memmap(path, mode="r")
