# SPDX-License-Identifier: Apache-2.0
"""Fewer key heads, RMS norm before every block, other global layers, a table of the masked head's own: their
parameters, growing, what is refused. `test_every_encoder.py` has what holds for all.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import make_tokenizer, random_params

from bert_jax.checkpoints.grow import grow
from bert_jax.checkpoints.names import flatten
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.devices.sharding import check_divisible, make_mesh
from bert_jax.errors import InputError
from bert_jax.model.flops import forward_flops
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.objective import init_params
from bert_jax.model.shapes import abstract_params
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import MeshConfig
from bert_jax.training.optim import decay_mask

EURO = dataclasses.replace(
    model_size("eurobert-210m"), vocab_size=203, hidden_size=32, num_layers=3, num_heads=4, num_key_heads=2,
    intermediate_size=48, unroll=1,
)  # fmt: skip
ULTRA = dataclasses.replace(
    model_size("ultrabert-mini"), vocab_size=203, hidden_size=32, num_layers=4, num_heads=4, num_key_heads=2,
    intermediate_size=48, window=6, prediction_size=16, unroll=1,
)  # fmt: skip
MODELS = pytest.mark.parametrize("model", [EURO, ULTRA], ids=["eurobert", "ultrabert"])


@functools.cache
def params_of(config):
    return random_params(config, parts=("mlm",))


@MODELS
def test_parameters_are_those_that_are_made(model):
    made = jax.eval_shape(functools.partial(init_params, model, head=MASKED_LM), jax.random.key(0))
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params_of(model))
    assert all(jax.tree.leaves(decay_mask(made)["mlm"]))


def test_key_heads_are_divided_by_devices():
    check_divisible(make_mesh(MeshConfig(data=4, tensor=2)), ULTRA)
    with pytest.raises(InputError, match="num_key_heads 2 is not divisible by mesh"):
        check_divisible(make_mesh(MeshConfig(data=2, tensor=4)), ULTRA)


def test_new_words_are_those_of_both_tables():
    bert = Pretrained(EURO, params_of(EURO), make_tokenizer(203), "masked_lm", ())
    ids, grown = bert.tokenizer.encode("abc"), grow(bert, ["abc"]).params
    for path in ("mlm/words/embedding", "encoder/embeddings/word/embedding"):
        before, after = flatten(bert.params)[path], flatten(grown)[path]
        np.testing.assert_allclose(after[203], before[ids].mean(axis=0), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_first": 3}, "model.global_first 3 is not below model.global_every 3"),
        ({"prediction_size": 3}, "needs a model.family with two dense layers before words"),
        ({"num_key_heads": 3}, "num_heads 4 is not divisible by model.num_key_heads 3; use 3 or 6"),
        ({"norm_bias": True}, "set model.norm_bias=False"),
        ({"embedding_size": 16}, "model.embedding_size 16 needs another model.norm than before_all"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(EURO, **changes).validate()


def test_sizes_of_eurobert_have_its_numbers_of_parameters_and_key_heads_save_products():
    """Source: Boizard et al. 2025, table 1; the table of the masked head is not counted."""
    for size, millions in (("210m", 210), ("610m", 610), ("2.1b", 2100)):
        encoder = abstract_params(model_size(f"eurobert-{size}"))["encoder"]
        found = sum(math.prod(leaf.shape) for name, part in encoder.items() if name != "pooler"
                    for leaf in jax.tree.leaves(part)) / 1e6  # fmt: skip
        assert abs(found - millions) < 0.01 * millions
    few, all_heads = EURO, dataclasses.replace(EURO, num_key_heads=0)
    assert forward_flops(all_heads, 10, 0, 0, 0) - forward_flops(few, 10, 0, 0, 0) == 10 * 3 * 4 * 32 * 16
