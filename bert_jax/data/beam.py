# SPDX-License-Identifier: Apache-2.0
"""Text to a data set as an Apache Beam pipeline: the bytes of `prepare`, on any number of machines.

Each step is a function of `prepare` and `pieces`; Beam moves what they return. A document travels as bytes, with
its place in the input, and documents are sorted as in `pieces` when a shard is made. The design is explained in
docs/decisions/0014-beam.md.
"""

import bisect
import contextlib
import dataclasses
import logging
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.data import building, pieces, prepare, records, summary
from bert_jax.data.prepare import PrepareOptions, Range
from bert_jax.data.sources import corpus, formats
from bert_jax.errors import InputError
from bert_jax.storage import files, urls
from bert_jax.storage.files import JsonObject
from bert_jax.storage.places import RemotePath, to_place
from bert_jax.storage.writing import WRITTEN_LAST
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tokenizing import load_tokenizer

try:
    import apache_beam as beam  # pyright: ignore[reportMissingImports]: an extra
    from apache_beam.options.pipeline_options import PipelineOptions  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise InputError(
        f"Apache Beam cannot be imported ({error}); pip install 'bert_jax[beam]'"
    ) from None

_LINE_SETS = 256  # among which the hashes of lines are divided, to be compared
Place = tuple[int, int, int]  # of a document: number of the input, of its piece, and place in it
# Beam checks the annotations of steps as type hints: Any where a step yields tagged outputs too.
# a part of one: its place, `pieces.DOCUMENT`, sentences and tokens
Document = tuple[Place, bytes, bytes, bytes]


def prepare_with_beam(
    inputs: str,
    tokenizer: str,
    output: str,
    options: PrepareOptions,
    pipeline_options: str,
    text_column: str = corpus.TEXT_COLUMN,
) -> JsonObject:
    """Returns the manifest of the data set that `output`, a new directory or URL, then holds.

    It is byte for byte what `prepare.prepare` makes of the same text, tokenizer and options. `pipeline_options` are as
    in `run_pipeline`.

    Raises: InputError for unusable inputs or options, and if `output` is there.
    """
    options.validate()
    loaded = load_tokenizer(tokenizer)
    started = time.monotonic()
    names = corpus.public_names(inputs)

    def build(pipeline: Any, target: str) -> None:
        job = _Job(target, options, loaded, text_column, names)
        _build(pipeline, corpus.list_sources(inputs), job)

    manifest = run_pipeline(output, pipeline_options, build)
    summary.say_summary(manifest, time.monotonic() - started)
    return manifest


def run_pipeline(
    output: str, pipeline_options: str, build: Callable[[Any, str], None]
) -> JsonObject:
    """Returns the manifest of the data set that a pipeline writes to `output`, a new directory or URL.

    `pipeline_options` are Beam's, as on a command line. `build` adds all steps to a pipeline, given the place of the
    output. On other machines, inputs and output must be URLs or on a disk that all share.

    Raises: InputError for unusable options, if a step does, and if `output` is there.
    """
    remote = urls.is_remote(output)
    if to_place(output).exists():
        raise InputError(
            f"output {output} exists; a pipeline does not go on from what is there: choose a new place"
        )
    target = output.rstrip("/") if remote else str(Path(output).resolve())
    with contextlib.nullcontext() if remote else building.alone(Path(output)):
        try:
            with beam.Pipeline(options=_parse(pipeline_options)) as pipeline:
                build(pipeline, target)
        except Exception as error:  # runners wrap the errors of steps in their own
            if not remote:
                building.remove_unfinished(Path(output))
            raise _unwrap(error) from error
    return files.read_json(urls.local_copy(f"{target}/{records.MANIFEST}"))


def _parse(shown: str) -> PipelineOptions:
    """Returns Beam's options. Raises: InputError if a value is wrong, or if Beam's own runner has no such option."""
    try:
        arguments = shlex.split(shown)
    except ValueError as error:
        raise InputError(f"pipeline_options {shown!r} cannot be read: {error}; close it") from None
    try:
        options = PipelineOptions(arguments, save_main_session=False)
        known = options.get_all_options()
        unknown = sorted(options.get_all_options(retain_unknown_options=True).keys() - known.keys())
    except SystemExit:  # argparse has printed the reason to stderr
        raise InputError(
            f"pipeline_options {shown!r} are not Beam's: see the lines above"
        ) from None
    direct = known["runner"] in (None, "DirectRunner")
    if direct:  # its workers log every error many times; the error is raised here as well
        logging.getLogger("apache_beam").setLevel(logging.CRITICAL)
        if not known["default_sdk_harness_log_level"]:
            options = PipelineOptions(
                [*arguments, "--default_sdk_harness_log_level=CRITICAL"], save_main_session=False
            )
    stray = [argument for argument in arguments if not argument.startswith("-")]
    if stray or (unknown and direct):  # other runners know more options than Beam does here
        wrong = stray[0] if stray else f"--{unknown[0]}"
        raise InputError(
            f"pipeline_options {shown!r}: {wrong} is not Beam's; write options as --name=value"
        )
    return options


def _unwrap(error: Exception) -> Exception:
    """Returns the `InputError` that a step raised, whatever a runner has made of it, or the error itself."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InputError):
            return InputError(str(cause).partition(" [while running ")[0])
        cause = cause.__cause__ or cause.__context__
    match = re.search(
        r"bert_jax\.errors\.\w+: (.*?)(?: \[while running .*)?$", str(error), re.MULTILINE
    )
    return InputError(match[1]) if match else error


@dataclasses.dataclass(frozen=True)
class _Job:
    """The settings that all steps share."""

    output: str
    options: PrepareOptions
    tokenizer: Tokenizer
    text_column: str
    input_names: list[str]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The shards, as the manifest has them and in order of their hashes."""

    ranges: list[Range]
    numbers: list[int]  # places in `ranges`, by order of hash
    firsts: list[int]  # their first hashes


def _build(pipeline: Any, sources: list[str], job: _Job) -> None:
    """Adds all steps to a pipeline."""
    # Without Reshuffle a runner fuses a step with the one before it, and one worker would do the
    # work of all.
    planned = (
        pipeline
        | "sources" >> beam.Create(list(enumerate(sources)))
        | "spread sources" >> beam.Reshuffle()
        | "plan"
        >> beam.FlatMap(_plan_source, job.text_column).with_outputs("fingerprints", main="pieces")
    )
    encoded = (
        planned.pieces
        | "spread pieces" >> beam.Reshuffle()
        | "encode"
        >> beam.FlatMap(_encode_piece, job).with_outputs("abouts", "lines", main="documents")
    )
    abouts, fingerprints = (
        beam.pvalue.AsList(encoded.abouts),
        beam.pvalue.AsList(planned.fingerprints),
    )
    # A collection of one element is a step that runs once; it reads all others as side inputs.
    plan = beam.pvalue.AsSingleton(
        pipeline
        | "one plan" >> beam.Create([None])
        | "plan shards" >> beam.Map(_plan_shards, abouts, job.options)
    )
    shards = (
        encoded.documents
        | "to shards" >> beam.Map(_find_shard, plan)
        | "shards" >> beam.GroupByKey()
        | "make shards" >> beam.FlatMap(_make_shard, plan, job).with_outputs("counts", main="made")
    )
    different = (
        encoded.lines
        | "sets of lines" >> beam.GroupByKey()
        | "compare lines" >> beam.Map(_count_different)
    )
    _ = (
        pipeline
        | "one end" >> beam.Create([None])
        | "finish"
        >> beam.Map(
            _finish,
            job,
            fingerprints,
            abouts,
            plan,
            beam.pvalue.AsList(shards.made),
            beam.pvalue.AsSingleton(different | "all lines" >> beam.CombineGlobally(sum)),
            beam.pvalue.AsSingleton(shards.counts | "all tokens" >> beam.CombineGlobally(add)),
        )
    )


# Steps


def _plan_source(source: tuple[int, str], text_column: str) -> Iterator[Any]:
    """Yields ((number of the source, of the piece), piece), and the source's fingerprint."""
    number, name = source
    path = urls.local_copy(name)
    yield beam.pvalue.TaggedOutput(
        "fingerprints", (number, corpus.fingerprint_source(name, path, text_column))
    )
    for index, piece in enumerate(corpus.plan_source(name, path, text_column=text_column)):
        yield (number, index), piece


def _encode_piece(task: tuple[tuple[int, int], formats.Piece], job: _Job) -> Iterator[Any]:
    """Yields (place, `pieces.DOCUMENT`, sentences, tokens) of each part of a document, arrays as bytes.

    Also yields, as tagged outputs, the piece's (documents, number of lines), and the hashes of its lines by set.
    """
    place, piece = task
    if urls.is_remote(piece.source):  # another machine may have planned it
        piece = dataclasses.replace(piece, path=urls.local_copy(piece.source))
    text = corpus.read_piece(piece)
    encoded = pieces.encode_documents(text, job.tokenizer, job.options.seed, job.options.language)
    yield beam.pvalue.TaggedOutput("abouts", (encoded.parts.tobytes(), len(encoded.lines)))
    # Hashes are sorted, so a set is a stretch of them.
    bounds = np.arange(1, _LINE_SETS, dtype=np.uint64) * np.uint64((1 << 64) // _LINE_SETS)
    for number, hashes in enumerate(
        np.split(encoded.lines, np.searchsorted(encoded.lines, bounds))
    ):
        if len(hashes):
            yield beam.pvalue.TaggedOutput("lines", (number, np.unique(hashes).tobytes()))
    sentence = token = 0
    for number, document in enumerate(encoded.parts):
        sentences = encoded.sentences[sentence : sentence + document["sentences"]]
        tokens = encoded.tokens[token : token + document["tokens"]]
        sentence, token = sentence + len(sentences), token + len(tokens)
        yield (*place, number), document.tobytes(), sentences.tobytes(), tokens.tobytes()


def _plan_shards(_: None, abouts: list[tuple[bytes, int]], options: PrepareOptions) -> _Plan:
    """Returns the shards of all documents."""
    ranges = prepare.plan_ranges(_all_documents(abouts), options)
    numbers = sorted(range(len(ranges)), key=lambda number: ranges[number].first)
    return _Plan(ranges, numbers, [ranges[number].first for number in numbers])


def _all_documents(abouts: list[tuple[bytes, int]]) -> np.ndarray:
    """Returns `pieces.DOCUMENT`s [D], in any order."""
    return np.frombuffer(b"".join(documents for documents, _ in abouts), pieces.DOCUMENT)


def _find_shard(document: Document, plan: _Plan) -> tuple[int, Any]:
    """Returns the number of a document's shard, and the document."""
    key = int(
        pieces.keys_of(np.frombuffer(document[1], pieces.DOCUMENT), plan.ranges[0].passage)[0]
    )
    return plan.numbers[bisect.bisect_right(plan.firsts, key) - 1], document


def _make_shard(group: tuple[int, Iterable[Document]], plan: _Plan, job: _Job) -> Iterator[Any]:
    """Writes a shard; yields its number and its record in the manifest, and for training its counts of tokens."""
    number, members = group
    shard = plan.ranges[number]
    ordered = sorted(members)
    documents = b"".join([document for _, document, _, _ in ordered])
    sentences = b"".join([lengths for _, _, lengths, _ in ordered])
    tokens = b"".join([ids for _, _, _, ids in ordered])
    united = pieces.unite(np.frombuffer(documents, pieces.DOCUMENT), shard.passage)
    bounds, counts = pieces.order_documents(united, np.frombuffer(sentences, np.int32))
    ids = np.frombuffer(tokens, np.min_scalar_type(job.tokenizer.vocab_size - 1))
    with output_folder(job.output) as folder:
        made, token_counts = prepare.make_shard(
            folder, shard, job.options, job.tokenizer, ids, bounds, counts
        )
    yield number, made
    if shard.split == "train":
        yield beam.pvalue.TaggedOutput("counts", token_counts)


def _count_different(group: tuple[int, Iterable[bytes]]) -> int:
    """Returns the number of different hashes in a set."""
    return len(np.unique(np.frombuffer(b"".join(group[1]), np.uint64)))


def add(arrays: Iterable[np.ndarray]) -> Any:
    """Returns the sum of arrays."""
    return sum(arrays)


def _finish(
    _: None,
    job: _Job,
    fingerprints: list[tuple[int, corpus.Content]],
    abouts: list[tuple[bytes, int]],
    plan: _Plan,
    made: list[tuple[int, JsonObject]],
    num_different: int,
    token_counts: np.ndarray,
) -> None:
    """Writes all files but the shards, the manifest last."""
    # Eight parameters: Beam passes each side input as an argument.
    contents = [content for _, content in sorted(fingerprints)]
    identity = prepare.identity_of(job.options, corpus.join_fingerprints(contents), job.tokenizer)
    num_lines = sum(lines for _, lines in abouts)
    figures = {
        "inputs": corpus.describe_inputs(job.input_names, contents),
        **summary.describe_text(
            _all_documents(abouts), num_lines, num_different, plan.ranges[0].passage
        ),
    }
    results = [result for _, result in sorted(made, key=lambda result: result[0])]
    with output_folder(job.output) as folder:
        job.tokenizer.save(folder / records.TOKENIZER)
        prepare.finish(
            folder,
            identity,
            job.options,
            job.tokenizer,
            plan.ranges,
            results,
            token_counts,
            figures,
        )


@contextlib.contextmanager
def output_folder(output: str) -> Iterator[Path]:
    """Yields a directory whose files are in the output when the block ends: that itself, or one to copy to a URL."""
    if not urls.is_remote(output):
        yield Path(output)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)
        # What others have written there stays.
        made = [path for path in Path(temporary).rglob("*") if path.is_file()]
        for path in sorted(made, key=lambda path: path.name in WRITTEN_LAST):
            (RemotePath(output) / path.relative_to(temporary).as_posix()).put(path)
