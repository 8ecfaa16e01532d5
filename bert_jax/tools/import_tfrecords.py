# SPDX-License-Identifier: Apache-2.0
"""Imports Google's TFRecords of pre-training examples into a data set.

    python -m bert_jax.tools.import_tfrecords --input='examples/*.tfrecord' --tokenizer=vocab.txt --output=data128

The files are those of create_pretraining_data.py of google-research/bert, plain, gzip or zstd. With --masks=keep the
model is trained on the masks in them, the same in every epoch; --masks=redraw puts the words back, and training draws
new masks as it does for text. A run that was stopped continues when the same command is given again.
"""

from absl import flags

from bert_jax.data.google.import_examples import MASKS, import_examples
from bert_jax.tools import cli

_INPUT = flags.DEFINE_string("input", None, "Files or quoted globs, separated by commas.", required=True)
_HELDOUT_INPUT = flags.DEFINE_string("heldout_input", "", "Files of the held-out split; empty for none.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "The examples' vocabulary file, or its directory.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to make.", required=True)
_MASKS = flags.DEFINE_enum("masks", "keep", MASKS, "Whether to keep the examples' masks or to draw others in training.")
_WORKERS = flags.DEFINE_integer("workers", 0, "Processes; 0 is all cores.")


def main() -> None:
    """Imports the examples that the flags name."""
    import_examples(_INPUT.value, _TOKENIZER.value, _OUTPUT.value, _HELDOUT_INPUT.value, _MASKS.value, _WORKERS.value)


if __name__ == "__main__":
    cli.run(main)
