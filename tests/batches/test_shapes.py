# SPDX-License-Identifier: Apache-2.0
"""Layouts of batches: every row of a task in one place, nothing over the edge, few programs, fewer FLOPs."""

import itertools

import numpy as np
import pytest

from bert_jax.batch import Row
from bert_jax.batches.examples import Batching
from bert_jax.batches.order import Mix, plan_epoch
from bert_jax.batches.pack import Sizes, best_fit, layout_packed
from bert_jax.batches.shapes import (
    choose_lengths,
    choose_shape,
    few_sizes,
    needed_flops,
    padded_flops,
    padded_length,
    row_lengths,
)
from bert_jax.settings.model import ModelConfig

LENGTHS = np.random.default_rng(0).integers(3, 120, 1003)
SHORT = np.clip(np.random.default_rng(1).gamma(2.0, 6.0, 2000).astype(np.int64), 3, 66)  # like phrases of SST-2
MODEL = ModelConfig(vocab_size=100)


def sizes(lengths, sequences=1):
    return Sizes(np.asarray(lengths, np.int64), np.full(len(lengths), sequences, np.int64))


def check_bins(bins, of, length, num_places):
    assert sorted(itertools.chain.from_iterable(bins)) == list(range(len(of.tokens)))
    for members in bins:
        assert of.tokens[members].sum() <= length
        assert of.sequences[members].sum() <= num_places


@pytest.mark.parametrize("bucket", [True, False])
def test_every_row_is_in_one_batch_of_an_epoch(bucket):
    batches = plan_epoch(LENGTHS, 32, seed=0, epoch=0, bucket=bucket)
    assert len(batches) == Mix((1003,), (1003,)).num_steps(32) == 32
    assert sorted(map(len, batches)) == [1003 % 32] + [32] * 31
    assert sorted(np.concatenate(batches)) == list(range(1003))


def test_epochs_and_seeds_differ_and_repeat():
    first, again, other_epoch, other_seed = (
        np.concatenate(plan_epoch(LENGTHS, 32, seed, epoch)).tolist()
        for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert first == again
    assert first != other_epoch and first != other_seed and other_epoch != other_seed


def test_a_small_data_set_has_other_batches_in_each_epoch():
    lengths = np.arange(3, 67)
    one, other = ({frozenset(batch.tolist()) for batch in plan_epoch(lengths, 16, 0, epoch)} for epoch in (0, 1))
    assert one != other


def test_padded_lengths():
    lengths = (1, 8, 9, 120, 128, 129, 256, 257, 385, 512, 513)
    assert [padded_length(length, 9999, 8) for length in lengths] == [8, 8, 16, 120, 128, 144, 256, 288, 416, 512, 768]
    assert [padded_length(length, 9999, 16) for length in lengths[:6]] == [16, 16, 16, 128, 128, 160]
    assert padded_length(100, 102, 8) == 102
    assert len({padded_length(length, 512, 8) for length in range(1, 513)}) == 32  # programs at most


@pytest.mark.parametrize("multiple", [16, 32])
def test_the_kernel_of_fused_attention_has_every_length(multiple):
    lengths = {padded_length(length, 512, multiple) for length in range(1, 513)}
    assert all(length % multiple == 0 for length in lengths)
    assert all(length % multiple == 0 for longest in (5, 70, 300) for length in row_lengths(longest, 512, multiple))


@pytest.mark.parametrize("seed", range(3))
def test_packed_rows_hold_every_row_of_the_task_once(seed):
    rng = np.random.default_rng(seed)
    of = Sizes(rng.integers(1, 65, 200), rng.integers(1, 5, 200))
    num_places = int(rng.integers(4, 12))
    bins = best_fit(of, 64, num_places)
    check_bins(bins, of, 64, num_places)
    assert len(bins) >= max(-(-of.tokens.sum() // 64), -(-of.sequences.sum() // num_places))


def test_rows_are_full_where_they_can_be():
    of = sizes([40, 30, 24, 20, 10, 4])
    assert sorted(map(sorted, best_fit(of, 64, 8))) == [[0, 2], [1, 3, 4, 5]]  # 40 + 24 and 30 + 20 + 10 + 4
    assert len(best_fit(sizes(SHORT), 72, 24)) * 72 < 1.02 * SHORT.sum()


@pytest.mark.parametrize("num_steps", [1, 100, 10**6])
def test_a_second_size_is_worth_its_compilation(num_steps):
    counts = np.random.default_rng(0).integers(1, 12, 40).tolist()

    def cost(few):  # of a step, in counts
        filled = sum(min(size for size in few if size >= count) for count in counts)
        return (filled + len(few) * 24 / num_steps * sum(counts)) / len(counts)

    (_, found), values = few_sizes(counts, num_steps), sorted(set(counts))
    options = [(max(counts),), *((value, max(counts)) for value in values[:-1])]
    assert cost(found) == min(map(cost, options)) and len(found) == (1 if num_steps < 100 else 2)
    assert few_sizes([7, 7], num_steps)[1] == (7,)


def test_rows_of_their_own_have_as_many_lengths_as_the_steps_are_worth():
    for num_steps, least, most in ((32, 1, 1), (200, 2, 4), (10**5, 8, 16)):
        lengths = choose_lengths(sizes(LENGTHS), 32, True, 8, num_steps)
        assert least <= len(lengths) <= most and lengths[-1] == LENGTHS.max()
        batching = Batching(32, 3, True, lengths)
        layouts = [batching.layout(sizes(LENGTHS), numbers) for numbers in plan_epoch(LENGTHS, 32, 3, 2)]
        assert {layout.length for layout in layouts} <= set(lengths)
    assert choose_lengths(sizes(LENGTHS), 32, False, 8, 10**5) == (LENGTHS.max(),)


def test_training_batches_have_few_shapes_whatever_the_batch():
    of = sizes(SHORT)
    shape = choose_shape(of, 32, MODEL, 8, 1, 10**6)
    layouts = [layout_packed(of, numbers, shape) for numbers in plan_epoch(SHORT, 32, 3, 0, bucket=False)]
    assert {layout.num_rows for layout in layouts} <= set(shape.num_rows) and len(shape.num_rows) == 2
    assert len(choose_shape(of, 32, MODEL, 8, 1, 16).num_rows) == 1
    for layout in layouts:
        assert len(layout.bins) <= layout.num_rows
        assert (layout.length, layout.num_places) == (shape.length, shape.num_places)
    long = np.argsort(-SHORT)[:32]  # a batch as long as none that was sampled
    layout = layout_packed(of, long, shape)
    assert layout.num_rows >= len(layout.bins) > shape.num_rows[-1]


def test_the_length_of_rows_is_the_same_on_any_number_of_devices():
    of = sizes(SHORT)
    alone, eight = (choose_shape(of, 32, MODEL, 8, group, 10**6) for group in (1, 8))
    assert (alone.length, alone.num_places) == (eight.length, eight.num_places)
    assert all(size % 8 == 0 for size in eight.num_rows)
    for numbers in plan_epoch(SHORT, 32, 0, 0, bucket=False)[:20]:
        one, other = layout_packed(of, numbers, alone), layout_packed(of, numbers, eight)
        assert one.bins == other.bins and other.num_rows % 8 == 0


def test_packing_short_texts_takes_fewer_flops():
    of = sizes(SHORT)
    shape = choose_shape(of, 32, MODEL, 8, 1, 10**6)
    rows = [Row(0, np.zeros(n, np.int32), np.zeros(n, np.uint8), (n,)) for n in SHORT.tolist()]
    packed = Batching(32, 0, True, (), shape).flops(rows, MODEL)
    alone = [Batching(32, 0, bucket, choose_lengths(of, 32, bucket, 8, 10**6)) for bucket in (True, False)]
    buckets, random = (batching.flops(rows, MODEL) for batching in alone)
    needed = needed_flops(MODEL, rows)
    assert needed < packed < 1.25 * needed < buckets < random  # of two sizes
    layouts = [layout_packed(of, numbers, shape) for numbers in plan_epoch(SHORT, 32, 0, 0, bucket=False)]
    assert padded_flops(MODEL, layouts) == pytest.approx(packed, rel=0.01)


def test_rows_that_are_all_of_one_length_gain_nothing():
    of = sizes([64] * 100)
    shape = choose_shape(of, 10, MODEL, 8, 1, 10**6)
    assert shape.length == 64 and shape.num_rows == (10,)


def test_no_row_is_longer_than_the_model_has_positions():
    """The positions of padding run on from 0, and a table that is read beyond its end gives NaN."""
    short = ModelConfig(vocab_size=100, max_positions=70)
    of = sizes(SHORT)
    assert choose_shape(of, 32, short, 8, 1, 10**6).length <= 70
    choices = Sizes(np.array([90, 60]), np.array([3, 2]))  # none of them is longer than 70
    assert choose_shape(choices, 2, short, 8, 1, 10**6).length == 90
