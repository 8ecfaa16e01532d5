# SPDX-License-Identifier: Apache-2.0
"""What the processes of a job agree on, with a store in place of JAX's; real ones are in end_to_end/."""

import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from processes import Store

from bert_jax.devices import job
from bert_jax.devices.job import Job, Several, this_job
from bert_jax.devices.preemption import Preemption
from bert_jax.devices.work import under_way
from bert_jax.errors import InputError, LostProcessError


@pytest.fixture
def several(monkeypatch):
    """Returns what makes the processes of a job, none of which watches the others."""
    monkeypatch.setattr("bert_jax.devices.members._BEAT_SECONDS", 0.1)
    made = []

    def make(count=2, agree_seconds=30.0):
        store = Store()
        made.extend(Several(store, index, count, agree_seconds=agree_seconds) for index in range(count))
        return made[-count:]

    yield make
    for one in made:
        one.members.close()


def test_all_hear_what_each_has_said_in_turn(several):
    jobs = several(3)
    with ThreadPoolExecutor(3) as pool:
        for topic in ("a", "b", "a"):
            said = list(pool.map(lambda one, topic=topic: one.exchange(topic, f"{topic}{one.index}"), jobs))
            assert said == [[f"{topic}0", f"{topic}1", f"{topic}2"]] * 3


def test_the_first_is_heard_by_topic_and_number(several):
    first, second = several(2)
    for topic, text in (("a/b", "1"), ("a", "2"), ("a", "3")):
        assert first.broadcast_text(topic, text) == text
    assert [second.broadcast_int(topic, 0) for topic in ("a", "a/b", "a")] == [2, 1, 3]


def test_another_order_of_topics_is_an_error_with_both_topics_and_both_hosts(several):
    jobs = several(2)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(one.exchange, topic) for one, topic in zip(jobs, ("free disk", "resume step"))]
        told = [str(each.exception(timeout=30)) for each in asked]
    for number, (line, topics) in enumerate(zip(told, (("free disk", "resume step"), ("resume step", "free disk")))):
        assert line.startswith(f"process {number} (") and f"process {1 - number} (" in line
        assert [line.index(repr(topic)) for topic in topics] == sorted(line.index(repr(topic)) for topic in topics)


def test_who_waits_for_a_process_that_failed_gets_its_line_and_does_not_tell_it_again(several):
    jobs = several(3)
    jobs[1].members.tell_failure("the disk is full", 1)
    with pytest.raises(InputError, match=r"^process 1 \(.+\) ended: the disk is full$") as caught:
        jobs[0].exchange("here")
    jobs[0].members.tell_failure(str(caught.value), 1)
    with pytest.raises(InputError, match=r"^process 1 \(.+\) ended: the disk is full$"):
        jobs[2].exchange("here")


def test_a_process_that_works_is_waited_for_and_one_that_does_not_is_named(several):
    first = several(2, agree_seconds=0.5)[0]
    with ThreadPoolExecutor(1) as pool:
        with under_way("saving"):
            asked = pool.submit(first.exchange, "free disk")
            time.sleep(1)
            assert not asked.done()
        with pytest.raises(InputError, match=r"^process 1 \(.+\) has not come to agree on 'free disk' within 0.5 s"):
            asked.result(timeout=20)


def test_a_process_that_died_is_named_with_what_it_did_last(several, monkeypatch):
    """As in a program that has joined the processes itself, where no watch ends the others."""
    monkeypatch.setattr(job, "_LOST_SECONDS", 1.0)
    first, second = several(2)
    with under_way("saving"):
        time.sleep(0.5)
        second.members.close()
    with pytest.raises(LostProcessError, match=r"process 1 \(.+\) has not been heard of for 1 s, last in saving"):
        first.exchange("free disk")


def first_of_two(theirs):
    """Returns the job of the first of two processes, and what it says; `theirs` is what the other says to that."""
    said = []

    class First(Job):
        count = 2

        def exchange(self, topic, value=""):
            said.append(value)
            return [value, theirs(value)]

        def name(self, number):
            return f"process {number} (there)"

    return First(), said


def test_equal_values_are_exchanged_as_a_digest_alone():
    first, said = first_of_two(lambda value: value)
    first.check_same({"run": {"train": {"seed": 3, "notes": "x" * 10_000}}})
    assert len(said) == 1 and len(said[0]) == 64


def test_other_values_are_named_with_their_process():
    first, _ = first_of_two(lambda value: value.replace('"seed": 3', '"seed": 4') if value[0] == "{" else "0" * 64)
    with pytest.raises(InputError, match=r"process 1 \(there\) has run.train.seed 4, and process 0 \(there\) has 3"):
        first.check_same({"run": {"train": {"seed": 3}}})


def test_other_code_is_named():
    code = job._code_digest()
    first, _ = first_of_two(lambda value: value.replace(code, "0123456789ab") if value[0] == "{" else "0" * 64)
    with pytest.raises(InputError, match=r"process 1 \(there\) has code of bert_jax '0123456789ab', and process 0"):
        first.check_same({})


def test_signals_are_asked_for_with_numbers_that_grow_over_all_runs(several, monkeypatch):
    """A run of a grid begins at step 0 again: JAX waits for a number that is larger than all before."""
    numbers = []
    monkeypatch.setattr(job, "_job", several(2)[0])
    monkeypatch.setattr(
        "jax.experimental.multihost_utils.reached_preemption_sync_point", lambda number: bool(numbers.append(number))
    )
    for _ in range(2):
        with Preemption() as asked:
            assert [asked.received() for _ in range(3)] == [0, 0, 0]
    assert numbers == list(range(6))


def test_processes_that_cannot_agree_are_refused(monkeypatch):
    """There are several, and JAX's coordination service is not there."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for agree in (lambda: this_job().check_same({}), lambda: this_job().broadcast_int("step", 1)):
        with pytest.raises(InputError, match=r"jax\.distributed\.initialize\(\) before"):
            agree()


def test_one_process_needs_no_inner_names_of_jax(repository):
    program = """
        import builtins
        import_ = builtins.__import__
        def without(name, globals=None, *more):
            if name.startswith("jax._src") and (globals or {}).get("__name__", "").startswith("bert_jax"):
                raise ImportError(name)
            return import_(name, globals, *more)
        builtins.__import__ = without
        import bert_jax.pretraining, bert_jax.devices.cluster
        from bert_jax.devices.job import this_job
        bert_jax.devices.cluster.join()
        with bert_jax.devices.cluster.one_fate():
            print(this_job().exchange("x", "alone"), this_job().broadcast_int("y", 3))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=repository, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "['alone'] 3\n", done.stderr
