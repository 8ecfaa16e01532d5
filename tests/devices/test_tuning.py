# SPDX-License-Identifier: Apache-2.0
"""The library leaves its process alone; `tune_process`, which commands call, changes what its page says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_python

# What a process has that a library could change, before the import and after the first answers.
STATE = """
import json, locale, logging, os, signal, sys, threading, warnings
import jax, numpy

CODE = r'''
def fewest_cores():
    # of any thread; one that ends while it is asked is left out
    found = []
    for task in os.listdir("/proc/self/task"):
        try:
            found.append(sorted(os.sched_getaffinity(int(task))))
        except ProcessLookupError:
            pass
    return min(found, key=len)

def state():
    memory = dict(line.split(":") for line in open("/proc/self/status").read().splitlines() if line.startswith("Vm"))
    files = sorted(os.path.relpath(os.path.join(top, name), HOME) for top, _, names in os.walk(HOME) for name in names)
    return {
        "jax": {name: str(value) for name, value in jax.config.values.items()},
        "listeners": [len(getattr(MONITORING, name)) for name in LISTENERS],
        "environment": dict(os.environ),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "errors": numpy.geterr(),
        "filters": [str(entry) for entry in warnings.filters],
        "locale": locale.setlocale(locale.LC_ALL),
        "log": [logging.root.level, len(logging.root.handlers)],
        "cores": fewest_cores(),
        "folder": os.getcwd(),
        "umask": os.umask(os.umask(0)) or os.umask(0o022),
        "heap GiB": int(memory["VmSize"].split()[0]) // 2**20 // 4,
        "files": files,
    }
'''
from jax._src import monitoring as MONITORING
LISTENERS = ["_event_listeners", "_event_duration_secs_listeners"]
HOME = os.environ["HOME"]
exec(CODE)
jax.numpy.ones(3).sum().block_until_ready()  # JAX's own threads and compiler
before = state()
exec(sys.argv[1])
after = state()
print(json.dumps({name: [before[name], after[name]] for name in before if before[name] != after[name]}))
"""

ANSWERS = """
import bert_jax
bert = bert_jax.load_pretrained(sys.argv[2])
bert_jax.sentence_embeddings(bert, ["ban bis"])
bert_jax.fill_masks(bert, ["ban [MASK]"])
bert.encode(["ban"])
bert_jax.load_predictor(sys.argv[2])(["bis [MASK]"])
"""
TUNED = """
import bert_jax
bert_jax.tune_process()
jax.jit(lambda x: x + 1)(1.0).block_until_ready()
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="is for Linux with glibc"
)


def changes(repository: Path, home: Path, program: str, *arguments: str, **variables: str) -> dict:
    """Returns the parts of a process's state that a program changes: name -> [before, after]."""
    home.mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "JAX_PLATFORMS": "cpu"} | variables
    environment["PYTHONPATH"] = str(repository)
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # Python's own files in the repository are not what is asked
    command = [sys.executable, "-c", STATE, program, *arguments]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_library_leaves_its_process_alone(repository, pretrained, tmp_path):
    assert changes(repository, tmp_path / "home", ANSWERS, str(pretrained), XLA_FLAGS=os.environ["XLA_FLAGS"]) == {}


def test_tuning_changes_what_it_says(repository, tmp_path):
    changed = changes(repository, tmp_path / "home", TUNED)
    assert set(changed) == {"jax", "listeners", "heap GiB", "files"}
    before, after = changed["jax"]
    directory = f"{tmp_path}/home/.cache/bert_jax/compiled_programs"
    assert {name: after[name] for name in after if after[name] != before[name]} == {
        "jax_compilation_cache_dir": directory,
        "jax_compilation_cache_max_size": str(2 * 2**30),
        "jax_persistent_cache_min_compile_time_secs": "0.0",
    }
    assert changed["files"][1] and all(
        name.startswith(".cache/bert_jax/compiled_programs/") for name in changed["files"][1]
    )


def test_the_user_s_own_cache_of_programs_is_the_user_s(repository, tmp_path):
    """Not one file of it goes, whatever its size, and JAX's settings for it stay."""
    own = tmp_path / "home" / "mine"
    own.mkdir(parents=True)
    (own / "README.txt").write_text("mine")
    with open(own / "old-cache", "wb") as stream:
        stream.truncate(3 * 2**30)  # a hole: more than our own directory may have
    changed = changes(repository, tmp_path / "home", TUNED, JAX_COMPILATION_CACHE_DIR=str(own))
    assert set(changed) <= {"listeners", "heap GiB", "files"}
    assert {"README.txt", "old-cache"} <= set(os.listdir(own))


def test_nothing_is_tuned_if_asked(tmp_path):
    environment = {"HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", "BERT_JAX_KEEP": "0"}
    done = run_python(["-c", STATE, TUNED], tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}
