# SPDX-License-Identifier: Apache-2.0
"""Vectors of a corpus that need not fit in memory, written shard by shard by all processes of a job.

Shard i holds lines i x R to (i + 1) x R of those of the corpus that are not blank; if none has a text, there is none. A
process makes those of the missing shards that are its own, counted in turn, and reads past the others. Each has a
record once it is whole, so a stopped command goes on with what is missing, in any number of processes.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.checkpoints.names import flatten
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.data import vectors as stored
from bert_jax.data.building import WORK, check_identity
from bert_jax.data.processes import say
from bert_jax.data.records import read_part
from bert_jax.data.sources.formats import TEXT_COLUMN
from bert_jax.devices.job import this_job
from bert_jax.devices.work import beat, under_way
from bert_jax.errors import InputError
from bert_jax.inference.features import sentence_embeddings
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.rules import affecting
from bert_jax.storage import files, urls
from bert_jax.storage.files import JsonObject
from bert_jax.storage.places import AnyPath, Place, RemotePath, to_place
from bert_jax.storage.resolve import MANIFEST
from bert_jax.storage.writing import remove, write_json
from bert_jax.tasks.embeddings.corpus import ToRead, corpus_files, read_corpus
from bert_jax.training.workdir import locked

SHARD_ROWS = 65536  # lines of a shard, whose texts and vectors are in memory
_IDENTITY = "identity.json"
_USUAL = {"pooling": "", "layer": -1, "max_seq_length": 0, "long_texts": "cut"}
_LATE = 60.0  # seconds after which a file system shows what other processes have written


def digest_of(bert: Pretrained) -> str:
    """Returns a sha256 of what determines the vectors of a model: parameters, architecture, tokenizer and task."""
    architecture = [getattr(bert.config, name) for name in affecting(ModelConfig, "model")]
    about = [architecture, bert.task, bert.task_settings, bert.tokenizer.fingerprint]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, leaf in sorted(flatten(bert.params).items()):
        digest.update(name.encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()


def write_vectors(
    bert: Pretrained,
    corpus: str,
    output: AnyPath,
    precision: str = "float32",
    kind: str = "passage",
    text_column: str = TEXT_COLUMN,
    shard_rows: int = SHARD_ROWS,
    **options: Any,
) -> JsonObject:
    """Returns the manifest of the directory of vectors that `output` then holds, made by all processes of the job.

    Vectors get length 1. A command that was stopped goes on; a finished one is not repeated.

    Args:
      bert: the model, of vectors of texts.
      corpus: files of texts, JSON lines or tables (CSV, TSV, Parquet), by paths or globs with commas between, or a
        directory in BEIR's layout.
      output: a directory, or a URL; all processes see it.
      precision: as in `quantize`; the ranges of 8 bits are those of all vectors.
      kind: of the texts, as in `sentence_embeddings`.
      text_column: of tables and JSON lines.
      shard_rows: texts of a shard; so many and their vectors are in memory.
      options: pooling, layer, max_seq_length and long_texts of `sentence_embeddings`.
    Raises: InputError if the corpus or the options cannot be used, or if `output` holds vectors of another corpus or
    model, or with other options, or something else.
    """
    stored.quantize(np.zeros((2, 1)), precision)  # what cannot be used is refused now
    options = _USUAL | options | {"kind": kind}
    embed = partial(sentence_embeddings, bert, **options)
    embed([])
    job = this_job()
    place = to_place(output)
    sources = corpus_files(corpus)
    options |= {"precision": precision, "shard_rows": shard_rows, "text_column": text_column}
    identity = {
        "format": stored.FORMAT,
        "version": stored.VERSION,
        "options": options | {"dtype": bert.config.compute_dtype},
        "model": digest_of(bert),
        "input": _digest_of_files(sources),
    }
    job.check_same(identity)
    with locked(place):
        there = job.first_does(f"look at {place}", lambda: _begin(place, identity))
        if there is None:
            say(f"{place} is already complete")
            return stored.read_manifest(place)
        lines = read_corpus(sources, text_column)
        written = 0
        blank = 0
        for number, part in _missing(lines, shard_rows, there):
            with under_way("a shard of vectors"):
                is_written = _write_shard(place, number, part, precision, embed)
            written += is_written
            blank += 0 if is_written else len(part)
        total = len(there) + sum(map(int, job.exchange("shards are written", str(written))))
        if not total and blank:
            raise InputError(
                f"none of {blank} lines or rows of {corpus} has a text; correct the input, or give --text_column"
            )
        if not total:
            raise InputError(f"corpus {corpus} has no text; give files with texts")
        if precision in stored.RANGED:
            _encode_shards(place, precision, total)
            job.exchange("codes are written")
        job.first_does(f"finish {place}", lambda: _finish(place, identity, total))
        return stored.read_manifest(place)


def _digest_of_files(paths: list[str]) -> str:
    """Returns a sha256 of the contents of files, in their order."""
    digest = hashlib.sha256()
    with under_way("reading the corpus"):
        for path in paths:
            digest.update(files.sha256_file(urls.local_copy(path)).encode())
            beat()
    return digest.hexdigest()


def _begin(place: Place, identity: JsonObject) -> list[int] | None:
    """Returns the numbers of the shards that are there, None if the directory is complete.

    Raises: InputError if it has another identity, or something else.
    """
    if (place / MANIFEST).is_file():
        check_identity(place, identity, stored.read_manifest(place)["identity"])
        _remove_work(place)  # of a kill after the manifest was written
        return None
    begun = place / WORK / _IDENTITY
    records = _records(place)
    # of a shard that a kill has left without its record, or of another program
    others = any(not child.name.startswith((".", WORK)) for child in place.iterdir())
    if records or (others and begun.is_file()):
        check_identity(place, identity, files.read_json(begun))
    elif others:
        raise InputError(f"output {place} holds something else; choose a new directory")
    write_json(begun, identity)
    for left_over in list(place.glob(".*.tmp")):  # of a process that was killed while it wrote
        left_over.unlink()
    whole = []
    with under_way("checking"):
        for path, record in records.items():
            beat()
            try:
                if isinstance(place, Path):  # what is in a bucket is whole
                    stored.check_files(place, record)
                whole.append(int(path.name[:-5]))
            except InputError as error:
                say(f"{error}; it is made again")
    return whole


def _record_of(place: Place, number: int) -> Place:
    """Returns the path of the record of a shard."""
    return place / WORK / f"{number:05d}.json"


def _records(place: Place) -> dict[Place, JsonObject]:
    """Returns the records of the shards that were written, in their order, by the path of each."""
    paths: list[Any] = sorted((place / WORK).glob("[0-9]*.json"))
    found = {path: read_part(path, ()) for path in paths}
    return {path: record for path, record in found.items() if record}


def _missing(
    lines: Iterator[ToRead], shard_rows: int, there: list[int]
) -> Iterator[tuple[int, list[ToRead]]]:
    """Yields the missing shards that are this process's: their numbers, and their lines."""
    job = this_job()
    turn = 0
    for number in itertools.count():
        is_there = number in there
        part = itertools.islice(lines, shard_rows)
        if is_there or turn % job.count != job.index:
            read = sum(1 for _ in part)
        else:
            read = len(own := list(part))
            if own:
                yield number, own
        turn += not is_there
        if read < shard_rows:
            return


def _write_shard(
    place: Place,
    number: int,
    lines: list[ToRead],
    precision: str,
    embed: Callable[[list[str]], np.ndarray],
) -> bool:
    """Makes the vectors of some lines, and writes them, the ids and texts, and at last a record of the shard.

    Returns whether a line has a text; if none has, there is no shard.

    Raises: InputError if one cannot be used, or has a vector that is not finite.
    """
    began = time.monotonic()
    passages = [(id_, text) for id_, text in (read() for read in lines) if text]
    if not passages:
        return False
    vectors = embed([text for _, text in passages])
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        id_, text = passages[int(np.argmin(finite))]
        raise InputError(
            f"the vector of passage {id_} ({text!r:.60}) is not finite; the model is damaged, or its type too small"
        )
    vectors = stored.unit(vectors)
    texts = stored.write_texts(place, f"texts-{number:05d}.parquet", passages)
    name = f"vectors-{number:05d}.npy"
    codes = vectors
    if precision in stored.RANGED:  # the codes are made when all ranges are known
        name = f"{WORK}/{name}"
    else:
        codes = stored.quantize(vectors, precision)
    record = {
        "rows": len(vectors),
        "vectors": stored.write_codes(place, name, codes),
        "texts": texts,
        "ranges": [vectors.min(axis=0).tolist(), vectors.max(axis=0).tolist()],
    }
    # last: it says that the files are there
    write_json(_record_of(place, number), record)
    speed = len(passages) / (time.monotonic() - began)
    say(f"shard {number}: {len(passages):,} texts, {speed:,.0f} a second")
    return True


def _encode_shards(place: Place, precision: str, total: int) -> None:
    """Makes codes of the numbers of this process's shards, for the ranges of all."""
    job = this_job()
    records = _seen(place, total)
    ranges = stored.ranges_of(list(records.values()))
    for path in list(records)[job.index :: job.count]:
        name = records[path]["vectors"]["name"]
        if name.startswith(WORK):  # or else a command that was stopped has made them
            with under_way("codes of a shard"):
                vectors = np.load(urls.local_copy(str(place / name)))
                codes = stored.quantize(vectors, precision, ranges)
                made = stored.write_codes(place, name.removeprefix(f"{WORK}/"), codes)
                write_json(path, records[path] | {"vectors": made})


def _finish(place: Place, identity: JsonObject, total: int) -> None:
    """Writes the manifest, and removes what a finished directory does not need."""
    shards = _seen(place, total, without=WORK).values()
    stored.write_manifest(place, identity, list(shards))
    _remove_work(place)


def _seen(place: Place, total: int, without: str = "/") -> dict[Place, JsonObject]:
    """Returns the records of all shards, once none has vectors whose name begins with `without`.

    Raises: InputError if this process does not see what the others have written.
    """
    began = time.monotonic()
    names = []
    while time.monotonic() - began < _LATE:
        records = _records(place)
        names = [record["vectors"]["name"] for record in records.values()]
        if len(names) == total and not any(name.startswith(without) for name in names):
            return records
        time.sleep(0.1)
    raise InputError(f"{len(names)} of {total} shards are seen in {place}; run the command again")


def _remove_work(place: Place) -> None:
    work = place / WORK
    if isinstance(work, RemotePath):
        work.delete_all()
    else:
        remove(work)
