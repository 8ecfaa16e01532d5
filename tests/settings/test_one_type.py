# SPDX-License-Identifier: Apache-2.0
"""Pairs of texts and a model with a single type of text (model.type_vocab_size=1): refused, for it would give NaN."""

import dataclasses

import numpy as np
import pytest
from builders import make_pretrained, message, tiny_model, tiny_run, topics_run, write

from bert_jax import load_pretrained
from bert_jax.data.records import open_dataset
from bert_jax.finetuning import finetune
from bert_jax.inference import features
from bert_jax.inference.compare import differences
from bert_jax.inference.predict import Predictor
from bert_jax.pretraining import pretrain
from bert_jax.settings.pretraining import MeshConfig
from bert_jax.settings.rules import to_dict
from bert_jax.tokenizing import load_tokenizer
from bert_jax.training.phases import resolve


def test_pretraining_on_pairs(toy_data, tmp_path):
    config = tiny_run(toy_data, model=tiny_model(vocab_size=0, type_vocab_size=1))
    problem = "data has pairs of texts, and the model has model.type_vocab_size 1"
    assert problem in message(pretrain, config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    dataset, tokenizer = open_dataset(toy_data), load_tokenizer(toy_data / "tokenizer")
    dataset.manifest["identity"]["options"]["next_sentence"] = "none"  # then it has single texts
    assert resolve(config, [dataset], tokenizer).model.type_vocab_size == 1


@pytest.mark.slow
def test_pairs_are_refused_for_a_model_with_one_type(tmp_path):
    """Before, their type ids were beyond the table, which gives NaN: training blamed the learning rate."""
    start = make_pretrained(tmp_path, type_vocab_size=1)
    source = write(tmp_path / "train.tsv", "sentence1\tsentence2\tlabel\nban\tbas\tyes\nbas\tban\tno\n")
    config = topics_run(source, start, mesh=MeshConfig(data=8))
    expected = "has pairs of texts, and the model has model.type_vocab_size 1, too few to tell them apart"
    assert expected in message(finetune, config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    bert = load_pretrained(start)
    assert np.isfinite(bert.encode(["ban"]).hidden).all()
    assert np.isfinite(list(differences(bert, bert).values())).all()
    head = {"kernel": np.ones((32, 2), np.float32), "bias": np.zeros(2, np.float32)}
    classifier = dataclasses.replace(
        bert,
        params=bert.params | {"classifier": head},
        task="sequence_classification",
        task_settings=to_dict(config.task),
        labels=("no", "yes"),
    )
    token_features = lambda pairs: list(features.token_features(bert, pairs, [-1], 16))  # noqa: E731
    for use in (bert.encode, token_features, Predictor(classifier)):
        assert "the input has pairs of texts" in message(use, [("ban", "bas")])
