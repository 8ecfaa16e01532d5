# SPDX-License-Identifier: Apache-2.0
"""Memory that a program on a CPU frees is kept for the next one, in huge pages.

XLA allocates the temporaries of a program whenever it runs, and frees them after. glibc gives blocks of that size back
to the kernel, which fills them with zeros, page by page of 4 KiB, when the next step asks for them. What is kept for
programs of many sizes adds up, so when it comes to a quarter of the machine's memory it is given back
(docs/decisions/0023-freed-memory.md).
"""

import ctypes
import functools
import os
import sys
from pathlib import Path

# The names of mallopt(3) and madvise(2).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2**21
_ACCELERATORS = ("/dev/accel0", "/dev/vfio/vfio", "/dev/nvidiactl", "/dev/kfd")

_keeping: ctypes.CDLL | None = None  # the C library, once it keeps what is freed


def reuse_freed_memory() -> bool:
    """Makes the C library keep what is freed; returns whether it does. To be called before JAX starts its threads.

    Nothing is changed where it would not help or is not ours to choose: on another system than Linux with glibc, beside
    an accelerator that JAX may take, and where the environment says how to allocate.
    """
    if sys.platform != "linux" or not _computes_on_cpu() or _is_chosen():
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallinfo2"):  # since glibc 2.33
        return False
    libc.mallinfo2.restype = _MallocInfo
    # Freed memory stays, no block comes from the kernel alone, and all threads share one heap, which may grow at will.
    kept = [
        libc.mallopt(option, value) for option, value in ((_M_TRIM_THRESHOLD, -1), (_M_MMAP_MAX, 0), (_M_ARENA_MAX, 1))
    ]
    _ask_for_huge_pages(libc, _memory() // 2)
    global _keeping
    _keeping = libc if all(kept) else None
    return all(kept)


def give_back_freed_memory(most: float = 0.25) -> bool:
    """Gives what is kept back to the kernel if it is more than that share of the memory there is.

    To be called after each step; returns whether it was done. What is kept is what the process holds in memory beyond
    what it has asked for, mapped files left out: those the kernel takes back by itself.
    """
    if _keeping is None:
        return False
    resident, shared = map(int, Path("/proc/self/statm").read_text("ascii").split()[1:3])  # pages
    kept = os.sysconf("SC_PAGE_SIZE") * (resident - shared) - _keeping.mallinfo2().uordblks
    if kept <= most * _memory() or not _keeping.malloc_trim(0):
        return False
    _ask_for_huge_pages(_keeping, _memory() // 2)  # the heap has shrunk, and what it grows by knows nothing of them
    return True


class _MallocInfo(ctypes.Structure):
    """What mallinfo2(3) returns."""

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
            continue  # there is none, or it is "max"
    return min(limits)


def _ask_for_huge_pages(libc: ctypes.CDLL, size: int) -> None:
    """Grows the heap by `size` bytes of addresses, none of them touched, and asks for huge pages behind them."""
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(size)
    if block:  # there are systems that promise no more than they have: pages stay small there
        start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(start, (block + size - start) // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)
        libc.free(block)


def _computes_on_cpu() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return platforms == "cpu" if platforms else not any(Path(device).exists() for device in _ACCELERATORS)


def _is_chosen() -> bool:
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    return chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or "LD_PRELOAD" in os.environ
