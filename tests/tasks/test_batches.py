# SPDX-License-Identifier: Apache-2.0
"""Rows of a task become batches of like lengths: each row once in an epoch, the same at a step on any way to it."""

import itertools

import jax
import numpy as np
import pytest

from bert_jax.devices.sharding import make_mesh
from bert_jax.settings.pretraining import MeshConfig
from bert_jax.tasks.base import Row
from bert_jax.tasks.batches import (
    eval_batches,
    length_step,
    make_batch,
    padded_length,
    plan_epoch,
    steps_per_epoch,
    train_batches,
    unpadded_outputs,
)

LENGTHS = np.random.default_rng(0).integers(3, 120, 1003)


def make_rows(lengths, label=lambda index, length: index % 3):
    rng = np.random.default_rng(1)
    return [
        Row(index, rng.integers(5, 99, length, np.int32), np.zeros(length, np.uint8), (length,), label(index, length))
        for index, length in enumerate(lengths)
    ]


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


def test_lengths_are_closer_to_each_other_on_a_cpu(monkeypatch):
    assert (length_step(), length_step("fused")) == (8, 8)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert (length_step(), length_step("fused")) == (16, 32)


@pytest.mark.parametrize("multiple", [16, 32])
def test_the_kernel_of_fused_attention_has_every_length(multiple):
    lengths = {padded_length(length, 512, multiple) for length in range(1, 513)}
    assert all(length % multiple == 0 for length in lengths)


@pytest.mark.parametrize("devices", [1, 4])
def test_batches_go_on_from_any_step(devices):
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    rows = make_rows(LENGTHS[:50])
    whole = list(itertools.islice(train_batches(rows, "sequence_classification", 0, 16, 3, True, mesh), 6))
    rest = list(itertools.islice(train_batches(rows, "sequence_classification", 4, 16, 3, True, mesh), 2))
    for ours, theirs in zip(rest, whole[4:]):  # steps 4 and 5 are in the second epoch of 4 steps
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    short = [batch for batch in whole[:4] if np.asarray(batch.sequence_weights).sum() == 50 % 16]
    assert len(short) == 1 and short[0].token_ids.shape[0] == 16


def test_evaluation_covers_every_row_once_and_fills_up_with_nothing():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    rows = make_rows(LENGTHS[:50])
    seen, weight = [], 0.0
    for numbers, batch in eval_batches(rows, "sequence_classification", 16, mesh):
        seen += numbers.tolist()
        weight += float(np.asarray(batch.sequence_weights).sum())
        for place, number in enumerate(numbers):
            length = len(rows[number].token_ids)
            assert (np.asarray(batch.token_ids)[place, :length] == rows[number].token_ids).all()
            assert (np.asarray(batch.sequence_ids)[place] > 0).sum() == length
        assert not np.asarray(batch.sequence_ids)[len(numbers) :].any()
    assert sorted(seen) == list(range(50)) and weight == 50
    assert list(eval_batches([], "sequence_classification", 16, mesh)) == []


def test_labels_of_every_head():
    numbers = make_batch(make_rows([4, 6], lambda index, length: 0.5), 8, 1, "sequence_classification")
    assert numbers.labels.tolist() == [[0.5], [0.5]] and numbers.labels.dtype == np.float32
    classes = make_batch([*make_rows([4]), None], 8, 1, "sequence_classification")
    assert classes.labels.tolist() == [[0], [0]] and classes.labels.dtype == np.int32
    spans = make_batch(make_rows([4], lambda index, length: (1, 3)), 8, 1, "question_answering")
    assert spans.labels.tolist() == [[1, 3]]
    tags = make_batch(make_rows([3], lambda index, length: np.array([-1, 2, -1])), 5, 1, "token_classification")
    assert tags.labels.tolist() == [[-1, 2, -1, -1, -1]]
    unknown = make_batch(make_rows([4], lambda index, length: None), 8, 1, "sequence_classification")
    assert unknown.labels is None


def test_choices_lie_one_after_the_other():
    row = Row(0, np.arange(1, 10, dtype=np.int32), np.zeros(9, np.uint8), (4, 2, 3), 2)
    batch = make_batch([row], 12, 4, "multiple_choice")
    assert batch.sequence_ids.tolist() == [[1, 1, 1, 1, 2, 2, 3, 3, 3, 0, 0, 0]]
    assert batch.cls_positions.tolist() == [[0, 4, 6, 0]]
    assert batch.sequence_weights.tolist() == [[1, 1, 1, 0]] and batch.labels.tolist() == [[2]]
    outputs = unpadded_outputs(row, np.arange(4.0)[:, None], "multiple_choice")
    assert outputs.tolist() == [0, 1, 2]
