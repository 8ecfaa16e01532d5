# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools

import jax
import numpy as np
import pytest
from builders import CLS, MASK, SEP, random_batch

from bert_jax.config import MaskingConfig
from bert_jax.masking import mask_tokens, prediction_budgets, predictions_per_row

VOCAB_SIZE = 203


@functools.partial(jax.jit, static_argnums=(1, 2))
def masked_on_device(batch, config, vocab_size):
    return mask_tokens(batch, config, vocab_size, MASK, (CLS, SEP))


def mask(batch, config=MaskingConfig(), vocab_size=VOCAB_SIZE):  # noqa: B008 - frozen
    return jax.device_get(masked_on_device(batch, config, vocab_size))


def test_budgets_follow_the_paper_and_python_rounding():
    budgets = prediction_budgets(MaskingConfig(), 512)
    assert budgets[0] == 0
    assert [budgets[n] for n in (1, 5, 10, 30, 50, 128)] == [1, 1, 2, 4, 8, 19]
    assert prediction_budgets(MaskingConfig(max_predictions=80), 512)[512] == 77
    assert prediction_budgets(MaskingConfig(max_predictions=76), 512)[512] == 76
    assert predictions_per_row(MaskingConfig(), 128, 1) == 19


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_every_sequence_has_exactly_its_budget(num_sequences):
    batch = random_batch(num_rows=64, row_length=96, num_sequences=num_sequences)
    masked = mask(batch)
    budgets = prediction_budgets(MaskingConfig(), 96)
    for row in range(64):
        positions = masked.mlm_positions[row][masked.mlm_weights[row] > 0]
        assert len(set(positions)) == len(positions)
        for place in range(1, num_sequences + 1):
            length = (batch.sequence_ids[row] == place).sum()
            assert (batch.sequence_ids[row][positions] == place).sum() == budgets[length]


def test_labels_are_the_hidden_tokens_and_the_rest_is_untouched():
    batch = random_batch(num_rows=64, row_length=64)
    masked = mask(batch)
    chosen = np.zeros(batch.token_ids.shape, bool)
    for row in range(64):
        positions = masked.mlm_positions[row][masked.mlm_weights[row] > 0]
        chosen[row, positions] = True
        assert (masked.mlm_labels[row][masked.mlm_weights[row] > 0] == batch.token_ids[row][positions]).all()
    assert (masked.token_ids[~chosen] == batch.token_ids[~chosen]).all()
    assert not chosen[(batch.token_ids == CLS) | (batch.token_ids == SEP) | (batch.sequence_ids == 0)].any()
    empty = masked.mlm_weights == 0
    assert (masked.mlm_positions[empty] == 0).all() and (masked.mlm_labels[empty] == 0).all()


@pytest.mark.parametrize(
    ("mask_rate", "random_rate"), [(0.8, 0.1), (1.0, 0.0), (0.8, 0.2), (0.8, 0.0), (0.0, 0.2), (0.0, 1.0)]
)
def test_mixes_of_table_8_within_binomial_bounds(mask_rate, random_rate):
    batch = random_batch(seed=1, num_rows=1024, row_length=64)
    config = MaskingConfig(mask_rate=mask_rate, random_rate=random_rate)
    masked = mask(batch, config)
    taken = masked.mlm_weights > 0
    now = np.take_along_axis(masked.token_ids, masked.mlm_positions, 1)[taken]
    before = masked.mlm_labels[taken]
    count = taken.sum()
    # A random token can be the old one, or [MASK], once in a vocabulary.
    expected = {
        "mask": mask_rate + random_rate / VOCAB_SIZE,
        "same": 1 - mask_rate - random_rate + random_rate / VOCAB_SIZE,
    }
    observed = {"mask": (now == MASK).mean(), "same": (now == before).mean()}
    for name, share in expected.items():
        deviation = np.sqrt(share * (1 - share) / count)
        assert abs(observed[name] - share) <= 4 * deviation + 1e-12, name


def test_random_replacements_cover_the_unpadded_vocabulary_evenly():
    batch = random_batch(seed=2, num_rows=4096, row_length=64)
    masked = mask(batch, MaskingConfig(mask_rate=0.0, random_rate=1.0))
    taken = masked.mlm_weights > 0
    now = np.take_along_axis(masked.token_ids, masked.mlm_positions, 1)[taken]
    counts = np.bincount(now, minlength=VOCAB_SIZE)
    assert len(counts) == VOCAB_SIZE  # nothing from the padding
    chi_squared = ((counts - len(now) / VOCAB_SIZE) ** 2).sum() / (len(now) / VOCAB_SIZE)
    assert abs(chi_squared - (VOCAB_SIZE - 1)) < 4 * np.sqrt(2 * (VOCAB_SIZE - 1))


def test_positions_are_chosen_evenly():
    batch = random_batch(seed=3, num_rows=1, row_length=40)
    many = jax.tree.map(lambda x: np.repeat(x, 4000, axis=0), batch)
    many = many._replace(sequence_numbers=np.arange(4000, dtype=np.uint32)[:, None])
    masked = mask(many)
    candidates = np.flatnonzero((batch.sequence_ids[0] > 0) & ~np.isin(batch.token_ids[0], [CLS, SEP]))
    counts = np.bincount(masked.mlm_positions[masked.mlm_weights > 0], minlength=40)[candidates]
    expected = counts.sum() / len(candidates)
    assert (abs(counts - expected) < 4.5 * np.sqrt(expected)).all()


def test_dynamic_masks_change_with_the_epoch_and_static_ones_do_not():
    batch = random_batch()
    later = batch._replace(epochs=batch.epochs + 1)
    assert (mask(batch).mlm_positions != mask(later).mlm_positions).any()
    static = MaskingConfig(static=True)
    for before, after in zip(mask(batch, static)[:1], mask(later, static)[:1], strict=True):
        assert (before == after).all()
    assert (mask(batch).token_ids == mask(batch, static).token_ids).all()  # epoch 0 is the static one
    other_seed = mask(batch, dataclasses.replace(MaskingConfig(), seed=1))
    assert (mask(batch).mlm_positions != other_seed.mlm_positions).any()


def test_packing_changes_no_mask():
    packed = random_batch(seed=4, num_rows=8, row_length=96, num_sequences=3)
    masked = mask(packed)
    for row in range(8):
        for place in range(3):
            inside = packed.sequence_ids[row] == place + 1
            length = inside.sum()
            alone = random_batch(num_rows=1, row_length=96)
            for name in ("token_ids", "sequence_ids"):
                getattr(alone, name)[:] = 0
                getattr(alone, name)[0, :length] = getattr(packed, name)[row][inside]
            alone.sequence_ids[0, :length] = 1
            alone = alone._replace(sequence_numbers=packed.sequence_numbers[row : row + 1, place : place + 1])
            assert (mask(alone).token_ids[0, :length] == masked.token_ids[row][inside]).all()


def test_rows_do_not_depend_on_their_neighbours():
    batch = random_batch(num_rows=16)
    half = jax.tree.map(lambda x: x[8:], batch)
    assert (mask(batch).token_ids[8:] == mask(half).token_ids).all()


def test_a_rate_of_zero_predicts_nothing():
    masked = mask(random_batch(), MaskingConfig(rate=0.0))
    assert masked.mlm_weights.sum() == 0
