# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools
import hashlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from builders import CLS, MASK, SEP, computed, random_batch, tiny_model

from bert_jax.model.masking import (
    _ngram_lengths,
    choose_words,
    first_tokens_of_words,
    leave_causal,
    mask_rows,
    mask_tokens,
    next_tokens,
    prediction_budgets,
    predictions_per_row,
)
from bert_jax.model.objective import PretrainingObjective
from bert_jax.settings.pretraining import MaskingConfig

VOCAB_SIZE = 203
GOLDEN = ["ae622f05ffc0", "238a17157265"]  # of positions and of what stands there


@functools.partial(jax.jit, static_argnums=(1, 2))
def masked_on_device(batch, config, vocab_size):
    return mask_rows(batch, config, vocab_size, MASK, (CLS, SEP))


def mask(batch, config=MaskingConfig(), vocab_size=VOCAB_SIZE):  # noqa: B008 - frozen
    """Returns masked rows, compiled for a few numbers of them: a row does not depend on its neighbours."""
    rows = len(batch.token_ids)
    more = next(size for size in (256, 1024, 4096) if size >= rows) - rows
    filled = jax.tree.map(lambda leaf: np.pad(leaf, ((0, more), *[(0, 0)] * (leaf.ndim - 1))), batch)
    masked = jax.device_get(masked_on_device(filled, config, vocab_size))
    return jax.tree.map(lambda leaf: leaf[:rows], masked)


left_causal_on_device = jax.jit(leave_causal, static_argnums=2)


def left_causal(masked, batch, config):
    return jax.device_get(left_causal_on_device(masked, batch, config))


def test_budgets_follow_the_paper_and_python_rounding():
    budgets = prediction_budgets(MaskingConfig(), 512)
    assert budgets[0] == 0 and len(budgets) == 513
    assert [budgets[n] for n in (1, 5, 10, 30, 50, 128)] == [1, 1, 2, 4, 8, 19]
    assert prediction_budgets(MaskingConfig(max_predictions=80), 512)[512] == 77
    assert prediction_budgets(MaskingConfig(max_predictions=76), 512)[512] == 76
    assert [predictions_per_row(MaskingConfig(), 128, number) for number in (1, 2, 3)] == [19, 21, 22]
    assert predictions_per_row(MaskingConfig(max_predictions=5), 128, 3) == 15
    assert [predictions_per_row(MaskingConfig(rate=0.0), 128, number) for number in (1, 3)] == [1, 1]


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
    batch = random_batch(num_rows=64, row_length=96)
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


@pytest.mark.parametrize(("mask_rate", "random_rate"), [(0.8, 0.1), (1.0, 0.0), (0.0, 0.2)])
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
    batch = random_batch(seed=2, num_rows=1024, row_length=64)
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
    batch = random_batch(row_length=96)
    later = batch._replace(epochs=batch.epochs + 1)
    assert (mask(batch).mlm_positions != mask(later).mlm_positions).any()
    static = MaskingConfig(static=True)
    for before, after in zip(mask(batch, static)[:1], mask(later, static)[:1], strict=True):
        assert (before == after).all()
    assert (mask(batch).token_ids == mask(batch, static).token_ids).all()  # epoch 0 is the static one
    other_seed = mask(batch, dataclasses.replace(MaskingConfig(), seed=1))
    assert (mask(batch).mlm_positions != other_seed.mlm_positions).any()


def test_rows_do_not_depend_on_their_neighbours():
    batch = random_batch(num_rows=16, row_length=96)
    half = jax.tree.map(lambda x: x[8:], batch)
    assert (mask(batch).token_ids[8:] == mask(half).token_ids).all()


def test_a_rate_of_zero_predicts_nothing():
    masked = mask(random_batch(row_length=96), MaskingConfig(rate=0.0))
    assert masked.mlm_weights.sum() == 0


# Whole words and runs of them


def words_by_the_book(scores, num_words, candidates, starts, sequence, budget):
    """Returns the tokens that google-research's loop over shuffled words chooses in one sequence, in plain Python."""
    groups = []
    for position in np.flatnonzero(candidates & sequence):
        if starts[position] or not groups:
            groups.append([position])
        else:
            groups[-1].append(position)
    chosen = set()
    for first in sorted(range(len(groups)), key=lambda group: scores[groups[group][0]]):
        if len(chosen) >= budget:
            break
        count = num_words[groups[first][0]]
        run = [position for group in groups[first : first + count] for position in group]
        while count > 1 and len(chosen) + len(run) > budget:
            count -= 1
            run = [position for group in groups[first : first + count] for position in group]
        if len(chosen) + len(run) <= budget and not chosen.intersection(run):
            chosen.update(run)
    return chosen


@pytest.mark.parametrize(("max_ngram", "num_sequences"), [(1, 3), (3, 1)])
def test_words_are_chosen_by_the_references_loop(max_ngram, num_sequences):
    batch = random_batch(seed=6, num_rows=48, row_length=60, num_sequences=num_sequences)
    rng = np.random.default_rng(1)
    shape = batch.token_ids.shape
    word_starts = (rng.random(shape) < 0.2) | (batch.token_ids == CLS) | (batch.token_ids == SEP)
    candidates = (batch.sequence_ids > 0) & ~np.isin(batch.token_ids, [CLS, SEP])
    scores = rng.permuted(np.arange(shape[1], dtype=np.uint32) * 2 * np.ones(shape, np.uint32), axis=1)
    num_words = rng.integers(1, max_ngram + 1, shape)
    budgets = rng.integers(0, 9, (shape[0], num_sequences))
    place = np.maximum(batch.sequence_ids.astype(np.int32) - 1, 0)
    starts = computed(first_tokens_of_words, candidates, word_starts, batch.sequence_ids.astype(np.int32))
    arrays = (scores, num_words, candidates, starts, place, budgets)
    chosen = computed(lambda *arrays: choose_words(*arrays, max_ngram), *arrays)
    short = 0
    for row in range(shape[0]):
        expected = set()
        for sequence in range(num_sequences):
            inside = batch.sequence_ids[row] == sequence + 1
            book = words_by_the_book(
                scores[row], num_words[row], candidates[row], word_starts[row], inside, budgets[row, sequence]
            )
            short += len(book) < min(budgets[row, sequence], (candidates[row] & inside).sum())
            expected |= book
        assert set(np.flatnonzero(chosen[row])) == expected
    assert short  # the case that makes whole words differ: words that did not fit


def with_words(batch, seed=0):
    """Returns the batch with about half of its tokens going on with the word before."""
    starts = np.random.default_rng(seed).random(batch.token_ids.shape) < 0.5
    return batch._replace(word_starts=starts | (batch.token_ids == CLS) | (batch.token_ids == SEP))


def chosen_tokens(batch, config):
    masked = mask(batch, config)
    chosen = np.zeros(batch.token_ids.shape, bool)
    for row in range(len(chosen)):
        chosen[row, masked.mlm_positions[row][masked.mlm_weights[row] > 0]] = True
    return chosen, masked


def test_whole_words_are_masked_whole_within_the_budget():
    batch = with_words(random_batch(seed=8, num_rows=256, row_length=96))
    config = MaskingConfig(whole_word=True)
    chosen, masked = chosen_tokens(batch, config)
    candidates = (batch.sequence_ids > 0) & (batch.token_ids != CLS) & (batch.token_ids != SEP)
    budgets = prediction_budgets(config, 96)[(batch.sequence_ids > 0).sum(1)]
    assert (chosen.sum(1) <= budgets).all() and (chosen.sum(1) < budgets).any()
    assert chosen.sum() > 0.9 * budgets.sum()
    for row in range(256):
        places = np.flatnonzero(candidates[row])
        going_on = ~batch.word_starts[row][places[1:]]
        assert (chosen[row][places[1:]] == chosen[row][places[:-1]])[going_on].all()
    # Tokens of a word are hidden one by one: some become [MASK] while their neighbour stays.
    inside = np.take_along_axis(masked.token_ids, masked.mlm_positions, 1)
    assert 0.7 < (inside == MASK)[masked.mlm_weights > 0].mean() < 0.9


def test_ngrams_are_longer_runs_of_the_same_budget():
    batch = random_batch(seed=9, num_rows=256, row_length=96)  # of words of one token

    def runs(config):
        chosen, _ = chosen_tokens(batch, config)
        padded = np.pad(chosen, ((0, 0), (1, 0)))
        return chosen.sum(), (padded[:, 1:] & ~padded[:, :-1]).sum()

    (words, word_runs), (grams, gram_runs) = (runs(MaskingConfig(whole_word=True, max_ngram=n)) for n in (1, 3))
    assert grams == words  # words of one token always fill the budget
    assert gram_runs < 0.8 * word_runs


def test_ngram_lengths_have_the_chances_of_their_inverses():
    lengths = computed(lambda key: _ngram_lengths(jax.random.bits(key, (60_000,), "uint32"), 3), jax.random.key(0))
    counts = np.bincount(lengths, minlength=4)[1:]
    np.testing.assert_allclose(counts / 60_000, np.array([6, 3, 2]) / 11, atol=0.01)


@pytest.mark.parametrize(
    ("whole_word", "max_ngram"), [(False, 1), pytest.param(True, 1, marks=pytest.mark.slow), (True, 3)]
)
def test_packing_changes_no_mask(whole_word, max_ngram):
    packed = with_words(random_batch(seed=4, num_rows=8, row_length=96, num_sequences=3))
    config = MaskingConfig(whole_word=whole_word, max_ngram=max_ngram)
    masked = mask(packed, config)
    alone = random_batch(num_rows=24, row_length=96)
    for name in ("token_ids", "sequence_ids", "word_starts"):
        getattr(alone, name)[:] = 0
    numbers = packed.sequence_numbers.reshape(24, 1)
    for row in range(8):
        for place in range(3):
            inside = packed.sequence_ids[row] == place + 1
            for name in ("token_ids", "word_starts"):
                getattr(alone, name)[3 * row + place, : inside.sum()] = getattr(packed, name)[row][inside]
            alone.sequence_ids[3 * row + place, : inside.sum()] = 1
    apart = mask(alone._replace(sequence_numbers=numbers), config)
    for row in range(8):
        for place in range(3):
            inside = packed.sequence_ids[row] == place + 1
            ours = apart.token_ids[3 * row + place, : inside.sum()]
            assert (ours == masked.token_ids[row][inside]).all()


def test_masks_are_those_of_earlier_versions():
    """A run that goes on with a later version sees the masks that it would have seen."""
    batch = with_words(random_batch(seed=5, num_rows=16, row_length=48, num_sequences=2))
    masked = mask(batch, MaskingConfig(whole_word=True, max_ngram=2, seed=3))
    bits = [np.asarray(array, np.int32).tobytes() for array in (masked.mlm_positions, masked.token_ids)]
    assert [hashlib.sha256(each).hexdigest()[:12] for each in bits] == GOLDEN


@pytest.mark.parametrize("options", [{}, {"whole_word": True, "max_ngram": 2}])
def test_a_falling_rate_takes_fewer_and_fewer_of_the_same_masks_in_the_same_shapes(options):
    batch = with_words(random_batch(num_rows=64, row_length=96, num_sequences=3))
    config = MaskingConfig(rate=0.3, end_rate=0.15, **options)
    prepare = PretrainingObjective(tiny_model(), config, MASK, (CLS, SEP), num_steps=100).prepare
    at_step = jax.jit(prepare)
    first, half, last = (jax.device_get(at_step(batch, np.int32(step))) for step in (0, 50, 100))
    for step, rate, found in ((0, 0.3, first), (50, 0.225, half), (100, 0.15, last)):
        assert at_step._cache_size() == 1 and found.mlm_positions.shape == first.mlm_positions.shape
        alone = mask(batch, dataclasses.replace(config, rate=rate, end_rate=0.0))
        assert found.mlm_weights.sum() == alone.mlm_weights.sum(), step
        np.testing.assert_array_equal(found.token_ids, alone.token_ids)
    if not options:
        assert ((first.token_ids == half.token_ids) | (half.token_ids == batch.token_ids)).all()
    held_out = jax.device_get(jax.jit(prepare)(batch))  # which knows no step
    np.testing.assert_array_equal(held_out.token_ids, mask(batch, config).token_ids)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_masks_by_a_key_are_causal_where_all_rows_are(rate):
    tokenizer = SimpleNamespace(
        mask_id=MASK, cls_id=CLS, sep_id=SEP, vocab_size=VOCAB_SIZE, word_starts=np.ones(VOCAB_SIZE, bool)
    )
    batch = random_batch(num_rows=4, row_length=16)
    masked = jax.jit(lambda key: mask_tokens(tokenizer, batch, key, MaskingConfig(causal_rate=rate)))(jax.random.key(0))
    assert masked.causal is None if rate == 0 else masked.causal.all()
    assert (masked.token_ids == batch.token_ids).all() == (rate == 1)


def test_next_tokens_are_every_token_but_the_first_of_a_sequence():
    batch = random_batch(seed=3, num_rows=4, row_length=40, num_sequences=2)
    task = computed(next_tokens, batch)
    assert task.mlm_positions.shape == (4, 39) and (task.token_ids == batch.token_ids).all()
    for row in range(4):
        expected = [
            (position, batch.token_ids[row, position + 1])
            for position in range(39)
            if batch.sequence_ids[row, position] == batch.sequence_ids[row, position + 1] > 0
        ]
        real = np.asarray(task.mlm_weights[row]) > 0
        assert list(zip(task.mlm_positions[row][real], task.mlm_labels[row][real])) == expected
        assert not task.mlm_positions[row][~real].any() and not task.mlm_labels[row][~real].any()


@pytest.mark.parametrize(("num_sequences", "options"), [(1, {"max_ngram": 2, "whole_word": True}), (3, {})])
def test_causal_rows_predict_what_their_masks_hide_from_the_position_before(num_sequences, options):
    batch = random_batch(num_rows=64, row_length=96, num_sequences=num_sequences)
    masked = mask(batch, MaskingConfig(**options))
    mixed = left_causal(masked, batch, MaskingConfig(causal_rate=0.4, **options))
    causal = mixed.causal
    assert 0 < causal.sum() < 64
    for before, after in zip(jax.tree.leaves(masked), jax.tree.leaves(mixed._replace(causal=None)), strict=True):
        np.testing.assert_array_equal(before[~causal], after[~causal])
    np.testing.assert_array_equal(mixed.token_ids[causal], batch.token_ids[causal])
    np.testing.assert_array_equal(mixed.mlm_weights, masked.mlm_weights)
    np.testing.assert_array_equal(mixed.mlm_labels, masked.mlm_labels)
    rows, places = np.nonzero(mixed.mlm_weights * causal[:, None])
    positions = mixed.mlm_positions[rows, places]
    assert len(rows) > 50 and (mixed.mlm_positions[mixed.mlm_weights == 0] == 0).all()
    np.testing.assert_array_equal(batch.token_ids[rows, positions + 1], mixed.mlm_labels[rows, places])
    of_label, of_position = batch.sequence_ids[rows, positions + 1], batch.sequence_ids[rows, positions]
    assert (of_label > 0).all() and (of_label == of_position).all()  # no padding, nothing of another sequence
    assert CLS in batch.token_ids[rows, positions]  # the first word of a sequence is predicted from it


def test_causal_rows_are_a_share_of_rows_drawn_anew_in_each_epoch_apart_from_masks():
    batch = random_batch(num_rows=2048, row_length=24, num_sequences=3)
    later = batch._replace(epochs=batch.epochs + 1)

    def rows(batch, **options):
        return left_causal(mask(batch), batch, MaskingConfig(causal_rate=0.1, **options)).causal

    found = rows(batch)
    assert abs(found.sum() - 204.8) < 4 * np.sqrt(2048 * 0.1 * 0.9)
    assert abs((found & rows(later)).sum() - 20.48) < 4 * np.sqrt(20.48)  # the epochs are independent
    assert (found != rows(batch, seed=1)).any()
    np.testing.assert_array_equal(rows(batch, static=True), rows(later, static=True))
    upside_down = jax.tree.map(lambda leaf: leaf[::-1], batch)
    np.testing.assert_array_equal(rows(upside_down), found[::-1])  # wherever a row stands
    others = batch.sequence_numbers.copy()
    others[:, 1:] += 1
    np.testing.assert_array_equal(rows(batch._replace(sequence_numbers=others)), found)  # known by its first
