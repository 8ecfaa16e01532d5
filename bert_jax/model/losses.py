# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics as (sum, weight) pairs, which can be added up over the parts of a batch."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from bert_jax.errors import InputError
from bert_jax.model.inputs import check_shapes
from bert_jax.model.product import widened

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
    _check("cross_entropy", logits, labels, weights)
    logits = widened(logits)
    loss = jax.nn.logsumexp(logits, axis=-1) - _logit_of(logits, labels)
    return jnp.sum(loss * weights), jnp.sum(weights)


def accuracy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> Pair:
    """Returns the weighted number of labels with a larger logit than every other class, and the summed weight.

    A tie counts as wrong, and so does NaN. Shapes as for `cross_entropy`.
    """
    _check("accuracy", logits, labels, weights)
    others = jnp.where(_is_label(logits, labels), -jnp.inf, logits)
    return jnp.sum((_logit_of(logits, labels) > jnp.max(others, axis=-1)) * weights), jnp.sum(
        weights
    )


def squared_error(outputs: jax.Array, labels: jax.Array, weights: jax.Array) -> Pair:
    """Returns the summed square of outputs - labels, and the summed weight; all three [...] float."""
    check_shapes("squared_error", labels=(labels, outputs.shape), weights=(weights, outputs.shape))
    return jnp.sum(jnp.square(widened(outputs) - labels) * weights), jnp.sum(weights)


def _check(where: str, logits: jax.Array, labels: jax.Array, weights: jax.Array) -> None:
    """Raises: InputError if there is not a class and a weight for each row of the logits, which would broadcast."""
    if labels is None or weights is None:
        raise InputError(
            f"{where}: the batch has no labels or no weights; make_batch and mask_tokens write them"
        )
    rows = logits.shape[:-1]
    check_shapes(where, labels=(labels, rows), weights=(weights, rows))
    if jnp.issubdtype(labels.dtype, jnp.floating):
        raise InputError(
            f"{where}: labels are {labels.dtype}, and a class is a whole number; a head with one output learns numbers"
        )


def _logit_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the logits of the labels, by a masked sum: unlike a gather, its gradient needs no scatter."""
    return jnp.sum(jnp.where(_is_label(logits, labels), logits, 0), axis=-1)


def _is_label(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
