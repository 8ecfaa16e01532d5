# SPDX-License-Identifier: Apache-2.0
"""Damaged vocabularies and text: read, or refused in one line."""

import gzip
import itertools
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import write_corpus, write_vocab
from conftest import ROOT
from described import write_described
from fuzzing import TIMES, Reader, make_tests
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.data.sentences import split_lines
from bert_jax.data.sources.corpus import contents_of, iterate_documents
from bert_jax.storage.files import zstd
from bert_jax.text.sentencepieces import learn_sentencepieces
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.wordpiece import WordPiece
from bert_jax.tokenizing import load_tokenizer
from bert_jax.tools.lines import open_lines, parse_line, read_input, read_passages

TEXT = 'The "ban" ran [MASK] naïve 漢字 Straße 9.5 ' + "b" * 300
WIKI = "".join(
    f'<doc id="{number}" url="https://x.org/wiki?curid={number}" title="Ban &amp; {number}">\nBan &amp; {number}\n\n'
    "The ban ran.\nIt sat.\n\n</doc>\n"
    for number in range(4)
)
JSON_LINES = "".join(
    json.dumps(
        {"url": f"https://x.org/wiki?curid={number}", "title": "Ban", "text": "Ban\nThe ban &lt; ran.\n\nIt sat."}
    )
    + "\n"
    for number in range(4)
)


def use_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    ids, spans = tokenizer.encode_with_offsets(TEXT)
    assert len(ids) == len(spans) and len(tokenizer.word_starts) == tokenizer.vocab_size
    tokenizer.decode(tokenizer.encode(TEXT, allow_special=True))
    assert len(tokenizer.fingerprint) == 64
    tokenizer.save(path.parent / "saved")


def write_wordpiece(directory: Path) -> None:
    write_vocab(directory / "vocab.txt")
    load_tokenizer(directory / "vocab.txt", lowercase=True).save(directory / "tokenizer")


def write_sentencepiece(directory: Path) -> None:
    lines = [f"The {word} ran to the old town, as {word}s do: naïve." for word in "ban bot kit ter los mun pir".split()]
    Tokenizer(learn_sentencepieces(lines, 36, "unigram")).save(directory / "tokenizer")


def write_albert(directory: Path) -> None:
    write_sentencepiece(directory)
    names = {"tokenizer_class": "AlbertTokenizer", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    (directory / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))


def use_text(path: Path) -> None:
    assert sum(len(document) for document in iterate_documents(str(path)))
    assert contents_of(str(path))


def use_lines(path: Path) -> None:
    with open_lines(str(path)) as stream:
        for where, line in read_input(stream, str(path)):
            parse_line(line, where, False)


def write_parquet(directory: Path) -> None:
    table = pa.table({"id": range(40), "text": [f"The ban {number} ran.\nIt sat." for number in range(40)]})
    pq.write_table(table, directory / "x.parquet", row_group_size=15)


def write(name: str, content: str | bytes):
    return lambda directory: (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)


READERS = [
    Reader("vocab.txt", write_wordpiece, lambda path: use_tokenizer(path / "vocab.txt"), ("vocab.txt",), 500),
    Reader("tokenizer", write_wordpiece, lambda path: use_tokenizer(path / "tokenizer"), ("tokenizer/*.json",), 300),
    Reader(
        "sentencepiece", write_sentencepiece, lambda path: use_tokenizer(path / "tokenizer"), ("tokenizer/*",), 1000
    ),
    Reader("pieces", write_albert, lambda path: use_tokenizer(path / "tokenizer"), ("tokenizer/*",), 300),
    Reader(
        "tokenizer.json",
        lambda path: write_described(path / "tokenizer", "roberta"),
        lambda path: use_tokenizer(path / "tokenizer"),
        ("tokenizer/*",),
        600,
    ),
    Reader(
        "text", lambda path: write_corpus(path / "x.txt", 5), lambda path: use_text(path / "x.txt"), ("x.txt",), 250
    ),
    Reader("wiki", write("x.txt", WIKI), lambda path: use_text(path / "x.txt"), ("x.txt",), 400),
    Reader("jsonl", write("x.jsonl", JSON_LINES), lambda path: use_text(path / "x.jsonl"), ("x.jsonl",), 400),
    Reader("gzip", write("x.gz", gzip.compress(WIKI.encode())), lambda path: use_text(path / "x.gz"), ("x.gz",), 300),
    Reader(
        "zstd",
        write("x.zst", zstd.compress(WIKI.encode())),
        lambda path: use_text(path / "x.zst"),
        ("x.zst",),
        300,
    ),
    Reader("parquet", write_parquet, lambda path: use_text(path / "x.parquet"), ("x.parquet",), 1000),
    Reader(
        "lines",
        write("x.jsonl", '{"text": "ban"}\n["ban", "ran"]\n{"question": "?", "context": "x"}\n'),
        lambda path: use_lines(path / "x.jsonl"),
        ("x.jsonl",),
        250,
    ),
    Reader(
        "passages",
        write("x.txt", '{"_id": 1, "title": "t", "text": "ban"}\n\n{a} ban\nran\n'),
        lambda path: list(read_passages(str(path / "x.txt"))),
        ("x.txt",),
        100,
    ),
]

test_some_damage, test_much_damage = make_tests(READERS)

# What splitters of sentences look at: capitals, full stops, marks in pairs, and all that is a blank somewhere.
_BLANKS = [chr(code) for code in range(0x3001) if chr(code).isspace() and code != ord("\n")]  # a line has no end
_PARTS = [
    *"ABZaz09.!?,;:'\"()[]…。！？「」«»“”-ÉéΣДд漢あ😀\u0301\u200b\u00ad\0",
    *_BLANKS,
    " ",
    " ",
    *"Dr. z.B. U.S. e.g. 3.5 ... ।".split(),
]
_LANGUAGES = "en de fr es it ru ja zh hi ar am hy kk bn el pl nl my xx".split()


def check_sentences(cases: int) -> None:
    @settings(max_examples=cases, derandomize=True, database=None, deadline=None)
    @given(
        st.lists(st.sampled_from(_PARTS), max_size=20).map("".join), st.integers(1, 400), st.sampled_from(_LANGUAGES)
    )
    def any_text_is_split_without_loss(text: str, times: int, language: str) -> None:
        for line in (text, text * times):
            sentences, num_failed = split_lines([line], language)
            assert "".join("".join(sentences).split()) == "".join(line.split())
            assert num_failed == 0 and all(sentence.strip() == sentence != "" for sentence in sentences)

    any_text_is_split_without_loss()


def test_some_sentences() -> None:
    check_sentences(200)


@pytest.mark.slow
def test_many_sentences() -> None:
    check_sentences(4000 * TIMES)


# Words are looked up by 16 bytes or whole; NUL bytes are what a key is padded with.
_WORDS = [
    "a",
    "bat",
    "\0",
    "\0\0\0",
    "\0" * 17,
    "a\0",
    "\0a",
    "漢字",
    "é",
    "a-b",
    "x" * 16,
    "x" * 17,
    "y" * 40,
    "z" * 300,
    "\n",
    "\u00a0",
]


def check_words(cases: int) -> None:
    tokenizer = load_tokenizer(ROOT / "tests/fixtures/tokenizer")
    text = st.lists(st.sampled_from(_WORDS), max_size=10).map(" ".join)
    batches = st.lists(st.tuples(st.lists(text, max_size=4), st.integers(0, 3000), st.integers(1, 10**6)), max_size=4)

    @settings(max_examples=cases, derandomize=True, database=None, deadline=None)
    @given(batches)
    def arrays_are_the_ids_of_single_texts(batches: list[tuple[list[str], int, int]]) -> None:
        encoder = WordPiece(tokenizer.vocab, tokenizer.pieces.normalizer)  # whose table is small
        for texts, count, factor in batches:
            texts = [*texts, " ".join(f"{number * factor:x}" for number in range(count))]  # so that the table grows
            ids, counts = encoder.encode_arrays(texts)
            expected = tokenizer.encode_batch(texts)
            assert counts.tolist() == list(map(len, expected)) and ids.tolist() == [*itertools.chain(*expected)]

    arrays_are_the_ids_of_single_texts()


def test_some_words() -> None:
    check_words(60)


@pytest.mark.slow
def test_many_words() -> None:
    check_words(2000 * TIMES)
