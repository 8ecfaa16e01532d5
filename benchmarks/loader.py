# SPDX-License-Identifier: Apache-2.0
"""How fast rows of a data set come from disk, shuffled, and become batches; in one thread.

python benchmarks/loader.py --data=DIR
"""

import time

import numpy as np
from absl import flags

from bert_jax.data.pipeline import rows_to_batch, train_rows
from bert_jax.data.records import open_dataset
from bert_jax.tools import cli

_DATA = flags.DEFINE_string("data", None, "A directory made by prepare_corpus.", required=True)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 4096, "Rows of a batch.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 3.0, "How long to measure each, three times.", lower_bound=0.01)


def main() -> None:
    """Prints rows per second: read, and read and made into batches, the median of three."""
    split = open_dataset(_DATA.value).train
    places = np.arange(_BATCH_SIZE.value)

    def rates(to_batch: bool) -> str:
        measured = []
        for trial in range(3):
            started, step = time.perf_counter(), 0
            while (seconds := time.perf_counter() - started) < _SECONDS.value:
                indices, epochs = train_rows(step, places, len(places), split.num_rows, seed=trial)
                rows = split.gather(indices)
                if to_batch:
                    rows_to_batch(rows, epochs)
                step += 1
            measured.append(step * len(places) / seconds)
        return f"{np.median(measured):,.0f} rows/s ({min(measured):,.0f} to {max(measured):,.0f})"

    print(f"{split.num_rows:,} rows of {split.dtype['token_ids'].shape[0]} tokens, {_BATCH_SIZE.value} a batch")
    print(f"shuffled and read: {rates(False)}")
    print(f"and made into batches: {rates(True)}")


if __name__ == "__main__":
    cli.run(main)
