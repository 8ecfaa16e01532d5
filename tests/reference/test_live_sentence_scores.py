# SPDX-License-Identifier: Apache-2.0
"""minicons and ours on the same random BertForMaskedLM, both methods: `make test-reference` installs what it needs.

minicons 0.3.39 calls `batch_encode_plus`, which tokenizers of transformers 5 have no more; the test hands it on.
"""

import random

import numpy as np
import pytest
from hf_models import make_tokenizer

from bert_jax import load_pretrained, score_sentences
from bert_jax.inference.sentence_scores import METHODS, token_scores

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
scorer = pytest.importorskip("minicons.scorer")

pytestmark = [pytest.mark.reference, pytest.mark.slow]

transformers.utils.logging.disable_progress_bar()

NUM_SENTENCES = 40


def random_sentence(rng: random.Random) -> str:
    """Returns words of one to six letters, each letter a token, with known words, a comma or an unknown word."""
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 6))]
    words.append(rng.choice(["word3", "word7", "a,b", "\u4e2d"]))
    rng.shuffle(words)
    return " ".join(words)


@pytest.mark.parametrize("seed", range(2))
def test_scores_are_those_of_minicons(tmp_path, seed):
    tokenizer = make_tokenizer(90)
    tokenizer.save(tmp_path)
    config = transformers.BertConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
        hidden_act=("gelu", "gelu_new")[seed],
    )
    torch.manual_seed(seed)
    theirs = transformers.BertForMaskedLM(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.2)
    theirs.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path)
    reference = scorer.MaskedLMScorer(
        theirs, "cpu", tokenizer=transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"), do_lower_case=True)
    )
    # The name that transformers 5 has no more, of what a tokenizer does when it is called.
    reference.tokenizer.batch_encode_plus = reference.tokenizer.__call__
    rng = random.Random(seed)
    sentences = [random_sentence(rng) for _ in range(NUM_SENTENCES)]
    worst = 0.0
    for method in METHODS:
        expected = reference.sequence_score(sentences, reduction=lambda scores: scores.sum(0).item(), PLL_metric=method)
        found = score_sentences(ours, sentences, method)
        worst = max(worst, float(np.abs(found - np.array(expected)).max()))
        tokens = reference.token_score(sentences[:5], PLL_metric=method)
        for each, scores in zip(tokens, token_scores(ours, sentences[:5], method), strict=True):
            np.testing.assert_allclose(scores, [score for _, score in each], atol=1e-4)
    print(f"\n{NUM_SENTENCES} sentences, both methods: sums of log-probabilities differ by {worst:.2g} at most")
    assert worst < 1e-4
