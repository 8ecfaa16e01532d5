# SPDX-License-Identifier: Apache-2.0
"""Gradients of a loss that needs the outputs of all rows of a batch at once, in the memory of a microbatch."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from bert_jax.batch import Batch, PyTree
from bert_jax.model.keys import rows_numbered
from bert_jax.training.accumulate import microbatches_of, sum_over_microbatches

_Rest = TypeVar("_Rest")


def gradients_of_whole(
    outputs_of: Callable[[PyTree, Batch, jax.Array], jax.Array],
    loss_of: Callable[[jax.Array], tuple[jax.Array, _Rest]],
    count: int,
    params: PyTree,
    batch: Batch,
    key: jax.Array,
    **options: PyTree,
) -> tuple[tuple[jax.Array, _Rest], PyTree]:
    """Returns a loss that needs the outputs of all rows at once, its auxiliary output, and its gradients.

    The first pass over `count` microbatches keeps nothing but their outputs [B, ...]. The loss of all of them gives the
    gradient of each output, and a second pass, with the same dropout, takes these to the parameters. So the memory is
    that of a microbatch, and the result that of a single one within rounding. `options` are `sum_over_microbatches`'s.
    Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache).
    """

    def outputs_of_some(rows: Batch, index: jax.Array) -> jax.Array:
        with rows_numbered(index, count):
            return outputs_of(params, rows, key)

    def pull_back(params: PyTree, rows: Batch, key: jax.Array) -> tuple[jax.Array, PyTree]:
        def pulled(params: PyTree) -> jax.Array:
            outputs = outputs_of(params, rows._replace(labels=None), key)
            return jnp.sum(outputs * rows.labels)

        return jnp.zeros(()), jax.grad(pulled)(params)

    pieces = microbatches_of(batch._replace(labels=None), count), jnp.arange(count)
    outputs = jax.lax.map(lambda piece: outputs_of_some(*piece), pieces)
    # in the order of the rows
    outputs = jnp.swapaxes(outputs, 0, 1).reshape(-1, *outputs.shape[2:])
    loss, pulls = jax.value_and_grad(loss_of, has_aux=True)(outputs)
    # The gradients of the outputs travel as labels, so that they are divided into microbatches as
    # the rows are.
    return loss, sum_over_microbatches(
        pull_back, count, params, batch._replace(labels=pulls), key, **options
    )[1]
