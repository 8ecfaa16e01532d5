# SPDX-License-Identifier: Apache-2.0
"""The masked language model's task: choose tokens, hide them, remember them.

A mask is a pure function of (seed, sequence number, epoch). Keys, budgets and random bits belong to a
sequence and to the place of a token in it, so neither packing nor the number of devices changes a mask.
Runs on the device, inside the step.
"""

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.config import MaskingConfig


def prediction_budgets(config: MaskingConfig, max_length: int) -> np.ndarray:
    """Returns how many tokens to predict in a sequence of 0..max_length tokens, [max_length + 1] int32.

    Source: google-research/bert create_pretraining_data.py: min(most, max(1, round(length x rate))), with
    [CLS] and [SEP] counted in and Python 3's rounding of halves to even.
    """
    budgets = [min(config.max_predictions, max(1, round(length * config.rate))) for length in range(max_length + 1)]
    return np.array([0, *budgets[1:]], np.int32) * (config.rate > 0)


def predictions_per_row(config: MaskingConfig, row_length: int, num_sequences: int) -> int:
    """Returns P, the places for predictions that a row of M sequences needs at most."""
    if num_sequences == 1:
        return max(1, int(prediction_budgets(config, row_length)[-1]))
    most = min(int(config.rate * row_length) + num_sequences, num_sequences * config.max_predictions)
    return max(1, most)


def mask_tokens(
    batch: Batch, config: MaskingConfig, vocab_size: int, mask_id: int, never_predicted: tuple[int, ...]
) -> Batch:
    """Returns the batch with tokens hidden and `mlm_positions`, `mlm_labels`, `mlm_weights` [B, P] set.

    In each sequence an exact number of tokens is chosen at random (`prediction_budgets`), none of them in
    `never_predicted` ([CLS] and [SEP]). A chosen token becomes [MASK], a random token of the whole unpadded
    vocabulary, or stays. Source: paper, section 3.1; google-research/bert create_pretraining_data.py.
    """
    assert batch.sequence_numbers is not None and batch.epochs is not None
    num_rows, row_length = batch.token_ids.shape
    num_sequences = batch.cls_positions.shape[1]
    token_ids = batch.token_ids.astype(jnp.int32)
    sequence_ids = batch.sequence_ids.astype(jnp.int32)
    real = sequence_ids > 0
    place = jnp.maximum(sequence_ids - 1, 0)  # [B, L]: which of the row's M sequences

    def of_token(per_sequence: jax.Array) -> jax.Array:
        return jnp.take_along_axis(per_sequence, place, axis=1)

    positions = jnp.arange(row_length)
    offsets = positions - of_token(batch.cls_positions.astype(jnp.int32))
    epochs = jnp.zeros_like(batch.epochs) if config.static else batch.epochs
    bits = _token_bits(config.seed, epochs, batch.sequence_numbers.astype(jnp.uint32), place, offsets)  # [B, L, 3]

    lengths = jnp.sum(sequence_ids[:, None, :] == jnp.arange(1, num_sequences + 1)[:, None], axis=-1)  # [B, M]
    budgets = jnp.asarray(prediction_budgets(config, row_length))[lengths]
    candidates = real & ~jnp.isin(token_ids, jnp.array(never_predicted))
    chosen = candidates & (_rank_in_sequence(bits[..., 0], candidates, sequence_ids) < of_token(budgets))

    num_predictions = predictions_per_row(config, row_length, num_sequences)
    ordered = jnp.sort(jnp.where(chosen, positions, row_length), axis=1)[:, :num_predictions]
    weights = ordered < row_length
    mlm_positions = jnp.where(weights, ordered, 0)
    mlm_labels = jnp.where(weights, jnp.take_along_axis(token_ids, mlm_positions, axis=1), 0)

    share = _unit(bits[..., 1])
    random_ids = (bits[..., 2] % vocab_size).astype(jnp.int32)  # the bias, vocab_size / 2**32, is below 1e-4
    hidden = jnp.where(share < config.mask_rate, mask_id, token_ids)
    hidden = jnp.where(
        (share >= config.mask_rate) & (share < config.mask_rate + config.random_rate), random_ids, hidden
    )
    return batch._replace(
        token_ids=jnp.where(chosen, hidden, token_ids),
        mlm_positions=mlm_positions,
        mlm_labels=mlm_labels,
        mlm_weights=weights.astype(jnp.float32),
    )


def _token_bits(seed: int, epochs: jax.Array, numbers: jax.Array, place: jax.Array, offsets: jax.Array) -> jax.Array:
    """Returns three 32-bit words [B, L, 3] for each token, from its sequence, its offset in it and the epoch.

    threefry whatever the default generator: its bits do not depend on vmap, shape or sharding.
    """
    root = jax.random.key(seed, impl="threefry2x32")

    def row_bits(epoch: jax.Array, numbers: jax.Array, place: jax.Array, offsets: jax.Array) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(root, epoch), numbers)
        return jax.vmap(lambda key, offset: jax.random.bits(jax.random.fold_in(key, offset), (3,), jnp.uint32))(
            keys[place], offsets
        )

    return jax.vmap(row_bits)(epochs, numbers, place, offsets)


def _rank_in_sequence(scores: jax.Array, candidates: jax.Array, sequence_ids: jax.Array) -> jax.Array:
    """Returns for each token how many candidates of its sequence have a lower score, [B, L].

    Ties go to the earlier token. Compares all pairs: L is small, and a fused reduction beats a sort.
    """
    index = jnp.arange(scores.shape[1])
    mine, other = scores[:, :, None], scores[:, None, :]
    before = (other < mine) | ((other == mine) & (index[None, None, :] < index[None, :, None]))
    same = sequence_ids[:, :, None] == sequence_ids[:, None, :]
    return jnp.sum(before & same & candidates[:, None, :], axis=-1)


def _unit(bits: jax.Array) -> jax.Array:
    """Returns 32-bit words as float32 in [0, 1), by their 24 high bits."""
    return (bits >> 8).astype(jnp.float32) * np.float32(2**-24)
