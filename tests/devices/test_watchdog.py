# SPDX-License-Identifier: Apache-2.0
"""The watchdog ends a process whose work is overdue, and no other."""

import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest

from bert_jax.devices import work
from bert_jax.devices.members import HANG_STATUS
from bert_jax.devices.watchdog import Watchdog
from bert_jax.devices.work import under_way


def run(repository, block, seconds):
    script = f"""
        import time
        from bert_jax.devices import work
        from bert_jax.devices.watchdog import Watchdog
        def waits_for_ever():
            time.sleep(60)
        work._OF_DISKS = 2, 1.5
        with Watchdog({seconds}), work.under_way("steps"):
            {block}
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=repository, capture_output=True, text=True, timeout=50
    )


def test_a_hang_ends_the_process_and_shows_where(repository):
    done = run(repository, "waits_for_ever()", 0.5)
    assert done.returncode == HANG_STATUS
    assert "steps in thread MainThread for " in done.stderr and "its limit is 0.5 s" in done.stderr
    assert "(train.hang_seconds 0.5)" in done.stderr and "waits_for_ever" in done.stderr


def test_slow_work_that_goes_on_is_left_alone(repository):
    done = run(repository, "[(time.sleep(0.2), work.beat()) for _ in range(10)]", 1.5)
    assert done.returncode == 0, done.stderr


def test_slow_work_has_more_time_and_not_for_ever(repository):
    wait = "with work.under_way('saving'): time.sleep({})"
    done = run(repository, wait.format(1.2), 0.5)
    assert done.returncode == 0, done.stderr
    done = run(repository, wait.format(60), 0.5)
    assert done.returncode == HANG_STATUS
    assert "saving in thread MainThread" in done.stderr and "its limit is 1.5 s" in done.stderr
    done = run(repository, wait.format(1) + "\n            waits_for_ever()", 0.5)
    assert done.returncode == HANG_STATUS and "its limit is 0.5 s" in done.stderr


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
