# SPDX-License-Identifier: Apache-2.0
"""Converts text to a data set on disk. Any number of processes gives the same bytes.

1. Each piece of the input is read, split into sentences and turned into ids, and its documents are sorted by a
   hash of their text.
2. Hashes decide where a document goes: the smallest to the held-out split, the others in equal ranges to the
   shards of the training split. So identical documents stay together, no document is in both splits, and a
   shard is one stretch of every piece.
3. Exact copies of documents and lines are counted: a model memorizes frequent copies, and its loss stops improving.
4. Each shard is made into instances, and those into rows, with a random generator of its own.

Every step ends with a rename, so a killed run continues from its finished pieces and shards.
"""

import dataclasses
import functools
import math
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_jax.data import instances, packing, pieces, records, summary
from bert_jax.data.building import finished_manifest, unfinished, uploaded
from bert_jax.data.processes import task_runner
from bert_jax.data.sentences import splitter_version
from bert_jax.data.sources import corpus
from bert_jax.errors import InputError
from bert_jax.settings.rules import MOST_RATE, Section, choice, setting
from bert_jax.storage import urls, writing
from bert_jax.storage.files import JsonObject
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tokenizing import load_tokenizer
from bert_jax.version import __version__

SHARD_TOKENS = 16 << 20  # about 64 MiB of English text, which a process holds in memory
LINES_AT_ONCE = 8 << 20  # lines that a process compares at a time, by 64 MiB of hashes
# Where this many times the rate would be held out, and this share of all tokens, long documents are cut into passages.
# Less is by chance: a few of hundreds of documents are held out, and some are longer than others.
MOST_HELD_OUT = 2
MUCH_TEXT = 0.05
_ROWS_AT_ONCE = 1024  # their intermediate arrays fit in a processor's cache


@dataclass(frozen=True)
class PrepareOptions(Section):
    """The options that determine the contents of a data set, together with the input and the tokenizer."""

    max_seq_length: int = setting(128, least=8, most=65535)  # tokens of a row, with [CLS] and [SEP]
    # task of sentence B: nsp, sop (ALBERT's sentence order prediction), or none
    next_sentence: str = choice("nsp", "sop", "none")
    # passes over the training documents, each cut differently; held-out documents get one
    duplicates: int = setting(10, least=1)
    # share of documents that are cut into sequences of a random shorter length
    short_seq_rate: float = setting(0.1, most=MOST_RATE)
    # share of documents or passages to hold out, 2 at least; 0 holds out nothing
    holdout_rate: float = setting(0.01, most=MOST_RATE)
    shards: int = 0  # shards of the training split; 0 makes one for every 16 M tokens
    seed: int = 0
    language: str = "en"  # language of the sentence splitter, an ISO 639 code
    # most sequences in a row; with 0 or 1 each row has one sequence
    pack: int = setting(1, most=packing.MAX_PER_ROW)

    def validate(self) -> None:
        super().validate()
        if not re.fullmatch("[a-z]{2,3}", self.language):
            raise InputError(
                f"language {self.language!r} is not an ISO 639 code in small letters, such as en or de"
            )

    def identity(self) -> JsonObject:
        """Returns the options; "pack" only if rows are packed, as in data sets made before packing was added."""
        options = dataclasses.asdict(self)
        return (
            options
            if self.pack > 1
            else {name: value for name, value in options.items() if name != "pack"}
        )


def prepare(
    inputs: str,
    tokenizer: str,
    output: str,
    options: PrepareOptions,
    num_workers: int = 0,
    text_column: str = corpus.TEXT_COLUMN,
) -> JsonObject:
    """Returns the manifest of the data set that `output` then holds.

    The contents depend on the text, the tokenizer and the options alone: not on the paths of the input, nor on
    `num_workers` (0 takes all cores). Only the manifest also names the inputs. `text_column` is the column of Parquet
    files, or the key of JSON lines. A run that was stopped continues; a finished one is not repeated.

    Raises: InputError for unusable inputs or options, and if `output` holds something else.
    """
    options.validate()
    if num_workers < 0:
        raise InputError(f"workers {num_workers} is negative; 0 takes all cores")
    if urls.is_remote(output):
        return uploaded(
            output, lambda path: prepare(inputs, tokenizer, path, options, num_workers, text_column)
        )
    path = Path(output)
    plan = corpus.plan_pieces(inputs, text_column=text_column)
    loaded = load_tokenizer(tokenizer)
    contents = corpus.contents_of(inputs, text_column)
    identity = identity_of(options, corpus.join_fingerprints(contents), loaded)
    if manifest := finished_manifest(path, identity):
        return manifest

    started = time.monotonic()
    with unfinished(path, identity, loaded) as work:
        job = _Job(path, work, options, len(plan), loaded.fingerprint)
        with task_runner(num_workers) as run:
            run(functools.partial(_make_piece, job), list(enumerate(plan)), "pieces of text")
            documents = pieces.read_documents(work, len(plan))
            ranges = plan_ranges(documents, options)
            num_lines = pieces.count_lines(work, len(plan))
            different = run(
                functools.partial(pieces.count_different_lines, work, len(plan)),
                _hash_ranges(num_lines),
                "sets of lines",
            )
            results = run(functools.partial(_make_shard, job), ranges, "shards")
        counts = (
            np.load(work / f"counts-{shard.name}") for shard in ranges if shard.split == "train"
        )
        token_counts = sum(counts, start=np.zeros(loaded.vocab_size, np.int64))
        figures = {
            "inputs": corpus.describe_inputs(corpus.public_names(inputs), contents),
            **summary.describe_text(documents, num_lines, sum(different), ranges[0].passage),
        }
        manifest = finish(path, identity, options, loaded, ranges, results, token_counts, figures)
    summary.say_summary(manifest, time.monotonic() - started)
    return manifest


def identity_of(
    options: PrepareOptions, input_fingerprint: str, tokenizer: Tokenizer
) -> JsonObject:
    """Returns the identity of a data set in its manifest: format, options, and fingerprints of input and tokenizer."""
    return {
        "format": records.FORMAT,
        "version": records.VERSION,
        "options": options.identity(),
        "input": input_fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "splitter": splitter_version(),
    }


@dataclass(frozen=True)
class Range:
    """A shard: the documents whose hash is in first..last."""

    split: str
    index: int
    num_shards: int
    first: int
    last: int
    passage: int = 0  # if not 0, a passage of that many parts of a document is a document

    @property
    def name(self) -> str:
        """The name of its file."""
        return records.shard_name(self.split, self.index, self.num_shards)


def plan_ranges(parts: np.ndarray, options: PrepareOptions) -> list[Range]:
    """Returns the shards of both splits for the parts [D] of all documents (records of `pieces.DOCUMENT`).

    Raises: InputError if there are too few documents to draw a random next sentence from another one.
    """
    documents = pieces.unite(parts, 0)
    passage = 0
    if _holds_out_too_much(documents, options) and parts["part"].any():
        # Eight passages or more are held out, where the text is long enough for it.
        wanted = (options.holdout_rate or 1.0) * float(parts["tokens"].sum()) / 8
        passage = min(max(int(wanted / pieces.PART_TOKENS), 1), 64)
        documents = pieces.unite(parts, passage)
    # Different texts are counted: copies have one hash, and so one place.
    keys = np.unique(documents["key"])
    least, rule = _least(options)
    if not len(keys):
        raise InputError(
            "the input holds no document: no line of it gives a token; give files with text"
        )
    if len(keys) < least:
        contents = (
            f"{len(documents)} documents, all of the same text"
            if len(documents) > 1
            else "one document"
        )
        raise InputError(
            f"the input holds {contents}, and {rule}; part documents by blank lines, or add text"
        )
    num_heldout = _count_heldout(len(keys), options)
    if len(keys) - num_heldout < least:
        held = f"{len(keys)} different documents; to hold out {num_heldout}, each split needs {least}, as {rule}"
        raise InputError(f"the input holds {held}; use --holdout_rate=0 or add text")
    ranges = []
    for split, split_keys in (("train", keys[num_heldout:]), ("heldout", keys[:num_heldout])):
        inside = documents["tokens"][np.isin(documents["key"], split_keys)]
        num_shards = math.ceil(inside.sum() / SHARD_TOKENS)
        if split == "train" and options.shards:
            num_shards = options.shards
            if least * num_shards > len(split_keys):
                few = f"{len(split_keys)} documents: each needs {least}, as {rule}"
                raise InputError(
                    f"shards {num_shards} is too many for {few}; use at most {len(split_keys) // least}"
                )
        num_shards = min(num_shards, len(split_keys) // least)
        for index in range(num_shards):
            first, last = (len(split_keys) * number // num_shards for number in (index, index + 1))
            ends = int(split_keys[first]), int(split_keys[last - 1])
            ranges.append(Range(split, index, num_shards, *ends, passage))
    return ranges


def _least(options: PrepareOptions) -> tuple[int, str]:
    """Returns the least number of documents in a split or a shard, and the reason."""
    if options.next_sentence == "none":
        return 1, "a split and a shard cannot be empty"
    return 2, "a random next sentence comes from another document"


def _count_heldout(num_documents: int, options: PrepareOptions) -> int:
    """Returns the number of different documents to hold out."""
    return (
        max(_least(options)[0], round(options.holdout_rate * num_documents))
        if options.holdout_rate
        else 0
    )


def _holds_out_too_much(documents: np.ndarray, options: PrepareOptions) -> bool:
    """Returns whether whole documents are too few, or those held out have far more tokens than the rate asks."""
    keys = np.unique(documents["key"])
    num_heldout = _count_heldout(len(keys), options)
    if len(keys) - num_heldout < _least(options)[0] * max(1, options.shards):
        return True
    heldout = documents["tokens"][np.isin(documents["key"], keys[:num_heldout])].sum()
    return bool(
        heldout > max(MOST_HELD_OUT * options.holdout_rate, MUCH_TEXT) * documents["tokens"].sum()
    )


def _hash_ranges(num_lines: int) -> list[tuple[int, int]]:
    """Returns (first, last) of the equal ranges of 64-bit hashes that hold about `LINES_AT_ONCE` lines each."""
    count = math.ceil(num_lines / LINES_AT_ONCE)
    return [((index << 64) // count, ((index + 1) << 64) // count - 1) for index in range(count)]


# Tasks


@dataclass(frozen=True)
class _Job:
    """The settings that all tasks of a run share."""

    path: Path
    work: Path
    options: PrepareOptions
    num_pieces: int
    fingerprint: str  # of the tokenizer

    def tokenizer(self) -> Tokenizer:
        return load_once(str(self.path / records.TOKENIZER), self.fingerprint)


@functools.lru_cache(maxsize=1)
def load_once(path: str, fingerprint: str) -> Tokenizer:
    """Returns the tokenizer, loaded once in a process; the fingerprint tells apart tokenizers with the same path."""
    del fingerprint
    return load_tokenizer(path)


def _make_piece(job: _Job, task: tuple[int, corpus.Piece]) -> None:
    """Writes a piece as arrays of ids."""
    pieces.write_piece(job.work, *task, job.tokenizer(), job.options.seed, job.options.language)


def _make_shard(job: _Job, shard: Range) -> JsonObject:
    """Writes a shard and its counts of tokens, and returns its record in the manifest."""
    finished = job.work / f"{shard.name}.json"
    if (
        made := records.read_part(
            finished, ("file", "documents", "words", "sequences", "filled", "dropped")
        )
    ) is not None:
        return made
    tokenizer = job.tokenizer()
    text = pieces.read_range(job.work, job.num_pieces, shard.first, shard.last, shard.passage)
    result, token_counts = make_shard(job.path, shard, job.options, tokenizer, *text)
    writing.write_array(job.work / f"counts-{shard.name}", token_counts)
    # Last: it says that the shard and its counts are there.
    writing.write_json(finished, result)
    return result


def make_shard(
    folder: Path,
    shard: Range,
    options: PrepareOptions,
    tokenizer: Tokenizer,
    tokens: np.ndarray,
    bounds: list[instances.Document],
    counts: dict[str, int],
) -> tuple[JsonObject, np.ndarray]:
    """Writes a shard into a folder and returns its record in the manifest, and its counts of tokens [V].

    Args:
      folder: the directory of the file.
      shard: the shard to write.
      options: of the data set.
      tokenizer: of the ids.
      tokens: the flat ids of its documents.
      bounds: of the documents in `tokens`, in order of their hashes.
      counts: of documents, sentences, tokens and bytes of text.
    """
    created = instances.create_instances(
        bounds,
        options.max_seq_length,
        options.short_seq_rate,
        options.duplicates if shard.split == "train" else 1,
        random.Random(f"{options.seed}/{shard.split}/{shard.index}"),
        options.next_sentence,
        tokenizer.template.separators,
    )
    # rows hold their numbers as 32 bits, and equal numbers would have equal masks
    if len(created) * shard.num_shards >= 1 << 32:
        raise InputError(
            "the data set has more than 2^32 sequences; use fewer duplicates or part the text"
        )
    # Sequence i of shard s of S shards has the number i * S + s, since no shard knows the size of the others.
    numbers = np.arange(len(created), dtype=np.uint32) * np.uint32(shard.num_shards) + np.uint32(
        shard.index
    )
    lengths = instances.sequence_lengths(created, tokenizer.template.separators)
    dtype = records.row_dtype(options.max_seq_length, 1, tokenizer.vocab_size)

    def single_rows(chosen: np.ndarray | slice) -> np.ndarray:
        return instances.make_rows(created[chosen], numbers[chosen], tokens, tokenizer, dtype)

    if options.pack > 1:
        row_dtype = records.row_dtype(options.max_seq_length, options.pack, tokenizer.vocab_size)
        seed = packing.shard_seed(options.seed, shard.split, shard.index)
        num_rows, chunks = packing.packed_rows(
            lengths, single_rows, row_dtype, tokenizer.pad_id, seed
        )
    else:
        num_rows = len(created)
        row_dtype = dtype
        chunks = (
            single_rows(slice(start, start + _ROWS_AT_ONCE))
            for start in range(0, len(created), _ROWS_AT_ONCE)
        )
    # of the text, and not of the rows, in which each pass over it counts again
    token_counts = np.bincount(tokens, minlength=tokenizer.vocab_size)
    result = {
        "file": records.write_shard(folder / shard.name, row_dtype, num_rows, chunks),
        **counts,
        "sequences": len(created),
        "random_next": int(np.count_nonzero(created["label"] == instances.IS_RANDOM)),
        "filled": int(lengths.sum()),
        "unknown": int(token_counts[tokenizer.unk_id]),
        "dropped": instances.count_dropped(created, len(tokens)),
    }
    return result, token_counts


# The manifest


def finish(
    path: Path,
    identity: JsonObject,
    options: PrepareOptions,
    tokenizer: Tokenizer,
    ranges: list[Range],
    made: list[JsonObject],
    token_counts: np.ndarray,
    figures: JsonObject,
) -> JsonObject:
    """Returns the manifest of a directory that has its shards, after writing it.

    `made` holds the record from `make_shard` for each of `ranges`, `token_counts` [V] is their sum over the training
    split, and `figures` holds the results of `corpus.describe_inputs` and `summary.describe_text`.
    """
    # Eight parameters: in a Beam pipeline each of the results comes from another step.
    row = {"length": options.max_seq_length, "max_sequences": max(1, options.pack)}
    made_with = {"bert_jax": __version__, **dict([splitter_version().split()])}
    splits = summary.describe_splits(
        options.max_seq_length, [shard.split for shard in ranges], made
    )
    return records.finish_dataset(
        path, identity, row, tokenizer, splits, token_counts, made_with, **figures
    )
