# SPDX-License-Identifier: Apache-2.0
"""Rows of different lengths become one batch, and what stands at padding changes no result."""

import functools

import jax
import numpy as np
from builders import task_params, tiny_model

from bert_jax.batch import pad_rows
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.model.objective import forward


def test_rows_are_padded_at_their_ends():
    batch = pad_rows([[7, 8, 9], [], [5]], 4, type_ids=[[0, 1, 1], [], [1]], pad_id=6)
    assert batch.token_ids.tolist() == [[7, 8, 9, 6], [6, 6, 6, 6], [5, 6, 6, 6]]
    assert batch.type_ids.tolist() == [[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert batch.sequence_ids.tolist() == [[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert batch.cls_positions.tolist() == [[0], [0], [0]]
    assert batch.sequence_weights.tolist() == [[1], [0], [1]]
    assert [field.dtype.str[1:] for field in batch[:5]] == ["i4", "u1", "i4", "i4", "f4"]
    assert all(field is None for field in batch[5:])


def test_several_sequences_of_a_row():
    batch = pad_rows([range(10, 15), [9], []], 6, lengths=[(2, 3), (1,), ()], num_sequences=3)
    assert batch.token_ids.tolist() == [[10, 11, 12, 13, 14, 0], [9, 0, 0, 0, 0, 0], [0] * 6]
    assert not batch.type_ids.any()
    assert batch.sequence_ids.tolist() == [[1, 1, 2, 2, 2, 0], [1, 0, 0, 0, 0, 0], [0] * 6]
    assert batch.cls_positions.tolist() == [[0, 2, 0], [0, 0, 0], [0, 0, 0]]
    assert batch.sequence_weights.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]


def test_a_batch_of_nothing():
    for num_rows in (0, 2):
        batch = pad_rows([()] * num_rows, 3)
        assert batch.token_ids.shape == batch.sequence_ids.shape == (num_rows, 3)
        assert batch.cls_positions.shape == (num_rows, 1) and not batch.sequence_weights.any()


def test_the_id_at_padding_changes_no_output_and_no_gradient():
    """Not by a bit, so that a task need not know the tokenizer's own."""
    params = task_params("sequence_classification", 3)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients(params, batch):
        logits = forward(tiny_model(), params, batch, SEQUENCES)
        total, weight = SEQUENCES.losses(logits, batch, SEQUENCES.weights(batch))["loss"]
        return total / weight, logits

    rows = [np.arange(20, 29), np.arange(40, 45), ()]
    labels = np.array([[1], [2], [0]], np.int32)
    (zeros, others) = (
        gradients(params, pad_rows(rows, 12, pad_id=pad_id)._replace(labels=labels)) for pad_id in (0, 77)
    )
    np.testing.assert_array_equal(zeros[1][:2], others[1][:2])
    leaves = jax.tree.leaves(zeros[0])
    assert len(leaves) > 10 and any(np.any(leaf) for leaf in leaves)
    jax.tree.map(np.testing.assert_array_equal, zeros[0], others[0])
