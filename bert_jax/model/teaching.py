# SPDX-License-Identifier: Apache-2.0
"""Losses of a student: how far its outputs are from a teacher's."""

import jax
import jax.numpy as jnp

from bert_jax.batch import Batch
from bert_jax.model.inputs import check_shapes
from bert_jax.model.losses import Pair
from bert_jax.settings.pretraining import TeacherConfig


def taught(hard: Pair, divergence: jax.Array, weights: jax.Array, config: TeacherConfig) -> Pair:
    """Returns a loss for each label; a share of it is the divergence from the teacher at a temperature.

    That part is multiplied by the temperature's square, so that its gradient keeps its size. Source: Hinton et al.
    2015.
    """
    check_shapes("a teacher", weights=(weights, divergence.shape))
    soft = jnp.sum(divergence * weights) * config.temperature**2
    return (1 - config.weight) * hard[0] + config.weight * soft, hard[1]


def class_divergence(
    outputs: jax.Array, teacher: jax.Array, batch: Batch | None = None, temperature: float = 1.0
) -> jax.Array:
    """Returns the Kullback-Leibler divergence [...] of classes [..., K]; for a single number the squared difference.

    Both are divided by the temperature. Outputs beyond the teacher's do not count.
    """
    check_shapes("a teacher", teacher=(teacher, (*outputs.shape[:-1], teacher.shape[-1])))
    pair = outputs[..., : teacher.shape[-1]], teacher
    student, target = (logits.astype(jnp.float32) / temperature for logits in pair)
    if target.shape[-1] == 1:
        return jnp.square(student - target)[..., 0]
    target = jax.nn.log_softmax(target)
    return jnp.sum(jnp.exp(target) * (target - jax.nn.log_softmax(student)), axis=-1)
