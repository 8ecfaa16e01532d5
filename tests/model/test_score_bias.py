# SPDX-License-Identifier: Apache-2.0
"""A bias of scores by distance: an encoder in NumPy, blocks, windows, derivatives, its costs.

`test_every_encoder.py` has packed rows and devices, `tests/checkpoints/test_older_layouts.py` encoders with ALiBi in
NumPy, and `tests/reference/test_live_family.py` those with vectors of distances, beside transformers.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import computed, random_batch, tiny_model
from hf_models import random_params
from older_layouts import slopes

from bert_jax.batch import pad_rows
from bert_jax.model import long_rows, score_bias
from bert_jax.model.attention import attend, attention_mask
from bert_jax.model.attention_kernels import AttentionShape
from bert_jax.model.flops import forward_flops
from bert_jax.model.keys import rows_numbered
from bert_jax.model.long_rows import in_blocks, in_windows
from bert_jax.model.objective import encode, init_params
from bert_jax.model.parts import Dropout
from bert_jax.model.score_bias import (
    DistanceVectors,
    bias_of,
    bias_of_scores,
    bucket_of,
    rows_of_distances,
    slopes_of,
)
from bert_jax.settings.model import model_size
from bert_jax.training.memory import activation_bytes
from bert_jax.training.optim import decay_mask, scale_by_depth

MPNET = dataclasses.replace(
    model_size("mpnet-base"), vocab_size=203, hidden_size=32, num_heads=4, num_layers=2, intermediate_size=48,
    max_positions=400, hidden_dropout_rate=0.0, attention_dropout_rate=0.0, unroll=1,
)  # fmt: skip
JINA = dataclasses.replace(
    model_size("jina-bert-small"), vocab_size=203, hidden_size=24, num_heads=6, num_layers=2,
    intermediate_size=20, max_positions=1100, hidden_dropout_rate=0.0, unroll=1,
)  # fmt: skip


DEBERTA = dataclasses.replace(
    model_size("deberta-v3-base"), vocab_size=203, hidden_size=24, num_heads=3, num_layers=2, intermediate_size=20,
    max_positions=1100, distance_buckets=16, farthest_distance=90, hidden_dropout_rate=0.0, attention_dropout_rate=0.0,
    unroll=1,
)  # fmt: skip


def params_of(config):
    made = random_params(config, parts=("mlm",))
    if config.score_bias == "buckets":
        made["encoder"]["score_bias"]["embedding"] *= 10  # a wrong bucket shall be seen
    is_scale = lambda path: path[-1].key == "scale"  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf + is_scale(path), made)


@pytest.fixture(scope="module")
def params():
    return params_of(MPNET)


def distances(queries, keys, ahead=0):
    return ahead + np.arange(keys) - np.arange(queries)[:, None]


def expected_bucket(distance):
    """One distance at a time. Source: the paper of T5, section 2.1."""
    away, later = abs(distance), 16 * (distance > 0)
    if away < 8:
        return later + away
    return later + min(15, 8 + math.floor(8 * math.log(away / 8, 16) + 1e-12))


def test_buckets_are_exact_and_then_logarithmic():
    some = [*range(-140, 141), -8191, -1000, 1000, 8191]
    assert bucket_of(np.array(some)).tolist() == [expected_bucket(each) for each in some]
    assert bucket_of(np.array([0, 1, -1, 7, 8, 91, -90])).tolist() == [0, 17, 1, 23, 24, 31, 14]


@pytest.mark.parametrize(("queries", "keys", "ahead"), [(5, 5, 0), (1, 1, 0), (7, 300, -3), (200, 600, -200)])
def test_biases_are_rows_of_the_table_or_slopes_by_distance(queries, keys, ahead):
    table = np.random.default_rng(0).normal(size=(2, 3, 32)).astype(np.float32)
    tables = table, np.float32(slopes_of(3))[None, :, None]
    found, of_slopes = computed(lambda *tables: [bias_of(each, queries, keys, ahead) for each in tables], *tables)
    away = distances(queries, keys, ahead)
    np.testing.assert_array_equal(found, table[:, :, bucket_of(away)])
    np.testing.assert_allclose(of_slopes, -np.array(slopes(3))[:, None, None] * abs(away)[None, None], rtol=1e-6)


@pytest.mark.parametrize("heads", [1, 2, 3, 12, 20])
def test_slopes_are_those_of_the_paper(heads):
    assert slopes_of(heads).tolist() == slopes(heads)
    assert {1: [2**-8], 2: [2**-4, 2**-8]}.get(heads, slopes(heads)) == slopes_of(heads).tolist()


def expected_row(distance, buckets, farthest):
    """One distance at a time, query - key. Source: the code of the paper of DeBERTa."""
    half, away = buckets // 2, abs(distance)
    if buckets and away > half:
        ratio = math.log(away / half) / math.log((farthest - 1) / half)
        distance = math.copysign(half + math.ceil(ratio * (half - 1) - 1e-6), distance)
    size = buckets or farthest
    return min(max(int(distance) + size, 0), 2 * size - 1)


@pytest.mark.parametrize(("buckets", "farthest"), [(256, 512), (8, 30), (32, 128), (0, 10), (4, 7)])
def test_rows_of_distances_are_exact_and_then_logarithmic(buckets, farthest):
    found = rows_of_distances(buckets, farthest).tolist()
    assert found == [expected_row(each, buckets, farthest) for each in range(-farthest, farthest + 1)]
    size = buckets or farthest
    assert (found[0], found[farthest], found[-1]) == (0, size, 2 * size - 1)


def vectors_for(rng, size, heads=3, width=4):
    return jnp.asarray(rng.normal(size=(size, heads, width)), jnp.float32)


@pytest.mark.parametrize(
    ("queries", "keys", "ahead", "block", "sides"),
    [
        (5, 5, 0, 128, (True, False)),
        (1, 9, -3, 4, (False, True)),
        (7, 300, -3, 64, (True, True)),
        (100, 300, -100, 37, (True, True)),
    ],
)
def test_queries_and_keys_are_multiplied_with_the_vector_of_their_distance(
    monkeypatch, queries, keys, ahead, block, sides
):
    monkeypatch.setattr(score_bias, "_BLOCK", block)
    rng = np.random.default_rng(queries)
    query, key = (jnp.asarray(rng.normal(size=(2, size, 3, 4)), jnp.float32) for size in (queries, keys))
    vectors = [vectors_for(rng, 16) if has else None for has in sides]
    biases = DistanceVectors(jnp.asarray(rows_of_distances(8, 30)), *vectors)
    found = jax.jit(bias_of_scores, static_argnums=3)(biases, query, key, ahead)
    rows = np.vectorize(lambda distance: expected_row(distance, 8, 30))(-distances(queries, keys, ahead))
    expected = np.zeros((2, 3, queries, keys))
    for array, of, letters in zip((query, key), vectors, ("BQND", "BKND"), strict=True):
        if of is not None:
            expected += np.einsum(f"{letters},QKND->BNQK", array, np.asarray(of)[rows])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def encoder_in_numpy(config, encoder, ids):
    """Returns the hidden states [L, H] of one row, in float64. Source: the modeling file of transformers 5.23."""
    encoder = jax.tree.map(np.float64, encoder)
    length, heads = len(ids), config.num_heads

    def norm(x, of):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.layer_norm_epsilon) * of[
            "scale"
        ] + of["bias"]

    def dense(x, of):
        return x @ of["kernel"] + of["bias"]

    tables = encoder["embeddings"]
    x = norm(tables["word"]["embedding"][ids] + tables["position"]["embedding"][2 : 2 + length], tables["norm"])
    bias = np.empty((heads, length, length))
    for query, key in np.ndindex(length, length):
        bias[:, query, key] = encoder["score_bias"]["embedding"][expected_bucket(key - query)]
    for number in range(config.num_layers):
        layer = jax.tree.map(lambda leaf: leaf[number], encoder["layers"])  # noqa: B023
        of, mlp = layer["attention"], layer["mlp"]
        query, key, value = (
            dense(x, of[name]).reshape(length, heads, -1).swapaxes(0, 1) for name in ("query", "key", "value")
        )
        raised = np.exp(query @ key.swapaxes(1, 2) / math.sqrt(config.head_size) + bias)
        context = (raised / raised.sum(-1, keepdims=True)) @ value
        x = norm(x + dense(context.swapaxes(0, 1).reshape(length, -1), of["output"]), of["norm"])
        wide = dense(x, mlp["intermediate"])
        wide = wide * np.vectorize(lambda each: (1 + math.erf(each / math.sqrt(2))) / 2)(wide)
        x = norm(x + dense(wide, mlp["output"]), mlp["norm"])
    return x


@functools.cache
def hidden_of(config):
    compiled = jax.jit(lambda params, batch: encode(config, params, batch, layers=True, attentions=True).hidden)
    return lambda params, batch: np.asarray(compiled(params, batch))


def test_mpnet_computes_what_numpy_computes(params):
    ids = [np.random.default_rng(number).integers(5, 203, length) for number, length in enumerate((150, 61))]
    found = hidden_of(MPNET)(params, pad_rows(ids, 150))
    for row, own in enumerate(ids):
        np.testing.assert_allclose(found[row, : len(own)], encoder_in_numpy(MPNET, params["encoder"], own), atol=2e-5)
    flat = params | {"encoder": params["encoder"] | {"score_bias": {"embedding": np.zeros((32, 4), np.float32)}}}
    assert np.abs(hidden_of(MPNET)(flat, pad_rows(ids, 150)) - found).max() > 0.1


def by_whole_scores(shape, query, key, value, ids, keys, biases):
    heads = [array.reshape(*array.shape[:2], shape.num_heads, -1) for array in (query, key, value)]
    size = query.shape[1]
    away = distances(size, size)
    if isinstance(biases, DistanceVectors):
        of_queries, of_keys = (each[rows_of_distances(8, 30)[np.clip(-away, -30, 30) + 30]] for each in biases[1:])
        bias = jnp.einsum("BQND,QKND->BNQK", heads[0], of_queries) + jnp.einsum("BKND,QKND->BNQK", heads[1], of_keys)
    else:
        bias = biases[:, :, bucket_of(away)] if biases.shape[-1] > 1 else -biases[..., None] * abs(away)
    seen = attention_mask(ids, False, shape.window)
    return attend(*heads, seen, lambda probabilities: probabilities, "default", bias)[0].reshape(query.shape)


@pytest.mark.parametrize("kind", ["learned", "slopes", "vectors"])
@pytest.mark.parametrize("window", [0, 70])
def test_blocks_and_windows_compute_what_whole_rows_do(monkeypatch, window, kind):
    """Both passes, and the gradient of the table, whose two copies are of two rows each; or slopes, which have none."""
    monkeypatch.setattr(long_rows, "SCORES", 20_000)
    rng, shape = np.random.default_rng(0), AttentionShape(2, 8, False, 2**16, window=window)
    floats = [jnp.asarray(rng.normal(size=(4, 331, 16)), jnp.float32) for _ in range(3)]
    rows, is_learned = jnp.asarray(rows_of_distances(8, 30)), kind != "slopes"
    table = rng.normal(size=(2, 2, 32)) if is_learned else np.array(slopes(2))[None, :, None]
    made = (vectors_for(rng, 16, 2, 8), vectors_for(rng, 16, 2, 8))
    floats.append(made if kind == "vectors" else jnp.asarray(table, jnp.float32))
    ids = np.ones((4, 331), np.int32)
    ids[0, 200:], ids[1, 320:] = 2, 0
    real = (ids > 0)[..., None]

    def loss(compute, query, key, value, biases):
        biases = DistanceVectors(rows, *biases) if kind == "vectors" else biases
        context = compute(shape, query, key, value, jnp.asarray(ids), jnp.zeros((4, 2, 2), jnp.int32), biases=biases)
        return jnp.sum(jnp.where(real, context, 0) * jnp.cos(jnp.arange(context.size).reshape(context.shape)))

    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, each), argnums=tuple(range(3 + is_learned))))(*floats)
        for each in (in_windows if window else in_blocks, by_whole_scores)
    )
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(1, np.abs(theirs).max()))
    assert np.abs(jax.tree.leaves(expected[1])[-1]).max() > 0.1


def test_dropout_of_distances_is_the_same_in_all_rows_and_parts_of_a_batch():
    """So two microbatches are one batch; and it draws, for other keys other vectors."""
    config = dataclasses.replace(DEBERTA, hidden_dropout_rate=0.3)
    params = params_of(config)
    batch = random_batch(num_rows=4, row_length=40)

    @jax.jit
    def hidden(batch, first, seed):
        with rows_numbered(first):
            return encode(config, params, batch, jax.random.key(seed)).hidden

    whole = hidden(batch, 0, 1)
    for first in (0, 2):
        half = jax.tree.map(lambda leaf: leaf[first : first + 2], batch)  # noqa: B023
        np.testing.assert_allclose(hidden(half, first, 1), whole[first : first + 2], atol=1e-5)
    drop = functools.partial(Dropout(0.3, of_rows=False).apply, {}, jnp.ones((50, 24)), False)
    drawn = [drop(rngs={"dropout": jax.random.key(seed)}) for seed in (0, 1)]
    assert 0.2 < (drawn[0] == 0).mean() < 0.4 and (drawn[0] != drawn[1]).any()


def test_the_table_is_a_bias_at_the_depth_of_embeddings(params):
    assert decay_mask(params)["encoder"]["score_bias"] == {"embedding": False}
    ones = jax.tree.map(np.ones_like, params)
    scaled = computed(lambda ones: scale_by_depth(0.5).update(ones, None)[0], ones)
    of_table, of_words = (scaled["encoder"][name] for name in ("score_bias", "embeddings"))
    assert of_table["embedding"][0, 0] == of_words["word"]["embedding"][0, 0] == 0.125


def test_vectors_of_distances_decay_as_tables_do():
    made = params_of(dataclasses.replace(DEBERTA, distance_shared=False))
    decayed = decay_mask(made)["encoder"]
    assert decayed["distances"] == {"embedding": True, "norm": {"scale": False, "bias": False}}
    assert decayed["layers"]["attention"]["distance_key"] == {"kernel": True, "bias": False}
    scaled, _ = scale_by_depth(0.5).update(jax.tree.map(np.ones_like, made), None)
    assert scaled["encoder"]["distances"]["embedding"][0, 0] == 0.125


def test_alibi_has_no_parameters_and_no_kernel():
    plain = dataclasses.replace(JINA, score_bias="none", attention="fused")
    shapes = [jax.eval_shape(functools.partial(init_params, each), jax.random.key(0)) for each in (plain, JINA)]
    assert shapes[0] == shapes[1] and "position" not in shapes[0]["encoder"]["embeddings"]
    assert plain.has_kernels and not dataclasses.replace(plain, score_bias="alibi").has_kernels


def test_what_it_costs():
    """No product of matrices, but of vectors; its scores are kept where those of a kernel would not be."""
    model = tiny_model(attention="fused")
    biased = dataclasses.replace(model, score_bias="buckets")
    work = (40, 800, 6, 2)
    assert forward_flops(biased, *work) == forward_flops(model, *work)
    with_vectors = dataclasses.replace(model, score_bias="vectors")
    assert forward_flops(with_vectors, *work) - forward_flops(model, *work) == 2 * 2 * 800 * model.hidden_size * (
        model.num_layers
    )
    plain = activation_bytes(dataclasses.replace(biased, attention="plain"), 512)
    assert activation_bytes(model, 512) < activation_bytes(biased, 512) == plain
    products = 2 * 4 * 512 * 512 * model.num_heads  # of one layer
    assert activation_bytes(with_vectors, 512) == plain + products
