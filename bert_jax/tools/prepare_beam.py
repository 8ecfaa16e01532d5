# SPDX-License-Identifier: Apache-2.0
r"""Prepares text as a data set for pre-training on many machines, as `prepare_corpus` does, with Apache Beam.

    pip install 'bert_jax[beam]'
    bert_jax prepare_beam --input='text/*.txt.gz' --tokenizer=vocab --output=data128 \
        --pipeline_options='--direct_num_workers=2 --direct_running_mode=multi_processing'
    bert_jax prepare_beam --input='gs://bucket/text/*.txt.gz' --tokenizer=vocab \
        --output=gs://bucket/data128 --pipeline_options='--runner=DataflowRunner --project=P --region=R \
        --temp_location=gs://bucket/temp --sdk_container_image=IMAGE'

The data set is byte for byte what `prepare_corpus` makes of the same text with the same options. The first command runs
on this machine and is meant for trials: there, Beam keeps all data that moves between steps in memory. The second runs
on Dataflow; Beam's options can choose Flink or Spark instead. Their workers need this package with the extra, so name
an image that has both. All workers must be able to reach the inputs and the output.
"""

from absl import flags

from bert_jax.tools import cli
from bert_jax.tools.shared_flags import define_options, define_text_column

_INPUT = flags.DEFINE_string(
    "input", None, "Files, quoted globs, URLs, tfds:NAME, separated by commas.", required=True
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "Directory of a tokenizer, or a vocabulary file.", required=True
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "Directory or URL to create; it must not exist.", required=True
)
_PIPELINE_OPTIONS = flags.DEFINE_string(
    "pipeline_options", "", "Beam's options in one string, such as --runner=NAME."
)
_TEXT_COLUMN = define_text_column()
_read_options = define_options()


def main() -> None:
    """Prepares the data set that the flags describe."""
    from bert_jax.data.beam import prepare_with_beam  # an extra, and slow to import

    arguments = (_INPUT.value, _TOKENIZER.value, _OUTPUT.value, _read_options())
    prepare_with_beam(*arguments, _PIPELINE_OPTIONS.value, _TEXT_COLUMN.value)


if __name__ == "__main__":
    cli.run(main)
