# SPDX-License-Identifier: Apache-2.0
"""Commands for tests, each in a process of its own, forked from one that has imported JAX and the package: imports are
most of what a short command costs.

A test of the start itself, of imports or of variables that JAX reads when it is imported starts Python anew instead.
"""

import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_python(
    arguments: Sequence[object],
    folder: Path | None = None,
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Returns status, stdout and stderr of what `python ARGUMENTS` runs: a script, -m and a module, or -c and code.

    `text` is its standard input, and `environment` all of its variables; JAX has read its own, those of this process.
    """
    variables = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory(prefix="bert_jax_tests_") as place:
        streams = [Path(place) / name for name in ("stdin", "stdout", "stderr")]
        for path, content in zip(streams, (text or "", "", "")):
            path.write_text(content, "utf-8")
        wanted = {
            "arguments": [str(each) for each in arguments],
            "folder": str(folder or Path.cwd()),
            "streams": [str(path) for path in streams],
            "environment": variables,
        }
        status = _forked(json.dumps(wanted))
        out, told = (path.read_bytes().decode("utf-8") for path in streams[1:])
    return subprocess.CompletedProcess(wanted["arguments"], status, out, told)


def variables(repository):
    """Returns the environment of a command: one device, as users have, and a compiler in a hurry."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return {**os.environ, "PYTHONPATH": str(repository), "XLA_FLAGS": " ".join(flags)}


def assert_one_line(result, *parts):
    """A command has failed with one line for its user, which has these parts."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    for part in parts:
        assert part in lines[0]


def _forked(wanted: str) -> int:
    """Returns the exit status of a command, or minus the number of the signal that ended it."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(wanted + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Returns the process that forks commands. It ends when this one does, or by `end`."""
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, __file__], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def end() -> None:
    """Ends the process that forks commands, if there is one."""
    if _server.cache_info().currsize:
        _server().communicate(timeout=60)
        _server.cache_clear()


def _next_command() -> dict | None:
    """Returns a command in a new process, whose it is; None in this one, once there are no more."""
    while line := sys.stdin.readline():
        if not (child := os.fork()):
            return json.loads(line)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(1, f"{status}\n".encode())
    return None


def _become(command: dict) -> None:
    """Does in this process what Python does for a command."""
    for number, path in enumerate(command["streams"]):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    first, *rest = command["arguments"]
    if first == "-m":
        sys.path[0], sys.argv[:] = os.getcwd(), rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[0], sys.argv[:] = "", ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.path[0], sys.argv[:] = os.path.dirname(os.path.abspath(first)), [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    import gc

    import bert_jax.finetuning
    import bert_jax.pretraining
    import bert_jax.tools.cli  # noqa: F401

    gc.collect()
    gc.freeze()
    if (found := _next_command()) is not None:
        _become(found)
