# SPDX-License-Identifier: Apache-2.0
"""The objectives beside the paper's: left to right, no next sentence, order of sentences, masks that data bring."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from builders import CLS, MASK, SEP, make_dataset, random_batch, tiny_model, tiny_run

import bert_jax
from bert_jax.errors import InputError
from bert_jax.inference.predict import fill_masks
from bert_jax.model.heads.pretraining import PRETRAINING
from bert_jax.model.masking import next_tokens
from bert_jax.model.objective import forward as forward_of
from bert_jax.model.objective import init_params, pretraining_objective
from bert_jax.pretraining import pretrain
from bert_jax.settings.pretraining import MaskingConfig, MeshConfig, PretrainConfig, TrainConfig
from bert_jax.settings.rules import to_dict
from bert_jax.storage.files import read_json
from bert_jax.storage.writing import write_json
from bert_jax.training.report import read_metrics
from bert_jax.training.workdir import check_workdir

forward = jax.jit(functools.partial(forward_of, head=PRETRAINING), static_argnums=0)


def run(data, workdir, **sections):
    sections = {"mesh": MeshConfig(data=1), "train": TrainConfig(num_steps=12)} | sections
    return pretrain(tiny_run(data, **sections), workdir, jax.devices()[:1])


def evaluations(workdir):
    return [record for record in read_metrics(workdir / "metrics.jsonl") if record["kind"] == "eval"]


def test_a_causal_model_sees_nothing_that_comes_later():
    batch = next_tokens(random_batch(num_rows=4, row_length=24, num_sequences=2))
    later = np.array(batch.token_ids)
    position = 9
    later[:, position + 1 :] = 77  # everything after the position
    for causal in (True, False):
        model = tiny_model(causal=causal)
        params = jax.jit(init_params, static_argnums=0)(model, jax.random.key(0))
        ours, theirs = (forward(model, params, batch._replace(token_ids=ids)) for ids in (batch.token_ids, later))
        difference = np.abs(ours.encoded.hidden - theirs.encoded.hidden).max(axis=(0, 2))
        assert (difference[: position + 1] == 0).all() == causal
        assert (difference[position + 1 :] > 0).all()


def test_without_next_sentence_the_loss_is_that_of_the_tokens_alone():
    batch = random_batch(num_rows=4)
    params = jax.jit(init_params, static_argnums=0)(tiny_model(), jax.random.key(0))
    losses, denominators = {}, {}
    for next_sentence in (True, False):
        objective = pretraining_objective(tiny_model(), MaskingConfig(), MASK, (CLS, SEP), next_sentence)
        prepared = jax.jit(objective.prepare)(batch)
        losses[next_sentence] = jax.jit(lambda p, b, o=objective: o.losses(p, b, None))(params, prepared)
        denominators[next_sentence] = objective.denominators(prepared)
    assert set(denominators[True]) - set(denominators[False]) == {"nsp_loss"}
    assert set(losses[True]) - set(losses[False]) == {"nsp_loss", "nsp_accuracy"}
    for name in losses[False]:
        np.testing.assert_array_equal(losses[True][name], losses[False][name])


@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_that_says_what_to_predict_is_left_alone(causal):
    batch = random_batch(num_rows=4)._replace(
        mlm_positions=np.full((4, 2), 3), mlm_labels=np.full((4, 2), 9), mlm_weights=np.ones((4, 2), np.float32)
    )
    objective = pretraining_objective(tiny_model(causal=causal), MaskingConfig(), MASK, (CLS, SEP))
    prepared = objective.prepare(batch)
    for before, after in zip(batch, prepared, strict=True):
        assert before is after


@pytest.mark.slow
def test_left_to_right_trains_and_evaluates(toy_data, tmp_path):
    train = TrainConfig(num_steps=12, next_sentence=False)
    model = dataclasses.replace(tiny_run(toy_data).model, causal=True)
    run(toy_data, tmp_path / "run", model=model, train=train)
    first, *_, last = evaluations(tmp_path / "run")
    assert first["mlm_loss"] == pytest.approx(math.log(167), rel=0.03) and last["mlm_loss"] < first["mlm_loss"] - 0.02
    assert last["loss"] == last["mlm_loss"] and "nsp_accuracy" not in last and "nsp_base_rate" not in last
    bert = bert_jax.load_pretrained(tmp_path / "run")
    assert bert.config.causal
    one, two = (bert.encode([text]).hidden[0, :4] for text in ("the ban bas dar .", "the ban bas dir ."))
    np.testing.assert_array_equal(one, two)  # it still reads from left to right
    with pytest.raises(InputError, match="from left to right"):
        fill_masks(bert, ["the [MASK] ."])


def test_a_causal_model_with_next_sentence_is_refused():
    config = PretrainConfig(model=tiny_model(causal=True))
    with pytest.raises(InputError, match=r"set train.next_sentence=False"):
        dataclasses.replace(config, data=dataclasses.replace(config.data, path="x")).validate()


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["none", "sop"])
def test_data_without_labels_and_with_the_order_of_sentences_train(tmp_path, labels, capsys):
    data = make_dataset(tmp_path, next_sentence=labels)
    run(data, tmp_path / "run", masking=MaskingConfig(max_predictions=5, whole_word=True, max_ngram=2))
    said = capsys.readouterr().err
    first, *_, last = evaluations(tmp_path / "run")
    assert last["mlm_loss"] < first["mlm_loss"]
    assert ("nsp_loss" in last) == (labels == "sop")
    assert ("order of sentences" in said) == (labels == "sop") and ("no next sentence" in said) == (labels == "none")
    assert "masked as whole words in runs of up to 2" in said
    assert read_json(tmp_path / "run" / "config.json")["run"]["train"]["next_sentence"] == (labels == "sop")


def test_a_run_that_is_older_than_a_setting_resumes(toy_data, tmp_path):
    config = tiny_run(toy_data)
    identity = {"dataset": "these rows", "run": to_dict(config)}
    before = {"dataset": "these rows", "run": to_dict(config)}
    del before["run"]["masking"]["whole_word"], before["run"]["optimizer"]["name"]
    write_json(tmp_path / "config.json", before)
    check_workdir(tmp_path, identity, config)  # it had the meaning of the default
    for name in ("lamb", "stable_adamw"):
        other = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name=name))
        with pytest.raises(InputError, match=r"another optimizer\.name;"):
            check_workdir(tmp_path, {**identity, "run": to_dict(other)}, other)
