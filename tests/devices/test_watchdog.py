# SPDX-License-Identifier: Apache-2.0
"""The watchdog ends a process whose work is overdue, and no other."""

import textwrap
import time

import jax
import numpy as np
import pytest
from commands import run_python

from bert_jax.devices import work
from bert_jax.devices.members import HANG_STATUS
from bert_jax.devices.watchdog import Watchdog
from bert_jax.devices.work import under_way


def run(block, seconds):
    script = f"""
        import time
        from bert_jax.devices import work
        from bert_jax.devices.watchdog import Watchdog
        def waits_for_ever():
            time.sleep(60)
        work._OF_DISKS = 2, 0.9
        with Watchdog({seconds}), work.under_way("steps"):
            {block}
    """
    return run_python(["-c", textwrap.dedent(script)])


def test_slow_work_that_goes_on_is_left_alone():
    done = run("[(time.sleep(0.1), work.beat()) for _ in range(11)]", 1)
    assert done.returncode == 0, done.stderr


def test_slow_work_has_more_time_and_not_for_ever():
    done = run("with work.under_way('saving'): time.sleep(60)", 0.3)
    assert done.returncode == HANG_STATUS
    assert "saving in thread MainThread" in done.stderr and "its limit is 0.9 s" in done.stderr


def test_a_hang_ends_the_process_and_shows_where():
    """Also after slow work, which had more time."""
    wait = "with work.under_way('saving'): time.sleep(0.6)"
    done = run(wait + "\n            waits_for_ever()", 0.3)
    assert done.returncode == HANG_STATUS
    assert "steps in thread MainThread for " in done.stderr and "its limit is 0.3 s" in done.stderr
    assert "(train.hang_seconds 0.3)" in done.stderr and "waits_for_ever" in done.stderr


def test_the_compiler_has_a_limit_of_its_own():
    """XLA may take minutes for a large program, and JAX tells of its end alone."""
    seen, compiled = [], []

    @jax.jit
    def program(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: y @ y + 1, x)

    def listen(event, *_, **__):
        if event.endswith("jaxpr_to_mlir_module_duration"):
            seen.extend((entry.name, entry.limit(10)) for entry in work.current())

    jax.monitoring.register_event_duration_secs_listener(listen)
    work.on_compiled.append(compiled.append)
    with under_way("steps"):
        program(np.ones((3, 3)))
        assert set(seen) == {("compilation", 3600.0)} and [entry.name for entry in work.current()] == ["steps"]
    work.on_compiled.remove(compiled.append)
    assert compiled


def test_a_compilation_that_fails_does_not_keep_its_limit(monkeypatch):
    def fail(*_, **__):
        seen.extend(entry.name for entry in work.current())
        raise ValueError("no memory for the compiler")

    seen = []
    monkeypatch.setattr("jax._src.compiler.backend_compile_and_load", fail)
    with under_way("steps"):
        with pytest.raises(ValueError, match="no memory for the compiler"), under_way("evaluation"):
            jax.jit(lambda x: x @ x + 3)(np.ones((5, 5)))
        assert seen == ["compilation"] and [entry.name for entry in work.current()] == ["steps"]


def test_zero_seconds_is_off():
    with Watchdog(0) as one:
        assert not one._thread.is_alive()


def test_the_thread_ends_with_the_block():
    with Watchdog(100) as one:
        assert one._thread.is_alive()
        started = time.monotonic()
    assert not one._thread.is_alive() and time.monotonic() - started < 5
