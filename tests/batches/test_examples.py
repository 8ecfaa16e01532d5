# SPDX-License-Identifier: Apache-2.0
"""Rows of a task become batches: each row once in an epoch, the same at a step on any way to it, packed or not."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from builders import message

import bert_jax
from bert_jax.batch import Row
from bert_jax.batches.examples import Batching, choose_batching, train_batches
from bert_jax.batches.infer import inference_layouts
from bert_jax.batches.make import batch_of_layout, batch_of_rows, unpadded_outputs
from bert_jax.batches.pack import sizes_of
from bert_jax.batches.shapes import choose_lengths, choose_shape, length_step
from bert_jax.devices.sharding import make_mesh
from bert_jax.model.heads.choice import CHOICES
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.model.heads.spans import SPANS
from bert_jax.model.heads.tokens import TOKENS
from bert_jax.settings.finetuning import FinetuneDataConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import MeshConfig

LENGTHS = np.random.default_rng(0).integers(3, 120, 1003)


def make_rows(lengths, label=lambda index, length: index % 3):
    rng = np.random.default_rng(1)
    return [
        Row(index, rng.integers(5, 99, length, np.int32), np.zeros(length, np.uint8), (length,), label(index, length))
        for index, length in enumerate(lengths)
    ]


def test_lengths_are_closer_to_each_other_on_a_cpu(monkeypatch):
    assert (length_step(), length_step("fused")) == (8, 8)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert (length_step(), length_step("fused")) == (16, 32)


def batching(rows, shape=True, group=1, size=16, bucket=True):
    of = sizes_of(rows)
    lengths = choose_lengths(of, size, bucket, 8, 10**6)
    return Batching(size, 3, bucket, lengths, choose_shape(of, size, ModelConfig(), 8, group, 10**6) if shape else None)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("devices", [1, 4])
def test_batches_go_on_from_any_step(devices, packed):
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    rows = make_rows(LENGTHS[:50])
    how = batching(rows, packed, devices)
    whole = list(itertools.islice(train_batches(rows, SEQUENCES, 0, how, mesh), 6))
    rest = list(itertools.islice(train_batches(rows, SEQUENCES, 4, how, mesh), 2))
    for ours, theirs in zip(rest, whole[4:]):  # steps 4 and 5 are in the second epoch of 4 steps
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    counts = [int(np.asarray(batch.sequence_weights).sum()) for batch in whole]
    assert sorted(counts[:4]) == [50 % 16, 16, 16, 16]
    assert all(batch.token_ids.shape[0] % devices == 0 for batch in whole)


def examples_of(batch):
    """Returns the token ids and the label of each example of a batch of classes, sorted."""
    found = []
    for line, ids in enumerate(np.asarray(batch.sequence_ids)):
        for place in range(ids.max()):
            tokens = tuple(np.asarray(batch.token_ids)[line][ids == place + 1].tolist())
            assert batch.cls_positions[line, place] == np.flatnonzero(ids == place + 1)[0]
            assert batch.sequence_weights[line, place] == 1
            found.append((tokens, int(batch.labels[line, place])))
    return sorted(found)


def test_packed_batches_have_the_examples_of_random_ones():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    rows = make_rows(LENGTHS[:70])
    packed, alone = (
        list(itertools.islice(train_batches(rows, SEQUENCES, 0, batching(rows, shape, 1, 16, False), mesh), 10))
        for shape in (True, False)
    )
    for ours, theirs in zip(packed, alone, strict=True):
        assert examples_of(ours) == examples_of(theirs)
    assert sum(batch.token_ids.size for batch in packed) < 0.7 * sum(batch.token_ids.size for batch in alone)


@pytest.mark.parametrize("pack", ["on", "off"])
def test_evaluation_covers_every_row_once_and_fills_up_with_nothing(pack):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    rows = make_rows(LENGTHS[:50])
    seen, weight = [], 0.0
    for layout in inference_layouts(sizes_of(rows), ModelConfig(), pack):
        batch = batch_of_layout(rows, layout, SEQUENCES, mesh)
        weight += float(np.asarray(batch.sequence_weights).sum())
        for line, numbers in enumerate(layout.bins):
            seen += numbers
            tokens = np.concatenate([rows[number].token_ids for number in numbers])
            assert (np.asarray(batch.token_ids)[line, : len(tokens)] == tokens).all()
            assert (np.asarray(batch.sequence_ids)[line] > 0).sum() == len(tokens)
            assert np.asarray(batch.labels)[line, : len(numbers)].tolist() == [rows[n].label for n in numbers]
        assert not np.asarray(batch.sequence_ids)[len(layout.bins) :].any()
    assert sorted(seen) == list(range(50)) and weight == 50


def test_labels_of_every_head():
    def labels(rows, length, head, num_places=1):
        return batch_of_rows([[row] if row else [] for row in rows], length, num_places, head).labels

    numbers = labels(make_rows([4, 6], lambda index, length: 0.5), 8, SEQUENCES)
    assert numbers.tolist() == [[0.5], [0.5]] and numbers.dtype == np.float32
    classes = labels([*make_rows([4]), None], 8, SEQUENCES)
    assert classes.tolist() == [[0], [0]] and classes.dtype == np.int32
    spans = labels(make_rows([4], lambda index, length: (1, 3)), 8, SPANS)
    assert spans.tolist() == [[[1, 3]]]
    tags = labels(make_rows([3], lambda index, length: np.array([-1, 2, -1])), 5, TOKENS)
    assert tags.tolist() == [[-1, 2, -1, -1, -1]]
    assert labels(make_rows([4], lambda index, length: None), 8, SEQUENCES) is None


def test_labels_of_packed_rows_are_where_their_examples_are():
    spans = make_rows([4, 3], lambda index, length: (1, 2))
    batch = batch_of_rows([spans, []], 8, 3, SPANS)
    assert batch.labels.tolist() == [[[1, 2], [5, 6], [0, 0]], [[0, 0]] * 3]
    tags = make_rows([3, 2], lambda index, length: np.arange(length) - 1)
    assert batch_of_rows([tags], 6, 2, TOKENS).labels.tolist() == [[-1, 0, 1, -1, 0, -1]]
    classes = batch_of_rows([make_rows([3, 2, 4])], 10, 4, SEQUENCES)
    assert classes.labels.tolist() == [[0, 1, 2, 0]] and classes.sequence_weights.tolist() == [[1, 1, 1, 0]]


def test_choices_lie_one_after_the_other():
    row = Row(0, np.arange(1, 10, dtype=np.int32), np.zeros(9, np.uint8), (4, 2, 3), 2)
    other = Row(1, np.arange(11, 15, dtype=np.int32), np.zeros(4, np.uint8), (2, 2), 0)
    batch = batch_of_rows([[row, other]], 14, 6, CHOICES)
    assert batch.sequence_ids.tolist() == [[1, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 0]]
    assert batch.cls_positions.tolist() == [[0, 4, 6, 9, 11, 0]]
    assert batch.sequence_weights.tolist() == [[1, 1, 1, 1, 1, 0]] and batch.labels.tolist() == [[2, -1, -1, 3, -1, -1]]
    first, second = unpadded_outputs([row, other], np.arange(6.0)[:, None], CHOICES)
    assert first.tolist() == [0, 1, 2] and second.tolist() == [3, 4]


def test_outputs_go_back_to_their_rows():
    rows = make_rows([3, 2])
    first, second = unpadded_outputs(rows, np.arange(12.0).reshape(6, 2), TOKENS)
    assert first[:, 0].tolist() == [0, 2, 4] and second[:, 0].tolist() == [6, 8]
    first, second = unpadded_outputs(rows, np.arange(6.0).reshape(3, 2), SEQUENCES)
    assert first.tolist() == [0, 1] and second.tolist() == [2, 3]


def test_what_auto_chooses_is_the_same_on_any_number_of_devices():
    rows = make_rows([3 + number % 5 for number in range(64)])
    data = FinetuneDataConfig(source="a", batch_size=16)
    chosen = [choose_batching(rows, data, ModelConfig(), group, "auto", 1000) for group in (1, 4, 16)]
    assert all(how.shape is not None for how in chosen)
    assert len({how.shape.length for how in chosen}) == 1 and [how.shape.group for how in chosen] == [1, 4, 16]
    # On 16 devices most rows of a packed batch are empty: it takes more than one example a row
    alone = choose_batching(rows, data, ModelConfig(), 16, "off", 1000)
    assert chosen[2].flops(rows, ModelConfig()) > alone.flops(rows, ModelConfig())


MADE = {  # head: texts, labels, what `Batch.labels` are
    "classes": (SEQUENCES, ["b", "d"], [0, 1], [[0], [1]]),
    "numbers": (SEQUENCES, ["b", "d"], [1, 0.5], [[1.0], [0.5]]),
    "shares": (SEQUENCES, ["b", "d"], [[0.5, 0.5], [1, 0]], [[[0.5, 0.5]], [[1.0, 0.0]]]),
    "tokens": (TOKENS, ["b", "d e"], [[-1, 2, -1], [-1, 0, 1, -1]], [[-1, 2, -1, -1], [-1, 0, 1, -1]]),
    "spans": (SPANS, ["b", "d e"], [(0, 0), (1, 2)], [[[0, 0]], [[1, 2]]]),
    "choices": (CHOICES, [["b", "d"], [("b", "d"), "e", "b"]], [1, 2], [[1, -1, -1], [2, -1, -1]]),
}


@pytest.mark.parametrize("name", MADE)
def test_make_batch_writes_the_labels_of_every_head(bert, name):
    head, texts, labels, expected = MADE[name]
    batch = bert_jax.make_batch(bert, texts, labels=labels, head=head)
    length = batch.token_ids.shape[1]
    if head is TOKENS:
        expected = [row + [-1] * (length - len(row)) for row in expected]
    assert batch.labels.tolist() == expected
    outputs = {TOKENS: (len(texts), length, 3), SPANS: (len(texts), length, 2), CHOICES: (len(texts), 3, 1)}
    logits = np.zeros(outputs.get(head, (len(texts), 1, 1 if name == "numbers" else 2)), np.float32)
    total, weight = jax.jit(lambda logits: head.losses(logits, batch, head.weights(batch))["loss"])(logits)
    counted = {"tokens": 3, "spans": 4}.get(name, 2)
    assert np.isfinite(total) and weight == counted
    bare = bert_jax.make_batch(bert, texts, head=head)
    np.testing.assert_array_equal(bare.token_ids, batch.token_ids)
    assert bare.labels is None


def test_make_batch_writes_texts_that_are_compared(bert):
    texts = [["bar", "bes"], ["bar", "bit", "bon"]]
    batch = bert_jax.make_batch(bert, texts, labels=[1.0, 0.5], head=bert_jax.HEADS["sentence_embedding"])
    assert batch.token_ids.shape[0] == 5 and batch.labels.scores.tolist() == [1.0, 0.5]
    assert batch.labels.numbers.tolist() == [[0, 1, -1], [0, 2, 3]]
    assert batch.labels.places[:, :2].tolist() == [[0, 1], [2, 3]] and batch.labels.places[1, 2] == 4


WRONG = {
    "too few": (SEQUENCES, [0], "there are 1 labels for 2 examples; give each one"),
    "a name": (SEQUENCES, ["no", "yes"], "a label is 'no', and its place takes whole numbers of the shape []"),
    "none": (SEQUENCES, [0, None], "a label is None, and its place takes whole numbers"),
    "shares of other classes": (SEQUENCES, [[0.5, 0.5], [1.0]], "a label is [1.0], and its place takes numbers of"),
    "a class for tokens": (TOKENS, [0, 1], "a label is 0, and its place takes whole numbers of the shape [3]"),
    "tokens of another row": (TOKENS, [[0] * 3, [0] * 3], "a label is [0, 0, 0], and its place takes whole numbers of"),
    "a place for spans": (
        SPANS,
        [1, 1],
        "a label is 1, and its place takes whole numbers of the shape [2] from 0 to 2",
    ),
    "beyond the row": (SPANS, [(0, 1), (3, 4)], "a label is (3, 4), and its place takes"),
    "no such choice": (CHOICES, [2, 0], "a label is 2, and its place takes whole numbers of the shape [] from 0 to 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_make_batch_refuses_labels_that_do_not_fit(bert, name):
    head, labels, expected = WRONG[name]
    texts = [["b", "d"], ["e", "f"]] if head is CHOICES else ["b", "d e"]
    assert message(bert_jax.make_batch, bert, texts, labels=labels, head=head).startswith(expected)


def test_make_batch_knows_the_classes_and_the_length_of_its_model(bert):
    long = ["b " * 100]
    with pytest.warns(UserWarning, match="more than 64 tokens"):
        assert bert_jax.make_batch(bert, long).token_ids.shape == (1, 64)
    assert bert_jax.make_batch(bert.tokenizer, long).token_ids.shape == (1, 104)
    assert "64 positions" in message(bert_jax.make_batch, bert, long, max_length=128)
    named = dataclasses.replace(bert, task=SEQUENCES.name, labels=("no", "yes"))
    found = message(bert_jax.make_batch, named, ["b"], labels=[2])
    assert found == "a label is 2, and the model has 2 classes: no, yes"
