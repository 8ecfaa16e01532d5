# SPDX-License-Identifier: Apache-2.0
"""Google's pre-training examples to a data set, by any number of processes (docs/decisions/0006-what-is-predicted.md).

Each file becomes one or more shards, its examples in their order. Every step ends with a rename, so a run that was
killed goes on from its finished files.
"""

import functools
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_jax.data import records
from bert_jax.data.building import finished_manifest, unfinished, uploaded
from bert_jax.data.google.examples import (
    AT_ONCE,
    LABELS,
    Columns,
    check_examples,
    examples_to_rows,
    read_examples,
    refusal,
)
from bert_jax.data.processes import say, task_runner
from bert_jax.errors import InputError
from bert_jax.storage import urls, writing
from bert_jax.storage.files import JsonObject, expand_globs, public_name, sha256_file
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tokenizing import load_tokenizer
from bert_jax.version import __version__

MASKS = ("keep", "redraw")
SHARD_BYTES = 64 << 20


@dataclass(frozen=True)
class _Job:
    """The settings that all tasks of an import share."""

    path: Path
    work: Path
    row_length: int
    predictions: int  # P, or 0 if masks are drawn anew


@dataclass(frozen=True)
class _File:
    """A file of examples, and its index among the files of its split."""

    split: str
    index: int
    num_files: int
    path: str


def import_examples(
    inputs: str,
    tokenizer: str,
    output: str,
    heldout_inputs: str = "",
    masks: str = "keep",
    num_workers: int = 0,
) -> JsonObject:
    """Returns the manifest of the data set that `output` then holds: the examples of the input files, in their order.

    `masks` is "keep", and training uses the masks of the examples in every epoch, or "redraw", and it draws its own.
    A run that was stopped continues; a finished one is not repeated. 0 workers takes all cores.

    Raises: InputError for unusable inputs, and if `output` holds something else.
    """
    if masks not in MASKS:
        raise InputError(f"masks {masks!r} is not known; use keep or redraw")
    if num_workers < 0:
        raise InputError(f"workers {num_workers} is negative; 0 takes all cores")
    if urls.is_remote(output):
        return uploaded(
            output,
            lambda path: import_examples(
                inputs, tokenizer, path, heldout_inputs, masks, num_workers
            ),
        )
    files = _plan_files(inputs, heldout_inputs)
    loaded = load_tokenizer(tokenizer)
    row_length, predictions = _row_shape(files, loaded, masks)
    identity = {
        "format": records.FORMAT,
        "version": records.VERSION,
        "options": {"masks": masks, "max_seq_length": row_length, "next_sentence": "nsp"},
        "input": _fingerprint(files, "train"),
        "heldout_input": _fingerprint(files, "heldout"),
        "tokenizer": loaded.fingerprint,
    }
    path = Path(output)
    if manifest := finished_manifest(path, identity):
        return manifest

    given = [part.strip() for part in f"{inputs},{heldout_inputs}".split(",") if part.strip()]
    described = {
        "names": list(dict.fromkeys(map(public_name, given))),
        "files": len(files),
        "bytes": sum(os.path.getsize(file.path) for file in files),
    }
    started = time.monotonic()
    with unfinished(path, identity, loaded) as work:
        job = _Job(path, work, row_length, predictions)
        with task_runner(num_workers) as run:
            results = run(functools.partial(_import_file, job), files, "files of examples")
        splits = {name: _finish_split(job, name, files, results) for name in ("train", "heldout")}
        counts = np.zeros(loaded.vocab_size, np.int64)
        for index in range(files[0].num_files):
            counts += np.load(job.work / f"counts-{index}.npy")
        row = {"length": row_length, "max_sequences": 1} | (
            {"predictions": predictions} if predictions else {}
        )
        made_with = {"bert_jax": __version__}
        manifest = records.finish_dataset(
            path, identity, row, loaded, splits, counts, made_with, inputs=described
        )
    _summarize(manifest, time.monotonic() - started)
    return manifest


def _plan_files(inputs: str, heldout_inputs: str) -> list[_File]:
    """Returns the files of both splits, the training ones first. Raises: InputError if one is in both."""
    train = expand_globs(inputs)
    heldout = expand_globs(heldout_inputs) if heldout_inputs else []
    for path in heldout:
        if path in train:
            raise InputError(
                f"{path} is in input and in heldout_input; hold out files that are not trained on"
            )
    return [
        _File(split, index, len(paths), path)
        for split, paths in (("train", train), ("heldout", heldout))
        for index, path in enumerate(urls.local_copies(paths))
    ]


def _fingerprint(files: list[_File], split: str) -> str:
    """Returns a sha256 of the contents of a split's files, whatever their paths."""
    contents = [sha256_file(file.path) for file in files if file.split == split]
    return hashlib.sha256(" ".join(contents).encode()).hexdigest()


def _row_shape(files: list[_File], tokenizer: Tokenizer, masks: str) -> tuple[int, int]:
    """Returns L of the first example, and P, or 0 if masks are drawn anew.

    Raises: InputError if there is no example, or it is not usable.
    """
    for file in files:
        for first, columns in read_examples(file.path):
            check_examples(file.path, first, columns, tokenizer)
            row_length, predictions = (
                columns["input_ids"].shape[1],
                columns["masked_lm_ids"].shape[1],
            )
            if not 2 <= row_length <= 65535:
                raise refusal(
                    file.path,
                    first,
                    f"input_ids has {row_length} values",
                    "give examples of 2 to 65535",
                )
            if masks == "keep" and not predictions:
                raise refusal(
                    file.path,
                    first,
                    "masked_lm_ids has no value to keep",
                    "import it with --masks=redraw",
                )
            return row_length, predictions if masks == "keep" else 0
    raise InputError(
        f"{files[0].path} and the other {len(files) - 1} files hold no example; give others"
    )


def _import_file(job: _Job, file: _File) -> JsonObject:
    """Writes the examples of a file as shards in the working directory, and returns their record."""
    finished = job.work / f"{file.split}-{file.index}.json"
    if (
        done := records.read_part(
            finished, ("shards", "sequences", "random_next", "filled", "tokens")
        )
    ) is not None:
        return done
    tokenizer = load_tokenizer(job.path / records.TOKENIZER)
    dtype = records.row_dtype(job.row_length, 1, tokenizer.vocab_size, job.predictions)
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    result: JsonObject = {"shards": [], "sequences": 0, "random_next": 0, "filled": 0}
    waiting: list[np.ndarray] = []

    def write_waiting() -> None:
        name = f"{file.split}-{file.index}-{len(result['shards'])}.npy"
        num_rows = sum(map(len, waiting))
        result["shards"].append(records.write_shard(job.work / name, dtype, num_rows, waiting))
        waiting.clear()

    for first, columns in read_examples(file.path):
        _check_shape(file.path, first, columns, job)
        check_examples(file.path, first, columns, tokenizer)
        # rows hold their numbers as 32 bits, and equal numbers would have equal masks
        if (first + len(columns[LABELS])) * file.num_files >= 1 << 32:
            raise InputError(
                f"{file.path} and the others of its split have more than 2^32 examples; part them"
            )
        # Numbers are dealt to the files like cards, as none knows the size of the others.
        numbers = (
            np.arange(first - 1, first - 1 + len(columns[LABELS])) * file.num_files + file.index
        ).astype(np.uint32)
        rows, text = examples_to_rows(columns, numbers, tokenizer, dtype)
        counts += np.bincount(text, minlength=tokenizer.vocab_size)
        result["sequences"] += len(rows)
        result["random_next"] += int(np.count_nonzero(rows["labels"] == 1))
        result["filled"] += int(rows["lengths"].sum(dtype=np.int64))
        waiting.append(rows)
        if len(waiting) * AT_ONCE * dtype.itemsize >= SHARD_BYTES:
            write_waiting()
    if waiting:
        write_waiting()
    result["tokens"] = int(counts.sum())
    if file.split == "train":
        writing.write_array(job.work / f"counts-{file.index}.npy", counts)
    writing.write_json(finished, result)
    return result


def _check_shape(path: str, first: int, columns: Columns, job: _Job) -> None:
    """Raises: InputError if the examples do not have the shape of those of the first file."""
    for name, length in (("input_ids", job.row_length), ("masked_lm_ids", job.predictions)):
        if length and columns[name].shape[1] != length:
            reason = f"{name} has {columns[name].shape[1]} values, and the first file has {length}"
            raise refusal(
                path, first, reason, "import files of other lengths into a data set of their own"
            )


def _finish_split(
    job: _Job, split: str, files: list[_File], results: list[JsonObject]
) -> JsonObject:
    """Returns the manifest's record of a split, after giving its shards their names."""
    own = [result for file, result in zip(files, results, strict=True) if file.split == split]
    shards = [shard for result in own for shard in result["shards"]]
    named = []
    for index, shard in enumerate(shards):
        name = records.shard_name(split, index, len(shards))
        # The order of shards is that of the files, so a run that goes on gives each the same name
        # again.
        if (job.work / shard["name"]).exists():  # or else a run that was killed has moved it
            os.replace(job.work / shard["name"], job.path / name)
        named.append(shard | {"name": name})
    totals = {
        name: sum(result[name] for result in own)
        for name in ("sequences", "tokens", "random_next", "filled")
    }
    if split == "train" and not named:
        raise InputError(
            f"input {files[0].path} and the others hold no example; give files that do"
        )
    return {
        "sequences": totals["sequences"],
        "tokens": totals["tokens"],
        "rows": totals["sequences"],
        "fill": round(totals["filled"] / max(1, totals["sequences"] * job.row_length), 4),
        "random_next_share": round(totals["random_next"] / max(1, totals["sequences"]), 4),
        "shards": named,
    }


def _summarize(manifest: JsonObject, seconds: float) -> None:
    total = 0
    for name, split in manifest["splits"].items():
        total += split["rows"]
        say(
            f"{name}: {split['rows']:,} examples, {split['tokens']:,} tokens ({split['random_next_share']:.1%} with a "
            f"random next sentence; {split['fill']:.1%} full), {len(split['shards'])} shards"
        )
    say(f"{total:,} examples in {seconds:.0f} s ({total / max(seconds, 1e-9):,.0f} a second)")
