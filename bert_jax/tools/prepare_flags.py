# SPDX-License-Identifier: Apache-2.0
"""The flags of the commands that prepare text; they determine the contents of a data set."""

from collections.abc import Callable

from absl import flags

from bert_jax.data.prepare import PrepareOptions
from bert_jax.data.sources.formats import TEXT_COLUMN


def define_text_column() -> flags.FlagHolder[str]:
    """Defines and returns the flag that names the text in inputs with columns."""
    return flags.DEFINE_string("text_column", TEXT_COLUMN, "Column of Parquet, or key of JSON lines, with the text.")


def define_options() -> Callable[[], PrepareOptions]:
    """Defines the flags of `PrepareOptions`; returns a function that reads them."""
    defaults = PrepareOptions()
    defined = [
        flags.DEFINE_integer("max_seq_length", defaults.max_seq_length, "Tokens per row, including [CLS] and [SEP]."),
        flags.DEFINE_string(
            "next_sentence", defaults.next_sentence, "Task of sentence B: nsp (next sentence), sop (order) or none."
        ),
        flags.DEFINE_integer("duplicates", defaults.duplicates, "Passes over the text, each cut into new sequences."),
        flags.DEFINE_float("short_seq_rate", defaults.short_seq_rate, "Share of documents cut into shorter sequences."),
        flags.DEFINE_float(
            "holdout_rate",
            defaults.holdout_rate,
            "Share of documents held out for evaluation, or of passages where documents are few and long; 0 is none.",
        ),
        flags.DEFINE_integer("shards", defaults.shards, "Files of the training split; 0 writes one per 16 M tokens."),
        flags.DEFINE_integer("seed", defaults.seed, "Random seed of the held-out documents and of the sequences."),
        flags.DEFINE_string("language", defaults.language, "Language of the text, for the sentence splitter."),
        flags.DEFINE_integer("pack", defaults.pack, "Maximum sequences per row; 3 fills rows of 512, 1 packs none."),
    ]

    def read() -> PrepareOptions:
        return PrepareOptions(**{flag.name: flag.value for flag in defined})

    return read
