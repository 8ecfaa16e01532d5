# SPDX-License-Identifier: Apache-2.0
"""Prints the passages of a corpus that are nearest to each query.

bert_jax search --checkpoint=DIR --corpus=FILE --queries=FILE|- --k=10

A line is a text, or a JSON object with "text" and, if it has them, "_id" and "title", as in BEIR's files. What has no
id has the number of its line, from 1. Each line of queries has a result, which is empty for a blank one; blank passages
are not found. The search is exact. The corpus is read once, and may be larger than memory.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from absl import flags

from bert_jax.data.sources.formats import is_json_lines
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

    queries = list(_read(QUERIES.value))
    asked = [query.text for query in queries if query.text]
    bert = cli.load_model(CHECKPOINT.value)
    corpus = (passage for passage in _read(CORPUS.value) if passage.text)
    results = iter(search(bert, asked, corpus, K.value, long_texts=LONG_TEXTS.value))
    with open_writer(OUTPUT.value) as write:
        for query in queries:
            write(show(query, next(results) if query.text else []))


def _read(path: str) -> Iterator["Passage"]:
    """Yields the texts of a file, one a line. Raises: InputError, with its line, at one that is not a text."""
    from bert_jax.inference.search import Passage

    with open_lines(path) as stream:
        for number, (where, line) in enumerate(read_input(stream, path), 1):
            value = _object_of(line, where, path)
            if value is None:
                yield Passage(str(number), line)
                continue
            if not isinstance(value.get("text"), str):
                raise InputError(f'{where}: the object has no "text" that is a text; write {{"text": "..."}}')
            title = value.get("title")
            text = f"{title} {value['text']}" if isinstance(title, str) else value["text"]
            given = value.get("_id")
            yield Passage(str(number) if given is None else given, text.strip())


def _object_of(line: str, where: str, path: str) -> dict[str, Any] | None:
    """Returns the object of a line; None if it is a text, which may begin with a brace, but not in a file of JSON."""
    if not line.startswith("{"):
        return None
    try:
        return parse_json(line, where)
    except InputError:
        if is_json_lines(path):
            raise
        return None


def _json_of(query: "Passage", hits: "list[Hit]") -> str:
    results = [{"id": hit.passage.id, "cosine": round(hit.cosine, 6), "text": hit.passage.text} for hit in hits]
    return json.dumps({"id": query.id, "query": query.text, "found": results}, ensure_ascii=False)


def _text_of(query: "Passage", hits: "list[Hit]") -> str:
    lines = [f"{hit.cosine:.4f}  {_id_of(hit.passage)}  {hit.passage.text[:_SHOWN]}" for hit in hits]
    return "\n    ".join([query.text, *lines])


def _id_of(passage: "Passage") -> str:
    return passage.id if isinstance(passage.id, str) else json.dumps(passage.id, ensure_ascii=False)


if __name__ == "__main__":
    cli.run(main)
