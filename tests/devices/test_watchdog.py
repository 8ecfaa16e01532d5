# SPDX-License-Identifier: Apache-2.0
"""The watchdog ends a process whose work stands still, and no other."""

import subprocess
import sys
import textwrap
import time

import jax
import numpy as np

from bert_jax.devices import watchdog
from bert_jax.devices.members import HANG_STATUS
from bert_jax.devices.watchdog import Watchdog


def run(repository, work, seconds):
    script = f"""
        import time
        from bert_jax.devices import watchdog
        from bert_jax.devices.watchdog import Watchdog
        def waits_for_ever():
            time.sleep(60)
        with Watchdog({seconds}):
            {work}
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=repository, capture_output=True, text=True, timeout=50
    )


def test_a_hang_ends_the_process_and_shows_where(repository):
    done = run(repository, "waits_for_ever()", 0.5)
    assert done.returncode == HANG_STATUS
    assert "train.hang_seconds 0.5" in done.stderr and "waits_for_ever" in done.stderr


def test_slow_work_that_goes_on_is_left_alone(repository):
    done = run(repository, "[(time.sleep(0.2), watchdog.beat()) for _ in range(10)]", 1.5)
    assert done.returncode == 0, done.stderr


def test_slow_work_has_more_time_and_not_for_ever(repository):
    limits = "watchdog._LEAST, watchdog._TIMES, watchdog._SLOWEST = 1.5, 2, 1e9"
    wait = "import contextlib\n            with watchdog.slow(): time.sleep({})"
    done = run(repository, f"{limits}; " + wait.format(1.2), 0.5)
    assert done.returncode == 0, done.stderr
    done = run(repository, f"{limits}; " + wait.format(60), 0.5)
    assert done.returncode == HANG_STATUS and "(train.hang_seconds 0.5; 1.5 s for what is done now)" in done.stderr
    done = run(repository, f"{limits}; " + wait.format(1) + "\n            waits_for_ever()", 0.5)
    assert done.returncode == HANG_STATUS and "(train.hang_seconds 0.5)" in done.stderr


def test_much_to_write_has_much_time():
    with Watchdog(1000) as one:
        with watchdog.slow(1e10):
            assert one.limit() == 10_000
        assert one.limit() == 1000


def test_the_compiler_has_a_limit_of_its_own():
    """XLA may take minutes for a large program, and JAX tells of its end alone."""
    limits = []

    @jax.jit
    def program(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: y @ y + 1, x)

    def listen(event, *_, **__):
        if event.endswith("jaxpr_to_mlir_module_duration"):
            limits.append(one.limit())

    jax.monitoring.register_event_duration_secs_listener(listen)
    with Watchdog(10) as one:
        program(np.ones((3, 3)))
        assert limits and set(limits) == {3600.0} and one.limit() == 10


def test_zero_seconds_is_off():
    with Watchdog(0) as one:
        assert not one._thread.is_alive()


def test_the_thread_ends_with_the_block():
    with Watchdog(100) as one:
        assert one._thread.is_alive()
        started = time.monotonic()
    assert not one._thread.is_alive() and time.monotonic() - started < 5
