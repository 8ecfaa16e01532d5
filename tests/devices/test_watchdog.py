# SPDX-License-Identifier: Apache-2.0
"""The watchdog ends a process whose work stands still, and no other."""

import subprocess
import sys
import textwrap
import time

from bert_jax.devices.members import HANG_STATUS
from bert_jax.devices.watchdog import Watchdog


def run(repository, work, seconds):
    script = f"""
        import time
        from bert_jax.devices.watchdog import Watchdog
        def waits_for_ever():
            time.sleep(60)
        with Watchdog({seconds}) as watchdog:
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
    done = run(repository, "[(time.sleep(0.2), watchdog.alive()) for _ in range(10)]", 1.5)
    assert done.returncode == 0, done.stderr


def test_zero_seconds_is_off():
    with Watchdog(0) as watchdog:
        assert not watchdog._thread.is_alive()


def test_the_thread_ends_with_the_block():
    with Watchdog(100) as watchdog:
        assert watchdog._thread.is_alive()
        started = time.monotonic()
    assert not watchdog._thread.is_alive() and time.monotonic() - started < 5
