# SPDX-License-Identifier: Apache-2.0
"""Imports Google's TFRecords of pre-training examples into a data set.

    bert_jax import_tfrecords --input='examples/*.tfrecord' --tokenizer=vocab.txt --output=data128

The files are made by create_pretraining_data.py of google-research/bert: plain, gzip or zstd. With --masks=keep,
training uses the masks in the files, the same in every epoch. With --masks=redraw, the original words are restored, and
training draws new masks as it does for text. To continue a run that was stopped, give the same command again.
"""

from absl import flags

from bert_jax.data.google.import_examples import MASKS, import_examples
from bert_jax.tools import cli

_INPUT = flags.DEFINE_string(
    "input", None, "Files or quoted globs, separated by commas.", required=True
)
_HELDOUT_INPUT = flags.DEFINE_string(
    "heldout_input", "", "Files of the held-out split; empty for none."
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "The examples' vocabulary file, or its directory.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to create.", required=True)
_MASKS = flags.DEFINE_enum(
    "masks", "keep", MASKS, "Keep the masks of the examples, or draw new ones in training."
)
_WORKERS = flags.DEFINE_integer("workers", 0, "Number of processes; 0 uses all cores.")


def main() -> None:
    """Imports the examples that the flags name."""
    import_examples(
        _INPUT.value,
        _TOKENIZER.value,
        _OUTPUT.value,
        _HELDOUT_INPUT.value,
        _MASKS.value,
        _WORKERS.value,
    )


if __name__ == "__main__":
    cli.run(main)
