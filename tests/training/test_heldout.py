# SPDX-License-Identifier: Apache-2.0
"""The baselines of the held-out split, against values computed by hand."""

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from bert_jax.batches.load import eval_batches
from bert_jax.data.records import LocalRows, row_dtype
from bert_jax.devices.sharding import make_mesh
from bert_jax.settings.pretraining import MeshConfig
from bert_jax.training.heldout import heldout_baselines

COUNTS = [3, 0, 7, 1, 4]  # plus one: 4, 1, 8, 2, 5 of 20, so that the frequencies are 0.2, 0.05, 0.4, 0.1, 0.25


def few_rows():
    """Returns three rows, whose masks are given: 2, 2, 4 are to be predicted in the first, 3 in the next, then 0, 2."""
    rows = np.zeros(3, row_dtype(8, 1, 300, predictions=4))
    rows["lengths"][:, 0], rows["first_lengths"][:, 0] = 8, 4
    rows["mlm_positions"] = [1, 2, 5, 6]
    # What stands after the number of predictions is not a prediction.
    rows["mlm_labels"], rows["mlm_counts"] = [[2, 2, 4, 1], [3, 1, 1, 1], [0, 2, 1, 1]], (3, 1, 2)
    rows["labels"][:, 0] = 1, 0, 1
    return rows


def baselines(rows, next_sentence=True, separator=-1):
    """Returns the baselines in batches of two rows, so that the last batch has an empty one."""
    split = LocalRows(rows.dtype, len(rows), (rows.view(np.uint8).reshape(len(rows), -1),), np.array([len(rows)]))
    objective = SimpleNamespace(prepare=lambda batch: batch)  # masks are in the rows
    batches = eval_batches(split, 2, make_mesh(MeshConfig(), jax.devices()[:1]))
    return heldout_baselines(objective, np.array(COUNTS), batches, next_sentence, separator)


def test_baselines_are_those_computed_by_hand():
    found = baselines(few_rows())
    # Six predictions: three times 2, the most frequent token, and once each of 4, 3 and 0.
    assert found == {
        "unigram_loss": pytest.approx(-math.log(0.4**3 * 0.25 * 0.1 * 0.2) / 6),
        "unigram_accuracy": pytest.approx(3 / 6),
        "nsp_base_rate": pytest.approx(2 / 3),
    }
    assert found["unigram_loss"] == pytest.approx(1.341198, abs=1e-6)


def test_the_base_rate_is_of_the_more_frequent_label():
    rows = few_rows()
    rows["labels"][:, 0] = 0, 0, 1
    assert baselines(rows)["nsp_base_rate"] == pytest.approx(2 / 3)
    rows["labels"][:, 0] = 0
    assert baselines(rows)["nsp_base_rate"] == 1
    assert "nsp_base_rate" not in baselines(rows, next_sentence=False)


def test_the_separator_that_a_causal_model_predicts_is_as_frequent_as_in_the_labels():
    found = baselines(few_rows(), separator=1)  # it is not a label of these
    assert found == baselines(few_rows())
    rows = few_rows()
    rows["mlm_labels"][:, 0] = 1  # three of six labels, so as frequent as the 20 others
    chances = {1: 21 / 40, 2: 8 / 40, 4: 5 / 40}
    loss = -math.log(chances[1] ** 3 * chances[2] ** 2 * chances[4]) / 6
    assert baselines(rows, separator=1)["unigram_loss"] == pytest.approx(loss)
    assert baselines(rows, separator=1)["unigram_accuracy"] == pytest.approx(0.5)
