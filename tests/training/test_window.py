# SPDX-License-Identifier: Apache-2.0
"""A window adds up metrics as pairs, counts only of timed steps, and the time in which the device may have waited."""

import time

import jax.numpy as jnp
import pytest

from bert_jax.model.losses import mean_metrics
from bert_jax.training.window import Window


def metrics(loss, weight, tokens):
    return {"loss": (loss, weight), "tokens": (tokens, 1.0)}


def test_a_mean_is_weighted_over_the_steps():
    window = Window()
    window.add(metrics(10.0, 2.0, 7))
    window.add(metrics(2.0, 4.0, 7))
    assert window.means() == {"loss": 2.0}


def test_counts_are_of_timed_steps():
    window = Window()
    window.add(metrics(1.0, 1.0, 100))  # not timed: it compiled
    window.start_clock()
    window.add(metrics(1.0, 1.0, 7))
    window.add(metrics(1.0, 1.0, 8))
    window.stop_clock()
    window.add(metrics(1.0, 1.0, 100))
    assert window.counts() == {"tokens": 15.0}
    assert window.means() == {"loss": 1.0}


def test_the_clock_adds_up_what_is_between_start_and_stop():
    window = Window()
    for _ in range(2):
        window.start_clock()
        time.sleep(0.05)
        window.stop_clock()
        time.sleep(0.2)
    window.stop_clock()  # again: adds nothing
    assert 0.1 <= window.seconds < 0.2


@pytest.mark.parametrize("finished", [True, False])
def test_waiting_counts_if_the_device_has_nothing_to_do(finished):
    class Result:
        def is_ready(self):
            return finished

    def batches():
        time.sleep(0.05)
        yield "batch"

    window = Window()
    window.start_clock()
    batch, waited = window.next_batch(batches(), Result())
    assert batch == "batch" and window.waited == waited
    assert (waited >= 0.05) == finished


def test_sums_go_on_from_a_checkpoint():
    window = Window({"loss": [10.0, 4.0]})
    window.add(metrics(jnp.float32(2.0), jnp.float32(2.0), 1))
    assert window.means() == {"loss": 2.0}
    assert mean_metrics({"nothing": (0.0, 0.0)}) == {"nothing": 0.0}
