# SPDX-License-Identifier: Apache-2.0
"""The flags that several commands have. Each is listed by --help of the command that asks for it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from absl import flags

from bert_jax.data.sources.formats import TEXT_COLUMN
from bert_jax.text.fitting import LONG_TEXTS

# A flag is then listed by --help of the command that asks for it, and not of every one that imports
# this.
flags.disclaim_key_flags()

if TYPE_CHECKING:
    from bert_jax.data.prepare import PrepareOptions


def define_checkpoint() -> flags.FlagHolder[str]:
    """Defines the flag of the commands that use a model."""
    return flags.DEFINE_string(
        "checkpoint", "", "a work directory, WORKDIR@STEP, or a model in any format"
    )


def define_recipe() -> flags.FlagHolder[str]:
    """Defines the flag that names a recipe where a model is used."""
    return flags.DEFINE_string(
        "recipe", "", "the recipe of a model with an own task or head; its code is run"
    )


def define_dtype() -> flags.FlagHolder[str]:
    """Defines the flag for the dtype that a model computes in."""
    text = "type of activations and matrix products; empty is the model's"
    flag = flags.DEFINE_enum("dtype", "", ["", "float32", "bfloat16"], text)
    flags.DEFINE_alias("compute_dtype", "dtype")  # its earlier name
    return flag


def define_long_texts() -> flags.FlagHolder[str]:
    """Defines the flag for texts that are too long."""
    text = "of texts with more tokens than there is room for: cut them and say how many, or refuse the first of them"
    return flags.DEFINE_enum("long_texts", LONG_TEXTS[0], LONG_TEXTS, text)


def define_format() -> Callable[[str], bool]:
    """Defines the flag for the format of results; returns a function that tells whether an output is JSON."""
    text = "text for people, or a JSON object per line; empty is json for files, else text"
    flag = flags.DEFINE_enum("format", "", ["", "text", "json"], text)
    return lambda output: flag.value == "json" or (not flag.value and output != "-")


def define_text_column() -> flags.FlagHolder[str]:
    """Defines the flag that names the text in inputs with columns."""
    return flags.DEFINE_string(
        "text_column", TEXT_COLUMN, "Column of Parquet, or key of JSON lines, with the text."
    )


def define_options() -> "Callable[[], PrepareOptions]":
    """Defines the flags of `PrepareOptions`, which determine the contents of a data set."""
    from bert_jax.data.prepare import PrepareOptions

    define = {
        bool: flags.DEFINE_bool,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
    }
    defaults = PrepareOptions()
    defined: list[flags.FlagHolder[Any]] = []
    for name, text in _OPTIONS.items():
        default = getattr(defaults, name)
        defined.append(define[type(default)](name, default, text))

    def read() -> PrepareOptions:
        return PrepareOptions(**{flag.name: flag.value for flag in defined})

    return read


_OPTIONS = {
    "max_seq_length": "Tokens per row, including [CLS] and [SEP].",
    "next_sentence": "Task of sentence B: nsp (next sentence), sop (order) or none.",
    "duplicates": "Passes over the text, each cut into new sequences.",
    "short_seq_rate": "Share of documents cut into shorter sequences.",
    "holdout_rate": "Share of documents held out for evaluation, or of passages where documents are few and long; "
    "0 is none.",
    "shards": "Files of the training split; 0 writes one per 16 M tokens.",
    "seed": "Random seed of the held-out documents and of the sequences.",
    "language": "Language of the text, for the sentence splitter.",
    "pack": "Maximum sequences per row; 3 fills rows of 512, 1 packs none.",
}
