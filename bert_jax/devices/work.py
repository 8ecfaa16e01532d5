# SPDX-License-Identifier: Apache-2.0
"""What this process is doing: a registry of the work under way, each with its thread, its last beat and its limit.

Whoever works opens an entry with `under_way` and calls `beat` when something is finished: a step, a batch, a file. The
watchdog ends a run whose work is overdue, other processes wait for one that works, and phases of the goodput clock are
entries. Entries of a thread are nested: the innermost is what the thread does.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

# The limit of a kind of work: a multiple of the limit of a step, and at least some seconds.
_LIMITS = {"steps": (1, 0.0), "evaluation": (1, 0.0), "compilation": (5, 3600.0)}
_OF_DISKS = (5, 120.0)  # and of networks: saving, sealing, restoring, ...
_SLOWEST = 1e6  # bytes per second of a disk or a network

_stacks: dict[int, list["Entry"]] = {}  # the entries of each thread, by its ident
# called with the seconds of each compilation, in its thread
on_compiled: list[Callable[[float], object]] = []


@dataclass(eq=False)
class Entry:
    """Some work of a thread."""

    name: str
    num_bytes: float = 0.0  # read or written by it
    waits_for: threading.Thread | None = None  # whose entry counts in place of this one
    by_jax: bool = False  # begun by an event of JAX, which tells of no end if the compiler fails
    thread: threading.Thread = field(default_factory=threading.current_thread)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.beaten = self.began

    def limit(self, seconds: float) -> float:
        """Returns the seconds that may pass without a beat, where `seconds` may for a step."""
        times, least = _LIMITS.get(self.name, _OF_DISKS)
        return max(times * seconds, least, self.num_bytes / _SLOWEST)

    def __str__(self) -> str:
        return f"{self.name} in thread {self.thread.name} for {time.monotonic() - self.began:.0f} s"


@contextlib.contextmanager
def under_way(
    name: str, num_bytes: float = 0.0, waits_for: threading.Thread | None = None
) -> Iterator[None]:
    """Registers the block as work of this thread. Compilations inside it are registered automatically.

    `num_bytes` is how much is read or written; `waits_for` is another thread that does the work.
    """
    entry = Entry(name, num_bytes, waits_for)
    ident = threading.get_ident()
    stack = _stacks.setdefault(ident, [])
    stack.append(entry)
    try:
        yield
    finally:
        del stack[stack.index(entry) :]  # also a compilation that failed
        if stack:
            beat()
        else:
            del _stacks[ident]


def beat() -> None:
    """Records that this thread has finished something; in a thread without an entry, that all have."""
    stack = _stacks.get(threading.get_ident())
    if stack and stack[-1].by_jax:
        stack.pop()
    # A thread without an entry is one of JAX's, whose events tell of no work in particular.
    for entry in stack[-1:] if stack else _innermost():
        entry.beaten = time.monotonic()


def begin_compilation() -> None:
    """Registers a compilation in this thread, until its next beat or the end of the entry around it."""
    beat()
    if own := _stacks.get(threading.get_ident()):
        own.append(Entry("compilation", by_jax=True))


def end_compilation(seconds: float) -> None:
    """Records that a compilation of this thread has ended."""
    beat()
    for hear in list(on_compiled):
        hear(seconds)


def _innermost() -> list[Entry]:
    return [entry for stack in list(_stacks.values()) for entry in stack[-1:]]


def current() -> list[Entry]:
    """Returns what each thread is doing, the oldest first, without threads that wait for another of these."""
    entries = _innermost()
    working = {entry.thread for entry in entries}
    for entry in [entry for entry in entries if entry.waits_for in working]:
        entry.beaten = time.monotonic()
        entries.remove(entry)
    return sorted(entries, key=lambda entry: entry.began)


def describe() -> str:
    """Returns what this process is doing, such as "saving in thread MainThread for 12 s"; "" if it is nothing."""
    return ", ".join(map(str, current()))


def find_overdue(seconds: float) -> str:
    """Returns what has gone on for longer than its limit without a beat; "" if nothing has."""
    now = time.monotonic()
    for entry in current():
        silence = now - entry.beaten
        limit = entry.limit(seconds)
        if silence > limit:
            return f"{entry}, of which {silence:.0f} s without a beat; its limit is {limit:g} s"
    return ""
