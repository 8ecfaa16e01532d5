# SPDX-License-Identifier: Apache-2.0
"""Freed memory that is kept: a large block is asked for again without a page fault for each of its pages."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from bert_jax.allocator import give_back_freed_memory, reuse_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

kept = reuse_freed_memory()
block = bytearray(2**26)
del block
before = faults()
block = bytearray(2**26)
again = faults() - before
del block
before = resident()
given_back = []
for most in (1.0, 0.0):
    given_back += [give_back_freed_memory(most), before - resident() > 2**25]
print(kept, again, *given_back)
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="is for Linux with glibc"
)


def run(**environment):
    """Returns what `reuse_freed_memory` says, the page faults of 64 MiB that were freed before, and what is given back.

    The last are, for a process that may hold all of the machine's memory and for one that may hold none: whether memory
    was given back, and whether the process holds 32 MiB less.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    for name in ("GLIBC_TUNABLES", "LD_PRELOAD"):
        clean.pop(name, None)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    kept, faults, *given_back = done.stdout.split()
    return kept == "True", int(faults), [said == "True" for said in given_back]


def test_a_block_that_was_freed_is_used_again():
    kept, faults, _ = run(JAX_PLATFORMS="cpu")
    assert kept and faults < 100  # of 16,384 pages


def test_a_process_that_holds_more_than_its_share_gives_back_what_is_free():
    assert run(JAX_PLATFORMS="cpu")[2] == [False, False, True, True]


@pytest.mark.parametrize(
    "environment",
    [
        {"JAX_PLATFORMS": "cuda,cpu"},
        {"JAX_PLATFORMS": "cpu", "MALLOC_ARENA_MAX": "2"},
        {"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=4"},
    ],
)
def test_what_the_environment_has_chosen_stays(environment):
    kept, _, given_back = run(**environment)
    assert not kept and not given_back[0] and not given_back[2]
