# SPDX-License-Identifier: Apache-2.0
"""Replaced-token pre-training: what is drawn, who learns from what, tables of two models, whole runs."""

import dataclasses
import signal

import jax
import numpy as np
import pytest
from builders import CLS, MASK, SEP, make_dataset, random_batch, tiny_model, tiny_run
from hf_models import random_params
from whole_runs import ONE_DEVICE, assert_same_state, stop_at, train

from bert_jax.checkpoints.hf import save_hf
from bert_jax.inference.pretrained import load_pretrained
from bert_jax.model import replacing
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.heads.replaced import REPLACED
from bert_jax.model.heads.table import head_of
from bert_jax.model.masking import bits_of_predictions
from bert_jax.model.objective import forward, parts_of
from bert_jax.model.replacing import GENERATOR, ReplacedTokens, draw_words, model_alone, put_words
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import (
    CheckpointConfig,
    EvalConfig,
    GeneratorConfig,
    MaskingConfig,
    MeshConfig,
    PretrainConfig,
    TeacherConfig,
    TrainConfig,
)
from bert_jax.training.report import read_metrics

MODEL = tiny_model(hidden_dropout_rate=0.0, attention_dropout_rate=0.0)
MASKS = MaskingConfig(rate=0.3)


def objective_with(tables="apart", model=MODEL, **settings):
    generator = GeneratorConfig(num_layers=1, num_heads=1, tables=tables, **settings)
    return ReplacedTokens(model, MASKS, MASK, (CLS, SEP), generator)


def params_of(objective):
    """Returns random parameters, whose tables are not those of the start."""
    made = random_params(objective.model, parts=()) | {
        "discriminator": jax.device_get(jax.jit(objective.init)(jax.random.key(1)))["discriminator"]
    }
    made["encoder"].pop("pooler", None)
    of_generator = random_params(objective.generator, parts=("mlm",))
    of_generator["encoder"].pop("pooler", None)
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    embeddings = of_generator["encoder"]["embeddings"]
    kept = shapes[GENERATOR]["encoder"]["embeddings"]
    of_generator["encoder"]["embeddings"] = {name: embeddings[name] for name in kept}
    made[GENERATOR] = of_generator
    assert jax.tree.map(np.shape, made) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    return made


def test_words_are_drawn_by_their_probability():
    logits = np.log(np.array([0.0, 0.5, 0.25, 0.0, 0.25, 0.0]) + 1e-38)
    shares = np.arange(4096) * 2**20
    drawn = jax.jit(draw_words)(np.tile(logits, (1, 4096, 1)), shares[None].astype(np.uint32))
    assert np.bincount(drawn[0], minlength=6).tolist() == [0, 2048, 1024, 0, 1024, 0]
    largest = jax.jit(draw_words)(logits[None, None], np.full((1, 1), 2**32 - 1, np.uint32))
    assert largest.tolist() == [[4]]


def test_words_stand_where_tokens_were_predicted():
    batch = random_batch(num_rows=1, row_length=6)._replace(
        token_ids=np.array([[2, 9, 4, 7, 4, 3]], np.int32),
        mlm_positions=np.array([[2, 4, 0]], np.int32),
        mlm_labels=np.array([[8, 5, 0]], np.int32),
        mlm_weights=np.array([[1, 1, 0]], np.float32),
    )
    replaced, others = jax.jit(put_words)(batch, np.array([[8, 11, 12]], np.int32))
    assert replaced.token_ids.tolist() == [[2, 9, 8, 7, 11, 3]]
    assert others.tolist() == [[0, 0, 0, 0, 1, 0]]


@pytest.mark.parametrize("tables", ["apart", pytest.param("shared", marks=pytest.mark.slow)])
def test_losses_are_those_of_two_models_of_which_each_learns_by_its_own(tables):
    objective = objective_with(tables, weight=3.0)
    params = params_of(objective)
    batch = jax.jit(objective.prepare)(random_batch(num_rows=4, num_sequences=2))
    losses = jax.jit(lambda params: objective.losses(params, batch, None))
    found = {name: np.array(pair) for name, pair in losses(params).items()}

    generator = params[GENERATOR]
    if tables == "shared":
        mine = generator["encoder"]["embeddings"] | params["encoder"]["embeddings"]
        mine |= generator["encoder"]["embeddings"]
        generator = generator | {"encoder": generator["encoder"] | {"embeddings": mine}}
    words = jax.jit(lambda: forward(objective.generator, generator, batch, MASKED_LM))()
    expected = MASKED_LM.losses(words, batch, batch.mlm_weights)["loss"]
    np.testing.assert_allclose(found["mlm_loss"], expected, rtol=1e-5)

    real = batch.sequence_ids > 0
    assert found["replaced_loss"][1] == found["replaced_accuracy"][1] == real.sum()
    replaced_share = found["replaced_recall"][1] / batch.mlm_weights.sum()
    assert 0.9 < replaced_share <= 1  # random words are rarely the right ones

    denominators = objective.denominators(batch)
    np.testing.assert_allclose(denominators["replaced_loss"], real.sum() / 3.0)

    def gradient(name):
        return jax.jit(jax.grad(lambda params: objective.losses(params, batch, None)[name][0]))(params)

    def is_learnt(tree):
        return any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(tree))

    by_words, by_tokens = gradient("mlm_loss"), gradient("replaced_loss")
    assert not is_learnt(by_tokens[GENERATOR]) and is_learnt(by_tokens["encoder"]["embeddings"]["word"])
    assert is_learnt(by_words[GENERATOR]) and not is_learnt(by_words["discriminator"])
    assert is_learnt(by_words["encoder"]["embeddings"]["word"]) == (tables == "shared")
    assert not is_learnt(by_words["encoder"]["layers"])


def test_draws_follow_from_the_sequence_and_the_epoch():
    """So they are the same in any microbatch, and others in the next epoch."""
    batch = jax.jit(objective_with().prepare)(random_batch(num_rows=4, num_sequences=2))
    bits_of = jax.jit(bits_of_predictions, static_argnums=1)
    bits = bits_of(batch, 0)
    np.testing.assert_array_equal(bits_of(jax.tree.map(lambda leaf: leaf[2:], batch), 0), bits[2:])
    later = bits_of(batch._replace(epochs=batch.epochs + 1), 0)
    real = np.asarray(batch.mlm_weights) > 0
    assert not np.any((bits == later)[real]) and not np.any((bits == bits_of(batch, 1))[real])
    assert len(np.unique(np.asarray(bits)[real])) == real.sum()


def test_a_table_is_the_sum_of_the_generators_and_a_difference():
    objective = objective_with()
    params, updates = params_of(objective), params_of(objective)
    new = jax.tree.map(np.add, params, objective.together(updates))
    differences, expected = objective.apart(new), jax.tree.map(np.add, objective.apart(params), updates)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5), differences, expected)
    fresh = jax.jit(objective.init)(jax.random.key(0))
    of_words = objective.apart(fresh)["encoder"]["embeddings"]["word"]["embedding"]
    assert not np.any(of_words) and np.any(fresh["encoder"]["embeddings"]["word"]["embedding"])
    shared = objective_with("shared")
    assert "word" not in jax.eval_shape(shared.init, jax.random.key(0))[GENERATOR]["encoder"]["embeddings"]


def test_a_generator_is_as_wide_as_its_heads():
    model = dataclasses.replace(model_size("electra-small"), vocab_size=100)
    narrow = GeneratorConfig(num_layers=12, num_heads=1).model_for(model)
    assert (narrow.hidden_size, narrow.intermediate_size, narrow.embedding_size) == (64, 256, 128)
    half = GeneratorConfig(num_layers=6).model_for(dataclasses.replace(model_size("deberta-v3-base"), vocab_size=100))
    assert (half.num_layers, half.hidden_size, half.embedding_size) == (6, 768, 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"teacher": TeacherConfig(checkpoint="x")}, "leave out teacher.checkpoint"),
        ({"model": tiny_model(causal=True), "train": TrainConfig(next_sentence=False)}, "set it to False"),
        ({"masking": MaskingConfig(causal_rate=0.5)}, "set masking.causal_rate=0"),
    ],
)
def test_what_has_no_generator_is_refused(changes, expected):
    config = PretrainConfig(generator=GeneratorConfig(num_layers=1), **changes)
    problems = [text for wrong, text in config.rules() if wrong]
    assert any(expected in text for text in problems)


def run_of(path, tables="apart", mesh=ONE_DEVICE, accumulate=1, **changes):
    return tiny_run(
        path, mesh=mesh, train=TrainConfig(num_steps=8, accumulate=accumulate), masking=MaskingConfig(rate=0.2),
        generator=GeneratorConfig(num_layers=1, num_heads=2, tables=tables), checkpoint=CheckpointConfig(every_steps=4),
        model=tiny_model(vocab_size=0, family="electra", activation="gelu_exact", hidden_dropout_rate=0.1), **changes,
    )  # fmt: skip


def of_steps(workdir, *names):
    return [[record[name] for name in names] for record in read_metrics(workdir / "metrics.jsonl")
            if record["kind"] == "train"]  # fmt: skip


NAMES = ("mlm_loss", "replaced_loss", "replaced_recall")


@pytest.mark.slow
def test_a_bert_that_told_replaced_tokens_is_loaded(tmp_path):
    """Transformers has no class for it, and its head is left out there."""
    config = run_of(make_dataset(tmp_path))
    config = dataclasses.replace(
        config, model=tiny_model(vocab_size=0), train=TrainConfig(num_steps=1), eval=EvalConfig(every_steps=0)
    )
    train(config, tmp_path / "run")
    bert = load_pretrained(tmp_path / "run")
    assert head_of(bert.task, parts_of(bert.params)) is REPLACED
    again = load_pretrained(tmp_path / "run/pretrained")
    jax.tree.map(np.testing.assert_array_equal, again.params, bert.params)
    notes = save_hf(tmp_path / "hf", bert.config, bert.params, bert.tokenizer, bert.task, ())
    assert any("discriminator is left out" in note for note in notes)
    assert load_pretrained(tmp_path / "hf").params.keys() == {"encoder"}


@pytest.mark.slow
def test_a_run_is_stopped_goes_on_and_leaves_the_model_alone(tmp_path, monkeypatch):
    config = run_of(make_dataset(tmp_path))
    whole = train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        stopped = train(config, tmp_path / "run")
    assert stopped.signal == signal.SIGTERM and stopped.step < 8
    assert_same_state(train(config, tmp_path / "run").state, whole.state)
    evaluations = [record for record in read_metrics(tmp_path / "whole/metrics.jsonl") if record["kind"] == "eval"]
    for record in evaluations:
        assert record["loss"] == pytest.approx(record["mlm_loss"] + 50 * record["replaced_loss"])
    assert evaluations[-1]["mlm_loss"] < evaluations[0]["mlm_loss"] and 0 <= evaluations[-1]["replaced_recall"] <= 1

    bert = load_pretrained(tmp_path / "whole")
    assert head_of(bert.task, parts_of(bert.params)) is REPLACED and GENERATOR not in bert.params
    params = jax.device_get(whole.state.params)
    jax.tree.map(np.testing.assert_array_equal, bert.params, model_alone(params))
    save_hf(tmp_path / "hf", bert.config, bert.params, bert.tokenizer, bert.task, ())
    back = load_pretrained(tmp_path / "hf")
    jax.tree.map(np.testing.assert_array_equal, back.params, bert.params)
    again = dataclasses.replace(config, init_checkpoint=str(tmp_path / "whole"))
    assert train(again, tmp_path / "again").step == 8


@pytest.mark.slow
def test_words_that_do_not_depend_on_the_text_are_found(tmp_path, monkeypatch):
    """A generator's own words can be as probable as the text's, and then nothing is there to learn."""
    monkeypatch.setattr(replacing, "draw_words", lambda logits, bits: (5 + (bits >> 8) % 60).astype(np.int32))
    config = run_of(make_dataset(tmp_path))
    masking = MaskingConfig(rate=0.2, seed=1)  # whose programs no other test has
    train(dataclasses.replace(config, train=TrainConfig(num_steps=200), masking=masking), tmp_path / "run")
    *_, last = (record for record in read_metrics(tmp_path / "run/metrics.jsonl") if record["kind"] == "eval")
    assert last["replaced_recall"] > 0.6 and last["replaced_accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["apart", "shared"])
@pytest.mark.parametrize("options", [
    {"mesh": MeshConfig(data=2, fsdp=2, tensor=2)}, {"accumulate": 2},
])  # fmt: skip
def test_a_run_is_the_same_on_eight_devices_and_in_microbatches(tmp_path, tables, options):
    data = make_dataset(tmp_path)
    train(run_of(data, tables), tmp_path / "one")
    train(run_of(data, tables, **options), tmp_path / "other")
    one, other = (of_steps(tmp_path / name, *NAMES) for name in ("one", "other"))
    np.testing.assert_allclose(other[:3], one[:3], rtol=1e-3, atol=1e-3)
