# SPDX-License-Identifier: Apache-2.0
"""The shapes by arithmetic are those of the parameters that a model is made with."""

import dataclasses

import jax
import pytest

from bert_jax.model.heads.table import HEADS
from bert_jax.model.objective import init_params
from bert_jax.model.shapes import abstract_params
from bert_jax.settings.model import ModelConfig, model_size


def traced(config, num_classes):
    """Returns the shapes of the encoder and of every head of its family, as they are made."""

    def every_part(key):
        params = init_params(config, key)
        for head in HEADS.values():
            if head.family in ("", config.family) and not head.own_parts <= set(params):
                params = init_params(config, key, head, num_classes) | params
        return params

    return jax.eval_shape(every_part, jax.random.key(0))


ODD = ModelConfig(
    vocab_size=1000,
    hidden_size=24,
    num_layers=3,
    num_heads=4,
    intermediate_size=40,
    max_positions=17,
    vocab_multiple=7,
    type_vocab_size=3,
    embedding_size=10,
    position_offset=5,
)


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("roberta-base", "distilbert", "electra-small")),
        "modernbert-mini",
        ODD,
        dataclasses.replace(ODD, norm_bias=False, dense_bias=False, feed_forward="gated", norm="before"),
        dataclasses.replace(ODD, feed_forward="gated", unbiased="layers"),
        dataclasses.replace(ODD, feed_forward="gated", unbiased="wide"),
        dataclasses.replace(ODD, family="mpnet", score_bias="buckets"),
        dataclasses.replace(ODD, family="deberta-v2", score_bias="vectors", distance_buckets=6, farthest_distance=9),
        dataclasses.replace(ODD, score_bias="vectors", distance_buckets=0, distance_norm=False, distance_shared=False),
        dataclasses.replace(ODD, family="jina_bert", score_bias="alibi", positions="none", position_offset=0),
        dataclasses.replace(ODD, family="electra", dense_bias=False, type_vocab_size=0),
        dataclasses.replace(ODD, family="modernbert", positions="none", position_offset=0, embedding_size=0),
    ],
    ids=lambda config: config if isinstance(config, str) else "",
)
def test_shapes_are_those_of_a_model_that_is_made(config):
    if isinstance(config, str):
        config = dataclasses.replace(model_size(config), vocab_size=203)
    assert abstract_params(config, 5) == traced(config, 5)
