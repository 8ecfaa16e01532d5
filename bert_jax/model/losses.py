# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics as (sum, weight) pairs, which can be added up over the parts of a batch."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

Pair = tuple[jax.Array, jax.Array]  # a float32 sum over predictions, and their number


def mean_metrics(sums: Mapping[str, Sequence[float] | Pair]) -> dict[str, float]:
    """Returns sum / weight of every metric; 0 if the weight is 0."""
    return {
        name: float(total) / float(weight) if weight else 0.0
        for name, (total, weight) in sums.items()
    }


def cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> Pair:
    """Returns the summed negative log-likelihood in nats, and the summed weight.

    logits [..., K] of any float type, labels [...] int, weights [...] float. Computed in float32.
    """
    logits = logits.astype(jnp.float32)
    loss = jax.nn.logsumexp(logits, axis=-1) - _logit_of(logits, labels)
    return jnp.sum(loss * weights), jnp.sum(weights)


def accuracy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> Pair:
    """Returns the weighted number of labels with a larger logit than every other class, and the summed weight.

    A tie counts as wrong, and so does NaN. Shapes as for `cross_entropy`.
    """
    others = jnp.where(_is_label(logits, labels), -jnp.inf, logits)
    return jnp.sum((_logit_of(logits, labels) > jnp.max(others, axis=-1)) * weights), jnp.sum(
        weights
    )


def squared_error(outputs: jax.Array, labels: jax.Array, weights: jax.Array) -> Pair:
    """Returns the summed square of outputs - labels, and the summed weight; all three [...] float."""
    return jnp.sum(jnp.square(outputs.astype(jnp.float32) - labels) * weights), jnp.sum(weights)


def _logit_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the logits of the labels, by a masked sum: unlike a gather, its gradient needs no scatter."""
    return jnp.sum(jnp.where(_is_label(logits, labels), logits, 0), axis=-1)


def _is_label(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[-1]) == labels[..., None]
