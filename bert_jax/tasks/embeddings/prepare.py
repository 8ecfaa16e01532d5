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
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_type_hints

import numpy as np

from bert_jax.batches.order import mix_by_weights
from bert_jax.data import records
from bert_jax.data.building import finished_manifest, unfinished, uploaded
from bert_jax.data.prepare import load_once
from bert_jax.data.processes import say, task_runner
from bert_jax.errors import InputError, TextError
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.rules import Section, setting
from bert_jax.storage import files, schema, urls, writing
from bert_jax.storage.files import JsonObject
from bert_jax.tasks.embeddings.beir import TextsExample, beir_files, beir_place
from bert_jax.tasks.embeddings.prepared import Source
from bert_jax.tasks.embeddings.read import (
    NO_TEXT,
    are_alone,
    are_taught,
    find_table,
    is_graded,
    is_squad,
    read_parts,
)
from bert_jax.tasks.embeddings.task import fit_prompted
from bert_jax.text.hf_tokenizer import with_prompt_tokens
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tokenizing import load_tokenizer
from bert_jax.version import __version__

SHARD_BYTES = 128 << 20
_EXAMPLES_AT_ONCE = 8192  # that are read and tokenized together
_ROWS_AT_ONCE = 4096
_MOST = 65535  # tokens of a row, and texts
# An example of a file that was read: where its tokens and texts begin, how many texts it has.
EXAMPLE = np.dtype([("tokens", "<i8"), ("texts", "<i8"), ("count", "<u2")])
TEXT = np.dtype([("length", "<u2"), ("hash", "<u8"), ("score", "<f4")])


@dataclass(frozen=True)
class PairOptions(Section):
    """The options that determine the contents of prepared pairs, together with the inputs and the tokenizer."""

    # tokens of a text, with [CLS] and [SEP]
    max_seq_length: int = setting(128, least=5, most=65535)
    query_prompt: str = ""  # written before an anchor or query, and both texts of a graded pair
    passage_prompt: str = ""  # written before what is found: positives and negatives
    # a prompt that the vocabulary has is a token, as in models of vectors of tokens
    prompt_tokens: bool = False
    # columns, where they have other names than the usual ones
    text_column: str = ""
    second_text_column: str = ""
    label_column: str = ""
    negative_columns: str = ""

    def load_tokenizer(self, place: str) -> Tokenizer:
        """Returns the tokenizer in a directory, to which prompts are tokens if they are to be."""
        tokenizer = load_tokenizer(place)
        prompts = self.query_prompt, self.passage_prompt
        return with_prompt_tokens(tokenizer, prompts) if self.prompt_tokens else tokenizer

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


class Counts(NamedTuple):
    """What is known of some examples."""

    examples: int = 0
    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    longest: int = 0  # tokens of an example
    most: int = 0  # texts of an example
    graded: bool = False
    alone: bool = True
    taught: bool = True
    largest_score: float = 0.0
    smallest_score: float = 0.0
    positive: int = 0  # the hash of the positive, if all have the same; else 0
    empty: int = 0  # rows that were left out, since a text is empty

    def and_of(self, other: "Counts") -> "Counts":
        """Returns what is known of these examples and of others."""
        if not self.examples:
            return other
        return Counts(
            examples=self.examples + other.examples,
            texts=self.texts + other.texts,
            tokens=self.tokens + other.tokens,
            truncated=self.truncated + other.truncated,
            longest=max(self.longest, other.longest),
            most=max(self.most, other.most),
            graded=self.graded,
            alone=self.alone and other.alone,
            taught=self.taught and other.taught,
            largest_score=max(self.largest_score, other.largest_score),
            smallest_score=min(self.smallest_score, other.smallest_score),
            positive=self.positive if self.positive == other.positive else 0,
            empty=self.empty + other.empty,
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
    sources = Sources.of(inputs, names, weights)
    if urls.is_remote(output):
        rest = names, weights, num_workers
        return uploaded(output, lambda path: prepare_pairs(inputs, tokenizer, path, options, *rest))
    path = Path(output)
    loaded = options.load_tokenizer(tokenizer)
    identity = identity_of(options, sources, map(digest_of, sources.files), loaded)
    if manifest := finished_manifest(path, identity):
        return manifest
    started = time.monotonic()
    with unfinished(path, identity, loaded) as work:
        job = _Job(path, work, options, loaded.fingerprint)
        manifest = _prepare(job, sources, identity, num_workers)
    say_pairs(manifest, time.monotonic() - started)
    return manifest


def say_pairs(manifest: JsonObject, seconds: float) -> None:
    """Says what prepared pairs hold."""
    row = manifest["row"]
    figures = manifest["figures"]
    texts = f"{figures['texts']:,} texts, {figures['truncated']:,} of them cut"
    rows = f"rows of {row['length']} tokens and at most {row['max_sequences']} texts"
    say(f"{figures['examples']:,} examples of {texts}, in {rows}; {seconds:.0f} s")
    if figures["empty"]:
        say(f"  {NO_TEXT}: {figures['empty']:,}")
    for source in manifest["sources"]:
        weight = f", weight {source['weight']:g}" if source["weight"] else ""
        say(f"  {source['name']}: {source['rows']:,}{weight}")


def _prepare(job: "_Job", sources: "Sources", identity: JsonObject, num_workers: int) -> JsonObject:
    """Returns the manifest, after writing the shards and it."""
    tokenizer = job.tokenizer()
    with task_runner(num_workers) as run:
        pieces = run(functools.partial(_make_piece, job), list(enumerate(sources.files)), "files")
        plan = Plan.of(sources, pieces, tokenizer)
        made = run(functools.partial(_make_shard, job, plan), list(plan.shards), "shards")
    lengths = [np.load(job.work / f"lengths-{shard.name}") for shard in plan.shards]
    token_counts = np.zeros(tokenizer.vocab_size, np.int64)
    for number in range(len(pieces)):
        token_counts += np.load(job.work / f"counts-{number:05d}.npy")
    return finish(job.path, tokenizer, identity, plan, made, np.concatenate(lengths), token_counts)


def finish(
    path: Path,
    tokenizer: Tokenizer,
    identity: JsonObject,
    plan: "Plan",
    made: list[JsonObject],
    lengths: np.ndarray,
    token_counts: np.ndarray,
) -> JsonObject:
    """Returns the manifest of a directory that has the shards `made`, after writing all other files."""
    counts = plan.counts
    where = path / records.LENGTHS
    writing.write_array(where, lengths)
    return records.finish_dataset(
        path=path,
        identity=identity,
        row={"length": counts.longest, "max_sequences": counts.most},
        tokenizer=tokenizer,
        splits={
            "train": {"sequences": counts.examples, "shards": made},
            "heldout": {"sequences": 0, "shards": []},
        },
        token_counts=token_counts,
        made_with={"bert_jax": __version__},
        form=records.PAIRS,
        lengths={
            "name": records.LENGTHS,
            "bytes": where.stat().st_size,
            "sha256": files.sha256_file(where),
        },
        sources=[source._asdict() for source in plan.sources],
        graded=counts.graded,
        alone=counts.alone,
        taught=counts.taught,
        largest_score=counts.largest_score,
        smallest_score=counts.smallest_score,
        figures=counts._asdict(),
    )


def identity_of(
    options: PairOptions, sources: "Sources", digests: Iterable[str], tokenizer: Tokenizer
) -> JsonObject:
    """Returns what decides the contents, given the `digest_of` each file."""
    left = iter(digests)
    digest = hashlib.sha256()
    for own in sources.places:
        digest.update("".join([next(left) for _ in own]).encode() + b"/")
    named = {"names": list(sources.names), "weights": list(sources.weights)}
    return {
        "format": records.PAIRS,
        "version": records.VERSION,
        "options": dataclasses.asdict(options) | named,
        "input": digest.hexdigest(),
        "tokenizer": tokenizer.fingerprint,
    }


# Sources


class Sources(NamedTuple):
    """The sources of pairs, as many of each."""

    names: Sequence[str]
    weights: Sequence[float]  # or none
    places: Sequence[Sequence[str]]  # what of each is read by itself: its files, or itself

    @classmethod
    def of(cls, inputs: str, names: Sequence[str], weights: Sequence[float]) -> "Sources":
        """Returns the sources that `inputs` names. Raises: InputError as `prepare_pairs`."""
        given = [part for part in files.split_places(inputs) if part]
        if not given:
            raise InputError(f"input {inputs!r} names no pairs; give a file or a directory")
        names = names or [_name_of(source) for source in given]
        _check_sources(given, names, weights)
        return cls(names, weights, [_places_of(source) for source in given])

    @property
    def files(self) -> list[str]:
        return [place for own in self.places for place in own]


def _name_of(source: str) -> str:
    """Returns the usual name of a source: that of its file or folder, without suffixes."""
    return source.rstrip("/").rpartition("/")[2].partition(".")[0].strip("*")


def _check_sources(given: Sequence[str], names: Sequence[str], weights: Sequence[float]) -> None:
    """Raises: InputError unless each source has a name of its own, and a weight if any has one."""
    if len(names) != len(given) or len(set(names)) != len(names) or not all(names):
        raise InputError(
            f"names {', '.join(names)} are not a name of its own for each of {len(given)} inputs; give --names"
        )
    if weights and (len(weights) != len(given) or not all(0 < each < 1e9 for each in weights)):
        raise InputError(
            f"weights {list(weights)} are not a number above 0 for each of {len(given)} inputs; correct them"
        )


def _places_of(source: str) -> list[str]:
    """Returns what of a source is read by itself: its files, or itself."""
    if source.startswith("tfds:") or is_squad(source):
        return [source]
    is_folder = not urls.is_remote(source) and os.path.isdir(source)  # its name may have [ ] in it
    if not is_folder and (glob.has_magic(source) or os.path.isfile(source)):
        return files.expand_globs(source)
    if beir_place(source, "train"):
        return [source]
    found = find_table(source, "train")
    if not found:
        raise InputError(f"input {source!r} has no training data; give a file")
    return [found] if found.startswith("tfds:") else files.expand_globs(found)


def digest_of(place: str) -> str:
    """Returns sums of the contents of files, or the name of what is no file."""
    if place.startswith("tfds:") or is_squad(place):
        return f"{place} "
    folder = beir_place(place, "train")
    found = beir_files(folder, "train") if folder else [place]
    return "".join(f"{files.sha256_file(urls.local_copy(each))} " for each in found)


def _check_alike(places: Sequence[str], pieces: "Sequence[Counts]") -> None:
    """Raises: InputError if a file has no example, or examples of another kind than the first."""
    for place, piece in zip(places, pieces):
        if not piece.examples:
            raise InputError(f"{place} has no example; leave it out")
        if piece.graded != pieces[0].graded:
            kinds = ["has graded pairs", "has pairs without scores"]
            first, other = kinds if pieces[0].graded else reversed(kinds)
            raise InputError(f"{places[0]} {first} and {place} {other}; prepare them apart")


# Tasks


@dataclass(frozen=True)
class _Job:
    """The settings that all tasks of a run share."""

    path: Path
    work: Path
    options: PairOptions
    fingerprint: str  # of the tokenizer

    def tokenizer(self) -> Tokenizer:
        return load_once(str(self.path / records.TOKENIZER), self.fingerprint)


class Shard(NamedTuple):
    """A shard: the examples first, first + 1, ..., last - 1 of all."""

    name: str
    first: int
    last: int


def _shards(ends: Sequence[int], row_bytes: int) -> list[Shard]:
    """Returns shards of about the same size, each with examples of one source, which end at `ends`."""
    parts = []
    start = 0
    for end in ends:
        count = -(-(end - start) * row_bytes // SHARD_BYTES)
        edges = [start + (end - start) * edge // count for edge in range(count + 1)]
        parts += itertools.pairwise(edges)
        start = end
    return [
        Shard(records.shard_name("train", index, len(parts)), first, last)
        for index, (first, last) in enumerate(parts)
    ]


class Plan(NamedTuple):
    """What follows from the counts of all files."""

    counts: Counts
    sources: Sequence[Source]
    ends: Sequence[int]  # where the examples of each file end among all
    shards: Sequence[Shard]

    @classmethod
    def of(cls, sources: Sources, pieces: Sequence[Counts], tokenizer: Tokenizer) -> "Plan":
        """Returns the plan. Raises: InputError if files do not go together."""
        _check_alike(sources.files, pieces)
        counts = functools.reduce(Counts.and_of, pieces)
        if counts.positive and counts.examples > 2 and not counts.graded:
            raise InputError(
                f"all examples of {sources.files[0]} have the same positive; check --second_text_column"
            )
        ends = np.cumsum([piece.examples for piece in pieces]).tolist()
        source_ends = [ends[last - 1] for last in np.cumsum(list(map(len, sources.places)))]
        starts = [0, *source_ends]
        weights = sources.weights or [0.0] * len(sources.names)
        of_sources = [
            Source(name, end - start, weight)
            for name, weight, start, end in zip(sources.names, weights, starts, source_ends)
        ]
        rows = tuple(source.rows for source in of_sources)
        for source, drawn in zip(of_sources, mix_by_weights(rows, tuple(sources.weights)).drawn):
            if not drawn:
                raise InputError(
                    f"weight {source.weight:g} of {source.name} is less than an example of {sum(rows):,} in an epoch; "
                    "raise it, or leave the source out"
                )
        plan = cls(counts, of_sources, ends, ())
        shards = _shards(source_ends, plan.dtype(tokenizer).itemsize)
        return plan._replace(shards=tuple(shards))

    def dtype(self, tokenizer: Tokenizer) -> np.dtype:
        return records.pair_dtype(self.counts.longest, self.counts.most, tokenizer.vocab_size)


class Arrays(NamedTuple):
    """Some examples of a file as arrays."""

    tokens: np.ndarray  # the ids of all texts, one after the other
    texts: np.ndarray  # `TEXT`
    examples: np.ndarray  # `EXAMPLE`


def _make_piece(job: _Job, task: tuple[int, str]) -> Counts:
    """Writes the examples of a file as arrays of ids, and returns counts of them."""
    number, place = task
    finished = job.work / f"piece-{number:05d}.json"
    form = get_type_hints(Counts)
    with contextlib.suppress(InputError):  # a file that was not finished is read again
        return Counts(**schema.read_record(finished, schema.record(form), ""))
    tokenizer = job.tokenizer()
    counts = Counts()
    token_counts = np.zeros(tokenizer.vocab_size, np.int64)
    with contextlib.ExitStack() as stack:
        streams = []
        for kind in Arrays._fields:
            whole = writing.atomic_path(job.work / f"{kind}-{number:05d}")
            streams.append(stack.enter_context(open(stack.enter_context(whole), "wb")))
        for arrays, own in parts_of(job.options.task(), place, tokenizer):
            arrays.examples["texts"] += counts.texts
            arrays.examples["tokens"] += counts.tokens
            for stream, array in zip(streams, arrays):
                stream.write(array.tobytes())
            token_counts += np.bincount(arrays.tokens, minlength=tokenizer.vocab_size)
            counts = counts.and_of(own)
    writing.write_array(job.work / f"counts-{number:05d}.npy", token_counts)
    # Last: it says that the arrays are there.
    writing.write_json(finished, counts._asdict())
    return counts


def parts_of(
    config: TaskConfig, place: str, tokenizer: Tokenizer
) -> Iterator[tuple[Arrays, Counts]]:
    """Yields the examples of a file, some thousand at a time, and what is known of them."""
    empty = 0
    for examples in read_parts(config, place, _EXAMPLES_AT_ONCE):
        empty += examples.counts.get(NO_TEXT, 0)
        if examples:
            arrays, counts = _arrays(examples, config, tokenizer)
            yield arrays, counts._replace(empty=empty)
            empty = 0


def _arrays(
    examples: Sequence[TextsExample], config: TaskConfig, tokenizer: Tokenizer
) -> tuple[Arrays, Counts]:
    """Returns examples as arrays, and what is known of them."""
    uses = []  # of each text: whether it is a query, and the text
    for example in examples:
        uses += [(example.is_query(place), text) for place, text in enumerate(example.texts)]
    try:
        fitted, cut = fit_prompted(config, list(dict.fromkeys(uses)), tokenizer)
    except TextError as error:
        places = [each.where for each in examples if any(error.text in text for text in each.texts)]
        raise error.at(places[0] if places else "a text") from None
    texts = np.zeros(len(uses), TEXT)
    scores: list[float] = []
    for example in examples:
        scores += _scores(example)
    lengths = []
    hashes = []
    for use in uses:
        lengths.append(len(fitted[use].token_ids))
        hashes.append(_hash(fitted[use].known))
    texts["length"], texts["hash"], texts["score"] = lengths, hashes, scores
    table = np.zeros(len(examples), EXAMPLE)
    numbers = np.array([len(example.texts) for example in examples])
    ends = np.cumsum(numbers)
    bounds = np.concatenate([[0], np.cumsum(texts["length"], dtype=np.int64)])
    sizes = bounds[ends] - bounds[ends - numbers]
    if (too_large := np.flatnonzero(np.maximum(numbers, sizes) > _MOST)).size:
        first = too_large[0]
        raise InputError(
            f"{examples[first].where} has {numbers[first]} texts of {sizes[first]} tokens, and a row holds {_MOST}; "
            "lower --max_seq_length, or give fewer negatives"
        )
    table["count"] = numbers
    table["texts"] = ends - numbers
    table["tokens"] = bounds[table["texts"]]
    positives = np.unique(texts["hash"][table["texts"] + 1])
    counts = Counts(
        examples=len(examples),
        texts=len(uses),
        tokens=int(bounds[-1]),
        truncated=cut,
        longest=int(sizes.max()),
        most=int(numbers.max()),
        graded=is_graded(examples),
        alone=are_alone(examples),
        taught=are_taught(examples),
        largest_score=float(texts["score"].max()),
        smallest_score=float(texts["score"].min()),
        positive=int(positives[0]) if len(positives) == 1 else 0,
    )
    ids = np.min_scalar_type(tokenizer.vocab_size - 1)
    tokens = np.concatenate([fitted[use].token_ids for use in uses]).astype(ids)
    return Arrays(tokens, texts, table), counts


def _scores(example: TextsExample) -> list[float]:
    """Returns a score for each text: of a graded pair, a teacher's, or 0."""
    scores = [0.0] * len(example.texts)
    if example.scores:
        scores[1:] = example.scores
    elif example.score is not None:
        scores[1] = example.score
    return scores


def _hash(content: bytes) -> int:
    """Returns a hash of 64 bits, which is not 0: that stands for no text."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1


def _make_shard(job: _Job, plan: Plan, shard: Shard) -> JsonObject:
    """Writes a shard and the lengths of its texts, and returns its record in the manifest."""
    finished = job.work / f"{shard.name}.json"
    if (made := records.read_part(finished, ("file",))) is not None:
        return made["file"]
    tokenizer = job.tokenizer()
    dtype = plan.dtype(tokenizer)
    lengths = []

    def chunks() -> Iterator[np.ndarray]:
        for first in range(shard.first, shard.last, _ROWS_AT_ONCE):
            rows = np.zeros(min(_ROWS_AT_ONCE, shard.last - first), dtype)
            rows["token_ids"] = tokenizer.pad_id
            _fill(job.work, plan.ends, rows, first)
            lengths.append(rows["lengths"].copy())
            yield rows

    num_rows = shard.last - shard.first
    record = records.write_shard(job.path / shard.name, dtype, num_rows, chunks())
    writing.write_array(job.work / f"lengths-{shard.name}", np.concatenate(lengths))
    writing.write_json(finished, {"file": record})
    return record


def _fill(work: Path, ends: Sequence[int], rows: np.ndarray, first: int) -> None:
    """Writes the examples first, first + 1, ... of all into rows, from the files that hold them."""
    ids = rows.dtype["token_ids"].base
    done = 0
    while done < len(rows):
        piece = int(np.searchsorted(ends, first + done, side="right"))
        start = first + done - (ends[piece - 1] if piece else 0)
        count = min(len(rows) - done, ends[piece] - first - done)
        examples = _read(work / f"examples-{piece:05d}", EXAMPLE, start, count)
        begin = int(examples["texts"][0])
        end = int(examples["texts"][-1] + examples["count"][-1])
        texts = _read(work / f"texts-{piece:05d}", TEXT, begin, end - begin)
        before = int(examples["tokens"][0])
        size = int(texts["length"].sum(dtype=np.int64))
        token_ids = _read(work / f"tokens-{piece:05d}", ids, before, size)
        fill_rows(rows[done : done + count], Arrays(token_ids, texts, examples))
        done += count


def fill_rows(rows: np.ndarray, arrays: Arrays) -> None:
    """Writes examples into rows that are empty. The arrays begin with the first of them."""
    first = arrays.examples[0]
    for row, example in zip(rows, arrays.examples):
        own = arrays.texts[example["texts"] - first["texts"] :][: example["count"]]
        at = example["tokens"] - first["tokens"]
        size = int(own["length"].sum())
        row["token_ids"][:size] = arrays.tokens[at : at + size]
        row["lengths"][: len(own)] = own["length"]
        row["texts"][: len(own)] = own["hash"]
        row["scores"][: len(own) - 1] = own["score"][1:]


def _read(path: Path, dtype: np.dtype, start: int, count: int) -> np.ndarray:
    """Returns some of the records of a file without a header."""
    return np.fromfile(path, dtype, count, offset=start * dtype.itemsize)
