# SPDX-License-Identifier: Apache-2.0
"""transformers loads the model in the box, and fills its masks as we do."""

from pathlib import Path

import pytest

import bert_jax

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")
pytestmark = [pytest.mark.reference, pytest.mark.slow]

BOX = Path(__file__).resolve().parents[2] / "models" / "bert-mini-en"


@pytest.mark.parametrize("text", ["They lived in the United [MASK].", "She opened the [MASK] and went into the house."])
def test_transformers_fills_the_same_masks(text):
    pipeline = transformers.pipeline("fill-mask", model=str(BOX), dtype="float32")
    ours = bert_jax.fill_masks(bert_jax.load_pretrained(BOX), [text])[0][0]
    theirs = pipeline(text, top_k=len(ours))
    assert [guess.token for guess in ours] == [guess["token_str"] for guess in theirs]
    assert [guess.probability for guess in ours] == pytest.approx([guess["score"] for guess in theirs], abs=1e-5)
