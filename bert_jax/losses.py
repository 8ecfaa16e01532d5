# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics as (sum, weight) pairs, so that any split of a batch adds up to the whole."""

import jax
import jax.numpy as jnp

Pair = tuple[jax.Array, jax.Array]  # a float32 sum over predictions, and how many there were


def cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> Pair:
    """Returns the summed negative log-likelihood in nats, and the summed weight.

    logits [..., K] of any float type, labels [...] int, weights [...] float. Computed in float32.
    """
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    loss = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(loss * weights), jnp.sum(weights)


def accuracy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> Pair:
    """Returns how many labels have the largest logit, and the summed weight."""
    return jnp.sum((jnp.argmax(logits, axis=-1) == labels) * weights), jnp.sum(weights)
