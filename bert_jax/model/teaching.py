# SPDX-License-Identifier: Apache-2.0
"""Losses of a student: how far its outputs are from a teacher's."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bert_jax.model.losses import Pair
from bert_jax.settings.pretraining import TeacherConfig


def taught(
    hard: Pair,
    outputs: jax.Array,
    teacher: jax.Array,
    weights: jax.Array,
    divergence: Callable[[jax.Array, jax.Array], jax.Array],
    config: TeacherConfig,
) -> Pair:
    """Returns a loss of which a share is how far outputs are from the teacher's, both divided by a temperature.

    That part is multiplied by the temperature's square, so that its gradient keeps its size. Source: Hinton et al.
    2015.
    """
    temperature, share = config.temperature, config.weight
    softened = (each.astype(jnp.float32) / temperature for each in (outputs[..., : teacher.shape[-1]], teacher))
    soft = jnp.sum(divergence(*softened) * weights) * temperature**2
    return (1 - share) * hard[0] + share * soft, hard[1]


def class_divergence(outputs: jax.Array, teacher: jax.Array) -> jax.Array:
    """Returns the Kullback-Leibler divergence [...] of classes [..., K]; of a single number the squared difference."""
    if outputs.shape[-1] == 1:
        return jnp.square(outputs - teacher)[..., 0]
    wanted = jax.nn.log_softmax(teacher)
    return jnp.sum(jnp.exp(wanted) * (wanted - jax.nn.log_softmax(outputs)), axis=-1)
