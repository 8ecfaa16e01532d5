# SPDX-License-Identifier: Apache-2.0
"""Prints the passages of a corpus that are nearest to each query.

bert_jax search --checkpoint=DIR --corpus=FILE --queries=FILE|- --k=10

A line is a text, or a JSON object with "text" and, if it has them, "_id" and "title", as in BEIR's files. Passages
without an id are counted from 1. The search is exact. The corpus is read once, and may be larger than memory.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from absl import flags

from bert_jax.devices.allocator import reuse_freed_memory
from bert_jax.errors import InputError
from bert_jax.storage.writing import check_file
from bert_jax.tasks.json_values import parse_json
from bert_jax.tools import cli
from bert_jax.tools.lines import open_lines, open_writer, read_input
from bert_jax.tools.shared_flags import define_checkpoint, define_format, define_long_texts

if TYPE_CHECKING:
    from bert_jax.inference.search import Hit, Passage

CHECKPOINT = define_checkpoint()
CORPUS = flags.DEFINE_string("corpus", "", "file with one passage per line")
QUERIES = flags.DEFINE_string("queries", "-", "file with one query per line; - is standard input")
OUTPUT = flags.DEFINE_string("output", "-", "file to write what is found to; - is standard output")
is_json = define_format()
K = flags.DEFINE_integer("k", 10, "passages for each query", lower_bound=1)
LONG_TEXTS = define_long_texts()

_SHOWN = 100  # characters of a passage, to people


def main() -> None:
    """Prints the best passages for each query."""
    cli.check_given(CHECKPOINT, CORPUS)
    if OUTPUT.value != "-":
        check_file(OUTPUT.value, CORPUS.value, QUERIES.value)
    show = _json_of if is_json(OUTPUT.value) else _text_of
    reuse_freed_memory()
    from bert_jax.inference.search import search

    queries = [query.text for query in _read(QUERIES.value)]
    bert = cli.load_model(CHECKPOINT.value)
    results = search(bert, queries, _read(CORPUS.value), K.value, long_texts=LONG_TEXTS.value)
    with open_writer(OUTPUT.value) as write:
        for query, hits in zip(queries, results):
            write(show(query, hits))


def _read(path: str) -> Iterator["Passage"]:
    """Yields the texts of a file. Raises: InputError, with its line, at one that is not a text."""
    from bert_jax.inference.search import Passage

    with open_lines(path) as stream:
        for number, (where, line) in enumerate(read_input(stream, path), 1):
            if not line.startswith("{"):
                if line:
                    yield Passage(str(number), line)
                continue
            value = parse_json(line, where)
            assert isinstance(value, dict)
            if not isinstance(value.get("text"), str):
                raise InputError(f'{where}: the object has no "text" that is a text; write {{"text": "..."}}')
            title = value.get("title")
            text = f"{title} {value['text']}".strip() if isinstance(title, str) else value["text"]
            yield Passage(str(value.get("_id", number)), text)


def _json_of(query: str, hits: "list[Hit]") -> str:
    results = [{"id": hit.passage.id, "cosine": round(hit.cosine, 6), "text": hit.passage.text} for hit in hits]
    return json.dumps({"query": query, "found": results}, ensure_ascii=False)


def _text_of(query: str, hits: "list[Hit]") -> str:
    lines = [f"{hit.cosine:.4f}  {hit.passage.id}  {hit.passage.text[:_SHOWN]}" for hit in hits]
    return "\n    ".join([query, *lines])


if __name__ == "__main__":
    cli.run(main)
