# SPDX-License-Identifier: Apache-2.0
"""A head of one's own: its parameters stand beside the encoder, and what is not said is as of a classifier."""

import jax
import numpy as np
from builders import drawn_like, tiny_model
from flax import linen as nn

from bert_jax.batch import Row
from bert_jax.batches.make import batch_of_rows
from bert_jax.model.heads.base import Head
from bert_jax.model.objective import TaskObjective, init_params


class Largest(Head):
    """A dense layer on the largest number of each feature over the row."""

    name = "largest"
    parts = ("largest",)

    def logits(self, model, encoded, batch, deterministic):
        return nn.Dense(model.num_outputs, name="largest")(encoded.hidden.max(axis=1, keepdims=True))


def test_an_own_head_has_a_loss_and_gradients():
    head = Largest()
    params = drawn_like(jax.eval_shape(lambda: init_params(tiny_model(), jax.random.key(0), head, 3)))
    assert set(params) == {"encoder", "largest"} and "pooler" not in params["encoder"]
    row = Row(0, np.arange(5, 9, dtype=np.int32), np.zeros(4, np.uint8), (4,), 2)
    batch = batch_of_rows([[row]], 6, 1, head)
    objective = TaskObjective(tiny_model(), head, 3)

    def loss_of(own):
        return objective.losses(params | {"largest": own}, batch, None)["loss"][0]

    loss, gradients = jax.jit(jax.value_and_grad(loss_of))(params["largest"])
    assert loss > 0 and np.any(gradients["kernel"]) and objective.denominators(batch)["loss"] == 1
