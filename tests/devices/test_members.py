# SPDX-License-Identifier: Apache-2.0
"""What processes of one job tell each other, with a store in place of JAX's; real ones are in end_to_end/."""

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import Store

from bert_jax.devices import members, preemption
from bert_jax.devices.members import Members
from bert_jax.devices.preemption import Preemption
from bert_jax.errors import InputError, LostProcessError


@pytest.fixture
def left(monkeypatch):
    """Returns the calls of `leave`, which end nothing."""
    calls = []
    monkeypatch.setattr(members, "leave", lambda *arguments: calls.append(arguments))
    return calls


@pytest.fixture
def job(left, monkeypatch):
    """Returns what makes the members of a job that look at each other every 0.1 s; their watches end with the test."""
    monkeypatch.setattr(members, "_BEAT_SECONDS", 0.1)
    made = []

    def make(count=2, store=None, lost_seconds=30.0):
        store = store or Store()
        made.extend(Members(store, index, count, lost_seconds) for index in range(count))
        return made[-count:]

    yield make
    for one in made:
        one.close()


def wait_for(true):
    deadline = time.monotonic() + 10
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_an_error_in_a_collective_has_the_status_of_its_cause(job):
    """A line that another has told is an error like any, and only a process that is lost is worth another try."""
    several = job(2)
    several[1].tell_failure("a label is missing", 1)
    cause = several[0].find_cause()
    assert type(cause) is InputError and str(cause).endswith("ended: a label is missing")


def test_a_process_that_is_silent_is_the_cause(job):
    several = job(2)
    assert several[0].find_cause() is None
    several[1].close()
    cause = several[0].find_cause()
    assert isinstance(cause, LostProcessError) and "process 1 (" in str(cause) and "not been heard of" in str(cause)


def test_where_the_first_process_is_gone_the_cause_is_that_and_nothing_else_is_raised(job, left):
    store = Store()
    second = job(2, store)[1]
    store.gone = True
    cause = second.find_cause()
    assert isinstance(cause, LostProcessError) and "\n" not in str(cause)
    assert str(cause).startswith("process 0 cannot be reached: UNAVAILABLE")
    second.tell_failure("something else", 1)


def test_a_watch_ends_its_process_where_another_is_lost_or_has_failed(job, left, monkeypatch):
    monkeypatch.setattr(members, "_GRACE_SECONDS", 0.2)
    several = job(2, lost_seconds=0.5)
    several[1].close()
    wait_for(lambda: left)
    assert left[0][0] == LostProcessError.STATUS and "process 1 (" in left[0][1]


def test_all_end_with_the_status_and_the_line_of_the_one_that_found_a_process_lost(job, left, monkeypatch):
    """They may be in a collective that does not break off, as those of other processes do."""
    monkeypatch.setattr(members, "_GRACE_SECONDS", 0.2)
    several = job(3)
    several[0].tell_failure("process 2 (there) has not been heard of", LostProcessError.STATUS)
    wait_for(lambda: left)
    assert left[0] == (LostProcessError.STATUS, "process 2 (there) has not been heard of")
    assert str(several[1].failure_of_another()) == "process 2 (there) has not been heard of"


def test_the_first_process_ends_last(job, monkeypatch):
    monkeypatch.setattr(members, "_GRACE_SECONDS", 30.0)
    first, second, third = job(3)
    second.outlast()  # the others wait for nobody
    started = time.monotonic()
    ending = threading.Timer(0.4, lambda: (second.close(), third.close()))
    ending.start()
    first.outlast()
    assert 0.4 < time.monotonic() - started < 10
    ending.join()


@pytest.mark.parametrize("told", [False, True])
def test_a_watch_ends_the_first_process_after_the_others(job, monkeypatch, told):
    """JAX aborts those that outlive the first process's store. The second one would not notice by itself for long."""
    monkeypatch.setattr(members, "_GRACE_SECONDS", 1.0)
    ended = []

    def leave(status, line=""):
        one = next(one for one in several if threading.current_thread() in one._threads)
        ended.append((one.index, status, line))
        one._ended.set()

    monkeypatch.setattr(members, "leave", leave)
    several = job(4, lost_seconds=60.0)
    several[3].close()
    if told:
        several[2].tell_failure("process 3 (there) has not been heard of", LostProcessError.STATUS)
        several[2].close()
    else:
        several[0].lost_seconds = 0.5
    wait_for(lambda: 0 in {index for index, *_ in ended})
    assert [index for index, *_ in ended][-1] == 0 and {index for index, *_ in ended} == ({0, 1} if told else {0, 1, 2})
    assert {status for _, status, _ in ended} == {LostProcessError.STATUS}
    assert all("process 3 (" in line and "not been heard of" in line for *_, line in ended)


def test_the_first_process_does_not_wait_for_ever(job, monkeypatch):
    monkeypatch.setattr(members, "_GRACE_SECONDS", 0.5)
    first, _ = job(2)
    started = time.monotonic()
    first.outlast()
    assert 0.9 < time.monotonic() - started < 10


def test_ctrl_c_is_noted_though_nobody_reads_what_is_said(monkeypatch):
    """As `train.py 2>&1 | tee log` has it: Ctrl-C ends the reader too."""

    def broken(*_):
        raise BrokenPipeError

    monkeypatch.setattr(preemption.os, "write", broken)
    with Preemption() as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked.received() == signal.SIGINT


def test_ctrl_c_while_a_stopped_command_shuts_down_ends_it_at_once(monkeypatch):
    """It must not raise KeyboardInterrupt in whatever runs then."""
    ends = []
    monkeypatch.setattr(preemption, "leave", lambda status, line: ends.append(status))
    signal.signal(signal.SIGINT, lambda *_: ends.append("the command's own"))
    with Preemption():
        pass
    signal.raise_signal(signal.SIGINT)
    with Preemption():
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert ends == ["the command's own", 130]


def test_a_run_in_another_thread_leaves_signals_alone():
    before = signal.getsignal(signal.SIGINT)

    def run():
        with Preemption() as asked:
            return signal.getsignal(signal.SIGINT), asked.received()

    with ThreadPoolExecutor() as pool:
        assert pool.submit(run).result() == (before, 0)


def test_a_program_that_calls_the_library_gets_its_ctrl_c_back():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Preemption():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("streams", ["None", "open(os.devnull)", "Interrupted()"])
def test_a_process_ends_with_its_status_whatever_its_streams_are(repository, streams):
    program = f"""
import os, sys
from bert_jax.devices.members import leave
class Interrupted:
    def write(self, text=""): raise RuntimeError("reentrant call")
    flush = write
sys.stdout = sys.stderr = {streams}
leave(75, "process 1 is lost")
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=repository, timeout=60).returncode == 75


def test_of_threads_that_end_a_process_at_once_one_says_why(repository):
    program = """
import sys, threading, time
from bert_jax.devices.members import leave
class Slow:  # others come while the first one writes
    def write(self, text): sys.__stderr__.write(text), time.sleep(0.2)
    def flush(self): time.sleep(0.2)
sys.stderr = Slow()
for number in range(4):
    threading.Thread(target=leave, args=(70 + number, f"cause {number}"), daemon=True).start()
time.sleep(20)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=repository, timeout=60, capture_output=True, text=True)
    assert done.stderr == f"error: cause {done.returncode - 70}\n"
