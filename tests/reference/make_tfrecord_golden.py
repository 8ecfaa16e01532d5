# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/google_examples.tfrecord with Google's own code, and what TensorFlow reads in it as .npz.

    git clone https://github.com/google-research/bert /tmp/bert
    git -C /tmp/bert checkout eedf5716ce1268e56f0a50264a88cafad334ac61
    python -m pip install tensorflow-cpu==2.21.0  # Python 3.11
    python tests/reference/make_tfrecord_golden.py --bert=/tmp/bert --output=tests/golden

create_pretraining_data.py runs unchanged, its `tensorflow` being `tensorflow.compat.v1`; TensorFlow reads with the
features that run_pretraining.py asks for. The .npz also has the text and the vocabulary that the examples are made
of. Text, vocabulary and seed are below, so the examples are the same each time; in what order a record holds its
features is up to the protobuf library.
"""

import argparse
import collections
import importlib
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf

MAX_SEQ_LENGTH, MAX_PREDICTIONS = 64, 12
OPTIONS = {
    "max_seq_length": MAX_SEQ_LENGTH,
    "max_predictions_per_seq": MAX_PREDICTIONS,
    "dupe_factor": 4,
    "random_seed": 12345,
    "masked_lm_prob": 0.15,
    "short_seq_prob": 0.1,
}
TEXT = """
The lighthouse keeper climbed the stairs every evening before sunset.
He carried a can of oil and a clean cloth.
The lamp needed both, and it needed patience too.
On clear nights one could see the lights of three villages.
On foggy nights one could see nothing, and the bell had to be rung.
Ships answered the bell with long, low whistles.
The keeper wrote each ship's name in a book.
After forty years there were eleven books on the shelf.

Bread begins with flour, water and salt.
The yeast may come from a packet, or from the air itself.
A baker mixes the dough at night, while the town is asleep.
The dough rests for hours under a cloth.
It grows slowly when the kitchen is cold, and quickly when it is warm.
Before dawn the oven is hot, and the loaves go in.
The smell of the crust wakes the neighbours.

A river is never the same length twice.
In spring it carries snow from the mountains, and in summer it carries dust.
Where the valley is flat the water turns in wide loops.
Sometimes a flood cuts through the neck of a loop.
The old bend becomes a lake in the shape of a moon.
Herons stand in the shallow water and wait for fish.
Maps of the river are out of date before they are printed.

The bees left the hive on the first warm day of March.
They visited the willow first, and then the plum trees.
Each bee carried yellow dust on its legs.
A dance told the others how far it was to the flowers.
The farther the flowers, the longer the dance.
By June the hive was heavy with honey.
The beekeeper took a third of it and left the rest for the winter.
Nobody was stung, for she worked slowly and wore white.

The clock in the market square had stopped at ten past four.
Nobody could agree on whether it was morning or afternoon.
A watchmaker from the next town came with a small black bag.
She opened the case and found a nest of mice.
The mice were moved to a barn; the wheels were cleaned and oiled.
At noon the clock struck twelve for the first time in nine years.
People set their watches by it, and were late for lunch.

Tides follow the moon, but not exactly.
The shape of the coast delays the water, here by an hour and there by five.
Fishermen keep a table of the tides beside the door.
Children learn to read it before they learn to read books.
When sun and moon pull together, the sea climbs over the harbour wall.
When they pull apart, one can walk to the island and back.
Twice a year somebody walks too slowly.
"""
RARE_ENDINGS = ("ing", "ed", "er", "ers", "ly", "s", "es", "keeper", "maker", "house", "men", "light", "noon")


def make_vocab() -> list[str]:
    """Returns special tokens, characters, a few endings, and the words that the text has more than once."""
    text = TEXT.lower()
    for mark in ".,;'":
        text = text.replace(mark, f" {mark} ")
    counts = collections.Counter(text.split())
    chars = sorted(set(text) - set(" \n"))
    words = sorted(word for word, count in counts.items() if count > 1 and len(word) > 1)
    unused = [f"[unused{number}]" for number in range(99)]  # where the published vocabularies have them
    specials = ["[PAD]", *unused, "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return [*specials, *chars, *(f"##{char}" for char in chars), *(f"##{ending}" for ending in RARE_ENDINGS), *words]


def run_reference(folder: str, text: Path, vocab: Path, output: Path) -> None:
    """Runs main() of create_pretraining_data.py."""
    with (
        mock.patch.object(sys, "path", [folder, *sys.path]),
        mock.patch.dict(sys.modules, {"tensorflow": tf}),
    ):
        reference = importlib.import_module("create_pretraining_data")
        files = {"input_file": text, "vocab_file": vocab, "output_file": output}
        reference.FLAGS(
            ["create_pretraining_data"] + [f"--{name}={value}" for name, value in (files | OPTIONS).items()]
        )
        reference.main(None)


def read_with_tensorflow(path: Path) -> dict[str, np.ndarray]:
    """Returns the features of all examples of a file, [R, length of the feature]."""
    features = {
        name: tf.FixedLenFeature([length], tf.float32 if name == "masked_lm_weights" else tf.int64)
        for name, length in {
            "input_ids": MAX_SEQ_LENGTH,
            "input_mask": MAX_SEQ_LENGTH,
            "segment_ids": MAX_SEQ_LENGTH,
            "masked_lm_positions": MAX_PREDICTIONS,
            "masked_lm_ids": MAX_PREDICTIONS,
            "masked_lm_weights": MAX_PREDICTIONS,
            "next_sentence_labels": 1,
        }.items()
    }
    records = list(tensorflow.data.TFRecordDataset(str(path)).as_numpy_iterator())
    parsed = tensorflow.io.parse_example(records, features)
    return {name: value.numpy() for name, value in parsed.items()}


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bert", required=True, help="google-research/bert at eedf571")
    parser.add_argument("--output", type=Path, required=True, help="folder of the files written")
    flags = parser.parse_args()
    vocab = make_vocab()
    output = flags.output / "google_examples.tfrecord"
    with tempfile.TemporaryDirectory() as folder:
        text_path, vocab_path = Path(folder, "text.txt"), Path(folder, "vocab.txt")
        text_path.write_text(TEXT.lstrip(), encoding="utf-8")
        vocab_path.write_text("".join(f"{token}\n" for token in vocab), encoding="utf-8")
        run_reference(flags.bert, text_path, vocab_path, output)
    versions = f"TensorFlow {tensorflow.__version__}, NumPy {np.__version__}, Python {sys.version.split()[0]}"
    np.savez_compressed(
        output.with_suffix(".npz"),
        made_with=np.array(f"google-research/bert eedf571 create_pretraining_data.py, {versions}"),
        text=np.array(TEXT),
        vocab=np.array(vocab),
        **read_with_tensorflow(output),
    )


if __name__ == "__main__":
    main()
