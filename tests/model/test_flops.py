# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from bert_jax.model.flops import forward_flops, train_flops
from bert_jax.settings.model import ModelConfig, model_size

BASE = ModelConfig(vocab_size=30522)
LARGE = ModelConfig(vocab_size=30522, hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096)


@pytest.mark.parametrize(
    ("model", "length", "predictions", "forward", "train"),
    [
        (BASE, 128, 20, 23.31e9, 69.9e9),
        (BASE, 512, 80, 100.5e9, 301.4e9),
        (LARGE, 128, 20, 80.21e9, 240.6e9),
        (LARGE, 512, 80, 340.2e9, 1020.5e9),
    ],
)
def test_flops_of_one_full_sequence(model, length, predictions, forward, train):
    work = (model, length, length**2, predictions, 1)
    assert forward_flops(*work) == pytest.approx(forward, rel=1e-3)
    assert train_flops(*work) == pytest.approx(train, rel=1e-3)


def test_flops_of_unpadded_sequences():
    # BERT-Large on Wikipedia at 512: a sequence has 254.2 tokens and 38 predictions on average.
    assert train_flops(LARGE, 254.2, 97.6e3, 38, 1) == pytest.approx(496.8e9, rel=1e-3)


def test_flops_agree_with_a_published_rate():
    # DeepSpeed reports 64 TFLOP/s for 272 sequences/s of BERT-Large at 128, by a slightly smaller count.
    assert 272 * train_flops(LARGE, 128, 128**2, 20, 1) == pytest.approx(65.5e12, rel=1e-2)


def test_flops_with_another_feed_forward_width():
    wider = ModelConfig(vocab_size=30522, intermediate_size=3072 + 1)
    extra = forward_flops(wider, 10, 100, 2, 1) - forward_flops(BASE, 10, 100, 2, 1)
    assert extra == 12 * 10 * 2 * 2 * 768  # per layer and token: one more column in, one more row out


def test_local_layers_have_the_scores_of_their_windows():
    model = dataclasses.replace(model_size("modernbert-base"), vocab_size=1000)
    everywhere = dataclasses.replace(model, window=0)
    local, whole = (forward_flops(each, 8192, 8192**2, 0, 0) for each in (model, everywhere))
    assert whole - local == 14 * 4 * 768 * 8192 * (8192 - 129)
    assert forward_flops(model, 100, 100**2, 0, 0) == forward_flops(everywhere, 100, 100**2, 0, 0)
    plain = dataclasses.replace(everywhere, feed_forward="plain")
    assert forward_flops(everywhere, 10, 100, 0, 0) - forward_flops(plain, 10, 100, 0, 0) == 22 * 10 * 2 * 768 * 1152
