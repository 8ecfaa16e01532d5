# SPDX-License-Identifier: Apache-2.0
"""The model in the box: it loads, fills masks, and does what its card says."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import bert_jax
from bert_jax.inference.minimal_pairs import read_pairs

BOX = Path(__file__).resolve().parents[1] / "models" / "bert-mini-en"
MASKS = {
    "She opened the [MASK] and went into the house.": "door",
    "They lived in the United [MASK].": "states",
    "I do [MASK] know.": "not",
}


@pytest.fixture(scope="module")
def bert():
    return bert_jax.load_pretrained(BOX)


@pytest.fixture(scope="module")
def card():
    return (BOX / "README.md").read_text("utf-8")


def test_masks_come_out_right(bert):
    guesses = bert_jax.fill_masks(bert, list(MASKS))
    assert [masks[0][0].token for masks in guesses] == list(MASKS.values())


def test_like_sentences_have_like_vectors(bert):
    texts = [
        "The city has a population of 20,000 people.",
        "The town has 5,000 inhabitants.",
        "She opened the door and went in.",
    ]
    vectors = bert_jax.sentence_embeddings(bert, texts)
    city, town, door = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert city @ town > 0.9 and city @ town - max(city @ door, town @ door) > 0.2


def test_the_card_names_licence_size_and_no_machine(bert, card):
    assert "license: cc-by-sa-3.0" in card and "CC BY-SA 3.0" in card
    shapes = [array.shape for array in load_file(BOX / "model.safetensors").values()]
    size = sum(math.prod(shape) for shape in shapes)
    assert f"{size:,} parameters" in card and not re.search(r"/(home|work|tmp|root|data)/", card)
    assert sum(path.stat().st_size for path in BOX.iterdir()) < 12 << 20


@pytest.mark.slow
def test_blimp_is_what_the_card_says(bert, card, shared_data):
    """Of 50 pairs of each paradigm ten are scored here."""
    least, most = map(float, re.search(r"BLiMP.*\| [\d.]+ % \[([\d.]+), ([\d.]+)\]", card).groups())
    pairs = read_pairs(str(shared_data / "blimp" / "blimp.jsonl.gz"), limit=10)
    scores = bert_jax.score_sentences(bert, [sentence for pair in pairs for sentence in (pair.good, pair.bad)])
    right: dict[str, list[bool]] = {}
    for pair, (good, bad) in zip(pairs, scores.reshape(-1, 2), strict=True):
        right.setdefault(pair.paradigm, []).append(good > bad)
    assert len(right) == 67 and least <= 100 * np.mean([np.mean(each) for each in right.values()]) <= most
