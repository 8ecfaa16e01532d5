# SPDX-License-Identifier: Apache-2.0
"""Tasks run on several cores, and nothing is left behind."""

import functools
import operator
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bert_jax.data import processes
from bert_jax.errors import InputError


@pytest.mark.parametrize("num_workers", [1, 2])
def test_results_come_in_the_order_of_the_tasks(num_workers, capsys):
    with processes.task_runner(num_workers) as run:
        assert run(abs, [-3, 1, -2], "numbers") == [3, 1, 2]
        assert run(str, [7], "words") == ["7"]
    assert "3 of 3 numbers" in capsys.readouterr().err


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_a_task_raises_is_raised(num_workers):
    with pytest.raises(ZeroDivisionError), processes.task_runner(num_workers) as run:
        run(functools.partial(operator.truediv, 1), [0], "quotients")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds child processes through /proc")
def test_workers_end_with_the_process_that_started_them(tmp_path):
    program = (
        "import time; from bert_jax.data import processes\n"
        "if __name__ == '__main__':\n"
        "    with processes.task_runner(2) as run: run(time.sleep, [60, 60], 'naps')"
    )
    (tmp_path / "nap.py").write_text(program)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "nap.py")], env=os.environ | {"PYTHONPATH": os.getcwd()})
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    deadline = time.monotonic() + 30
    while len(workers := children.read_text().split()) < 3 and time.monotonic() < deadline:  # and a resource tracker
        time.sleep(0.05)
    time.sleep(1)  # for the workers to start watching
    parent.kill()
    parent.wait()
    while any(alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 3 and not any(alive(worker) for worker in workers)


def test_a_worker_that_is_killed_is_an_input_error():
    with pytest.raises(InputError, match="fewer workers: what is finished is kept"):
        with processes.task_runner(2) as run:
            run(os._exit, [1], "ends")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a system without it")
def test_there_are_as_many_workers_as_cores_that_may_be_used(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    with processes.task_runner(0) as run:
        assert run(lambda task: os.getpid(), [0], "tasks") == [os.getpid()]  # one worker is this process


def test_the_limit_of_open_files_is_raised():
    program = (
        "import resource; from bert_jax.data import processes\n"
        "_, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))\n"
        "with processes.task_runner(1): assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def alive(process: str) -> bool:
    """Returns whether a process runs (an orphan that has ended may wait for its new parent)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False
