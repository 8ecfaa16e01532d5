# SPDX-License-Identifier: Apache-2.0
"""FLOPs of a BERT, by arithmetic."""

from collections.abc import Sequence

from bert_jax.settings.model import ModelConfig


def forward_flops(
    model: ModelConfig,
    num_tokens: float,
    sum_squared_lengths: float,
    num_predictions: float,
    num_sequences: float,
) -> float:
    """Returns the FLOPs of one forward pass with both heads; a multiplication and an addition are 2.

    Only matrix products count. Give the numbers of real tokens, squared lengths of real sequences and real predictions,
    so that padding does not count as useful work. A local layer has the scores of its window, those at the ends of
    sequences too.
    """
    hidden = model.hidden_size
    width = model.embedding_width
    feed_forward = (
        (3 if model.feed_forward == "gated" else 2) * 2 * hidden * model.intermediate_size
    )
    products = 4 * hidden * (hidden + model.key_size)  # queries and outputs, keys and values
    per_token = (
        model.num_layers * (products + feed_forward) + 2 * width * hidden * model.widens_embeddings
    )
    of_local = min(sum_squared_lengths, num_tokens * (2 * model.window + 1))
    scores = (model.num_layers - model.num_local) * sum_squared_lengths + model.num_local * of_local
    # and the sums they weigh; vectors of distances have products of their own with queries and keys
    attention = (4 + 2 * len(model.distance_products)) * hidden * scores
    transforms = hidden * (model.prediction_size or width) * model.block.word_layers
    masked_language_model = num_predictions * 2 * (transforms + width * model.vocab_size)
    pooler = num_sequences * 2 * hidden**2
    return per_token * num_tokens + attention + masked_language_model + pooler


def train_flops(
    model: ModelConfig,
    num_tokens: float,
    sum_squared_lengths: float,
    num_predictions: float,
    num_sequences: float,
) -> float:
    """Returns the FLOPs of one training step: the backward pass is twice the forward pass.

    Recomputation by rematerialisation is not counted.
    """
    return 3 * forward_flops(model, num_tokens, sum_squared_lengths, num_predictions, num_sequences)


def step_flops(
    models: Sequence[ModelConfig],
    num_tokens: float,
    sum_squared_lengths: float,
    num_predictions: float,
    num_sequences: float,
) -> float:
    """Returns the FLOPs of one training step of several models at once, of which the last predicts words."""
    first = sum(
        train_flops(model, num_tokens, sum_squared_lengths, 0, num_sequences)
        for model in models[:-1]
    )
    return first + train_flops(
        models[-1], num_tokens, sum_squared_lengths, num_predictions, num_sequences
    )
