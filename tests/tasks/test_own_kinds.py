# SPDX-License-Identifier: Apache-2.0
"""Heads and tasks made of a function: of texts, of words, of groups of texts; they train, are kept, and answer."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import computed, drawn_like, make_learner, message, topics_run

import bert_jax
from bert_jax import BatchHead, TextHead, TokenHead, batch_task, text_task, token_task
from bert_jax.settings.pretraining import MeshConfig

# Words of the toy language, by how they begin.
KINDS = {"b": ["ban", "bas", "bin", "ben"], "d": ["dan", "dus", "dit", "den"], "k": ["kan", "kis", "kor", "ken"]}


def means(encoded, batch):
    places = jnp.arange(1, batch.cls_positions.shape[1] + 1)
    inside = (batch.sequence_ids[:, None] == places[:, None])[..., None]
    return (encoded.hidden[:, None].astype(jnp.float32) * inside).sum(axis=2) / jnp.maximum(inside.sum(axis=2), 1)


def tokens(encoded, batch):
    return jnp.concatenate([encoded.hidden, encoded.hidden**2], axis=-1)


def nearest(vectors, texts):
    """Returns the cross entropy of each anchor's positive among all positives, by product."""
    scores = jnp.einsum("EK,CK->EC", vectors[:, 0], vectors[:, 1])
    there = texts.numbers[:, 0] >= 0
    log_shares = jnp.where(there, scores, -1e9) - jnp.log(jnp.sum(jnp.exp(scores) * there, axis=1, keepdims=True))
    return -jnp.diagonal(log_shares)


def texts_of(split):
    rng = np.random.default_rng(len(split))
    for _ in range({"train": 48, "dev": 12}.get(split, 0)):
        kind = str(rng.choice(list(KINDS)))
        yield kind, [str(word) for word in rng.choice(KINDS[kind], 3)]


def read_classes(source, split):
    return [(" ".join(words), kind) for kind, words in texts_of(split)]


def read_pairs_with_numbers(source, split):
    return [(" ".join(words), words[0], float(kind == "b")) for kind, words in texts_of(split)]


def read_words(source, split):
    return [(words, ["first" if word[1] == "a" else "other" for word in words]) for _, words in texts_of(split)]


def read_groups(source, split):
    return [(" ".join(words), " ".join(reversed(words)), "den") for _, words in texts_of(split)]


def given(*examples):
    return lambda source, split: examples


CASES = {
    "classes": (text_task(read_classes, list(KINDS)), TextHead("means", means)),
    "numbers": (text_task(read_pairs_with_numbers), TextHead("means", means)),
    "words": (token_task(read_words, ("first", "other")), TokenHead("squares", tokens)),
    "groups": (batch_task(read_groups), BatchHead("products", means, nearest)),
}


def settings(pretrained, **sections):
    return topics_run("anything", pretrained, **sections)


def finetune(config, workdir, case):
    task, head = case
    return bert_jax.finetune(config, workdir, task=task, head=head, devices=jax.devices()[: config.mesh.data])


@pytest.mark.parametrize("name", ["classes", "words"])
def test_a_head_is_a_dense_layer_on_what_its_function_gives(bert, name):
    head, batch = CASES[name][1], bert.batch(["ban bas bin", "dan"])
    shapes = jax.eval_shape(lambda: bert_jax.init_params(bert.config, jax.random.key(0), head, 3))
    dense = drawn_like(shapes["classifier"])

    def outputs(params):
        encoded = bert_jax.encode(bert.config, params, batch)
        return head.vectors(encoded, batch), bert_jax.forward(bert.config, params, batch, head)

    vectors, logits = computed(outputs, bert.params | {"classifier": dense})
    np.testing.assert_allclose(logits, vectors @ dense["kernel"] + dense["bias"], atol=1e-5)
    assert np.abs(logits).max() > 0.1


def trained(name, tmp_path, start, metric, least):
    """Returns the predictor of a run that has reached a score."""
    task, head = CASES[name]
    result = finetune(settings(start), tmp_path / "run", CASES[name])
    assert result.metrics[metric] > least, result.metrics
    return bert_jax.load_predictor(tmp_path / "run", task=task, head=head)


def test_an_own_kind_trains_is_kept_and_answers(pretrained, tmp_path):
    predict = trained("groups", tmp_path, pretrained, "recall@10", 0.6)
    assert [each.vectors.shape for each in predict(["ban bas bin", "bin bas ban"])] == [(1, 32), (1, 32)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "metric", "least", "inputs", "right"),
    [
        ("classes", "accuracy", 0.9, ["ban bas", "kan kor"], lambda b, k: (b.label, k.label) == ("b", "k")),
        ("numbers", "spearman", 0.7, [("ban bin", "ban"), ("dan dus", "dan")], lambda b, d: b.value > d.value + 0.5),
        ("words", "accuracy", 0.9, ["ban bin kan"], lambda found: found.tags == ["first", "other", "first"]),
    ],
)
def test_own_kinds_learn(tmp_path, name, metric, least, inputs, right):
    predict = trained(name, tmp_path, make_learner(tmp_path), metric, least)
    assert right(*predict(inputs))


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "accumulate"), [(4, 1), (1, 2)])
def test_the_loss_of_a_batch_does_not_depend_on_devices_or_microbatches(pretrained, tmp_path, devices, accumulate):
    found = []
    for name, count, parts in (("one", 1, 1), ("other", devices, accumulate)):
        config = settings(pretrained, mesh=MeshConfig(data=count))
        train = dataclasses.replace(config.train, accumulate=parts, num_epochs=1.0)
        model = dataclasses.replace(config.model, hidden_dropout_rate=0.0)
        finetune(dataclasses.replace(config, train=train, model=model), tmp_path / name, CASES["groups"])
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        found.append([line["loss"] for line in lines if line["kind"] == "train"])
    assert len(found[0]) == 3
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (text_task(given(("ban",)), "bd"), "train example 1: read gave ('ban',); needed: (text, label)"),
        (text_task(given("ab"), "bd"), "train example 1: read gave 'ab'; needed: a tuple for each example"),
        (batch_task(given(())), "needed: a tuple for each example"),
        (token_task(given((["ban"], [1]))), "needed: (words, tags), two lists of one length"),
        (text_task(given(("ban", 3, "b")), "bd"), "needed: (text, label) or (text, second text, label)"),
        (text_task(given(("ban", "b"))), "needed: a number as the label, or text_task(read, labels)"),
        (text_task(given(("ban", "x")), "bd"), "train example 1: label 'x' is not one of 'b', 'd'"),
        (token_task(given(("ban", ["first"]))), "needed: (words, tags), two lists of one length"),
        (token_task(given((["ban"], []))), "needed: (words, tags), two lists of one length"),
        (batch_task(given(("ban",))), "needed: (anchor, positive) or (anchor, positive, negative, ...)"),
        (batch_task(given(("ban", 2.0))), "needed: (anchor, positive)"),
    ],
)
def test_what_a_reader_gives_is_checked(pretrained, tmp_path, task, told):
    assert told in message(finetune, settings(pretrained), tmp_path / "run", (task, None))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "head", "told"),
    [
        ("classes", TextHead("own", lambda encoded, batch: encoded.hidden), "TextHead.logits gave (2, 5, 3)"),
        (
            "classes",
            TextHead("own", lambda encoded, batch: encoded.pooled),
            "TextHead.logits fails with AttributeError",
        ),
        ("words", TokenHead("own", means), "TokenHead.logits gave"),
        (
            "groups",
            BatchHead("own", lambda encoded, batch: encoded.hidden[..., 0], nearest),
            "own: vectors gave (1, 2)",
        ),
        ("groups", BatchHead("own", means, lambda vectors, texts: vectors.sum()), "own: loss gave (); needed: (2,)"),
        ("groups", BatchHead("own", means, lambda vectors, texts: vectors[:, 0]), "own: loss gave (2, 32)"),
    ],
)
def test_what_a_function_of_a_head_gives_is_checked(pretrained, tmp_path, name, head, told):
    assert told in message(finetune, settings(pretrained), tmp_path / "run", (CASES[name][0], head))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
