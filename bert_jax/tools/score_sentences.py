# SPDX-License-Identifier: Apache-2.0
"""Scores sentences by their likelihood under a model, or measures its accuracy on minimal pairs.

    bert_jax score_sentences --checkpoint=DIR --input=FILE|-
    bert_jax score_sentences --checkpoint=DIR --pairs=blimp.jsonl.gz

A masked language model gives the pseudo-log-likelihood, in nats: each token is masked in turn, alone ("original") or
with the rest of its word ("within_word_l2r"). A causal model gives the log-likelihood. Pairs are JSON lines of BLiMP, a
file or a directory of Zorro, or a table of good and bad sentences separated by tabs.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import flags

from bert_jax.devices.allocator import reuse_freed_memory
from bert_jax.errors import InputError
from bert_jax.storage.files import JsonObject
from bert_jax.storage.places import to_place
from bert_jax.storage.writing import check_file, write_json
from bert_jax.tools import cli
from bert_jax.tools.lines import open_lines, open_writer, read_input
from bert_jax.tools.shared_flags import define_checkpoint, define_dtype, define_long_texts

if TYPE_CHECKING:
    from bert_jax.checkpoints.pretrained import Pretrained

CHECKPOINT = define_checkpoint()
INPUT = flags.DEFINE_string("input", "-", "file with one sentence per line; - is standard input")
PAIRS = flags.DEFINE_string(
    "pairs", "", "minimal pairs to score instead of --input: a file, or Zorro's directory"
)
LIMIT = flags.DEFINE_integer(
    "limit", 0, "with --pairs: take the first N of each paradigm; 0 takes all", lower_bound=0
)
METHOD = flags.DEFINE_enum(
    "method",
    "",
    ["", "original", "within_word_l2r"],
    "scoring method of a masked language model; empty is original",
)
DTYPE = define_dtype()
LONG_TEXTS = define_long_texts()
OUTPUT = flags.DEFINE_string(
    "output", "", "JSON file for the results: one line per sentence, or one object for pairs"
)

_SECONDS_BETWEEN_REPORTS = 20.0


def main() -> None:
    """Scores the sentences or the pairs that the flags name."""
    cli.check_given(CHECKPOINT)
    if LIMIT.value and not PAIRS.value:
        raise InputError("--limit is of minimal pairs; give --pairs=FILE too, or leave it out")
    if PAIRS.value and flags.FLAGS["input"].present:
        raise InputError("--input and --pairs are two things to score; give one of them")
    if OUTPUT.value:
        check_file(OUTPUT.value, INPUT.value, PAIRS.value)
    # before JAX starts its threads
    reuse_freed_memory()
    if PAIRS.value:
        _score_pairs()
    else:
        _score_lines()


def _score_pairs() -> None:
    from bert_jax.inference import minimal_pairs
    from bert_jax.inference.sentence_scores import check_method, encode_sentences, score_sentences

    pairs = minimal_pairs.read_pairs(PAIRS.value, LIMIT.value)
    bert = cli.load_model(CHECKPOINT.value, DTYPE.value)
    method = check_method(bert, METHOD.value)
    sentences = [text for pair in pairs for text in (pair.good, pair.bad)]
    names = [pair.where for pair in pairs for _ in range(2)]
    started = time.monotonic()
    scores = score_sentences(bert, sentences, method, names, _report_progress(), LONG_TEXTS.value)
    seconds = time.monotonic() - started
    table = minimal_pairs.accuracies(pairs, scores[::2], scores[1::2])
    unknown = sum(bert.tokenizer.unk_id in ids for ids in encode_sentences(bert, sentences))
    for line in minimal_pairs.format_table(table):
        print(line)
    print(f"intervals: {minimal_pairs.INTERVALS}")
    _say_speed(len(sentences), seconds, unknown)
    if OUTPUT.value:
        record = _about(bert, method) | {"pairs": PAIRS.value, "limit": LIMIT.value}
        record |= {"intervals": minimal_pairs.INTERVALS, "sentences": len(sentences)}
        record |= {"sentences_with_unknown_words": unknown, "seconds": round(seconds, 3)}
        write_json(to_place(OUTPUT.value), record | table.as_json())


def _about(bert: "Pretrained", method: str) -> JsonObject:
    record = {"checkpoint": CHECKPOINT.value, "trained": bert.trained, "method": method}
    return record | {
        "compute_dtype": bert.config.compute_dtype,
        "tokenizer": bert.tokenizer.fingerprint,
    }


def _score_lines() -> None:
    with open_lines(INPUT.value) as stream:
        if stream.isatty():
            print("Write a sentence a line; end with Ctrl-D.", file=sys.stderr)
        lines = list(read_input(stream, INPUT.value))
    names = [where for where, line in lines if line]
    sentences = [line for _, line in lines if line]
    if not sentences:
        raise InputError(f"input {INPUT.value} has no sentence; write one a line")
    from bert_jax.inference.sentence_scores import check_method, encode_sentences, token_scores

    bert = cli.load_model(CHECKPOINT.value, DTYPE.value)
    method = check_method(bert, METHOD.value)
    started = time.monotonic()
    scores = token_scores(bert, sentences, method, names, _report_progress(), LONG_TEXTS.value)
    seconds = time.monotonic() - started
    token_ids = encode_sentences(bert, sentences)
    with open_writer(OUTPUT.value or "-") as write:
        results = zip(token_ids, scores, strict=True)
        for _, sentence in lines:
            if not sentence:  # a line for every line
                write(json.dumps({"sentence": ""}) if OUTPUT.value else "")
                continue
            ids, values = next(results)
            total = float(values.sum(dtype="float64"))
            if OUTPUT.value:
                tokens = bert.tokenizer.tokens(ids)
                record = {"sentence": sentence, "score": total, "method": method, "tokens": tokens}
                write(
                    json.dumps(
                        record | {"token_scores": [float(value) for value in values]},
                        ensure_ascii=False,
                    )
                )
            else:
                write(f"{total:.4f}\t{len(ids)}\t{sentence}")
    _say_speed(len(sentences), seconds, sum(bert.tokenizer.unk_id in ids for ids in token_ids))


def _report_progress() -> Callable[[int, int], None]:
    started = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_REPORTS:
            last = now
            print(
                f"{done:,} of {total:,} rows, {done / (now - started):,.0f} a second",
                file=sys.stderr,
            )

    return report


def _say_speed(num_sentences: int, seconds: float, unknown: int) -> None:
    note = f"; {unknown:,} have unknown words" if unknown else ""
    rate = num_sentences / max(seconds, 1e-9)
    print(
        f"{num_sentences:,} sentences in {seconds:.1f} s: {rate:,.1f} a second{note}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    cli.run(main)
