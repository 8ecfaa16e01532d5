# SPDX-License-Identifier: Apache-2.0
"""Whole runs beside Google's: 200 steps of pre-training and 100 of fine-tuning, by its own code on TensorFlow.

What Google's code did is in tests/golden/google_run.npz, made by tests/reference/make_google_run_golden.py. Ours go
through `import_tfrecords`, a checkpoint of TensorFlow 1, `pretrain.run` and `finetune.run`.
"""

import numpy as np
import pytest
from reference import google_run

from bert_jax.batches.order import plan_epoch, train_rows

LOSS_TOLERANCE = 1e-4  # of each step, in nats
PARAMETER_TOLERANCE = 1e-4  # of every entry at the end, where the parameters have moved by 0.05 to 0.3
RATE_TOLERANCE = 1e-9

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def golden(repository):
    return google_run.read_golden(repository / google_run.GOLDEN)


@pytest.fixture(scope="module", params=google_run.KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def ours(golden, kind, repository, tmp_path_factory):
    return google_run.train(golden, repository / google_run.GOLDEN.parent, kind, tmp_path_factory.mktemp(kind))


def test_every_loss_and_rate_is_googles(ours, golden, kind):
    theirs = golden.trajectory(kind)
    assert len(theirs.losses) == {"pretraining": 200, "finetuning": 100}[kind]
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=0, atol=LOSS_TOLERANCE)
    np.testing.assert_allclose(ours.rates, theirs.rates, rtol=0, atol=RATE_TOLERANCE)


def test_every_parameter_at_the_end_is_googles(ours, golden, kind):
    far = google_run.distances(ours.params, golden.trajectory(kind).params)
    assert len(far) == {"pretraining": 46, "finetuning": 41}[kind]
    assert max(far.values()) < PARAMETER_TOLERANCE, max(far, key=lambda name: far[name])


def test_they_have_learnt_and_moved(golden, kind):
    figures = google_run.figures(golden, kind, golden.trajectory(kind))
    assert figures["largest_loss_distance"] == figures["largest_parameter_distance"] == 0
    assert figures["last_loss"] < figures["first_loss"] / 3
    assert figures["largest_parameter_change"] > 300 * PARAMETER_TOLERANCE


def test_they_read_in_our_order(golden):
    run = golden.settings["pretraining"]
    with np.load(google_run.GOLDEN.parent / google_run.EXAMPLES[1]) as file:
        num_examples = len(file["input_ids"])
    places = np.arange(run["num_steps"] * run["batch_size"])
    rows, _ = train_rows(0, places, len(places), num_examples, run["data_seed"])
    np.testing.assert_array_equal(rows.reshape(-1, run["batch_size"]), golden.arrays["pretraining/order"])

    run, order = golden.settings["finetuning"], golden.arrays["finetuning/order"]
    lengths = golden.arrays["finetuning/lengths"]
    epochs = len(order) * run["batch_size"] // len(lengths)
    plan = [
        batch for epoch in range(epochs) for batch in plan_epoch(lengths, run["batch_size"], run["data_seed"], epoch)
    ]
    np.testing.assert_array_equal(plan, order)


def test_clipping_by_the_norm_of_gathered_rows_is_another_run(golden):
    theirs = golden.arrays["finetuning/losses_looked_up"]
    assert np.abs(theirs - golden.trajectory("finetuning").losses).max() > 2 * LOSS_TOLERANCE


def test_the_run_tells_a_setting(golden, repository, tmp_path, monkeypatch):
    given = google_run.optimizer
    monkeypatch.setattr(google_run, "optimizer", lambda run: given(run, beta2=0.9989))
    ours = google_run.train(golden, repository / google_run.GOLDEN.parent, "finetuning", tmp_path)
    assert np.abs(ours.losses - golden.trajectory("finetuning").losses).max() > LOSS_TOLERANCE
