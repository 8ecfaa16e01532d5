# SPDX-License-Identifier: Apache-2.0
"""What holds for every encoder of the family: packed rows, long rows, and eight devices change no numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import random_batch
from hf_models import random_params

from bert_jax.devices.sharding import make_mesh, path_name, row_sharding, tree_shardings
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.objective import encode, forward
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import MeshConfig

TINY = {
    "vocab_size": 203, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48, "unroll": 1,
    "max_positions": 1110, "hidden_dropout_rate": 0.0, "attention_dropout_rate": 0.0,
}  # fmt: skip
LOCAL = {"num_layers": 3, "window": 6}
DISTANCES = {"distance_buckets": 16, "farthest_distance": 90}

# A size of the family, and what its tiny model has besides.
SIZES = {
    "base": {},
    "roberta-base": {},
    "distilbert": {},
    "electra-small": {"embedding_size": 16},
    "albert-base": {"embedding_size": 16},
    "mpnet-base": {},
    "deberta-v3-base": DISTANCES,
    "nomic-bert": {},
    "gte": {},
    "jina-embeddings-v3": {},
    "jina-bert-small": {},
    "eurobert-210m": {"num_key_heads": 2},
    "ultrabert-mini": LOCAL | {"num_layers": 4, "num_key_heads": 2, "prediction_size": 16},
    "modernbert-mini": LOCAL | {"global_every": 2},
}
VARIANTS = {
    "base and causal": ("base", {"causal": True}),
    "mpnet and local": ("mpnet-base", {"window": 70, "global_every": 2}),
    "deberta and local": ("deberta-v3-base", DISTANCES | {"window": 70, "global_every": 2}),
}
MODELS = {
    name: dataclasses.replace(model_size(size), **TINY | changes)
    for name, (size, changes) in ({name: (name, changes) for name, changes in SIZES.items()} | VARIANTS).items()
}


def models(*fast):
    """Gives a test every model; all but some are slow, or none if none is named."""
    slow = set(MODELS) - set(fast) if fast else set()
    marked = [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in MODELS]
    return pytest.mark.parametrize("name", marked)


@functools.cache
def params_of(name):
    """Returns random parameters, with tables of distances that are seen beside scores."""
    made = random_params(MODELS[name], parts=("mlm",))
    if MODELS[name].score_bias == "buckets":
        made["encoder"]["score_bias"]["embedding"] *= 10
    return made


@functools.cache
def whole(name):
    """Returns what computes hidden states and keeps all probabilities, for which rows are computed whole."""
    compiled = jax.jit(lambda params, batch: encode(MODELS[name], params, batch, layers=True, attentions=True).hidden)
    return lambda batch: np.asarray(compiled(params_of(name), batch))


@models()
def test_a_sequence_in_a_packed_row_is_as_it_is_alone(name):
    packed = random_batch(num_rows=2, row_length=60, num_sequences=3)
    together = whole(name)(packed)
    for number in (1, 2, 3):
        inside = packed.sequence_ids[0] == number
        length, alone = inside.sum(), jax.tree.map(np.zeros_like, packed)
        alone.token_ids[0, :length] = packed.token_ids[0, inside]
        alone.type_ids[0, :length] = packed.type_ids[0, inside]
        alone.sequence_ids[0, :length] = 1
        np.testing.assert_allclose(whole(name)(alone)[0, :length], together[0, inside], atol=2e-5)


@models("deberta-v3-base", "ultrabert-mini")
def test_rows_of_more_than_1024_tokens_are_as_whole_ones(name):
    """They are computed in blocks or windows. Where there is no kernel, fused attention is plain."""
    batch, config = random_batch(num_rows=1, row_length=1100, num_sequences=2), MODELS[name]
    config = dataclasses.replace(config, attention="fused", remat="full")
    with jax.numpy_rank_promotion("raise"):  # as users switch it on
        found = jax.jit(lambda params: encode(config, params, batch).hidden)(params_of(name))
    real = batch.sequence_ids > 0
    np.testing.assert_allclose(np.asarray(found)[real], whole(name)(batch)[real], atol=2e-5)


@models("deberta-v3-base", "ultrabert-mini")
def test_eight_devices_compute_the_gradients_that_one_computes(name):
    """Rows, heads and parameters are divided; layers are scanned."""
    batch = random_batch(num_rows=8, row_length=40)._replace(mlm_positions=np.zeros((8, 5), np.int32) + np.arange(5))

    def loss(params, batch):
        return jnp.sum(jnp.cos(forward(MODELS[name], params, batch, MASKED_LM)[..., :203]))

    params = params_of(name)
    expected = jax.jit(jax.value_and_grad(loss))(params, batch)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        shardings = tree_shardings(mesh, params)
        compiled = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))
        found = compiled(jax.device_put(params, shardings), jax.device_put(batch, row_sharding(mesh)))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * max(1, np.abs(theirs).max()))
    learned = {path_name(path): np.abs(leaf).max() for path, leaf in jax.tree_util.tree_leaves_with_path(expected[1])}
    # All do but the bias of keys: it adds the same number to all scores of a query.
    assert {path for path, most in learned.items() if most < 1e-3} <= {"encoder/layers/attention/key/bias"}
