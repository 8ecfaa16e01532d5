# SPDX-License-Identifier: Apache-2.0
"""Other languages than English: vocabularies, data sets and models from German, Japanese and 36 languages at once."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from builders import tiny_model, tiny_run

from bert_jax import load_pretrained, load_tokenizer
from bert_jax.data.prepare import PrepareOptions, prepare
from bert_jax.data.records import open_dataset
from bert_jax.data.sentences import split_lines
from bert_jax.data.sources.corpus import iterate_documents
from bert_jax.inference.predict import fill_masks
from bert_jax.pretraining import pretrain
from bert_jax.settings.pretraining import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    MaskingConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)
from bert_jax.training.report import read_metrics

GERMAN, JAPANESE, UDHR = "novels_de/*.txt.gz", "wagahai_ja/wagahai.clean.txt.gz", "udhr/*.txt"


def build_vocab(text: str, output: Path, *flags: str) -> dict[str, float]:
    """Returns the figures that the command reports."""
    command = [sys.executable, "-m", "bert_jax.tools.build_vocab", f"--input={text}", f"--output={output}"]
    done = subprocess.run([*command, "--vocab_size=8000", "--cased", *flags], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    figures = {
        name: re.search(rf"([\d.]+)%? {pattern}", done.stdout)
        for name, pattern in (("per_token", "characters per token"), ("unknown", r"of the \w+ are \[UNK\]"))
    }
    assert "8,000 tokens from" in done.stdout and all(figures.values()), done.stdout
    return {name: float(found[1]) for name, found in figures.items() if found}


def prepare_text(text: str, folder: Path, options: PrepareOptions) -> float:
    """Returns the share of [UNK] in the data set of a text."""
    tokenizer = folder / "tokenizer"
    options = dataclasses.replace(options, max_seq_length=64, duplicates=1, holdout_rate=0.1)
    prepare(text, str(tokenizer), str(folder / "data"), options, num_workers=1)
    counts = open_dataset(str(folder / "data")).token_counts
    return counts[load_tokenizer(tokenizer).unk_id] / counts.sum()


def train(folder: Path) -> tuple[dict, dict]:
    """Returns the first and the last evaluation of a small run."""
    config = tiny_run(
        folder / "data",
        model=tiny_model(vocab_size=0, hidden_size=64, intermediate_size=128),
        data=DataConfig(path=str(folder / "data"), batch_size=32),
        masking=MaskingConfig(max_predictions=10, whole_word=True),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=10),
        train=TrainConfig(num_steps=100),
        eval=EvalConfig(every_steps=100),
        checkpoint=CheckpointConfig(every_steps=100),
        mesh=MeshConfig(data=1),
    )
    assert pretrain(config, folder / "run", jax.devices()[:1]).step == 100
    evaluations = [record for record in read_metrics(folder / "run/metrics.jsonl") if record["kind"] == "eval"]
    return evaluations[0], evaluations[-1]


@pytest.mark.slow
def test_german_cased_wordpiece(shared_data, tmp_path):
    text = str(shared_data / GERMAN)
    figures = build_vocab(text, tmp_path / "tokenizer")
    assert figures["unknown"] < 0.01 and 3 < figures["per_token"] < 5
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert not tokenizer.lowercase and not tokenizer.strip_accents
    sentence = "Die Mutter müßte es wissen, sagte Effi Briest."
    assert tokenizer.decode(tokenizer.encode(sentence)) == "Die Mutter müßte es wissen , sagte Effi Briest ."
    assert len(tokenizer.encode(sentence)) < 16
    assert prepare_text(text, tmp_path, PrepareOptions(language="de")) < 1e-4


@pytest.mark.slow
def test_japanese_unigram_with_whole_words(shared_data, tmp_path):
    text = str(shared_data / JAPANESE)
    figures = build_vocab(text, tmp_path / "tokenizer", "--kind=sentencepiece")
    assert figures["unknown"] < 0.2 and 1.5 < figures["per_token"] < 3
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert tokenizer.decode(tokenizer.encode("吾輩は猫である。名前はまだ無い。")) == "吾輩は猫である。名前はまだ無い。"
    assert prepare_text(text, tmp_path, PrepareOptions(language="ja", next_sentence="sop")) < 2e-3
    first, last = train(tmp_path)
    assert first["mlm_loss"] == pytest.approx(np.log(8000), rel=0.05)
    # Most of the way from guessing to what the frequencies of tokens alone give.
    assert last["mlm_loss"] < (first["mlm_loss"] + 2 * last["unigram_loss"]) / 3
    guesses = fill_masks(load_pretrained(tmp_path / "run"), ["吾輩は[MASK]である。"])[0][0]
    assert len(guesses) == 5 and all(guess.token not in ("[PAD]", "[UNK]") for guess in guesses)


@pytest.mark.slow
def test_36_languages_in_one_cased_vocabulary(shared_data, tmp_path):
    text = str(shared_data / UDHR)
    flags = ["--kind=sentencepiece", "--model_type=bpe", "--character_coverage=1"]
    figures = build_vocab(text, tmp_path / "tokenizer", *flags)
    assert figures["unknown"] == 0 and 2 < figures["per_token"] < 3
    # Numbered paragraphs are documents of their own, too short for pairs of sentences.
    assert prepare_text(text, tmp_path, PrepareOptions(next_sentence="none")) == 0


def test_japanese_is_split_into_sentences(shared_data):
    paragraphs = [line for document in iterate_documents(str(shared_data / JAPANESE)) for line in document][:300]
    sentences = [split_lines([paragraph], "ja")[0] for paragraph in paragraphs]
    assert ["".join("".join(part).split()) for part in sentences] == ["".join(line.split()) for line in paragraphs]
    flat = [sentence for part in sentences for sentence in part]
    assert len(flat) > 4 * len(paragraphs)
    assert sum(sentence[-1] in "。」" for sentence in flat) > 0.95 * len(flat)
    assert 20 < np.median([len(sentence) for sentence in flat]) < 60
