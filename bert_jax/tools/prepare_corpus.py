# SPDX-License-Identifier: Apache-2.0
"""Text to a data set for pre-training.

    python -m bert_jax.tools.prepare_corpus --input='text/*.txt.gz' --tokenizer=vocab --output=data128

Input are files of text (a sentence or a paragraph a line, blank lines between documents), JSON lines with a field
"text", or WikiExtractor's output, plain or compressed by gzip or zstd, here or behind a URL such as gs://bucket/*.gz;
prepared text data sets of TensorFlow Datasets, as tfds:NAME[:VERSION][:SPLIT[:FEATURE]]; or python-docs, the
documentation inside Python. The output depends on the text and the options alone, not on --workers. A run that was
stopped continues when the same command is given again.
"""

from absl import flags

from bert_jax.data.prepare import PrepareOptions, prepare
from bert_jax.tools import cli

_DEFAULTS = PrepareOptions()

_INPUT = flags.DEFINE_string(
    "input", None, "Files, quoted globs, URLs, tfds:NAME or python-docs, separated by commas.", required=True
)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Directory of a tokenizer, or a vocabulary file.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to make.", required=True)
_WORKERS = flags.DEFINE_integer("workers", 0, "Processes; 0 is all cores.")
_OPTIONS = [
    flags.DEFINE_integer("max_seq_length", _DEFAULTS.max_seq_length, "Tokens of a row, with [CLS] and [SEP]."),
    flags.DEFINE_string("next_sentence", _DEFAULTS.next_sentence, "What sentence B is for: nsp, sop or none."),
    flags.DEFINE_integer("duplicates", _DEFAULTS.duplicates, "Passes over the text, each cut into sequences anew."),
    flags.DEFINE_float("short_seq_rate", _DEFAULTS.short_seq_rate, "Share of documents cut into shorter sequences."),
    flags.DEFINE_float(
        "holdout_rate", _DEFAULTS.holdout_rate, "Share of documents held out for evaluation; 0 is none."
    ),
    flags.DEFINE_integer("shards", _DEFAULTS.shards, "Files of the training split; 0 is one for every 16 M tokens."),
    flags.DEFINE_integer("seed", _DEFAULTS.seed, "Another seed holds out other documents and draws other sequences."),
    flags.DEFINE_string("language", _DEFAULTS.language, "Language of the text, for the sentence splitter."),
    flags.DEFINE_integer("pack", _DEFAULTS.pack, "The most sequences of a row; 3 fills rows of 512, 1 packs none."),
]


def main() -> None:
    """Prepares the data set that the flags describe."""
    options = PrepareOptions(**{flag.name: flag.value for flag in _OPTIONS})
    prepare(_INPUT.value, _TOKENIZER.value, _OUTPUT.value, options, _WORKERS.value)


if __name__ == "__main__":
    cli.run(main)
