# SPDX-License-Identifier: Apache-2.0
"""Encoding in the hands of others: mapped over batches and over models by JAX, and called from several threads."""

import concurrent.futures
import dataclasses
import threading

import jax
import numpy as np
import pytest
from builders import computed, random_batch, tiny_model
from hf_models import make_tokenizer, random_params

import bert_jax
from bert_jax.batches import infer
from bert_jax.batches.pack import Layout
from bert_jax.inference.pretrained import Pretrained
from bert_jax.model.objective import encode
from bert_jax.settings.model import model_size

SMALL = {"vocab_size": 203, "hidden_size": 32, "num_heads": 2, "num_layers": 2, "max_positions": 64, "unroll": 1}
WITH_WINDOWS = dataclasses.replace(model_size("modernbert-mini"), **SMALL, intermediate_size=20, window=4)


@pytest.mark.parametrize("over_models", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_vmap_is_a_loop_for_a_model_with_windows(over_models):
    config = WITH_WINDOWS
    params = [random_params(config, seed=seed, parts=("pooler",)) for seed in range(2)]
    batches = [random_batch(seed, num_rows=3, num_sequences=2) for seed in range(3)]
    batches = [each._replace(type_ids=each.type_ids * 0) for each in batches]
    one = jax.jit(lambda params, batch: encode(config, params, batch, layers=True)._asdict())
    of_batches = computed(
        jax.vmap(one, in_axes=(None, 0)), params[0], jax.tree.map(lambda *each: np.stack(each), *batches)
    )
    for place, each in enumerate(batches):
        here = jax.tree.map(lambda leaf, place=place: leaf[place], of_batches)
        jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, atol=2e-5), here, one(params[0], each))
    if over_models:
        of_models = jax.vmap(one, in_axes=(0, None))(jax.tree.map(lambda *each: np.stack(each), *params), batches[0])
        for place, each in enumerate(params):
            here = jax.tree.map(lambda leaf, place=place: leaf[place], of_models)
            jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, atol=2e-5), here, one(each, batches[0]))


@pytest.mark.parametrize("config", [tiny_model(), pytest.param(WITH_WINDOWS, marks=pytest.mark.slow)])
def test_four_threads_say_what_one_says(config):
    rng = np.random.default_rng(0)
    texts = [
        [" ".join(f"word{number}" for number in rng.integers(0, 140, rng.integers(1, 7))) for _ in range(count)]
        for count in rng.integers(1, 3, 24)
    ]
    models = [Pretrained(config, random_params(config), make_tokenizer(203)) for _ in range(2)]  # the first is cold
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(models[0].encode, texts))
    for ours, theirs in zip(found, map(models[1].encode, texts), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours._asdict(), theirs._asdict())


def test_sets_are_the_same_bits_on_one_core_and_on_several(monkeypatch):
    """Batches are computed on a thread a core, but on the caller's if that has settings of JAX of its own."""
    rng = np.random.default_rng(1)
    config = tiny_model()
    bert = Pretrained(config, random_params(config), make_tokenizer(203))
    texts = [" ".join(f"word{number}" for number in rng.integers(0, 140, 20)) for _ in range(200)]
    threads = set()

    def device_get(tree):
        threads.add(threading.get_ident())
        return jax.tree.map(np.asarray, tree)

    monkeypatch.setattr(jax, "device_get", device_get)
    here = {threading.get_ident()}
    monkeypatch.setattr(infer, "_cores", lambda: 1)
    alone = bert_jax.sentence_embeddings(bert, texts)
    assert threads == here
    monkeypatch.setattr(infer, "_cores", lambda: 3)
    np.testing.assert_array_equal(bert_jax.sentence_embeddings(bert, texts), alone)
    assert len(threads) > 1
    threads.clear()
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(bert_jax.sentence_embeddings(bert, texts), alone, atol=1e-5)
    assert threads == here


def test_what_a_batch_raises_in_a_thread_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(infer, "_cores", lambda: 2)

    def compute(layout):
        if layout.bins == [[2]]:
            raise ValueError("two")
        return np.array(layout.bins)

    layouts = [Layout([[number]], 1, 8, 1) for number in range(5)]
    found = infer.computed(layouts, compute)
    assert [next(found)[1].tolist() for _ in range(2)] == [[[0]], [[1]]]
    with pytest.raises(ValueError, match="two"):
        list(found)
