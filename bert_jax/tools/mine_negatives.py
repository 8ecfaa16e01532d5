# SPDX-License-Identifier: Apache-2.0
"""Finds hard negatives for pairs: passages near a query that do not belong to it.

bert_jax mine_negatives --checkpoint=DIR --pairs=FILE --output=FILE.jsonl --num_negatives=3

--pairs is read as `finetune:embeddings` reads its training data: a table, SQuAD's file, a BEIR directory, a data set of
the hub. Negatives are looked for among all positives and the passages of --corpus, or of the BEIR directory. The output
has a line for each pair: "query", "positive", "negative" (a list, the most similar first), and with --scores "scores"
(of the positive, then of each negative), which training takes for a teacher's. It is training data as it is.
"""

import json
import os
import sys
from typing import TYPE_CHECKING

from absl import flags

from bert_jax.devices.allocator import reuse_freed_memory
from bert_jax.errors import InputError
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.storage.stores import is_remote
from bert_jax.storage.writing import check_file
from bert_jax.tools import cli
from bert_jax.tools.lines import open_writer, read_passages
from bert_jax.tools.shared_flags import define_checkpoint, define_dtype

if TYPE_CHECKING:
    from bert_jax.tasks.embeddings.beir import TextsExamples

CHECKPOINT = define_checkpoint()
PAIRS = flags.DEFINE_string("pairs", "", "pairs of a query and a passage that belongs to it")
CORPUS = flags.DEFINE_string(
    "corpus", "", "file with one more passage per line, as `search` reads it"
)
OUTPUT = flags.DEFINE_string(
    "output", "", "file to write pairs with negatives to; - is standard output"
)
NUM_NEGATIVES = flags.DEFINE_integer("num_negatives", 3, "negatives of a pair", lower_bound=1)
RANGE_MIN = flags.DEFINE_integer(
    "range_min", 0, "passages left out, of the nearest that are none of the query's"
)
RANGE_MAX = flags.DEFINE_integer(
    "range_max", 0, "passages to look at, with those; 0 is what is usual"
)
ABSOLUTE_MARGIN = flags.DEFINE_float(
    "absolute_margin", None, "how far below the score of the positive a negative has to be"
)
RELATIVE_MARGIN = flags.DEFINE_float("relative_margin", None, "the same, as a share of that score")
MAX_SCORE = flags.DEFINE_float("max_score", None, "largest score of a negative")
MIN_SCORE = flags.DEFINE_float("min_score", None, "smallest score of a negative")
SAMPLING = flags.DEFINE_enum(
    "sampling", "top", ["top", "random"], "which of those that may be negatives"
)
SEED = flags.DEFINE_integer("seed", 0, "of --sampling=random")
JUDGE = flags.DEFINE_string("judge", "", "a reranker, whose scores then count in place of cosines")
WITH_SCORES = flags.DEFINE_bool(
    "scores", False, "write the scores too, which training takes for a teacher's"
)
DTYPE = define_dtype()


def main() -> None:
    """Writes each pair with its negatives."""
    cli.check_given(CHECKPOINT, PAIRS, OUTPUT)
    if OUTPUT.value != "-":
        check_file(OUTPUT.value, PAIRS.value, CORPUS.value)
    # before JAX starts its threads
    reuse_freed_memory()
    from bert_jax.inference.negatives import Limits, load_judge, mine_negatives
    from bert_jax.tasks.embeddings.beir import beir_place, read_corpus

    limits = Limits(
        range_min=RANGE_MIN.value,
        range_max=RANGE_MAX.value,
        absolute_margin=ABSOLUTE_MARGIN.value,
        relative_margin=RELATIVE_MARGIN.value,
        max_score=MAX_SCORE.value,
        min_score=MIN_SCORE.value,
    )
    limits.check(NUM_NEGATIVES.value)
    pairs = _pairs()
    if CORPUS.value:
        corpus = [text for _, text in read_passages(CORPUS.value) if text]
    else:
        place = beir_place(PAIRS.value, "train")
        corpus = read_corpus(place) if place else []
    bert = cli.load_model(CHECKPOINT.value, DTYPE.value)
    if bert.embedding is not None and bert.embedding.embedding.kind != "dense":
        raise InputError(
            f"--checkpoint={CHECKPOINT.value} has vectors of tokens or of words; give a model with one of a text"
        )
    judge = None
    if JUDGE.value:
        judge = load_judge(cli.load_model(JUDGE.value, DTYPE.value), f"--judge={JUDGE.value}")
    mined = mine_negatives(
        bert,
        [(example.texts[0], example.texts[1]) for example in pairs],
        corpus=corpus,
        num_negatives=NUM_NEGATIVES.value,
        limits=limits,
        sampling=SAMPLING.value,
        seed=SEED.value,
        judge=judge,
    )
    with open_writer(OUTPUT.value) as write:
        for pair in mined:
            record = {"query": pair.query, "positive": pair.positive, "negative": pair.negatives}
            if WITH_SCORES.value:
                record["scores"] = [round(score, 6) for score in pair.scores]
            write(json.dumps(record, ensure_ascii=False))
    found = sum(len(pair.negatives) for pair in mined)
    about = f"{len(mined):,} pairs have {found:,} negatives, {found / len(mined):.2f} each"
    print(about, file=sys.stderr)


def _pairs() -> "TextsExamples":
    """Returns the pairs. Raises: InputError if there is none, or if they are graded or texts alone."""
    from bert_jax.tasks.embeddings.read import are_alone, is_graded, read_texts
    from bert_jax.tasks.readers import is_one_place

    settings = TaskConfig(name="embeddings", embedding=EmbeddingConfig())
    source = PAIRS.value
    if os.path.isfile(source) or (is_remote(source) and is_one_place(source)):
        # also one that is called dev.jsonl
        source = f"train={source}"
    pairs = read_texts(settings, source, "train")
    if not pairs:
        raise InputError(
            f"--pairs={PAIRS.value} has no pair; give a file, or a directory with train"
        )
    if is_graded(pairs) or are_alone(pairs):
        kind = "graded pairs" if is_graded(pairs) else "texts alone"
        raise InputError(
            f"--pairs={PAIRS.value} has {kind}, which have no positives; give columns query and positive"
        )
    return pairs


if __name__ == "__main__":
    cli.run(main)
