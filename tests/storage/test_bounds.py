# SPDX-License-Identifier: Apache-2.0
"""Small files that would take any amount of memory or time: compressed zeros, endless lines, pipes, flipped bytes."""

import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from builders import message, write_vocab
from read_models import load_hf_tokenizer

from bert_jax.data.sources import corpus, formats
from bert_jax.errors import InputError
from bert_jax.storage import files
from bert_jax.storage.files import zstd
from bert_jax.tasks import readers
from bert_jax.tasks.squad import read as squad_read
from bert_jax.text.sentencepieces import learn_sentencepieces
from bert_jax.tokenizing import load_tokenizer

MIB = 1 << 20


def write_zstd(path: Path, unit: bytes, count: int) -> str:
    """Writes `unit` `count` times over, compressed, without holding it all in memory."""
    with zstd.ZstdFile(path, "w") as writer:
        for _ in range(count):
            writer.write(unit)
    return str(path)


def peak_of(function, *arguments) -> tuple[str, int]:
    """Returns the message of the error that a function ends with, and the most bytes that Python held meanwhile."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as caught:
            function(*arguments)
        return str(caught.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def documents(path: str) -> int:
    return sum(1 for _ in corpus.iterate_documents(path))


@pytest.mark.slow
@pytest.mark.parametrize("start", [b"", b"text\n\n", b'{"text": "', b'<doc id="1">\n'])
def test_a_line_has_a_bound(tmp_path, start):
    (tmp_path / "x.zst").write_bytes(zstd.compress(start))
    with zstd.ZstdFile(tmp_path / "x.zst", "a") as writer:
        for _ in range(200):
            writer.write(b"word " * (MIB // 5))
    told, peak = peak_of(documents, str(tmp_path / "x.zst"))
    assert f"x.zst, line {start.count(10) + 1}: a line has more than 64 MiB; part it" in told
    assert peak < 4 * formats.LONGEST_LINE and (tmp_path / "x.zst").stat().st_size < 64 << 10


@pytest.mark.parametrize(
    ("start", "line"), [(b"", b"a\n"), (b'<doc id="1">\n', b"a\n"), (b'<doc id="1">\n', b"\n"), (b"", b"word word\n")]
)
def test_a_document_has_a_bound(tmp_path, monkeypatch, start, line):
    monkeypatch.setattr(formats, "LONGEST_DOCUMENT", MIB)
    write_zstd(tmp_path / "lines.zst", line * (MIB // 64 // len(line)), 64)
    (tmp_path / "x.zst").write_bytes(zstd.compress(start) + (tmp_path / "lines.zst").read_bytes())
    told, peak = peak_of(documents, str(tmp_path / "x.zst"))
    assert "has more than 1 MiB; part" in told
    assert peak < 4 * MIB


def test_a_document_of_json_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LONGEST_DOCUMENT", MIB)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n' + json.dumps({"text": "a\n" * 100_000}) + "\n")
    assert "x.jsonl, line 2: the document" in message(documents, str(tmp_path / "x.jsonl"))


def test_documents_are_counted_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LONGEST_DOCUMENT", 1000)
    for name, text in (
        ("x.txt", "line\nline\n\n" * 100),
        ("x.wiki", '<doc id="1">\nline\nline\n</doc>\n' * 100),
        ("x.jsonl", '{"text": "line\\nline"}\n' * 100),
    ):
        (tmp_path / name).write_text(text)
        assert documents(str(tmp_path / name)) == 100


def test_a_plain_file_is_cut_where_lines_end_within_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LONGEST_LINE", 1000)
    (tmp_path / "x.txt").write_text("a b\n\n" * 1000 + "word " * 300 + "\n\na b\n" * 1000)
    with pytest.raises(InputError, match=r"x.txt(, line 2001)?: a line has more than 0 MiB"):
        list(corpus.iterate_documents(str(tmp_path / "x.txt")))
    assert "x.txt: a line has more than 0 MiB" in message(corpus.plan_pieces, str(tmp_path / "x.txt"), 5010)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train.tsv", "train.json", "train.jsonl", "train.csv"])
@pytest.mark.parametrize("compress", ["zst", "gz"])
def test_data_of_tasks_has_a_bound_by_its_size(tmp_path, name, compress):
    path = tmp_path / f"{name}.{compress}"
    if compress == "zst":
        write_zstd(path, bytes(MIB), 100)
    else:
        path.write_bytes(gzip.compress(bytes(100 * MIB), 1))
    read = squad_read.read_squad_file if name == "train.json" else readers.read_table
    told, peak = peak_of(read, str(path))
    most = max(64, 200 * path.stat().st_size >> 20)
    assert told == f"{path} holds more than {most} MiB, far more than compressed text does; decompress it"
    assert peak < 3 * 110 * MIB


def test_a_few_compressed_bytes_are_decompressed_in_parts(tmp_path):
    """Before, the library made all of them in one go, however little was read."""
    path = write_zstd(tmp_path / "x", bytes(MIB), 300)
    assert os.path.getsize(path) < 32 << 10
    tracemalloc.start()
    with files.open_binary(path) as stream:
        assert stream.read(10) == bytes(10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80 * MIB


def test_text_that_compresses_well_is_read(tmp_path):
    (tmp_path / "x").write_bytes(zstd.compress(b"a\tb\n" * MIB))
    assert len(files.read_whole(str(tmp_path / "x"), "x")) == 4 * MIB


@pytest.mark.parametrize("name", ["vocab.txt", "spiece.model", "tokenizer_config.json"])
def test_a_pipe_is_no_vocabulary(tmp_path, name):
    """Before, what opened it waited for a writer for ever."""
    os.mkfifo(tmp_path / name)
    paths = [tmp_path, tmp_path / name]
    if name == "tokenizer_config.json":
        write_vocab(tmp_path / "vocab.txt")
        paths = [tmp_path]
    for path in paths:
        with pytest.raises(InputError, match=rf"{name} is not a file[,;] .*give a file"):
            load_tokenizer(path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "T" * 300_000}),
        ("tokenizer.json", {}),
        ("tokenizer.json", {"normalizer": {"type": "z" * 300_000}}),
        ("tokenizer.json", {"pre_tokenizer": {"type": ["z"] * 100_000}}),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_said_in_a_few_words(tmp_path, file, content):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, "x" * 300_000]) + "\n")
    vocab = {token: index for index, token in enumerate([*special, "y" * 300_000])}
    backend = {"model": {"type": "WordPiece", "vocab": vocab}, "normalizer": {"type": "BertNormalizer"}}
    backend |= {"pre_tokenizer": {"type": "BertPreTokenizer"}}
    (tmp_path / file).write_text(json.dumps(backend | content))
    told = message(load_hf_tokenizer, tmp_path).replace(str(tmp_path), "")  # a path is as long as the machine's
    assert len(told) < 400


FLIPS = """
import random, sys, time
from bert_jax.errors import InputError
from bert_jax.text.sentencepieces import SentencePieces
content, rng, slowest = open(sys.argv[1], "rb").read(), random.Random(int(sys.argv[2])), 0.0
for _ in range(int(sys.argv[3])):
    damaged = bytearray(content)
    damaged[rng.randrange(min(len(content), 60_000) if rng.random() < 0.8 else len(content))] ^= 1 << rng.randrange(8)
    started = time.monotonic()
    try:
        SentencePieces(bytes(damaged), True)("the man sat by the river")
    except InputError as error:
        assert "\\n" not in str(error)
    slowest = max(slowest, time.monotonic() - started)
print(slowest)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_damaged_sentencepiece_model_is_answered_soon(repository, tmp_path, kind):
    lines = [
        line for path in sorted((repository / "docs").glob("*.md")) for line in path.read_text("utf-8").split("\n")
    ]
    (tmp_path / "model").write_bytes(learn_sentencepieces(lines, 2000, kind, lowercase=True).content)
    command = [sys.executable, "-c", FLIPS, str(tmp_path / "model"), "0", "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=repository)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 5
