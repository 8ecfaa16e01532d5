# SPDX-License-Identifier: Apache-2.0
"""The command gives the same bytes every time, and one clear line when it cannot."""

import gzip
import os

import pytest
from commands import run_python

from bert_jax import load_tokenizer

TEXT = "\n\n".join(
    f"The lower towers of number {number} were newer than the widest flowers.\nNobody knew why, Élan said: 北京!"
    for number in range(200)
)


def build_vocab(*flags, **environment):
    return run_python(["-m", "bert_jax.tools.build_vocab", *flags], environment={**os.environ, **environment})


def failure(*flags) -> str:
    """Returns the one line of a run that must fail."""
    result = build_vocab(*flags)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stdout == ""
    return result.stderr


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "text.txt"


def test_same_bytes_in_three_processes_however_the_text_is_cut(tmp_path, text):
    documents = TEXT.split("\n\n")
    for part in range(3):
        data = "\n\n".join(documents[part * 67 : (part + 1) * 67]).encode()
        (tmp_path / f"part-{part}.gz").write_bytes(gzip.compress(data))
    contents = set()
    for run, (source, seed) in enumerate([(text, "0"), (text, "1"), (tmp_path / "part-*.gz", "2")]):
        result = build_vocab(f"--input={source}", f"--output={tmp_path}/{run}", "--vocab_size=100", PYTHONHASHSEED=seed)
        assert result.returncode == 0, result.stderr
        assert "100 tokens" in result.stdout
        assert "200 documents" in result.stdout
        contents.add((tmp_path / str(run) / "vocab.txt").read_bytes())
    assert len(contents) == 1
    tokenizer = load_tokenizer(tmp_path / "0")
    assert (tokenizer.vocab_size, tokenizer.lowercase, tokenizer.strip_accents) == (100, True, True)
    assert tokenizer.tokenize("The towers") == ["the", "towers"]
    assert tokenizer.unk_id not in tokenizer.encode(TEXT)


def test_another_vocabulary_is_not_overwritten_unasked(tmp_path, text):
    flags = (f"--input={text}", f"--output={tmp_path}/0", "--vocab_size=300", "--kind=bytes", "--cased")
    result = build_vocab(*flags)
    assert result.returncode == 0, result.stderr
    assert "300 tokens from 400 of 400 lines in 200 documents" in result.stdout
    assert load_tokenizer(tmp_path / "0").tokenize("The 北")[0] == "ĠThe"
    assert "it was there already" in build_vocab(*flags).stdout
    flags = (f"--input={text}", f"--output={tmp_path}/0", "--vocab_size=60", "--kind=sentencepiece")
    assert "holds a different vocabulary" in failure(*flags, "--character_coverage=1")
    assert build_vocab(*flags, "--character_coverage=1", "--overwrite").returncode == 0
    assert load_tokenizer(tmp_path / "0").kind == "sentencepiece" and not (tmp_path / "0" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--kind=sentencepiece", "--vocab_size=9"], "--character_coverage"),
        (["--kind=sentencepiece", "--alphabet_size=9"], "--alphabet_size is for --kind=wordpiece"),
        (["--model_type=bpe"], "--model_type is for --kind=sentencepiece"),
    ],
)
def test_flags_that_do_not_fit_are_one_line(tmp_path, text, flags, part):
    assert part in failure(f"--input={text}", f"--output={tmp_path}/v", *flags)
    assert not (tmp_path / "v").exists()


def test_a_cased_vocabulary_with_unused_places(tmp_path, text):
    result = build_vocab(f"--input={text}", f"--output={tmp_path}/v", "--vocab_size=220", "--cased", "--unused=101")
    assert result.returncode == 0, result.stderr
    tokenizer = load_tokenizer(tmp_path / "v")
    assert tokenizer.tokenize("The Élan") == ["The", "Élan"]
    assert not tokenizer.lowercase
    assert tokenizer.vocab[99:106] == ("[unused98]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused99]", "[unused100]")


def test_help_needs_no_jax():
    result = build_vocab("--help")
    assert "--vocab_size" in result.stdout
