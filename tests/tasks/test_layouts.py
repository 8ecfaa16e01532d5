# SPDX-License-Identifier: Apache-2.0
"""Layouts of batches: every row of a task in one place, nothing over the edge, few programs, fewer FLOPs."""

import itertools

import numpy as np
import pytest

from bert_jax.settings.model import ModelConfig
from bert_jax.tasks.base import Row
from bert_jax.tasks.layouts import (
    Limits,
    Sizes,
    best_fit,
    choose_lengths,
    choose_shape,
    epoch_flops,
    eval_layouts,
    few_sizes,
    layout_packed,
    needed_flops,
    padded_flops,
    padded_length,
    plan_epoch,
    row_lengths,
    steps_per_epoch,
    train_length,
)

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
    assert len(batches) == steps_per_epoch(1003, 32) == 32
    assert sorted(map(len, batches)) == [1003 % 32] + [32] * 31
    assert sorted(np.concatenate(batches)) == list(range(1003))


def test_epochs_and_seeds_differ_and_repeat():
    first, again, other_epoch, other_seed = (
        np.concatenate(plan_epoch(LENGTHS, 32, seed, epoch)).tolist()
        for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert first == again
    assert first != other_epoch and first != other_seed and other_epoch != other_seed


def test_buckets_save_most_of_the_padding():
    def padding(bucket):
        batches = plan_epoch(LENGTHS, 32, 0, 0, bucket)
        padded = sum(len(batch) * (LENGTHS[batch].max() if bucket else LENGTHS.max()) for batch in batches)
        return padded / LENGTHS.sum() - 1

    assert padding(bucket=True) < 0.25 * padding(bucket=False)


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


@pytest.mark.parametrize("seed", range(5))
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
        padded = [train_length(LENGTHS[each], lengths) for each in plan_epoch(LENGTHS, 32, 3, 2)]
        assert set(padded) <= set(lengths)
    assert choose_lengths(sizes(LENGTHS), 32, False, 8, 10**5) == (LENGTHS.max(),)


@pytest.mark.parametrize("pack", ["on", "off", "auto"])
@pytest.mark.parametrize("tokens", [0, 512])
def test_a_split_of_one_shape(pack, tokens):
    of = sizes(SHORT[:701])
    layouts = eval_layouts(of, MODEL, Limits(32, 16, 1, pack, tokens, one_shape=True))
    assert len(layouts) > 1 and len({layout[1:] for layout in layouts}) == 1
    check_bins([members for layout in layouts for members in layout.bins], of, layouts[0].length, layouts[0].num_places)


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
    packed = epoch_flops(of, 32, MODEL, True, shape)
    alone = [choose_lengths(of, 32, bucket, 8, 10**6) for bucket in (True, False)]
    buckets, random = (epoch_flops(of, 32, MODEL, bucket, how) for bucket, how in zip((True, False), alone))
    rows = [Row(0, np.zeros(n, np.int32), np.zeros(n, np.uint8), (n,)) for n in SHORT.tolist()]
    needed = needed_flops(MODEL, rows)
    assert needed < packed < 1.25 * needed < buckets < random  # of two sizes
    layouts = [layout_packed(of, numbers, shape) for numbers in plan_epoch(SHORT, 32, 0, 0, bucket=False)]
    assert padded_flops(MODEL, layouts) == pytest.approx(packed, rel=0.01)


def test_rows_that_are_all_of_one_length_gain_nothing():
    of = sizes([64] * 100)
    shape = choose_shape(of, 10, MODEL, 8, 1, 10**6)
    assert shape.length == 64 and shape.num_rows == (10,)
    assert {layout.length for layout in eval_layouts(of, MODEL, Limits(8, 8, 1, "auto"))} == {64}


@pytest.mark.parametrize(("group", "pack"), [(1, "on"), (4, "on"), (4, "off"), (1, "auto")])
def test_prediction_has_every_row_once_in_few_shapes(group, pack):
    of = sizes(SHORT[:700])
    layouts = eval_layouts(of, MODEL, Limits(32, 8, group, pack))
    bins = [members for layout in layouts for members in layout.bins]
    check_bins(bins, of, max(layout.length for layout in layouts), layouts[0].num_places)
    assert all(layout.num_rows % group == 0 and layout.num_rows >= len(layout.bins) for layout in layouts)
    assert all(layout.num_rows * layout.length <= 32 * 72 for layout in layouts)  # no more memory than one a row
    if pack != "off":
        assert len({layout[1:] for layout in layouts}) <= 2
        assert padded_flops(MODEL, layouts) < padded_flops(MODEL, eval_layouts(of, MODEL, Limits(32, 8, group, "off")))


def test_few_texts_make_a_small_batch():
    (layout,) = eval_layouts(sizes([9, 8, 10]), MODEL, Limits(8, 8, 1, "auto"))
    assert layout.num_rows * layout.length <= 32
    (layout,) = eval_layouts(sizes([11]), MODEL, Limits(1, 8, 1, "auto"))
    assert (layout.num_rows, layout.length) == (1, 16)
    assert eval_layouts(sizes([]), MODEL, Limits(8, 8, 1, "auto")) == []


def test_no_row_is_longer_than_the_model_has_positions():
    """The positions of padding run on from 0, and a table that is read beyond its end gives NaN."""
    short = ModelConfig(vocab_size=100, max_positions=70)
    of = sizes(SHORT)
    assert choose_shape(of, 32, short, 8, 1, 10**6).length <= 70
    assert all(
        layout.length <= 70 for pack in ("on", "off") for layout in eval_layouts(of, short, Limits(32, 8, 1, pack))
    )
    choices = Sizes(np.array([90, 60]), np.array([3, 2]))  # none of them is longer than 70
    assert choose_shape(choices, 2, short, 8, 1, 10**6).length == 90
    assert all(
        layout.length == 90 for pack in ("on", "off") for layout in eval_layouts(choices, short, Limits(2, 8, 1, pack))
    )


def test_choices_stay_together():
    of = Sizes(np.array([30, 50, 20, 40]), np.array([4, 4, 2, 3]))
    layouts = eval_layouts(of, MODEL, Limits(4, 8, 1, "on"))
    for layout in layouts:
        check = [int(of.sequences[members].sum()) for members in layout.bins]
        assert max(check) <= layout.num_places and layout.num_places >= 4


def test_sets_of_texts_of_any_kind_take_packed_rows_of_few_lengths():
    """Where one CPU computes, each shape is compiled while a person waits."""
    rng = np.random.default_rng(2)
    limits = Limits(32, 16, 1, "auto", tokens=512)
    shapes = set()
    for _ in range(40):
        texts = np.clip(rng.gamma(2.0, 6.0, 256).astype(np.int64), 3, int(rng.integers(30, 70)))
        shapes |= {(each.num_rows, each.length) for each in eval_layouts(sizes(texts), MODEL, limits)}
    assert {length for _, length in shapes} <= {32, 64, 96, 128} and len(shapes) <= 12
