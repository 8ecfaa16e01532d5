# SPDX-License-Identifier: Apache-2.0
"""Packs several sequences of a prepared data set into each row, so that rows have less padding.

    bert_jax pack_dataset --data=data512 --output=packed512 --max_per_row=3

Rows may become longer: with --row_length=512, four or more sequences of up to 128 tokens fit in a row. Sequences keep
their numbers, and so their masks; they do not attend to each other. `prepare_corpus --pack=3` gives the same rows in
one step. To continue a run that was stopped, give the same command again.
"""

from absl import flags

from bert_jax.data.packed_dataset import pack_dataset
from bert_jax.tools import cli

_DATA = flags.DEFINE_string("data", None, "A data set made by prepare_corpus, or its URL.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to create.", required=True)
_MAX_PER_ROW = flags.DEFINE_integer("max_per_row", 3, "Maximum number of sequences per row.")
_ROW_LENGTH = flags.DEFINE_integer("row_length", 0, "Tokens per row; 0 keeps the row length of --data.")
_SEED = flags.DEFINE_integer("seed", 0, "Random seed; it decides which sequences share a row.")
_WORKERS = flags.DEFINE_integer("workers", 0, "Number of processes; 0 uses all cores.")


def main() -> None:
    """Packs the data set that the flags name."""
    pack_dataset(_DATA.value, _OUTPUT.value, _MAX_PER_ROW.value, _ROW_LENGTH.value, _SEED.value, _WORKERS.value)


if __name__ == "__main__":
    cli.run(main)
