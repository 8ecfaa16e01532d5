# SPDX-License-Identifier: Apache-2.0
"""FLOPs and parameter counts of a BERT, by arithmetic."""

from bert_jax.settings.model import ModelConfig


def forward_flops(
    model: ModelConfig, num_tokens: float, sum_squared_lengths: float, num_predictions: float, num_sequences: float
) -> float:
    """Returns the FLOPs of one forward pass with both heads; a multiplication and an addition are 2.

    Only matrix products count. Give the numbers of real tokens, squared lengths of real sequences and real predictions,
    so that padding does not count as useful work.
    """
    hidden = model.hidden_size
    per_token = model.num_layers * (8 * hidden**2 + 4 * hidden * model.intermediate_size)
    attention = model.num_layers * 4 * hidden * sum_squared_lengths  # scores, and the sums they weigh
    masked_language_model = num_predictions * 2 * (hidden**2 + hidden * model.vocab_size)
    pooler = num_sequences * 2 * hidden**2
    return per_token * num_tokens + attention + masked_language_model + pooler


def train_flops(
    model: ModelConfig, num_tokens: float, sum_squared_lengths: float, num_predictions: float, num_sequences: float
) -> float:
    """Returns the FLOPs of one training step: the backward pass is twice the forward pass.

    Recomputation by rematerialisation is not counted.
    """
    return 3 * forward_flops(model, num_tokens, sum_squared_lengths, num_predictions, num_sequences)


def num_parameters(model: ModelConfig, heads: bool = True) -> int:
    """Returns the number of parameters, with or without the heads of pre-training.

    The rows that pad the word table to a multiple are not counted: they are zero and stay zero.
    """
    hidden, wide = model.hidden_size, model.intermediate_size
    norm = 2 * hidden
    embeddings = (model.vocab_size + model.max_positions + model.type_vocab_size) * hidden + norm
    attention = 4 * (hidden**2 + hidden) + norm
    feed_forward = 2 * hidden * wide + wide + hidden + norm
    pooler = hidden**2 + hidden
    encoder = embeddings + model.num_layers * (attention + feed_forward) + pooler
    masked_language_model = hidden**2 + hidden + norm + model.vocab_size  # its matrix is the word table
    next_sentence = 2 * hidden + 2
    return encoder + (masked_language_model + next_sentence if heads else 0)
