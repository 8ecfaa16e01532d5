# SPDX-License-Identifier: Apache-2.0
"""What a loop of one's own takes from `bert_jax`: masks, losses of pre-training, vectors in place of words, recipes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import make_pretrained

import bert_jax
from bert_jax import HEADS, InputError, MaskingConfig, ModelConfig

TEXTS = ["the ban ben bin ber .", "the dan dus det dor dan dis the dun .", "the kan kor ."]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return bert_jax.load_pretrained(make_pretrained(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def batch(bert):
    return bert_jax.make_batch(bert.tokenizer, TEXTS)


@pytest.mark.parametrize("masking", [MaskingConfig(), MaskingConfig(rate=0.5, whole_word=True)])
def test_tokens_are_masked_by_a_key(bert, batch, masking):
    mask = jax.jit(lambda batch, key: bert_jax.mask_tokens(bert.tokenizer, batch, key, masking))
    masked, again, other = (jax.device_get(mask(batch, jax.random.key(seed))) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, masked, again)
    assert (masked.mlm_positions != other.mlm_positions).any()
    chosen = masked.mlm_weights > 0
    rows = np.nonzero(chosen)[0]
    places = masked.mlm_positions[chosen]
    assert np.array_equal(batch.token_ids[rows, places], masked.mlm_labels[chosen])
    special = {bert.tokenizer.cls_id, bert.tokenizer.sep_id, bert.tokenizer.pad_id}
    assert not special & set(masked.mlm_labels[chosen].tolist())
    untouched = np.ones_like(batch.token_ids, bool)
    untouched[rows, places] = False
    assert np.array_equal(masked.token_ids[untouched], batch.token_ids[untouched])
    tokens = (batch.sequence_ids > 0).sum(axis=1)
    expected = np.maximum(1, (tokens * masking.rate).round())
    if masking.whole_word:
        assert (chosen.sum(axis=1) <= expected).all() and chosen.sum() > 3
        assert bert.tokenizer.word_starts[masked.mlm_labels[chosen]].any()
    else:
        assert np.array_equal(chosen.sum(axis=1), expected)


def test_a_loop_of_ones_own_trains_the_masked_language_model(bert, batch):
    head = HEADS["masked_lm"]
    params = {name: bert.params[name] for name in ("encoder", "mlm")}
    optimizer = optax.adam(3e-3)

    def loss(params, key):
        masked = bert_jax.mask_tokens(bert.tokenizer, batch, key)
        logits = bert_jax.forward(bert.config, params, masked, head)
        total, count = head.losses(logits, masked, head.weights(masked))["loss"]
        return total / count

    @jax.jit
    def step(params, state, key):
        value, gradients = jax.value_and_grad(loss)(params, key)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    state, values = optimizer.init(params), []
    for number in range(30):
        params, state, value = step(params, state, jax.random.key(number % 3))
        values.append(float(value))
    assert np.mean(values[-3:]) < 0.3 * np.mean(values[:3])


def test_the_head_of_pretraining_has_the_losses_of_a_run(bert, batch):
    head, labels = HEADS["pretraining"], np.array([[0], [1], [-1]])
    masked = bert_jax.mask_tokens(bert.tokenizer, batch, jax.random.key(0))
    output = bert_jax.forward(bert.config, bert.params, masked, head)
    weights = head.weights(masked)
    words_only = head.losses(output, masked, weights)
    metrics = head.losses(output, masked._replace(next_sentence_labels=labels), weights)
    log_words = jax.nn.log_softmax(output.mlm_logits)
    picked = jnp.take_along_axis(log_words, masked.mlm_labels[..., None], axis=-1)[..., 0]
    words = -(picked * weights).sum() / weights.sum()
    next_ones = -jax.nn.log_softmax(output.next_sentence_logits)[np.arange(2), 0, labels[:2, 0]].mean()
    assert set(words_only) == {"loss", "mlm_loss", "mlm_accuracy"}
    assert set(metrics) == {"loss", "mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"}
    assert float(words_only["loss"][0]) == pytest.approx(float(words), rel=1e-5)
    assert float(metrics["loss"][0]) == pytest.approx(float(words + next_ones), rel=1e-5)
    assert float(metrics["nsp_loss"][1]) == 2


def test_word_vectors_stand_in_for_token_ids(bert, batch):
    table = bert.params["encoder"]["embeddings"]["word"]["embedding"]
    vectors = table[batch.token_ids]

    @jax.jit
    def hidden(batch):
        return bert_jax.encode(bert.config, bert.params, batch).hidden

    by_ids, by_vectors = hidden(batch), hidden(batch._replace(word_vectors=vectors))
    np.testing.assert_allclose(by_vectors, by_ids, atol=1e-6)
    zeros = batch._replace(token_ids=np.zeros_like(batch.token_ids), word_vectors=vectors)
    np.testing.assert_allclose(hidden(zeros), by_ids, atol=1e-6)

    gradient = jax.grad(lambda vectors: hidden(batch._replace(word_vectors=vectors))[:, 0, 0].sum())(vectors)
    inside = np.asarray(batch.sequence_ids) > 0
    assert (np.abs(gradient).max(axis=-1) > 0)[inside].all() and not np.abs(gradient)[~inside].any()
    step = 1e-2 * gradient / jnp.linalg.norm(gradient)
    moved, back = (hidden(batch._replace(word_vectors=vectors + sign * step))[:, 0, 0].sum() for sign in (1, -1))
    assert float(moved - back) == pytest.approx(2e-2 * float(jnp.linalg.norm(gradient)), rel=0.02)


def test_sizes_and_recipes_by_name():
    base = ModelConfig.of("base")
    assert (base.num_layers, base.hidden_size, base.compute_dtype) == (12, 768, "float32")
    with pytest.raises(InputError, match=r"no model size 'bsae'.*base"):
        ModelConfig.of("bsae")

    config = bert_jax.recipe("pretrain:small", {"data.path": "data128", "train.num_steps": 7})
    plain = bert_jax.recipe("pretrain:small")
    assert (config.data.path, config.train.num_steps) == ("data128", 7) and config.model == plain.model
    changed = dataclasses.replace(plain.train, num_steps=7)
    assert config == dataclasses.replace(plain, data=dataclasses.replace(plain.data, path="data128"), train=changed)
    assert isinstance(bert_jax.recipe("finetune:mnli"), bert_jax.FinetuneConfig)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("pretrian:base", {}, "did you mean --config=pretrain:base"),
        ("my/own.py", {}, "the recipe my/own.py does not exist"),
        ("pretrain:base", {"train.num_stesp": 1}, "train.num_stesp is not a setting.*train.num_steps"),
        ("pretrain:base", {"train.num_steps": "many"}, "train.num_steps 'many' is of another type; use a whole number"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(name, settings, message):
    with pytest.raises(InputError, match=message):
        bert_jax.recipe(name, settings)
