# SPDX-License-Identifier: Apache-2.0
"""A model of the modern recipe, trained for a few steps here: transformers fills its masks with the same words."""

import sys
from pathlib import Path

import numpy as np
import pytest
from builders import make_dataset
from processes import finish

from bert_jax import load_pretrained
from bert_jax.checkpoints.hf import save_hf
from bert_jax.inference.predict import fill_masks

sys.path.insert(0, str(Path(__file__).parent.parent / "end_to_end"))
from test_modern import start

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.reference, pytest.mark.slow]


def test_masks_are_filled_with_the_same_words_and_probabilities(repository, tmp_path):
    for name in ("short", "long"):
        (tmp_path / name).mkdir()
    data = [
        make_dataset(tmp_path / name, length, next_sentence="none") for name, length in (("short", 64), ("long", 256))
    ]
    finish(start(repository, data, tmp_path / "run", 1))
    bert = load_pretrained(tmp_path / "run")
    save_hf(tmp_path / "out", bert.config, bert.params, bert.tokenizer, bert.task, bert.labels)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    assert type(model).__name__ == "ModernBertForMaskedLM"
    text = "the ban bas [MASK] . the dar bet [MASK] bit ." * 8
    ours = fill_masks(bert, [text])[0]
    inputs = tokenizer(text, return_tensors="pt")
    assert "token_type_ids" not in inputs
    with torch.no_grad():
        probabilities = torch.softmax(model(**inputs).logits[0], -1).numpy()
    places = np.flatnonzero(inputs["input_ids"][0].numpy() == tokenizer.mask_token_id)
    assert len(places) == len(ours) == 16
    for place, guesses in zip(places, ours, strict=True):
        for token, probability in guesses:
            assert probability == pytest.approx(probabilities[place][tokenizer.convert_tokens_to_ids(token)], rel=1e-4)
