# SPDX-License-Identifier: Apache-2.0
"""Compares packing with best-fit decreasing: how full rows are, and how long planning and assignment take.

python benchmarks/packing.py --data=DIR [--row_length=512]
"""

import time

import numpy as np
from absl import flags

from bert_jax.data.packing import assign, plan_packing
from bert_jax.data.records import open_dataset
from bert_jax.tools import cli

_DATA = flags.DEFINE_string("data", "", "A directory made by prepare_corpus.")
_HISTOGRAM = flags.DEFINE_string("histogram", "", "Or a .npy file: how many sequences there are of length 0, 1, ...")
_ROW_LENGTH = flags.DEFINE_integer("row_length", 0, "Tokens of a row; 0 is the longest sequence.")
_SEQUENCES = flags.DEFINE_integer("sequences", 16_000_000, "As many of the same lengths are planned and assigned.")


def best_fit_decreasing(histogram: np.ndarray, row_length: int, max_per_row: int) -> int:
    """Returns how many rows it takes to put each sequence, the longest first, where it leaves the least room."""
    rows = np.zeros((row_length + 1, max_per_row + 1), np.int64)  # [room left, sequences]
    for length in range(len(histogram) - 1, 0, -1):
        for _ in range(int(histogram[length])):
            open_rows = np.flatnonzero(rows[length:, 1:max_per_row].any(axis=1)) if max_per_row > 1 else []
            room, count = row_length, 0
            if len(open_rows):
                room = length + int(open_rows[0])
                count = 1 + int(np.flatnonzero(rows[room, 1:max_per_row])[0])
                rows[room, count] -= 1
            rows[room - length, count + 1] += 1
    return int(rows.sum())


def main() -> None:
    """Prints a table of the share of positions that hold a token, and times."""
    if _HISTOGRAM.value:
        histogram = np.load(_HISTOGRAM.value)
    else:
        dataset = open_dataset(_DATA.value)
        shards = [dataset.rows_of("train", index)["lengths"][:, 0] for index in range(dataset.train.num_shards)]
        histogram = np.bincount(np.concatenate(shards))
    row_length = _ROW_LENGTH.value or len(histogram) - 1
    tokens = int(histogram @ np.arange(len(histogram)))
    many = histogram * max(1, _SEQUENCES.value // int(histogram.sum()))
    print(f"{int(histogram.sum()):,} sequences, {tokens / histogram.sum():.1f} tokens each, rows of {row_length}")
    for max_per_row in (1, 2, 3, 4, 8):
        plan = plan_packing(histogram, row_length, max_per_row)
        seconds, large = [], plan
        for _ in range(5):
            started = time.process_time()
            large = plan_packing(many, row_length, max_per_row)
            seconds.append(time.process_time() - started)
        line = f"at most {max_per_row}: {plan.fill(row_length):.2%} full, {plan.num_rows:,} rows"
        if histogram.sum() < 1_000_000:
            theirs = tokens / (row_length * best_fit_decreasing(histogram, row_length, max_per_row))
            line += f"; best-fit decreasing {theirs:.2%}"
        print(
            f"{line}; {int(many.sum()):,} sequences planned in {np.median(seconds):.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f}), {large.fill(row_length):.2%} full"
        )
    lengths = np.random.default_rng(0).permutation(np.repeat(np.arange(len(many)), many))
    plan = plan_packing(many, row_length, 3)
    started = time.process_time()
    assign(lengths, plan, 0)
    print(f"assigned to rows, at most 3: {len(lengths) / (time.process_time() - started):,.0f} sequences/s")


if __name__ == "__main__":
    cli.run(main)
