# SPDX-License-Identifier: Apache-2.0
"""Freed memory that is kept: a large block is asked for again without a page fault for each of its pages."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bert_jax.devices import allocator

PROGRAM = """
import resource
from bert_jax.devices.allocator import give_back_freed_memory, reuse_freed_memory

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

AFTER_A_TRIM = """
import re
from bert_jax.devices.allocator import give_back_freed_memory, reuse_freed_memory

def huge():
    "Returns the bytes of the heap behind which huge pages were asked for."
    areas = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read())
    ends = [area.split()[0].split("-") for area in areas if "[heap]" in area and " hg" in area]
    return sum(int(stop, 16) - int(start, 16) for start, stop in ends)

reuse_freed_memory()
before = huge()
block = bytearray(2**26)
del block
print(before, give_back_freed_memory(0.0), huge())
"""

BESIDE_A_FILE = """
import mmap, sys
from bert_jax.devices import allocator

allocator.reuse_freed_memory()
with open(sys.argv[1], "rb") as stream:
    shard = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
    total = sum(shard[::4096])
    print(allocator.give_back_freed_memory(2**26 / allocator._memory()))
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="is for Linux with glibc"
)


def clean_environment():
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return {name: value for name, value in clean.items() if name not in ("GLIBC_TUNABLES", "LD_PRELOAD")}


def run(**environment):
    """Returns what `reuse_freed_memory` says, the page faults of 64 MiB that were freed before, and what is given back.

    The last are, for a process that may hold all of the machine's memory and for one that may hold none: whether memory
    was given back, and whether the process holds 32 MiB less.
    """
    command = [sys.executable, "-c", PROGRAM]
    environment = clean_environment() | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    kept, faults, *given_back = done.stdout.split()
    return kept == "True", int(faults), [said == "True" for said in given_back]


def test_a_block_that_was_freed_is_used_again_and_given_back_by_a_process_that_holds_more_than_its_share():
    kept, faults, given_back = run(JAX_PLATFORMS="cpu")
    assert kept and faults < 100  # of 16,384 pages
    assert given_back == [False, False, True, True]


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


def output_of(program, *arguments):
    environment = clean_environment() | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_huge_pages_are_asked_for_again_after_a_trim():
    before, given_back, after = output_of(AFTER_A_TRIM)
    if before == "0":
        pytest.skip("this kernel keeps no flags of huge pages")
    assert given_back == "True" and int(after) > 2**30


def test_a_mapped_file_is_not_memory_that_is_kept(tmp_path):
    (tmp_path / "shard").write_bytes(bytes(2**27))
    assert output_of(BESIDE_A_FILE, tmp_path / "shard") == ["False"]


@pytest.fixture
def asked(monkeypatch):
    """Returns what is asked of a C library that keeps memory and has nothing in use."""
    asked = []
    counted = SimpleNamespace(uordblks=0)
    heap = SimpleNamespace(
        mallinfo2=lambda: asked.append("count") or counted, malloc_trim=lambda pad: asked.append(f"trim {pad}") or 1
    )
    monkeypatch.setattr(allocator, "_keeping", heap)
    monkeypatch.setattr(allocator, "_ask_for_huge_pages", lambda libc, size: None)
    return asked


def test_after_a_compilation_all_is_given_back_once(monkeypatch, asked):
    """What a compiler leaves of the heap makes a short text take twice as long.

    A process that holds less than its share counts nothing else: mallinfo2 walks over every free piece of the heap, of
    which a compiler leaves thousands.
    """
    monkeypatch.setattr(allocator, "_memory", lambda: 2**60)
    assert not allocator.give_back_freed_memory() and asked == []
    allocator.note_compilation()
    assert allocator.give_back_freed_memory() and asked == ["count", "trim 0"]
    assert not allocator.give_back_freed_memory() and asked == ["count", "trim 0"]


@pytest.mark.parametrize(
    "kept, available, returns", [(0.2, 0.1, False), (0.3, 0.5, False), (0.3, 0.2, True), (0.6, 0.9, True)]
)
def test_more_than_a_quarter_is_kept_while_a_quarter_is_left_for_others(monkeypatch, asked, kept, available, returns):
    """Shares of the machine's memory; a step that frees more than a quarter takes twice as long if it is returned."""
    monkeypatch.setattr(allocator, "_available", lambda: int(available * allocator._memory()))
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    monkeypatch.setattr(allocator, "_memory", lambda: int(os.sysconf("SC_PAGE_SIZE") * (resident - shared) / kept))
    assert allocator.give_back_freed_memory() == returns


def test_what_is_available_is_the_least_of_the_machine_and_the_container(monkeypatch):
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**26 < allocator._available() <= total
    files = {"memory.max": f"{2**30}\n", "memory.current": f"{2**30 - 2**20}\n"}
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *given: files.get(self.name) or read(self, *given))
    assert allocator._available() == 2**20
    files["memory.max"] = "max\n"  # no limit
    assert allocator._available() > 2**20
