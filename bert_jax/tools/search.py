# SPDX-License-Identifier: Apache-2.0
"""Prints the passages of a corpus that are nearest to each query.

bert_jax search --checkpoint=DIR --corpus=FILE --queries=FILE|- --k=10
bert_jax search --checkpoint=DIR --corpus=FILE --rerank=maxsim|pairs --rerank_model=DIR --candidates=100

--corpus is a file, or a directory of vectors that `extract_features --output=DIR/` has written, which is searched.

With --rerank the passages that are found first, as many as --candidates, are ordered by another model: by vectors of
tokens, or by a reranker, which reads the query and the passage as a pair.

An output whose name ends in .trec is a TREC run: query, Q0, passage, rank, score, tag.

A line is a text, or a JSON object with "text" and, if it has them, "_id" and "title", as in BEIR's files; a CSV, TSV or
Parquet file has columns of these names. What has no id has the number of its line, from 1. Each line of queries has a
result, which is empty for a blank one; blank passages are not found. The search is exact. The corpus is read once, and
may be larger than memory.
"""

import json
import os
from functools import partial
from typing import TYPE_CHECKING

from absl import flags

from bert_jax.data.vectors import BITS, Vectors, open_vectors
from bert_jax.devices.allocator import reuse_freed_memory
from bert_jax.errors import InputError
from bert_jax.storage.resolve import MANIFEST, resolve
from bert_jax.storage.writing import check_file
from bert_jax.tools import cli
from bert_jax.tools.lines import open_writer, read_passages
from bert_jax.tools.shared_flags import (
    define_checkpoint,
    define_dtype,
    define_format,
    define_long_texts,
)

if TYPE_CHECKING:
    from bert_jax.inference.search import Hit, Passage

CHECKPOINT = define_checkpoint()
CORPUS = flags.DEFINE_string(
    "corpus", "", "file with one passage per line, or a directory of vectors"
)
QUERIES = flags.DEFINE_string("queries", "-", "file with one query per line; - is standard input")
OUTPUT = flags.DEFINE_string("output", "-", "file to write what is found to; - is standard output")
is_json = define_format()
K = flags.DEFINE_integer("k", 10, "passages for each query", lower_bound=1)
RERANK = flags.DEFINE_enum(
    "rerank",
    None,
    ["maxsim", "pairs"],
    "score what is found anew, by vectors of tokens (maxsim) or by a reranker (pairs)",
)
RERANK_MODEL = flags.DEFINE_string("rerank_model", "", "the model that does it, as --checkpoint")
CANDIDATES = flags.DEFINE_integer(
    "candidates",
    100,
    "passages for each query that it scores, or whose codes of one bit are multiplied by the query",
    lower_bound=1,
)
DTYPE = define_dtype()
LONG_TEXTS = define_long_texts()

_SHOWN = 100  # characters of a passage, to people


def main() -> None:
    """Prints the best passages for each query."""
    cli.check_given(CHECKPOINT, CORPUS)
    if bool(RERANK.value) != bool(RERANK_MODEL.value):
        raise InputError("--rerank and --rerank_model go together; give both, or neither")
    if OUTPUT.value != "-":
        check_file(OUTPUT.value, CORPUS.value, QUERIES.value)
    show = _json_of if is_json(OUTPUT.value) else _text_of
    if OUTPUT.value.endswith(".trec"):
        show = _run_of
    # before JAX starts its threads
    reuse_freed_memory()
    from bert_jax.inference.late_interaction import is_of_tokens
    from bert_jax.inference.negatives import load_judge
    from bert_jax.inference.search import Passage, rerank_by_maxsim, rerank_by_pairs, search

    queries = [Passage(*query) for query in read_passages(QUERIES.value)]
    if show is _run_of:
        for query in queries:
            _column_of(query)
    asked = [query.text for query in queries if query.text]
    bert = cli.load_model(CHECKPOINT.value, DTYPE.value)
    if "data" in resolve(CORPUS.value).kinds:
        corpus = open_vectors(CORPUS.value)
    elif os.path.isdir(CORPUS.value):
        raise InputError(
            f"--corpus={CORPUS.value} is a directory without {MANIFEST}; give a file, or vectors that extract_features "
            "has finished"
        )
    else:
        corpus = (Passage(id_, text) for id_, text in read_passages(CORPUS.value) if text)
    judge = cli.load_model(RERANK_MODEL.value, DTYPE.value) if RERANK.value else None
    rerank = None
    if judge is not None and RERANK.value == "pairs":
        scores_of = load_judge(judge, f"--rerank_model={RERANK_MODEL.value}", LONG_TEXTS.value)
        rerank = partial(rerank_by_pairs, scores_of)
    elif judge is not None:
        if not is_of_tokens(judge):
            raise InputError(
                f"--rerank_model={RERANK_MODEL.value} has no vectors of tokens; give a multi_vector model"
            )
        rerank = partial(rerank_by_maxsim, judge, long_texts=LONG_TEXTS.value)
    most = K.value if judge is None else max(K.value, CANDIDATES.value)
    found = search(
        bert, asked, corpus, most, long_texts=LONG_TEXTS.value, candidates=CANDIDATES.value
    )
    if rerank is not None:
        found = rerank(queries=asked, found=found, k=K.value)
    settings = bert.embedding
    is_cosine = judge is None and (settings is None or settings.embedding.kind == "dense")
    if isinstance(corpus, Vectors):
        is_cosine = is_cosine and corpus.manifest["precision"] not in BITS
    results = iter(found)
    name = "cosine" if is_cosine else "score"
    with open_writer(OUTPUT.value) as write:
        for query in queries:
            hits = next(results) if query.text else []
            if hits or show is not _run_of:
                write(show(query, hits, name))


def _json_of(query: "Passage", hits: "list[Hit]", name: str) -> str:
    results = [
        {"id": hit.passage.id, name: round(hit.score, 6), "text": hit.passage.text} for hit in hits
    ]
    return json.dumps({"id": query.id, "query": query.text, "found": results}, ensure_ascii=False)


def _text_of(query: "Passage", hits: "list[Hit]", name: str) -> str:
    lines = [f"{hit.score:.4f}  {_id_of(hit.passage)}  {hit.passage.text[:_SHOWN]}" for hit in hits]
    return "\n    ".join([query.text, *lines])


def _run_of(query: "Passage", hits: "list[Hit]", name: str) -> str:
    asked = _column_of(query)
    lines = []
    for rank, hit in enumerate(hits, 1):
        lines.append(f"{asked} Q0 {_column_of(hit.passage)} {rank} {hit.score:.6f} bert_jax")
    return "\n".join(lines)


def _column_of(passage: "Passage") -> str:
    """Returns the id of a passage or query. Raises: InputError if it is no column of a run."""
    name = _id_of(passage)
    if len(name.split()) != 1:
        raise InputError(
            f"the id {name!r:.60} has blanks, which part the columns of a run; write .jsonl"
        )
    return name


def _id_of(passage: "Passage") -> str:
    return passage.id if isinstance(passage.id, str) else json.dumps(passage.id, ensure_ascii=False)


if __name__ == "__main__":
    cli.run(main)
