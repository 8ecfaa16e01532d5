# SPDX-License-Identifier: Apache-2.0
"""Pairs to a data set on disk as an Apache Beam pipeline: the bytes of `prepare_pairs`, on any number of machines.

One worker reads a file, as text, and its examples travel some thousand at a time, as arrays, to those that write the
shards. The steps are functions of `prepare`; docs/decisions/0014-beam.md explains the design.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bert_jax.data import records
from bert_jax.data.beam import add, beam, output_folder, run_pipeline
from bert_jax.storage.files import JsonObject
from bert_jax.tasks.embeddings import prepare
from bert_jax.tasks.embeddings.prepare import Arrays, Counts, PairOptions, Plan, Sources
from bert_jax.text.tokenizer import Tokenizer

Place = tuple[int, int]  # of some examples: number of the file, and of the part of it
Part = tuple[int, Arrays]  # number of the first example among all, and examples


@dataclass(frozen=True)
class _Job:
    """The settings that all steps share."""

    output: str
    options: PairOptions
    sources: Sources
    tokenizer: Tokenizer


class _Laid(NamedTuple):
    """The plan, and the number of the first example of each part among all."""

    plan: Plan
    firsts: dict[Place, int]


def prepare_pairs_with_beam(
    inputs: str,
    tokenizer: str,
    output: str,
    options: PairOptions,
    pipeline_options: str,
    names: Sequence[str] = (),
    weights: Sequence[float] = (),
) -> JsonObject:
    """Returns the manifest of the prepared pairs that `output`, a new directory or URL, then holds.

    It is byte for byte what `prepare.prepare_pairs` makes of the same. `pipeline_options` are as in
    `data.beam.run_pipeline`.

    Raises: InputError for unusable inputs or options, and if `output` is there.
    """
    options.validate()
    sources = Sources.of(inputs, names, weights)
    loaded = options.load_tokenizer(tokenizer)
    started = time.monotonic()

    def build(pipeline: Any, target: str) -> None:
        _build(pipeline, _Job(target, options, sources, loaded))

    manifest = run_pipeline(output, pipeline_options, build)
    prepare.say_pairs(manifest, time.monotonic() - started)
    return manifest


def _build(pipeline: Any, job: _Job) -> None:
    """Adds all steps to a pipeline."""
    # Without Reshuffle a runner would give all files to the worker that lists them.
    read = (
        pipeline
        | "files" >> beam.Create(list(enumerate(job.sources.files)))
        | "spread files" >> beam.Reshuffle()
        | "read"
        >> beam.FlatMap(_read, job).with_outputs("digests", "abouts", "counts", main="parts")
    )
    # A collection of one element is a step that runs once; it reads all others as side inputs.
    laid = beam.pvalue.AsSingleton(
        pipeline
        | "one plan" >> beam.Create([None])
        | "plan" >> beam.Map(_plan, beam.pvalue.AsList(read.abouts), job)
    )
    made = (
        read.parts
        | "to shards" >> beam.FlatMap(_to_shards, laid)
        | "shards" >> beam.GroupByKey()
        | "make shards" >> beam.Map(_make_shard, laid, job)
    )
    _ = (
        pipeline
        | "one end" >> beam.Create([None])
        | "finish"
        >> beam.Map(
            _finish,
            job,
            beam.pvalue.AsList(read.digests),
            laid,
            beam.pvalue.AsList(made),
            beam.pvalue.AsSingleton(read.counts | "all tokens" >> beam.CombineGlobally(add)),
        )
    )


# Steps


def _read(file: tuple[int, str], job: _Job) -> Iterator[Any]:
    """Yields (place, arrays) of the examples of a file.

    Also yields, as tagged outputs, the file's digest, (place, `Counts`) of each part, and counts of the tokens.
    """
    number, source = file
    yield beam.pvalue.TaggedOutput("digests", (number, prepare.digest_of(source)))
    vocab_size = job.tokenizer.vocab_size
    yield beam.pvalue.TaggedOutput("abouts", ((number, -1), Counts()))  # also of a file without any
    for index, (arrays, counts) in enumerate(
        prepare.parts_of(job.options.task(), source, job.tokenizer)
    ):
        yield beam.pvalue.TaggedOutput("abouts", ((number, index), counts))
        yield beam.pvalue.TaggedOutput("counts", np.bincount(arrays.tokens, minlength=vocab_size))
        yield (number, index), tuple(arrays)


def _plan(_: None, abouts: list[tuple[Place, Counts]], job: _Job) -> _Laid:
    """Returns the plan of all examples."""
    pieces = [Counts()] * len(job.sources.files)
    firsts = {}
    total = 0
    for place, counts in sorted(abouts, key=lambda about: about[0]):
        firsts[place] = total
        total += counts.examples
        pieces[place[0]] = pieces[place[0]].and_of(Counts(*counts))
    return _Laid(Plan.of(job.sources, pieces, job.tokenizer), firsts)


def _to_shards(part: tuple[Place, Arrays], laid: _Laid) -> Iterator[tuple[int, Part]]:
    """Yields the number of each shard that examples are in, and those of them."""
    arrays = Arrays(*part[1])
    first = laid.firsts[part[0]]
    for number, shard in enumerate(laid.plan.shards):
        start = max(shard.first - first, 0)
        stop = min(shard.last - first, len(arrays.examples))
        if start < stop:
            yield number, (first + start, _some(arrays, start, stop))


def _some(arrays: Arrays, start: int, stop: int) -> Any:
    """Returns the examples start, start + 1, ..., stop - 1 of some."""
    examples = arrays.examples[start:stop]
    begin = int(examples["texts"][0])
    last = examples[-1]
    texts = arrays.texts[begin : int(last["texts"] + last["count"])]
    before = int(examples["tokens"][0])
    tokens = arrays.tokens[before : before + int(texts["length"].sum(dtype=np.int64))]
    return tuple(Arrays(tokens, texts, examples))


def _make_shard(
    group: tuple[int, Iterable[Part]], laid: _Laid, job: _Job
) -> tuple[int, JsonObject, np.ndarray]:
    """Writes a shard; returns its number, its record in the manifest and the lengths of its texts."""
    number, parts = group
    shard = laid.plan.shards[number]
    dtype = laid.plan.dtype(job.tokenizer)
    lengths = []

    def chunks() -> Iterator[np.ndarray]:
        for _, arrays in sorted(parts, key=lambda part: part[0]):
            some = Arrays(*arrays)
            rows = np.zeros(len(some.examples), dtype)
            rows["token_ids"] = job.tokenizer.pad_id
            prepare.fill_rows(rows, some)
            lengths.append(rows["lengths"].copy())
            yield rows

    with output_folder(job.output) as folder:
        path = folder / shard.name
        made = records.write_shard(path, dtype, shard.last - shard.first, chunks())
    return number, made, np.concatenate(lengths)


def _finish(
    _: None,
    job: _Job,
    digests: list[tuple[int, str]],
    laid: _Laid,
    made: list[tuple[int, JsonObject, np.ndarray]],
    token_counts: np.ndarray,
) -> None:
    """Writes all files but the shards, the manifest last."""
    in_order = [digest for _, digest in sorted(digests)]
    identity = prepare.identity_of(job.options, job.sources, in_order, job.tokenizer)
    made = sorted(made, key=lambda each: each[0])
    shards = [each[1] for each in made]
    lengths = np.concatenate([each[2] for each in made])
    with output_folder(job.output) as folder:
        job.tokenizer.save(folder / records.TOKENIZER)
        prepare.finish(folder, job.tokenizer, identity, laid.plan, shards, lengths, token_counts)
