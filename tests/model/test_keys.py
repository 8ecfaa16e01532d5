# SPDX-License-Identifier: Apache-2.0
"""Random keys: a purpose of their own for each, so that equal seeds share nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import make_pretrained

import bert_jax
from bert_jax.checkpoints.warm_start import complete
from bert_jax.devices.sharding import make_mesh
from bert_jax.model.keys import PURPOSES, root_key
from bert_jax.model.masking import _token_bits
from bert_jax.model.objective import task_objective
from bert_jax.settings.pretraining import MeshConfig, OptimizerConfig, TrainConfig
from bert_jax.training.step import init_state


def test_purposes_have_numbers_of_their_own():
    assert len(set(PURPOSES.values())) == len(PURPOSES)


@pytest.mark.parametrize("purpose", ["parameters", "dropout"])
def test_a_mask_is_drawn_from_no_key_of_another_purpose(purpose):
    """The masks of epoch 1 once were drawn from the keys of dropout, sequence by step, and those of epoch 0 too."""
    seed, count = 3, 8
    epochs, numbers = (np.ravel(part) for part in np.indices((4, count)))
    place = np.zeros((len(epochs), 1), np.int32)
    drawn = _token_bits(seed, jnp.asarray(epochs), jnp.asarray(numbers)[:, None], place, place, 3)
    drawn = {tuple(row) for row in np.asarray(drawn)[:, 0].tolist()}
    assert len(drawn) == 4 * count
    root = root_key(seed, purpose)
    for number in range(count):  # as a step's dropout, or a layer's parameters
        key = jax.random.fold_in(jax.random.fold_in(root, number), 0)
        assert tuple(jax.random.bits(key, (3,), jnp.uint32).tolist()) not in drawn


def test_a_missing_head_is_that_of_the_seed(tmp_path):
    start = bert_jax.load_pretrained(make_pretrained(tmp_path))
    objective = task_objective(start.config, "sequence_classification", 3)
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    fresh = init_state(objective, OptimizerConfig(), TrainConfig(seed=5), mesh).params["classifier"]
    jax.tree.map(np.testing.assert_array_equal, complete(start, objective, 5).params["classifier"], fresh)
