# SPDX-License-Identifier: Apache-2.0
"""Signals and terminals that go away: a run saves and stops, or goes on; nothing is lost and nothing crashes."""

import os
import signal
import subprocess
import sys
import time

import pytest
from builders import make_dataset
from processes import TRAIN, finish, start, wait_for_lines

from bert_jax.training.report import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    data = make_dataset(tmp_path_factory.mktemp("data"))
    return [*TRAIN, f"--config.data.path={data}"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_the_same_command_goes_on(repository, command, tmp_path, number):
    arguments = [*command, f"--workdir={tmp_path / 'run'}", "--config.train.num_steps=2000"]
    running = start(repository, arguments, 1)
    wait_for_lines(tmp_path / "run" / "metrics.jsonl", 4, running)
    running[0].send_signal(number)
    (error,) = finish(running, 128 + number)
    assert f"stopped by signal {int(number)} after step" in error
    reached = max(record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    arguments[-1] = f"--config.train.num_steps={reached + 2}"
    assert f"resume from step {reached}" in finish(start(repository, arguments, 1))[0]


def test_a_run_goes_on_when_nobody_reads_what_it_says(repository, command, tmp_path):
    """As `train.py ... 2>&1 | head -1` has it."""
    environment = os.environ | {"PYTHONPATH": str(repository)}
    arguments = [sys.executable, *command, f"--workdir={tmp_path / 'run'}"]
    with subprocess.Popen(arguments, cwd=repository, env=environment, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"model: ")
        process.stderr.close()
        assert process.wait(300) == 0
    assert max(record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")) == 24


@pytest.mark.parametrize("number", range(0, 12, 2))
def test_ctrl_c_while_jax_is_imported_is_one_line(repository, command, tmp_path, number):
    environment = os.environ | {"PYTHONPATH": str(repository)}
    code = "import bert_jax.tools, sys; print(flush=True); from bert_jax.tools.main import launch; "
    code += "launch('train', 'train.py', sys.argv[1:])"
    arguments = [sys.executable, "-c", code, *command[1:], f"--workdir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        arguments, cwd=repository, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "\n"
    time.sleep(0.25 * number)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=300)[1]
    assert process.returncode in (130, -signal.SIGINT), (process.returncode, error)
    is_short = len(error.splitlines()) < 12 or "stopped by signal 2" in error  # training had begun, on a fast machine
    assert "Traceback" not in error and is_short, error


IN_A_CALLBACK = """
import bert_jax.tools, gc, signal, sys, time
def callback(phase, about):
    if phase == "start":
        gc.callbacks.remove(callback)
        signal.raise_signal(signal.SIGINT)
class Leaves:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
if sys.argv[1] == "gc":
    gc.callbacks.append(callback)
    gc.collect()
else:
    Leaves()
time.sleep(20)
"""


@pytest.mark.parametrize("where", ["gc", "del"])
def test_ctrl_c_in_a_callback_is_not_swallowed(repository, where):
    environment = os.environ | {"PYTHONPATH": str(repository)}
    command = [sys.executable, "-c", IN_A_CALLBACK, where]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "stopped by Ctrl-C\n")


@pytest.mark.parametrize(("seconds", "times"), [(0.0, 1), (0.7, 2), (1.4, 1), (2.1, 2), (2.8, 1), (3.5, 2)])
def test_ctrl_c_while_the_first_programs_compile_is_no_crash(repository, command, tmp_path, seconds, times):
    """The cache is cold, so XLA is at work in threads of its own when the signal comes."""
    environment = os.environ | {"PYTHONPATH": str(repository), "BERT_JAX_CACHE": str(tmp_path / "cache")}
    arguments = [sys.executable, *command, f"--workdir={tmp_path / 'run'}", "--config.model.num_layers=4"]
    process = subprocess.Popen(arguments, cwd=repository, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / ".lock").exists():  # what follows are the first programs
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(seconds)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 130, (process.returncode, error)
    assert "Traceback" not in error and "Fatal" not in error
