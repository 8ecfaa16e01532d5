# SPDX-License-Identifier: Apache-2.0
"""After a pause the threads that compute have a core each, for as long as a request lasts."""

import json
import os
import sys

import pytest
from commands import run_python

from bert_jax import fill_masks, sentence_embeddings
from bert_jax.devices import cores

PROGRAM = """
import json, os, time
import jax.numpy as jnp
from bert_jax.devices import cores

cores._PAUSE = 0.2
if os.environ["WANTED"] == "1":
    cores.give_threads_cores()
jnp.ones(3) + 1

def may_run_on():
    return sorted(sorted(os.sched_getaffinity(thread)) for thread in cores._threads())

seen = []
for pause in (0, 0, 0.4):
    time.sleep(pause)
    seen.append(cores.on_all_cores()(may_run_on)())
    seen.append(may_run_on())
print(json.dumps([sorted(os.sched_getaffinity(0)), seen]))
"""


def affinities(**variables):
    """Returns the cores of a process, and those of each of its threads in and after three requests."""
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "WANTED": "1"} | variables
    done = run_python(["-c", PROGRAM], environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux" or (os.cpu_count() or 1) < 2, reason="needs Linux, and two cores")
def test_threads_have_a_core_each_only_during_a_request_after_a_pause():
    usable, (first, after, again, _, paused, at_the_end) = affinities()
    apart, anywhere = [[core] for core in usable], [usable] * len(usable)
    assert first == paused == apart
    assert after == again == at_the_end == anywhere


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("variables", [{"WANTED": "0"}, {"XLA_FLAGS": "--xla_force_host_platform_device_count=7"}])
def test_threads_stay_where_they_are_if_asked_or_if_they_are_not_one_a_core(variables):
    usable, seen = affinities(**variables)
    assert all(of_thread == usable for one in seen for of_thread in one) and all(seen)


def test_single_requests_are_such_blocks(bert, monkeypatch):
    asked = []
    monkeypatch.setattr(cores, "_wanted", True)
    monkeypatch.setattr(cores, "_PAUSE", -1.0)
    monkeypatch.setattr(cores, "_threads", lambda: asked.append(1) or [])
    sentence_embeddings(bert, ["a"])
    fill_masks(bert, ["a [MASK]"])
    assert len(asked) == 2
