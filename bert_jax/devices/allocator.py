# SPDX-License-Identifier: Apache-2.0
"""Keeps the memory that a step on a CPU frees for the next step, in huge pages.

XLA allocates temporaries at the start of every program and frees them at its end. By default glibc returns blocks of
this size to the kernel. The next step must ask for them again, and the kernel fills them with zeros in pages of 4 KiB.
Keeping them saves this time. Programs of many sizes accumulate kept memory, so it is returned once it exceeds a quarter
of the machine's memory; half of it, while a quarter is left for others (docs/decisions/0016-tuning-a-process.md).
"""

import ctypes
import functools
import os
import sys
from pathlib import Path

# The names of mallopt(3) and madvise(2).
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2**21
_ACCELERATORS = ("/dev/accel0", "/dev/vfio/vfio", "/dev/nvidiactl", "/dev/kfd")

_keeping: ctypes.CDLL | None = None  # the C library, once it keeps what is freed
_compiled = False  # whether a program was compiled since memory was last given back


def reuse_freed_memory() -> bool:
    """Makes the C library keep freed memory; returns whether it does. Call this before JAX starts its threads.

    It changes nothing on systems other than Linux with glibc, on machines with an accelerator that JAX may use, and
    where environment variables configure the allocator.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if not platforms and any(Path(device).exists() for device in _ACCELERATORS):
        return False
    if sys.platform != "linux" or platforms not in ("", "cpu"):
        return False
    # Somebody has chosen an allocator, or its options.
    if any(name.startswith(("MALLOC_", "LD_PRELOAD")) for name in os.environ):
        return False
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    libc = ctypes.CDLL(None)
    # since glibc 2.33
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallinfo2"):
        return False
    libc.mallinfo2.restype = _MallocInfo
    # Keep freed memory, never use mmap for single blocks, and let all threads share one heap.
    kept = [
        libc.mallopt(option, value)
        for option, value in ((_M_TRIM_THRESHOLD, -1), (_M_MMAP_MAX, 0), (_M_ARENA_MAX, 1))
    ]
    _ask_for_huge_pages(libc, _memory() // 2)
    global _keeping
    _keeping = libc if all(kept) else None
    return all(kept)


def note_compilation() -> None:
    """Has the next call of `give_back_freed_memory` return all: a compiler leaves the heap in small pieces."""
    global _compiled
    _compiled = True


def give_back_freed_memory(most: float = 0.25) -> bool:
    """Returns kept memory to the kernel if it is more than the share `most` of the machine's memory, or after a
    compilation that `note_compilation` was told of. While such a share is left for others, twice as much is kept.

    Call this after each step; returns whether memory was returned. Kept memory is resident memory minus memory in use,
    without mapped files, which the kernel can drop by itself.
    """
    global _compiled
    if _keeping is None:
        return False
    share, compiled, _compiled = int(most * _memory()), _compiled, False
    resident, shared = map(int, Path("/proc/self/statm").read_text("ascii").split()[1:3])  # pages
    held = os.sysconf("SC_PAGE_SIZE") * (resident - shared)
    if held <= share and not compiled:
        return False  # mallinfo2 walks over all that was freed: milliseconds after a compilation
    kept = held - _keeping.mallinfo2().uordblks
    many = kept > 2 * share or (kept > share and _available() < share)
    if not (many or (compiled and kept > 0)) or not _keeping.malloc_trim(0):
        return False
    # the heap has shrunk; new parts of it need the advice again
    _ask_for_huge_pages(_keeping, _memory() // 2)
    return True


class _MallocInfo(ctypes.Structure):
    """The struct that mallinfo2(3) returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


@functools.cache
def _memory() -> int:
    """Returns the bytes of the machine's memory, or of the container's."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups, version 2 and 1
        try:
            limits.append(int(Path("/sys/fs/cgroup", name).read_text("ascii")))
        except (OSError, ValueError):
            continue  # no such file, or no limit ("max")
    return min(limits)


def _available() -> int:
    """Returns the bytes that others may still take: the kernel's estimate, and what is left of a container's limit."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    left = [1024 * next((int(words[1]) for words in lines if words[:1] == ["MemAvailable:"]), 0)]
    # cgroups, version 2 and 1
    for limit, usage in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
        folder = Path("/sys/fs/cgroup", "memory" if usage == "usage_in_bytes" else "")
        try:
            most, used = (
                int((folder / f"memory.{name}").read_text("ascii")) for name in (limit, usage)
            )
        except (OSError, ValueError):
            continue  # no such file, or no limit ("max")
        left.append(most - used)
    return min(left)


def _ask_for_huge_pages(libc: ctypes.CDLL, size: int) -> None:
    """Grows the heap by `size` bytes of untouched address space, and advises the kernel to use huge pages there."""
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(size)
    if block:  # malloc fails on systems without overcommit; pages stay small there
        start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(start, (block + size - start) // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)
        libc.free(block)
