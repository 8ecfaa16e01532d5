# SPDX-License-Identifier: Apache-2.0
"""Exports a data set as TFRecords of pre-training examples, as run_pretraining.py of google-research/bert reads them.

    bert_jax export_tfrecords --data=data128 --output=examples --epochs=5 --num_files=10

The order and the masks are those of training with --seed as data.seed and masking.seed, for the given number of epochs.
Examples are distributed over the files in turn. Masks that are in the data set already are written unchanged. The
vocabulary is written beside the files.
"""

from absl import flags

from bert_jax.settings.pretraining import MaskingConfig
from bert_jax.tools import cli
from bert_jax.tools.shared_flags import define_settings
from bert_jax.tools.training_examples import export_examples

_DATA = flags.DEFINE_string("data", None, "Directory of a data set.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to create.", required=True)
_SPLIT = flags.DEFINE_enum("split", "train", ("train", "heldout"), "Split of the data set to export.")
_EPOCHS = flags.DEFINE_integer("epochs", 1, "Number of times that each row is written, each time with a new mask.")
_NUM_FILES = flags.DEFINE_integer("num_files", 1, "Number of files to write.")
_read_masking = define_settings(
    MaskingConfig(),
    {
        "rate": "Share of the tokens to predict.",
        "max_predictions": "Maximum number of predictions per example; 0 follows from the rate.",
        "mask_rate": "Share of the predicted tokens that become [MASK].",
        "random_rate": "Share of predicted tokens that become a random token.",
        "whole_word": "Mask whole words.",
        "max_ngram": "With --whole_word: mask runs of up to this many words.",
        "seed": "Random seed of the masks and of the order.",
    },
)


def main() -> None:
    """Writes the examples that the flags describe."""
    export_examples(_DATA.value, _OUTPUT.value, _read_masking(), _SPLIT.value, _EPOCHS.value, _NUM_FILES.value)


if __name__ == "__main__":
    cli.run(main)
