# SPDX-License-Identifier: Apache-2.0
"""Prepares texts that belong together as a data set for finetune:embeddings, so that they need not fit in memory.

    bert_jax prepare_pairs --input=nq.jsonl,squad/ --weights=2,1 --tokenizer=MODEL/tokenizer --output=pairs

Each input, separated by commas, is a source: a file or quoted glob (JSON lines, TSV, CSV, Parquet, plain or
compressed), a directory with training data, hf://datasets/ORG/NAME, SQuAD's files or a BEIR directory. Columns are
those of finetune:embeddings. JSON lines, TSV and Parquet are read a part at a time. An epoch takes each example once,
or with --weights as many in all, divided over the sources by these. The output depends on the inputs and the options,
not on --workers. The same command continues a run that was stopped.

With --pipeline_options Apache Beam prepares them on many machines, as `prepare_beam` does text: a worker reads a file.
The data set has the same bytes; all workers must be able to reach the inputs and the output, which must not exist.
"""

from absl import flags

from bert_jax.errors import InputError
from bert_jax.tasks.embeddings.prepare import PairOptions, prepare_pairs
from bert_jax.tools import cli

INPUT = flags.DEFINE_string("input", None, "sources of pairs, separated by commas", required=True)
NAMES = flags.DEFINE_list("names", [], "a name for each source; empty takes those of the files")
WEIGHTS = flags.DEFINE_list(
    "weights", [], "a weight for each source; empty takes each example once"
)
TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "directory of the tokenizer of the model to train", required=True
)
OUTPUT = flags.DEFINE_string("output", None, "directory to create", required=True)
MAX_SEQ_LENGTH = flags.DEFINE_integer(
    "max_seq_length", 128, "maximum tokens per text, [CLS] and [SEP] too"
)
QUERY_PROMPT = flags.DEFINE_string("query_prompt", "", "written before an anchor or query")
PASSAGE_PROMPT = flags.DEFINE_string("passage_prompt", "", "written before positives and negatives")
PROMPT_TOKENS = flags.DEFINE_bool(
    "prompt_tokens", False, "prompts that the vocabulary has are tokens, for vectors of tokens"
)
TEXT_COLUMN = flags.DEFINE_string("text_column", "", "column of the anchor or of the first text")
SECOND_TEXT_COLUMN = flags.DEFINE_string("second_text_column", "", "column of the positive")
LABEL_COLUMN = flags.DEFINE_string("label_column", "", "column of the score of graded pairs")
NEGATIVE_COLUMNS = flags.DEFINE_string(
    "negative_columns", "", "columns of hard negatives, separated by commas"
)
WORKERS = flags.DEFINE_integer("workers", 0, "number of processes; 0 uses all cores")
PIPELINE_OPTIONS = flags.DEFINE_string(
    "pipeline_options",
    "",
    "Apache Beam's options in one string, such as --runner=NAME: its workers prepare the pairs",
)


def main() -> None:
    """Prepares the pairs that the flags describe."""
    options = PairOptions(
        max_seq_length=MAX_SEQ_LENGTH.value,
        query_prompt=QUERY_PROMPT.value,
        passage_prompt=PASSAGE_PROMPT.value,
        prompt_tokens=PROMPT_TOKENS.value,
        text_column=TEXT_COLUMN.value,
        second_text_column=SECOND_TEXT_COLUMN.value,
        label_column=LABEL_COLUMN.value,
        negative_columns=NEGATIVE_COLUMNS.value,
    )
    if PIPELINE_OPTIONS.value and WORKERS.value:
        raise InputError("--workers are for one machine, and a pipeline has its own; leave one out")
    try:
        weights = [float(weight) for weight in WEIGHTS.value]
    except ValueError:
        raise InputError(
            f"--weights={','.join(WEIGHTS.value)} are not numbers; correct them"
        ) from None
    arguments = INPUT.value, TOKENIZER.value, OUTPUT.value, options
    if PIPELINE_OPTIONS.value:
        from bert_jax.tasks.embeddings.beam import (
            prepare_pairs_with_beam,  # an extra, and slow to import
        )

        prepare_pairs_with_beam(*arguments, PIPELINE_OPTIONS.value, NAMES.value, weights)
    else:
        prepare_pairs(*arguments, NAMES.value, weights, WORKERS.value)


if __name__ == "__main__":
    cli.run(main)
