# SPDX-License-Identifier: Apache-2.0
"""Real processes for tests, which train as one: started, waited for, and what they said."""

import os
import re
import socket
import subprocess
import sys
import time

TRAIN = (
    "train.py",
    "--config=configs/pretrain.py:tiny",
    "--config.data.batch_size=16",
    "--config.train.num_steps=24",
    "--config.model.hidden_size=32",
    "--config.model.num_heads=4",
    "--config.model.intermediate_size=64",
    "--config.masking.max_predictions=5",
    "--config.optimizer.warmup_steps=3",
    "--config.optimizer.learning_rate=1e-3",
    "--config.eval.every_steps=8",
    "--config.checkpoint.every_steps=8",
    "--config.report.every_steps=1",
    "--config.report.tensorboard=False",
    "--config.report.progress=False",
)


def start(repository, arguments, num_processes, devices=1, more=None, script=None):
    """Returns the processes of one job on this machine, with some devices each.

    `more` gives further arguments, by the number of the process, and `script` a program, with arguments or without,
    that is given the command.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(repository)}
    processes = []
    for number in range(num_processes):
        joining = [f"--coordinator=localhost:{port}", f"--num_processes={num_processes}", f"--process_id={number}"]
        through = (script or {}).get(number, [])
        through = [through] if isinstance(through, str) else through
        command = [sys.executable, *through, *arguments, *(joining if num_processes > 1 else ["--distributed=off"])]
        command += (more or {}).get(number, [])
        processes.append(subprocess.Popen(command, cwd=repository, env=environment, text=True, stderr=subprocess.PIPE))
    return processes


def finish(processes, expected=0, timeout=400):
    """Returns what each process wrote to stderr. Fails if one ends with another status, or not in time."""
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    statuses = expected if isinstance(expected, list) else [expected] * len(processes)
    assert [process.returncode for process in processes] == statuses, "\n\n".join(errors)
    return errors


def wait_for_lines(path, count, processes, timeout=300):
    """Returns once a file has so many lines, not counting goodput; fails if a process ends before."""
    lines = lambda: path.open() if path.exists() else ()  # noqa: E731
    wait_until(
        lambda: sum('"goodput"' not in line for line in lines() if line[-1:] == "\n") >= count, processes, timeout
    )


def wait_until(true, processes, timeout=300):
    """Returns once a function returns something true; fails if a process ends before."""
    deadline = time.monotonic() + timeout
    while not true():
        ended = [process for process in processes if process.poll() is not None]
        assert not ended and time.monotonic() < deadline, [process.communicate()[1] for process in ended]
        time.sleep(0.02)


def told(errors):
    """Returns the lines that begin with "error: " of each process."""
    return [[line for line in text.splitlines() if line.startswith("error: ")] for text in errors]


class Store:
    """A key-value store as JAX's client has it, of which `gone` makes every call fail."""

    def __init__(self):
        self.values, self.gone = {}, False

    def key_value_set(self, key, value, allow_overwrite=False):
        self._check()
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, key):
        self._check()
        return [(name, value) for name, value in list(self.values.items()) if name.startswith(key)]

    def _check(self):
        if self.gone:
            raise RuntimeError("UNAVAILABLE: failed to connect\nto all addresses")
