# SPDX-License-Identifier: Apache-2.0
"""Packs a prepared data set: several sequences in each row (docs/decisions/0017-packing.md).

Each shard is packed separately into a shard with the same number, so any number of processes gives the same bytes, and
a process holds the lengths of one shard in memory. Every step ends with a rename, so a killed run can continue.
"""

import functools
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_jax.data import packing, records
from bert_jax.data.building import finished_manifest, unfinished, uploaded
from bert_jax.data.processes import say, task_runner
from bert_jax.errors import InputError
from bert_jax.storage import urls, writing
from bert_jax.storage.files import JsonObject
from bert_jax.version import __version__

SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class _Job:
    """The arguments that all tasks share."""

    source: Path
    path: Path
    work: Path
    row_length: int
    max_per_row: int
    seed: int


@dataclass(frozen=True)
class _Shard:
    split: str
    index: int
    num_shards: int


def pack_dataset(
    data: str, output: str, max_per_row: int, row_length: int = 0, seed: int = 0, num_workers: int = 0
) -> JsonObject:
    """Returns the manifest of the data set that `output` then holds: the sequences of `data`, several in a row.

    Rows have `row_length` tokens (0: as many as those of `data`) and at most `max_per_row` sequences. A sequence keeps
    its number, and so its masks. A run that was stopped continues; a finished one is not repeated. 0 workers takes all
    cores.

    Raises: InputError if `data` is damaged, packed, or has masks of its own, if a sequence is longer than a row, and if
    `output` holds something else.
    """
    if num_workers < 0:
        raise InputError(f"workers {num_workers} is negative; 0 takes all cores")
    if urls.is_remote(output):
        return uploaded(output, lambda path: pack_dataset(data, path, max_per_row, row_length, seed, num_workers))
    path = Path(output)
    source = records.open_dataset(data)
    if path.exists() and path.samefile(source.path):
        raise InputError(f"output {output} is the data set itself; choose a new directory")
    row_length = row_length or source.row_length
    check_source(source, data, row_length, max_per_row)
    tokenizer = source.load_tokenizer()
    identity = {
        "format": records.FORMAT,
        "version": records.VERSION,
        "options": {
            "max_seq_length": row_length,
            "max_per_row": max_per_row,
            "seed": seed,
            "next_sentence": source.manifest["identity"]["options"].get("next_sentence", "nsp"),
        },
        "input": source.fingerprint,
        "tokenizer": tokenizer.fingerprint,
    }
    if manifest := finished_manifest(path, identity):
        return manifest

    started = time.monotonic()
    counts = {split: len(source.shards_of(split)) for split in SPLITS}
    shards = [_Shard(split, index, count) for split, count in counts.items() for index in range(count)]
    with unfinished(path, identity, tokenizer) as work:
        job = _Job(source.path.resolve(), path, work, row_length, max_per_row, seed)
        with task_runner(num_workers) as run:
            results = run(functools.partial(_pack_shard, job), shards, "shards")
        splits = {split: _describe_split(source, split, row_length, shards, results) for split in SPLITS}
        row = {"length": row_length, "max_sequences": max_per_row}
        kept = ("inputs", "exact_copies", "lines_not_split", "passage_tokens")
        figures = {name: source.manifest[name] for name in kept if name in source.manifest}
        manifest = records.finish_dataset(
            path, identity, row, tokenizer, splits, np.array(source.token_counts), {"bert_jax": __version__}, **figures
        )
    say_packed(manifest)
    seconds = max(time.monotonic() - started, 1e-9)
    megabytes = sum(shard["bytes"] for split in splits.values() for shard in split["shards"]) / 1e6
    say(f"{megabytes:.1f} MB of rows in {seconds:.1f} s ({megabytes / seconds:.1f} MB/s)")
    return manifest


def say_packed(manifest: JsonObject) -> None:
    """Prints how full the rows of a packed data set are."""
    for name, split in manifest["splits"].items():
        if split["rows"]:
            say(
                f"{name}: {split['sequences']:,} sequences in {split['rows']:,} rows of "
                f"{manifest['row']['length']} tokens ({split['sequences'] / split['rows']:.2f} a row, at most "
                f"{manifest['row']['max_sequences']}; {split['fill']:.2%} full)"
            )


def check_source(source: records.Dataset, data: str, row_length: int, max_per_row: int) -> None:
    """Raises: InputError if a data set, opened from `data`, cannot be packed like this."""
    row = source.manifest["row"]
    if row["max_sequences"] > 1:
        raise InputError(
            f"{data} is packed already, up to {row['max_sequences']} sequences in a row; give the data set that it was "
            "made of"
        )
    if row.get("predictions"):
        raise InputError(f"{data} has masks of its own, which packing would mix; import it with --masks=redraw")
    longest = source.row_length
    if longest > row_length:  # the sequences themselves may be shorter
        shards = (rows for split in SPLITS for rows in source.shards_of(split))
        longest = max(int(rows["lengths"].max(initial=0)) for rows in shards)
    packing.check_packing(row_length, max_per_row, longest)


@functools.lru_cache(maxsize=1)
def _open(path: Path, fingerprint: str) -> records.Dataset:
    """Returns the data set, opened once in a process; it has been verified before."""
    del fingerprint
    return records.open_dataset(path, verify=False)


def _pack_shard(job: _Job, shard: _Shard) -> JsonObject:
    """Writes a shard and returns the manifest's record of its file."""
    name = records.shard_name(shard.split, shard.index, shard.num_shards)
    finished = job.work / f"{name}.json"
    if (made := records.read_part(finished, ("name", "rows", "bytes", "sha256", "filled"))) is not None:
        return made
    source = _open(job.source, str(job.path))
    rows = source.shards_of(shard.split)[shard.index]
    vocab = source.manifest["tokenizer"]
    dtype = records.row_dtype(job.row_length, job.max_per_row, vocab["vocab_size"])
    lengths = rows["lengths"][:, 0]
    seed = packing.shard_seed(job.seed, shard.split, shard.index)
    num_rows, chunks = packing.packed_rows(lengths, lambda indices: rows[indices], dtype, vocab["pad_id"], seed)
    result = records.write_shard(job.path / name, dtype, num_rows, chunks)
    result["filled"] = int(lengths.sum(dtype=np.int64))
    writing.write_json(finished, result)
    return result


def _describe_split(
    source: records.Dataset, split: str, row_length: int, shards: list[_Shard], results: list[JsonObject]
) -> JsonObject:
    """Returns the manifest's record of a split: the source's record, updated for the new rows."""
    own = [dict(result) for shard, result in zip(shards, results, strict=True) if shard.split == split]
    filled = sum(result.pop("filled") for result in own)
    num_rows = sum(result["rows"] for result in own)
    fill = round(filled / max(1, num_rows * row_length), 4)
    return source.manifest["splits"][split] | {"rows": num_rows, "fill": fill, "shards": own}
