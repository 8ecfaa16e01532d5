# SPDX-License-Identifier: Apache-2.0
"""Where the CPU time of preparing text goes.

python -m benchmarks.preparing --input='wikipedia_en/*.txt.gz' --tokenizer=bert-base-uncased-vocab.txt --rounds=3

Runs `prepare` in this process, with a clock of CPU time around each part. A clock costs about a microsecond a call, so
parts that are called for every line or word look a few per cent dearer than they are. Each round begins with a
tokenizer that has seen no word yet.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks.timing import environment, table
from bert_jax.data import instances, pieces, prepare, records
from bert_jax.data.sources import corpus
from bert_jax.errors import InputError
from bert_jax.text.words import BatchEncoder
from bert_jax.tools import cli

INPUT = flags.DEFINE_string("input", "", "files of text, as prepare_corpus takes them")
TOKENIZER = flags.DEFINE_string("tokenizer", "", "a tokenizer's directory or a vocabulary file")
LENGTH = flags.DEFINE_integer("length", 128, "tokens of a row", lower_bound=8)
ROUNDS = flags.DEFINE_integer("rounds", 3, "how often everything is prepared", lower_bound=1)

# Part -> the function that it is, by its module or class. The second tokens part is a part of the first.
PARTS: dict[str, tuple[Any, str]] = {
    "reading, decompression": (corpus, "read_piece"),
    "sentences": (pieces, "split_lines"),
    "tokens": (BatchEncoder, "__call__"),
    "of these, words not seen before": (BatchEncoder, "_encode_words"),
    "hashes of documents": (pieces, "document_key"),
    "instances": (instances, "create_instances"),
    "rows": (instances, "make_rows"),
    "writing and hashing rows, rows included": (records, "write_shard"),
}


def clocked(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Returns the function with its CPU seconds added to `spent`; of a generator those of every item."""

    def items(generator: Iterator[Any]) -> Iterator[Any]:
        while True:
            started = time.process_time()
            try:
                item = next(generator)
            except StopIteration:
                return
            finally:
                spent[0] += time.process_time() - started
            yield item

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        result = function(*args, **kwargs)
        spent[0] += time.process_time() - started
        return items(result) if isinstance(result, Iterator) else result

    return run


def measure(inputs: str, tokenizer: str, length: int) -> tuple[dict[str, float], float]:
    """Returns the CPU seconds of each part and of the whole, and MB of text."""
    spent = {name: [0.0] for name in PARTS}
    before = {name: getattr(owner, attribute) for name, (owner, attribute) in PARTS.items()}
    prepare._load_tokenizer.cache_clear()
    try:
        for name, (owner, attribute) in PARTS.items():
            setattr(owner, attribute, clocked(before[name], spent[name]))
        with tempfile.TemporaryDirectory() as folder:
            started = time.process_time()
            options = prepare.PrepareOptions(max_seq_length=length, duplicates=1)
            manifest = prepare.prepare(inputs, tokenizer, str(Path(folder) / "data"), options, num_workers=1)
            whole = time.process_time() - started
    finally:
        for name, (owner, attribute) in PARTS.items():
            setattr(owner, attribute, before[name])
    num_bytes = sum(split["text_bytes"] for split in manifest["splits"].values())
    return {name: seconds for name, (seconds,) in spent.items()} | {"all": whole}, num_bytes / 1e6


def main() -> int:
    """Prints medians of all rounds."""
    if not INPUT.value or not TOKENIZER.value:
        raise InputError("--input and --tokenizer are needed, as prepare_corpus takes them")
    rounds = [measure(INPUT.value, TOKENIZER.value, LENGTH.value) for _ in range(ROUNDS.value)]
    megabytes = rounds[0][1]
    medians = {name: statistics.median(spent[name] for spent, _ in rounds) for name in rounds[0][0]}
    rows = [["", "CPU seconds", "of all", "ns a byte"]]
    rows += [
        [name, f"{seconds:.2f}", f"{seconds / medians['all']:.0%}", f"{1e3 * seconds / megabytes:.1f}"]
        for name, seconds in medians.items()
    ]
    print("\n".join(table(rows)))
    speed = megabytes / medians["all"]
    print(f"{megabytes:.1f} MB, {speed:.2f} MB a CPU second; {ROUNDS.value} rounds; {environment()['processor']}")
    return 0


if __name__ == "__main__":
    cli.run(main)
