# SPDX-License-Identifier: Apache-2.0
"""Evaluates a checkpoint on held-out text, with metrics that can be compared between runs.

    bert_jax evaluate --checkpoint=DIR --data=DATA
    bert_jax evaluate --checkpoint=DIR --input='text/*.txt'

Prints one JSON object: loss, perplexity and accuracy of masked language modelling, with the same masks for every model;
the same metrics of next sentence prediction, if data and model have it; and bits per byte of text. For a causal model,
they are loss, perplexity and accuracy of the next token. All devices of this process are used.
"""

import json

from absl import flags

from bert_jax.devices.allocator import reuse_freed_memory
from bert_jax.errors import InputError
from bert_jax.storage.places import to_place
from bert_jax.storage.writing import check_file, write_json
from bert_jax.tools import cli
from bert_jax.tools.shared_flags import define_checkpoint, define_dtype

CHECKPOINT = define_checkpoint()
DATA = flags.DEFINE_string(
    "data", "", "a directory made by prepare_corpus with the tokenizer of the model, or its URL"
)
SPLIT = flags.DEFINE_enum(
    "split", "heldout", ["heldout", "train"], "split of --data to evaluate on"
)
INPUT = flags.DEFINE_string(
    "input", "", "text instead of --data, in any format of prepare_corpus; all of it is read"
)
NEXT_SENTENCE = flags.DEFINE_enum(
    "next_sentence",
    "nsp",
    ["nsp", "sop", "none"],
    "with --input: next sentence (nsp), sentence order (sop) or neither",
)
MAX_SEQ_LENGTH = flags.DEFINE_integer(
    "max_seq_length",
    0,
    "with --input: tokens per row; 0 takes 128, or the model's maximum if smaller",
)
CACHE_GB = flags.DEFINE_float(
    "cache_gb",
    16.0,
    "with --data=URL: maximum gigabytes of rows kept on the local disk",
    lower_bound=0.0,
)
DTYPE = define_dtype()
OUTPUT = flags.DEFINE_string("output", "", "file to write the same JSON to")


def main() -> None:
    """Prints the metrics."""
    cli.check_given(CHECKPOINT)
    if bool(DATA.value) == bool(INPUT.value):
        raise InputError("give --data, a prepared data set, or --input, text; one of them")
    given, unused = (
        ("data", ("next_sentence", "max_seq_length"))
        if DATA.value
        else ("input", ("split", "cache_gb"))
    )
    if wrong := [name for name in unused if flags.FLAGS[name].present]:
        raise InputError(f"--{wrong[0]} has no effect with --{given}; leave it out")
    if OUTPUT.value:
        check_file(OUTPUT.value, INPUT.value)
    # before JAX starts its threads, which would already have heaps of their own
    reuse_freed_memory()
    from bert_jax.inference.evaluate import evaluate_pretrained, evaluate_text

    bert = cli.load_model(CHECKPOINT.value, DTYPE.value)
    if DATA.value:
        metrics = evaluate_pretrained(bert, DATA.value, SPLIT.value, cache_gb=CACHE_GB.value)
    else:
        metrics = evaluate_text(bert, INPUT.value, NEXT_SENTENCE.value, MAX_SEQ_LENGTH.value)
    record = {
        "checkpoint": CHECKPOINT.value,
        "trained": bert.trained,
        "compute_dtype": bert.config.compute_dtype,
    }
    result = record | {"data": DATA.value or INPUT.value} | metrics
    print(json.dumps(result, indent=1, sort_keys=True))
    if OUTPUT.value:
        write_json(to_place(OUTPUT.value), result)


if __name__ == "__main__":
    cli.run(main)
