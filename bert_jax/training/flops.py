# SPDX-License-Identifier: Apache-2.0
"""FLOPs and parameter counts of a BERT, by arithmetic."""

from bert_jax.settings.model import ModelConfig


def forward_flops(
    model: ModelConfig, num_tokens: float, sum_squared_lengths: float, num_predictions: float, num_sequences: float
) -> float:
    """Returns the FLOPs of one forward pass with both heads; a multiplication and an addition are 2.

    Only matrix products count. Give the numbers of real tokens, squared lengths of real sequences and real predictions,
    so that padding does not count as useful work. A local layer has the scores of its window, those at the ends of
    sequences too.
    """
    hidden, width = model.hidden_size, model.embedding_width
    feed_forward = (3 if model.feed_forward == "gated" else 2) * 2 * hidden * model.intermediate_size
    per_token = model.num_layers * (8 * hidden**2 + feed_forward) + 2 * width * hidden * (width != hidden)
    of_local = min(sum_squared_lengths, num_tokens * (2 * model.window + 1))
    scores = (model.num_layers - model.num_local) * sum_squared_lengths + model.num_local * of_local
    attention = 4 * hidden * scores  # and the sums they weigh
    masked_language_model = num_predictions * 2 * (hidden * width + width * model.vocab_size)
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
    hidden, wide, width = model.hidden_size, model.intermediate_size, model.embedding_width

    def dense(columns: int, rows: int) -> int:
        return columns * rows + rows * model.dense_bias

    def norm(size: int) -> int:
        return size * (1 + model.norm_bias)

    positions = (model.max_positions + model.position_offset) * (model.positions == "learned")
    embeddings = (model.vocab_size + positions + model.type_vocab_size) * width + norm(width)
    project = (width + 1) * hidden * (width != hidden)
    attention = 4 * dense(hidden, hidden) + norm(hidden)
    gates = 2 if model.feed_forward == "gated" else 1
    feed_forward = gates * dense(hidden, wide) + dense(wide, hidden) + norm(hidden)
    pooler = dense(hidden, hidden) + norm(hidden) * model.block.norm
    encoder = embeddings + project + model.num_layers * (attention + feed_forward) + pooler
    masked_language_model = dense(hidden, width) + norm(width) + model.vocab_size  # its matrix is the word table
    next_sentence = 2 * hidden + 2
    return encoder + (masked_language_model + next_sentence if heads else 0)
