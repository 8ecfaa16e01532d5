# SPDX-License-Identifier: Apache-2.0
"""The objectives beside the paper's: left to right, no next sentence, order of sentences, masks that data bring."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from builders import CLS, MASK, SEP, computed, drawn_params, make_dataset, random_batch, tiny_model, tiny_run
from whole_runs import ONE_DEVICE, assert_same_state, stop_at, train

import bert_jax
from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import InputError
from bert_jax.inference.predict import fill_masks
from bert_jax.model.heads.pretraining import PRETRAINING
from bert_jax.model.masking import mask_rows, next_tokens
from bert_jax.model.objective import PretrainingObjective
from bert_jax.model.objective import forward as forward_of
from bert_jax.pretraining import pretrain
from bert_jax.settings.pretraining import MaskingConfig, MeshConfig, TeacherConfig, TrainConfig
from bert_jax.settings.rules import to_dict
from bert_jax.storage.files import read_json
from bert_jax.storage.writing import write_json
from bert_jax.training.phases import open_corpora, resolve
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
    model = tiny_model(causal=True)
    ours, theirs = (
        np.asarray(forward(model, drawn_params(model), batch._replace(token_ids=ids)).encoded.hidden)
        for ids in (batch.token_ids, later)
    )
    difference = np.abs(ours - theirs).max(axis=(0, 2))
    assert (difference[: position + 1] == 0).all() and (difference[position + 1 :] > 0).all()


def test_without_next_sentence_the_loss_is_that_of_the_tokens_alone():
    batch = random_batch(num_rows=4)
    params = drawn_params(tiny_model())

    @jax.jit
    def compute(params):
        found = []
        for next_sentence in (False, True):
            objective = PretrainingObjective(tiny_model(), MaskingConfig(), MASK, (CLS, SEP), next_sentence)
            prepared = objective.prepare(batch)
            found.append((objective.losses(params, prepared, None), objective.denominators(prepared)))
        return found

    losses, denominators = zip(*compute(params))
    assert set(denominators[True]) - set(denominators[False]) == {"nsp_loss"}
    assert set(losses[True]) - set(losses[False]) == {"nsp_loss", "nsp_accuracy"}
    for name in losses[False]:
        np.testing.assert_array_equal(losses[True][name], losses[False][name])


@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_that_says_what_to_predict_is_left_alone(causal):
    batch = random_batch(num_rows=4)._replace(
        mlm_positions=np.full((4, 2), 3), mlm_labels=np.full((4, 2), 9), mlm_weights=np.ones((4, 2), np.float32)
    )
    objective = PretrainingObjective(tiny_model(causal=causal), MaskingConfig(), MASK, (CLS, SEP))
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
    for name in ("lamb", "stable_adamw", "muon"):
        other = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name=name))
        with pytest.raises(InputError, match=r"another optimizer\.name;"):
            check_workdir(tmp_path, {**identity, "run": to_dict(other)}, other)


MIXED = MaskingConfig(causal_rate=0.4)


def test_a_causal_row_is_what_a_causal_model_computes_and_others_are_as_without():
    batch = random_batch(num_rows=16, row_length=32, num_sequences=2)
    params = drawn_params(tiny_model())
    objectives = [PretrainingObjective(tiny_model(), masking, MASK, (CLS, SEP)) for masking in (MIXED, MaskingConfig())]
    mixed, masked = (computed(objective.prepare, batch) for objective in objectives)
    causal = np.array(mixed.causal)
    assert 0 < causal.sum() < 16
    found = jax.device_get(forward(tiny_model(), params, mixed).mlm_logits)
    alone = jax.device_get(forward(tiny_model(causal=True), params, mixed._replace(causal=None)).mlm_logits)
    np.testing.assert_allclose(found[causal], alone[causal], rtol=1e-6, atol=1e-6)
    assert abs(found[~causal] - alone[~causal]).max() > 1e-3
    without = jax.device_get(forward(tiny_model(), params, masked).mlm_logits)
    np.testing.assert_allclose(found[~causal], without[~causal], rtol=1e-6, atol=1e-6)

    given, of_masked = objectives[0], {"mlm": ~causal, "clm": causal}
    both = lambda params, batch: (given.losses(params, batch, None), given.denominators(batch))  # noqa: E731
    (losses, counts), everything = computed(both, params, mixed), np.array(mixed.mlm_weights)
    for kind, rows in of_masked.items():
        assert float(losses[f"{kind}_loss"][1]) == float(losses[f"{kind}_accuracy"][1]) == everything[rows].sum()
        assert float(counts[f"{kind}_loss"]) == pytest.approx(everything.sum())  # a prediction weighs the same in both
    assert float(losses["nsp_loss"][1]) == float(counts["nsp_loss"]) == 2 * (~causal).sum()
    one_kind = jax.eval_shape(lambda: objectives[1].losses(params, mixed._replace(causal=None), None))
    assert set(losses) - set(one_kind) == {"clm_loss", "clm_accuracy"}


def test_without_causal_rows_the_program_is_that_of_masks_alone():
    batch = random_batch(num_rows=4)
    objective = PretrainingObjective(tiny_model(), MaskingConfig(causal_rate=0.0), MASK, (CLS, SEP))
    masks = functools.partial(
        mask_rows, config=MaskingConfig(), vocab_size=203, mask_id=MASK, never_predicted=(CLS, SEP)
    )
    ours, theirs = (str(jax.make_jaxpr(prepare)(batch)) for prepare in (objective.prepare, masks))
    assert ours == theirs
    prepared = jax.eval_shape(objective.prepare, batch)
    assert prepared.causal is None and set(objective.denominators(jax.jit(masks)(batch))) == {"mlm_loss", "nsp_loss"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"masking": MaskingConfig(causal_rate=1.0)}, "masking.causal_rate 1.0 is not from 0 to"),
        (
            {"model": tiny_model(causal=True), "train": TrainConfig(next_sentence=False)},
            "model.causal=True reads all rows alike; set it to False, or masking.causal_rate=0",
        ),
        ({"model": tiny_model(attention="fused")}, "set it to plain, or masking.causal_rate=0"),
        ({"model": tiny_model(window=4, global_every=2)}, "model.window 4 reads all rows alike; set it to 0"),
        ({"teacher": TeacherConfig("somewhere")}, "leave out teacher.checkpoint"),
    ],
)
def test_what_does_not_go_with_causal_rows_is_refused(sections, message):
    with pytest.raises(InputError, match=message):
        tiny_run("data", **{"masking": MIXED, **sections}).validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"predictions": 5}, "masks of its own"),
        ({"length": 1056}, "use rows of 1024 at most"),
    ],
)
def test_data_that_cannot_be_read_from_left_to_right_are_refused(toy_data, change, message):
    corpora = open_corpora(tiny_run(toy_data, masking=MIXED), make_mesh(MeshConfig()))
    model = dataclasses.replace(corpora.config.model, max_positions=2048)
    dataset = corpora.phases[0].dataset
    dataset.manifest["row"].update(change)
    with pytest.raises(InputError, match=message):
        resolve(dataclasses.replace(corpora.config, model=model), [dataset], corpora.tokenizer)


@pytest.mark.slow
def test_causal_rows_train_beside_masks_and_a_stopped_run_goes_on_with_the_same_bits(toy_data, tmp_path, capsys):
    config = tiny_run(toy_data, masking=dataclasses.replace(MIXED, max_predictions=5), mesh=ONE_DEVICE)
    whole = train(config, tmp_path / "whole")
    assert "; 40.0% of the rows from left to right; next sentence" in capsys.readouterr().err
    records = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    trained = [record for record in records if record["kind"] == "train"]
    assert all(abs(each["clm_loss"] - 5) < 1 and 0 <= each["clm_accuracy"] < 1 for each in trained)
    for record in evaluations(tmp_path / "whole"):
        assert "clm_loss" not in record and record["loss"] == record["mlm_loss"] + record["nsp_loss"]
    plain = dataclasses.replace(config, masking=MaskingConfig(max_predictions=5), train=TrainConfig(num_steps=1))
    train(plain, tmp_path / "plain")
    first, other = (evaluations(tmp_path / name)[0] for name in ("whole", "plain"))
    assert {**first, "time": 0} == {**other, "time": 0}  # held-out masks are those of any run
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 5)
        assert train(config, tmp_path / "stopped").signal
    assert_same_state(train(config, tmp_path / "stopped").state, whole.state)
