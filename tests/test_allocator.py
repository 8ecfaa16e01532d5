# SPDX-License-Identifier: Apache-2.0
"""Freed memory that is kept: a large block is asked for again without a page fault for each of its pages."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from bert_jax.allocator import reuse_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

kept = reuse_freed_memory()
block = bytearray(2**26)
del block
before = faults()
block = bytearray(2**26)
print(kept, faults() - before)
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="is for Linux with glibc"
)


def run(**environment):
    """Returns what `reuse_freed_memory` says, and the page faults of 64 MiB that were freed before."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    for name in ("GLIBC_TUNABLES", "LD_PRELOAD"):
        clean.pop(name, None)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


def test_a_block_that_was_freed_is_used_again():
    kept, faults = run(JAX_PLATFORMS="cpu")
    assert kept and faults < 100  # of 16,384 pages


@pytest.mark.parametrize(
    "environment",
    [
        {"JAX_PLATFORMS": "cuda,cpu"},
        {"JAX_PLATFORMS": "cpu", "MALLOC_ARENA_MAX": "2"},
        {"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=4"},
    ],
)
def test_what_the_environment_has_chosen_stays(environment):
    assert run(**environment)[0] is False
