# SPDX-License-Identifier: Apache-2.0
"""Converts pairs to a data set on disk, which training need not hold. Any number of processes gives the same bytes.

1. Each file is read a part at a time, and its texts become ids. Equal texts are known by a hash of 64 bits, so that no
   table of all texts is needed.
2. The examples of all files, in the order of the files, become rows of fixed size, in shards.

Every step ends with a rename, so a killed run continues from its finished files and shards.
"""

import contextlib
import dataclasses
import functools
import glob
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.data import records
from bert_jax.data.building import finished_manifest, unfinished, uploaded
from bert_jax.data.processes import say, task_runner
from bert_jax.errors import InputError, TextError
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.rules import Section, setting
from bert_jax.storage import files, urls, writing
from bert_jax.storage.files import JsonObject
from bert_jax.tasks import readers
from bert_jax.tasks.embeddings.beir import TextsExample, beir_place
from bert_jax.tasks.embeddings.prepared import Source
from bert_jax.tasks.embeddings.read import are_alone, is_graded, is_squad, read_parts
from bert_jax.tasks.embeddings.task import fit_prompted
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tokenizing import load_tokenizer
from bert_jax.version import __version__

SHARD_BYTES = 128 << 20
_EXAMPLES_AT_ONCE = 8192  # that are read and tokenized together
_ROWS_AT_ONCE = 4096
# An example of a file that was read, and each of its texts.
_EXAMPLE = np.dtype([("tokens", "<i8"), ("texts", "<i8"), ("count", "<u2"), ("score", "<f4")])
_TEXT = np.dtype([("length", "<u2"), ("hash", "<u8")])
# Counts of a file, which a stopped run need not make again.
_COUNTS = ("examples", "texts", "tokens", "cut", "longest", "most", "graded", "alone", "largest")
_MADE = (*_COUNTS, "first", "same")


@dataclass(frozen=True)
class PairOptions(Section):
    """The options that determine the contents of prepared pairs, together with the inputs and the tokenizer."""

    max_seq_length: int = setting(
        128, least=5, most=65535
    )  # tokens of a text, with [CLS] and [SEP]
    query_prompt: str = ""  # written before an anchor or query, and both texts of a graded pair
    passage_prompt: str = ""  # written before what is found: positives and negatives
    # columns, where they have other names than the usual ones
    text_column: str = ""
    second_text_column: str = ""
    label_column: str = ""
    negative_columns: str = ""

    def task(self) -> TaskConfig:
        """Returns the settings of the task that reads and fits the pairs."""
        embedding = EmbeddingConfig(
            query_prompt=self.query_prompt,
            passage_prompt=self.passage_prompt,
            negative_columns=self.negative_columns,
        )
        return TaskConfig(
            name="embeddings",
            max_seq_length=self.max_seq_length,
            text_column=self.text_column,
            second_text_column=self.second_text_column,
            label_column=self.label_column,
            embedding=embedding,
        )


def prepare_pairs(
    inputs: str,
    tokenizer: str,
    output: str,
    options: PairOptions,
    names: Sequence[str] = (),
    weights: Sequence[float] = (),
    num_workers: int = 0,
) -> JsonObject:
    """Returns the manifest of the prepared pairs that `output` then holds.

    Each of the `inputs`, separated by commas, is a source: a file or glob, a directory, `hf://datasets/...`, BEIR's
    directory. `names` and `weights` are theirs; without weights an epoch takes each example once. A run that was
    stopped continues; a finished one is not repeated.

    Raises: InputError for unusable inputs or options, and if `output` holds something else.
    """
    options.validate()
    if num_workers < 0:
        raise InputError(f"workers {num_workers} is negative; 0 takes all cores")
    sources = [part for part in files.split_places(inputs) if part]
    names = names or [_name_of(source) for source in sources]
    if len(names) != len(sources) or len(set(names)) != len(names) or not all(names):
        raise InputError(
            f"names {', '.join(names)} are not a name of its own for each of {len(sources)} inputs; give --names"
        )
    if weights and (len(weights) != len(sources) or not all(0 < w < 1e9 for w in weights)):
        raise InputError(
            f"weights {list(weights)} are not a number above 0 for each of {len(sources)} inputs; correct them"
        )
    if urls.is_remote(output):
        rest = names, weights, num_workers
        return uploaded(output, lambda path: prepare_pairs(inputs, tokenizer, path, options, *rest))
    path, loaded = Path(output), load_tokenizer(tokenizer)
    places = [_places_of(source) for source in sources]
    identity = {
        "format": records.PAIRS,
        "version": records.VERSION,
        "options": dataclasses.asdict(options) | {"names": list(names), "weights": list(weights)},
        "input": _fingerprint(places),
        "tokenizer": loaded.fingerprint,
    }
    if manifest := finished_manifest(path, identity):
        return manifest

    started = time.monotonic()
    with unfinished(path, identity, loaded) as work:
        job = _Job(path, work, options, loaded.fingerprint)
        every = [place for own in places for place in own]
        with task_runner(num_workers) as run:
            pieces = run(functools.partial(_make_piece, job), list(enumerate(every)), "files")
            _check_alike(every, pieces)
            count = sum(int(piece["examples"]) for piece in pieces)
            layout = _Layout(
                row_length=max(int(piece["longest"]) for piece in pieces),
                max_texts=max(int(piece["most"]) for piece in pieces),
                ends=tuple(np.cumsum([int(piece["examples"]) for piece in pieces]).tolist()),
            )
            itemsize = layout.dtype(loaded).itemsize
            num_shards = -(-count * itemsize // SHARD_BYTES)
            cuts = [count * number // num_shards for number in range(num_shards + 1)]
            shards = [
                _Shard(records.shard_name("train", index, num_shards), first, last)
                for index, (first, last) in enumerate(zip(cuts, cuts[1:]))
            ]
            made = run(functools.partial(_make_shard, job, layout), shards, "shards")
        lengths = np.concatenate([np.load(work / f"lengths-{shard.name}") for shard in shards])
        writing.write_array(path / records.LENGTHS, lengths)
        counts = (np.load(work / f"counts-{number:05d}.npy") for number in range(len(every)))
        token_counts = sum(counts, start=np.zeros(loaded.vocab_size, np.int64))
        per_source = iter(int(piece["examples"]) for piece in pieces)
        rows = [sum(next(per_source) for _ in own) for own in places]
        described = [
            Source(name, number, weight)._asdict()
            for name, number, weight in zip(names, rows, weights or [0.0] * len(rows))
        ]
        manifest = records.finish_dataset(
            path,
            identity,
            {"length": layout.row_length, "max_sequences": layout.max_texts},
            loaded,
            {
                "train": {"sequences": count, "shards": [each["file"] for each in made]},
                "heldout": {"sequences": 0, "shards": []},
            },
            token_counts,
            {"bert_jax": __version__},
            form=records.PAIRS,
            lengths={
                "name": records.LENGTHS,
                "bytes": (path / records.LENGTHS).stat().st_size,
                "sha256": files.sha256_file(path / records.LENGTHS),
            },
            sources=described,
            graded=bool(pieces[0]["graded"]),
            alone=all(piece["alone"] for piece in pieces),
            largest_score=max(float(piece["largest"]) for piece in pieces),
            texts=sum(int(piece["texts"]) for piece in pieces),
            truncated=sum(int(piece["cut"]) for piece in pieces),
        )
    _say(manifest, time.monotonic() - started)
    return manifest


def _say(manifest: JsonObject, seconds: float) -> None:
    """Writes a summary on stderr."""
    rows, texts = manifest["splits"]["train"]["sequences"], manifest["texts"]
    row = manifest["row"]
    say(
        f"{rows:,} examples of {texts:,} texts, {manifest['truncated']:,} of them cut, in rows of "
        f"{row['length']} tokens and at most {row['max_sequences']} texts; {seconds:.0f} s"
    )
    for source in manifest["sources"]:
        weight = f", weight {source['weight']:g}" if source["weight"] else ""
        say(f"  {source['name']}: {source['rows']:,}{weight}")


def _name_of(source: str) -> str:
    """Returns the usual name of a source: that of its file or folder, without suffixes."""
    return source.rstrip("/").rpartition("/")[2].partition(".")[0].strip("*")


def _places_of(source: str) -> list[str]:
    """Returns what of a source is read by itself: its files, or itself."""
    if source.startswith("tfds:") or is_squad(source):
        return [source]
    if glob.has_magic(source) or (not urls.is_remote(source) and os.path.isfile(source)):
        return files.expand_globs(source)
    if beir_place(source, "train"):
        return [source]
    found = readers.find_split_file(source, "train")
    if not found:
        raise InputError(f"input {source!r} has no training data; give a file")
    return [found] if found.startswith("tfds:") else files.expand_globs(found)


def _fingerprint(places: Sequence[Sequence[str]]) -> str:
    """Returns a sha256 of the contents of all files, or of the names of what is no file."""
    digest = hashlib.sha256()
    for own in places:
        for place in own:
            is_file = not place.startswith("tfds:") and "[" not in place
            inside = [place]
            if is_file and (folder := beir_place(place, "train")):
                inside = readers.files_in(folder, "**")
            for each in inside:
                content = files.sha256_file(urls.local_copy(each)) if is_file else each
                digest.update(f"{content} ".encode())
        digest.update(b"/")
    return digest.hexdigest()


def _check_alike(places: Sequence[str], pieces: Sequence[JsonObject]) -> None:
    """Raises: InputError if there is nothing to learn, or if files have examples of two kinds."""
    for place, piece in zip(places, pieces):
        if not piece["examples"]:
            raise InputError(f"{place} has no example; leave it out")
        if piece["graded"] != pieces[0]["graded"]:
            kinds = ("has graded pairs", "has pairs without scores")
            first, other = kinds if pieces[0]["graded"] else kinds[::-1]
            raise InputError(f"{places[0]} {first} and {place} {other}; prepare them apart")
    if all(piece["same"] and piece["first"] == pieces[0]["first"] for piece in pieces):
        raise InputError(
            f"all examples of {places[0]} have the same positive; check --second_text_column"
        )


# Tasks


@dataclass(frozen=True)
class _Job:
    """The settings that all tasks of a run share."""

    path: Path
    work: Path
    options: PairOptions
    fingerprint: str  # of the tokenizer

    def tokenizer(self) -> Tokenizer:
        return _load_tokenizer(str(self.path / records.TOKENIZER), self.fingerprint)


@functools.lru_cache(maxsize=1)
def _load_tokenizer(path: str, fingerprint: str) -> Tokenizer:
    """Returns the tokenizer, loaded once in a process; the fingerprint tells apart tokenizers with the same path."""
    del fingerprint
    return load_tokenizer(path)


class _Shard(NamedTuple):
    """A shard: the examples first, first + 1, ..., last - 1 of all."""

    name: str
    first: int
    last: int


class _Layout(NamedTuple):
    """The shape of rows, and where the examples of each file end among all."""

    row_length: int
    max_texts: int
    ends: tuple[int, ...]

    def dtype(self, tokenizer: Tokenizer) -> np.dtype:
        return records.pair_dtype(self.row_length, self.max_texts, tokenizer.vocab_size)


def _make_piece(job: _Job, task: tuple[int, str]) -> JsonObject:
    """Writes the examples of a file as arrays of ids, and returns counts of them."""
    number, place = task
    finished = job.work / f"piece-{number:05d}.json"
    if (made := records.read_part(finished, _MADE)) is not None:
        return made
    tokenizer, config = job.tokenizer(), job.options.task()
    made = dict.fromkeys(_COUNTS, 0) | {"alone": 1, "first": 0, "same": 1}
    token_counts = np.zeros(tokenizer.vocab_size, np.int64)
    with contextlib.ExitStack() as stack:
        streams = []
        for kind in _Arrays._fields:
            whole = writing.atomic_path(job.work / f"{kind}-{number:05d}")
            streams.append(stack.enter_context(open(stack.enter_context(whole), "wb")))
        for examples in read_parts(config, place, _EXAMPLES_AT_ONCE):
            if not examples:
                continue
            part = _arrays(examples, config, tokenizer, made)
            for stream, array in zip(streams, part):
                stream.write(array.tobytes())
            token_counts += np.bincount(part.tokens, minlength=tokenizer.vocab_size)
    writing.write_array(job.work / f"counts-{number:05d}.npy", token_counts)
    # Last: it says that the arrays are there.
    writing.write_json(finished, made)
    return made


class _Arrays(NamedTuple):
    """Some examples of a file as arrays."""

    tokens: np.ndarray  # the ids of all texts, one after the other
    texts: np.ndarray  # `_TEXT`
    examples: np.ndarray  # `_EXAMPLE`


def _arrays(
    examples: Sequence[TextsExample], config: TaskConfig, tokenizer: Tokenizer, made: dict[str, Any]
) -> _Arrays:
    """Returns examples as arrays, and adds to the counts of what was made before them."""
    uses: dict[tuple[bool, str], None] = {}
    for example in examples:
        uses |= dict.fromkeys((example.is_query(n), text) for n, text in enumerate(example.texts))
    try:
        fitted, cut = fit_prompted(config, list(uses), tokenizer)
    except TextError as error:
        places = (example.where for example in examples if _holds(example.texts, error.text))
        raise error.at(next(places, "a text")) from None
    hashes = {use: _hash(text.known) for use, text in fitted.items()}
    of_texts = [
        (example.is_query(place), text)
        for example in examples
        for place, text in enumerate(example.texts)
    ]
    texts = np.zeros(len(of_texts), _TEXT)
    texts["length"] = [len(fitted[use].token_ids) for use in of_texts]
    texts["hash"] = [hashes[use] for use in of_texts]
    counts = np.array([len(example.texts) for example in examples], np.int64)
    ends = np.cumsum(counts)
    bounds = np.concatenate([[0], np.cumsum(texts["length"], dtype=np.int64)])
    table = np.zeros(len(examples), _EXAMPLE)
    table["texts"] = made["texts"] + ends - counts
    table["tokens"] = made["tokens"] + bounds[ends - counts]
    table["count"] = counts
    table["score"] = [example.score or 0.0 for example in examples]
    positives = texts["hash"][ends - counts + 1]
    if not made["examples"]:
        made["first"] = int(positives[0])
    made["same"] &= int((positives == made["first"]).all())
    made["alone"] &= int(are_alone(examples))
    made["graded"] |= int(is_graded(examples))
    made["largest"] = max(made["largest"], float(np.abs(table["score"]).max()))
    made["longest"] = max(made["longest"], int((bounds[ends] - bounds[ends - counts]).max()))
    made["most"] = max(made["most"], int(counts.max()))
    made["cut"] += cut
    made["examples"] += len(examples)
    made["texts"] += len(of_texts)
    made["tokens"] += int(bounds[-1])
    tokens = np.concatenate([fitted[use].token_ids for use in of_texts])
    return _Arrays(tokens.astype(np.min_scalar_type(tokenizer.vocab_size - 1)), texts, table)


def _holds(texts: Sequence[str], part: str) -> bool:
    return any(part in text for text in texts)


def _hash(content: bytes) -> int:
    """Returns a hash of 64 bits, which is not 0: that stands for no text."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1


def _make_shard(job: _Job, layout: _Layout, shard: _Shard) -> JsonObject:
    """Writes a shard and the lengths of its texts, and returns its record in the manifest."""
    finished = job.work / f"{shard.name}.json"
    if (made := records.read_part(finished, ("file",))) is not None:
        return made
    tokenizer = job.tokenizer()
    dtype = layout.dtype(tokenizer)
    lengths: list[np.ndarray] = []

    def chunks() -> Iterator[np.ndarray]:
        for first in range(shard.first, shard.last, _ROWS_AT_ONCE):
            rows = np.zeros(min(_ROWS_AT_ONCE, shard.last - first), dtype)
            rows["token_ids"] = tokenizer.pad_id
            _fill(job.work, layout, rows, first)
            lengths.append(rows["lengths"].copy())
            yield rows

    record = records.write_shard(job.path / shard.name, dtype, shard.last - shard.first, chunks())
    writing.write_array(job.work / f"lengths-{shard.name}", np.concatenate(lengths))
    result = {"file": record}
    writing.write_json(finished, result)
    return result


def _fill(work: Path, layout: _Layout, rows: np.ndarray, first: int) -> None:
    """Writes the examples first, first + 1, ... of all into rows, from the files that hold them."""
    ids = rows.dtype["token_ids"].base
    done = 0
    while done < len(rows):
        piece = int(np.searchsorted(layout.ends, first + done, side="right"))
        start = first + done - (layout.ends[piece - 1] if piece else 0)
        count = min(len(rows) - done, layout.ends[piece] - first - done)
        examples = _read(work / f"examples-{piece:05d}", _EXAMPLE, start, count)
        begin, end = int(examples["texts"][0]), int(examples["texts"][-1] + examples["count"][-1])
        texts = _read(work / f"texts-{piece:05d}", _TEXT, begin, end - begin)
        before = int(examples["tokens"][0])
        token_ids = _read(work / f"tokens-{piece:05d}", ids, before, int(texts["length"].sum()))
        for row, example in zip(rows[done : done + count], examples):
            own = texts[example["texts"] - begin :][: example["count"]]
            at, size = example["tokens"] - before, int(own["length"].sum())
            row["token_ids"][:size] = token_ids[at : at + size]
            row["lengths"][: len(own)] = own["length"]
            row["texts"][: len(own)] = own["hash"]
            row["score"] = example["score"]
        done += count


def _read(path: Path, dtype: np.dtype, start: int, count: int) -> np.ndarray:
    """Returns some of the records of a file without a header."""
    return np.fromfile(path, dtype, count, offset=start * dtype.itemsize)
