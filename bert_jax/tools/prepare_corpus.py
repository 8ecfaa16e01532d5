# SPDX-License-Identifier: Apache-2.0
"""Prepares text as a data set for pre-training.

    bert_jax prepare_corpus --input='text/*.txt.gz' --tokenizer=vocab --output=data128

Input files are text (a sentence or a paragraph per line, blank lines between documents), JSON lines with a field
"text", or WikiExtractor's output, plain or compressed by gzip or zstd; or Parquet with a column "text" (--text_column
names another), here or behind a URL such as gs://bucket/*.gz or hf://datasets/ORG/NAME/*.parquet (the Hugging Face
hub). tfds:NAME[:VERSION][:SPLIT[:FEATURE]] is a prepared text data set of TensorFlow Datasets. The output depends only
on the text and the options, not on --workers. The same command continues a run that was stopped. If one machine is not
enough, use `bert_jax prepare_beam`.
"""

from absl import flags

from bert_jax.data.prepare import prepare
from bert_jax.tools import cli
from bert_jax.tools.shared_flags import define_options, define_text_column

_INPUT = flags.DEFINE_string(
    "input", None, "Files, quoted globs, URLs or tfds:NAME, separated by commas.", required=True
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "Directory of a tokenizer, or a vocabulary file.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to create.", required=True)
_WORKERS = flags.DEFINE_integer("workers", 0, "Number of processes; 0 uses all cores.")
_TEXT_COLUMN = define_text_column()
_read_options = define_options()


def main() -> None:
    """Prepares the data set that the flags describe."""
    prepare(
        _INPUT.value,
        _TOKENIZER.value,
        _OUTPUT.value,
        _read_options(),
        _WORKERS.value,
        _TEXT_COLUMN.value,
    )


if __name__ == "__main__":
    cli.run(main)
