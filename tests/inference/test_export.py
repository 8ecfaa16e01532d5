# SPDX-License-Identifier: Apache-2.0
"""Exported programs beside the models that they were made from: rows of one token, and heads of texts."""

import dataclasses

import jax
import numpy as np
import pytest
from builders import tiny_model
from hf_models import make_tokenizer, random_params

from bert_jax.batch import Batch
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.inference.export import export_model
from bert_jax.inference.predict import Predictor
from bert_jax.model.heads.table import HEADS
from bert_jax.model.objective import encode, forward
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.model import ModelConfig, model_size
from bert_jax.settings.rules import to_dict

LABELS = ("a", "b", "c")
SMALL = {"vocab_size": 203, "hidden_size": 24, "num_heads": 2, "num_layers": 2, "max_positions": 30, "unroll": 1}
CONFIGS = {
    "bert": tiny_model(),
    "modernbert": dataclasses.replace(model_size("modernbert-mini"), **SMALL, intermediate_size=20, window=4),
    "mpnet": tiny_model(family="mpnet", score_bias="buckets", type_vocab_size=0),
    "jina_bert": tiny_model(family="jina_bert", score_bias="alibi", positions="none"),
    "deberta-v2": tiny_model(family="deberta-v2", score_bias="vectors", positions="none", distance_buckets=8),
}


def model_of(config: ModelConfig, head: str, **settings) -> Pretrained:
    labels = LABELS if HEADS[head].has_labels else ()
    parts = HEADS[head].parts_in(config)
    params = random_params(config, len(labels) or 1, parts=parts)
    return Pretrained(config, params, make_tokenizer(203), head, labels, task_settings=settings)


def served(bert: Pretrained, directory):
    """Returns the exported program, called with its own parameters."""
    export_model(bert, directory, ("cpu",))
    program = jax.export.deserialize(bytearray((directory / "model.stablehlo").read_bytes()))
    params = dict(np.load(directory / "params.npz"))
    call = jax.jit(program.call)
    return lambda *arrays: jax.device_get(call(params, *arrays))


def row_of(ids, length=0):
    length = max(length, len(ids))
    token_ids, mask = np.zeros((1, length), np.int32), np.zeros((1, length), np.int32)
    token_ids[0, : len(ids)], mask[0, : len(ids)] = ids, 1
    return token_ids, np.zeros_like(token_ids), mask


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("modernbert", "masked_lm"),
        ("mpnet", "masked_lm"),
        ("deberta-v2", "masked_lm"),
        pytest.param("jina_bert", "masked_lm", marks=pytest.mark.slow),
        pytest.param("bert", "pretraining", marks=pytest.mark.slow),
        pytest.param("bert", "token_classification", marks=pytest.mark.slow),
        pytest.param("bert", "question_answering", marks=pytest.mark.slow),
        pytest.param("bert", "multiple_choice", marks=pytest.mark.slow),
    ],
)
def test_a_row_of_one_token(tmp_path, family, head):
    bert = model_of(CONFIGS[family], head)
    call = served(bert, tmp_path / "served")
    fills_masks = head in ("masked_lm", "pretraining")
    more = [np.zeros((1, 1), np.int32)] * fills_masks

    @jax.jit
    def outputs(batch):
        own = HEADS["masked_lm" if fills_masks else head]
        logits = forward(bert.config, bert.params, batch, own, None, len(bert.labels) or 1)
        return logits, encode(bert.config, bert.params, batch) if fills_masks else None

    for ids in ([2], [57]):
        alone = call(*row_of(ids, 1), *more)
        one = np.zeros((1, 1), np.int32)
        batch = Batch(*row_of(ids), one, np.ones((1, 1), np.float32), mlm_positions=one)
        logits, encoded = outputs(batch)
        expected = np.asarray(logits, np.float32)[..., : 203 if fills_masks else None]
        assert np.isfinite(alone["logits"]).all()
        np.testing.assert_allclose(alone["logits"].reshape(-1), expected.reshape(-1), atol=2e-5)
        if fills_masks:
            padded = call(*row_of(ids, 7), *more)
            np.testing.assert_allclose(alone["hidden"], padded["hidden"][:, :1], atol=2e-5)
            np.testing.assert_allclose(alone["hidden"], encoded.hidden, atol=2e-5)
            assert ("pooled" in alone) == (head == "pretraining")
        if head == "pretraining":
            np.testing.assert_allclose(alone["pooled"], encoded.pooled[:, 0], atol=2e-5)


@pytest.mark.parametrize(
    ("family", "name", "head", "embedding"),
    [
        ("bert", "multilabel", "multilabel_classification", {}),
        pytest.param("modernbert", "embeddings", "sentence_embedding", {}, marks=pytest.mark.slow),
        pytest.param(
            *("bert", "embeddings", "sentence_embedding", {"pooling": "cls", "normalize": False}),
            marks=pytest.mark.slow,
        ),
        ("modernbert", "embeddings", "sentence_embedding", {"pooling": "last", "projection_size": 8}),
        pytest.param("bert", "embeddings", "token_embeddings", {"kind": "multi_vector"}, marks=pytest.mark.slow),
    ],
)
def test_heads_of_texts_say_what_the_model_says(tmp_path, family, name, head, embedding):
    thresholds = "0.5,0.5,0.5" if name == "multilabel" else ""
    settings = TaskConfig(name=name, max_seq_length=30, thresholds=thresholds, embedding=EmbeddingConfig(**embedding))
    bert = model_of(CONFIGS[family], head, **to_dict(settings))
    if "projection_size" in embedding:
        rng = np.random.default_rng(0)
        kernel, bias = rng.normal(size=(bert.config.hidden_size, 8)), rng.normal(size=8)
        bert.params["projection"] = {"kernel": kernel.astype(np.float32), "bias": bias.astype(np.float32)}
    call = served(bert, tmp_path / "served")
    texts = ["abc de", "x", "word1 word7 word30 f g h"]
    rows = [[2, *bert.tokenizer.encode(text), 3] for text in texts]
    length = max(map(len, rows))
    given = [np.concatenate(each) for each in zip(*(row_of(row, length) for row in rows))]
    logits = call(*given)["logits"]
    for found, said in zip(logits, Predictor(bert)(texts), strict=True):
        if name == "multilabel":
            found, wanted = 1 / (1 + np.exp(-found)), [said.probabilities[label] for label in LABELS]
        else:
            wanted = said.vectors[0]
            if head == "token_embeddings":  # of a query, whose [MASK]s no other token sees
                found, wanted = found[:3], wanted[:3]
        np.testing.assert_allclose(found, wanted, atol=2e-5)
