# SPDX-License-Identifier: Apache-2.0
"""The registry of work under way: entries nest by thread, and only the thread that works beats for itself."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from bert_jax.devices import work
from bert_jax.devices.work import Entry, beat, under_way


def names():
    return [entry.name for entry in work.current()]


def test_the_innermost_is_what_a_thread_does():
    with under_way("start"):
        with pytest.raises(KeyError), under_way("steps"), under_way("saving"):
            assert names() == ["saving"] and work.describe() == "saving in thread MainThread for 0 s"
            raise KeyError
        assert names() == ["start"]
    assert names() == [] and work.describe() == ""


def test_a_compilation_of_which_no_end_is_told_ends_with_a_beat_or_the_work_around_it():
    work.begin_compilation()
    assert names() == []  # nothing is under way that it could hold up
    with under_way("start"):
        with under_way("steps"):
            work.begin_compilation()
            assert names() == ["compilation"]
        assert names() == ["start"]
        work.begin_compilation()
        beat()
        assert names() == ["start"]


@pytest.mark.parametrize(
    ("name", "num_bytes", "limit"),
    [("steps", 0, 1000), ("saving", 0, 5000), ("saving", 1e10, 10_000), ("compilation", 0, 5000)],
)
def test_the_limit_is_that_of_the_kind_of_work(name, num_bytes, limit):
    assert Entry(name, num_bytes).limit(1000) == limit
    assert Entry("saving").limit(1) == 120 and Entry("compilation").limit(1) == 3600


def test_a_thread_beats_for_its_own_work_and_one_without_for_all():
    """Threads that read ahead work for those that wait for them."""

    def seal():
        with under_way("sealing", 1e9):
            beat()
            return work.find_overdue(0.04)

    with under_way("steps"), ThreadPoolExecutor(1) as pool:
        time.sleep(0.05)
        assert pool.submit(seal).result().startswith("steps in thread MainThread") and work.find_overdue(0.04)
        pool.submit(beat).result()
        assert not work.find_overdue(0.04)


def test_who_waits_for_a_thread_is_not_overdue_before_that_thread_is(monkeypatch):
    monkeypatch.setattr(work, "_OF_DISKS", (1, 0.0))
    go_on = threading.Event()

    def seal():
        with under_way("sealing", 1e9):
            go_on.wait()

    sealing = threading.Thread(target=seal, name="seal")
    sealing.start()
    with under_way("saving", waits_for=sealing):
        time.sleep(0.2)
        assert not work.find_overdue(0.1) and names() == ["sealing"]
        go_on.set()
        sealing.join()
        assert names() == ["saving"] and not work.find_overdue(0.1)
        time.sleep(0.2)
        overdue = work.find_overdue(0.1)
        assert re.match(r"saving in thread MainThread for \d+ s, of which 0 s without a beat", overdue)
