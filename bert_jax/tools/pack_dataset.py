# SPDX-License-Identifier: Apache-2.0
"""Packs several sequences of a prepared data set into each row, so that rows have less padding.

    python -m bert_jax.tools.pack_dataset --data=data512 --output=packed512 --max_per_row=3

Rows may become longer: --row_length=512 packs sequences of up to 128 tokens four and more to a row. Sequences keep
their numbers, and so their masks; they do not attend to each other. `prepare_corpus --pack=3` gives the same rows in
one go. A run that was stopped continues when the same command is given again.
"""

from absl import flags

from bert_jax.data.packed_dataset import pack_dataset
from bert_jax.tools import cli

_DATA = flags.DEFINE_string("data", None, "A data set of prepare_corpus, or its URL.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to make.", required=True)
_MAX_PER_ROW = flags.DEFINE_integer("max_per_row", 3, "The most sequences of a row.")
_ROW_LENGTH = flags.DEFINE_integer("row_length", 0, "Tokens of a row; 0 is as many as in --data.")
_SEED = flags.DEFINE_integer("seed", 0, "Another seed puts other sequences together.")
_WORKERS = flags.DEFINE_integer("workers", 0, "Processes; 0 is all cores.")


def main() -> None:
    """Packs the data set that the flags name."""
    pack_dataset(_DATA.value, _OUTPUT.value, _MAX_PER_ROW.value, _ROW_LENGTH.value, _SEED.value, _WORKERS.value)


if __name__ == "__main__":
    cli.run(main)
