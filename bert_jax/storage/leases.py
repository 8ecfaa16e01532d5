# SPDX-License-Identifier: Apache-2.0
"""Leases: locks in object stores, which have none.

A lease is an object that is made only if it is absent. Its holder rewrites it every `RENEW_SECONDS`, each time only if
it is still the version that the holder wrote. So a holder learns when another has taken the lease over. Another takes
it over once it has not been renewed for `EXPIRE_SECONDS`, or at once if its process was on this machine and is gone.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from bert_jax.errors import InputError, StoppedError
from bert_jax.storage import stores

# JSON of a lease: name, host, pid, machine, began, expire_seconds, doing
Holder: TypeAlias = dict[str, Any]

LEASE = ".lease"  # name of the object inside a directory
RENEW_SECONDS = 10.0
EXPIRE_SECONDS = 60.0
# seconds that a lease may ask to be waited for; one that asks for more is damaged
_LONGEST = 3600.0

_held: dict[str, "Lease"] = {}  # by the prefix that the lease protects


class Lease:
    """A lease that this process holds, renewed by a thread until `release`. `take` makes it."""

    def __init__(
        self, url: str, on_loss: Callable[[str], object], doing: Callable[[], str]
    ) -> None:
        self.url = url
        self._on_loss = on_loss
        self._doing = doing
        self._name = uuid.uuid4().hex
        self._renewals = 0
        self._token = ""
        self._lost = ""
        self._changing = threading.Lock()
        self._renewed_at = _now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, name="lease", daemon=True)

    def take(self) -> str:
        """Returns "" once this process holds the lease, or a description of the live run that does.

        Waits while it is open whether the holder is alive: until it renews the lease, or the lease expires.
        """
        first = ""
        began = _now()
        wait = 0.0
        while True:
            current = stores.read_version(self.url)
            if current is None:
                self._token = stores.write_if(self.url, self._content(), "")
                if self._token:
                    break
                continue
            other = _read(current.content)
            if other["name"] == self._name:  # the answer to our write was lost
                self._token = current.token
                break
            if first and current.token != first:
                return _describe(other, current.age)
            if not first:
                first = current.token
                began = _now()
                wait = _patience(other, current.age)
                if wait > RENEW_SECONDS / 2:
                    held = f"{self.url} is held by {_describe(other, current.age)}"
                    print(
                        f"{held}; waiting {wait:.0f} s at most to see whether it is renewed",
                        file=sys.stderr,
                        flush=True,
                    )
            if _now() - began >= wait:
                self._token = stores.write_if(self.url, self._content(), current.token)
                if self._token:
                    break
            time.sleep(min(1.0, max(0.05, wait / 10)))
        self._renewed_at = _now()
        self._thread.start()
        return ""

    def check(self) -> None:
        """Raises: StoppedError if this process no longer holds the lease. Renews it first if that is overdue."""
        # suspended, or no network
        if not self._lost and _now() - self._renewed_at > EXPIRE_SECONDS / 2:
            self._renew()
        if self._lost:
            raise StoppedError(self._lost)

    def release(self) -> None:
        """Ends the renewal and deletes the lease."""
        self._ended.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(RENEW_SECONDS)
        with contextlib.suppress(InputError):  # it expires
            current = None if self._lost else stores.read_version(self.url)
            if current is not None and current.token == self._token:
                stores.remove(self.url)

    def _keep_renewing(self) -> None:
        """Renews the lease until it is released or lost, which it then tells."""
        while not self._ended.wait(RENEW_SECONDS):
            # of the network: `check` decides, before anything is written
            with contextlib.suppress(InputError):
                self._renew()
            if self._lost and not self._ended.is_set():
                self._on_loss(self._lost)
                return

    def _renew(self) -> None:
        """Writes the lease again; if another has it, `_lost` says who, and it is written no more."""
        with self._changing:
            token = stores.write_if(self.url, self._content(), self._token)
            who = ""
            if not token:
                current = stores.read_version(self.url)
                who = "nobody, as it was deleted"
                if current is not None:
                    other = _read(current.content)
                    who = _describe(other, current.age)
                    if other["name"] == self._name:  # the answer to an earlier write was lost
                        token = current.token
            if token:
                self._token = token
                self._renewed_at = _now()
            else:
                self._lost = (
                    f"the lease {self.url} of this run is now held by {who}; this run stops and writes no more, so "
                    "that one run alone uses the place"
                )

    def _content(self) -> bytes:
        """Returns the next content of the lease: each has another number, and so another version."""
        self._renewals += 1
        about = {"name": self._name, "renewals": self._renewals, "expire_seconds": EXPIRE_SECONDS}
        about |= {"doing": self._doing()} | _this_process()
        return json.dumps(about, sort_keys=True).encode()


@contextlib.contextmanager
def lease(
    url: str,
    directory: str,
    on_loss: Callable[[str], object] = lambda line: None,
    doing: Callable[[], str] = lambda: "",
) -> Iterator[str]:
    """Yields "" while this process holds the lease at `url`, or a description of the run that holds it.

    Until the block ends, `check_held` guards writes below `directory`. `on_loss` is called, from another thread, with a
    message if another run has taken the lease. `doing` describes the work under way to others who find the lease held.

    Raises: InputError if the store cannot be reached or written, or has no conditional writes.
    """
    stores.check_no_pattern(directory)
    held = Lease(url, on_loss, doing)
    holder = held.take()
    if holder:
        yield holder
        return
    _held[directory.rstrip("/") + "/"] = held
    try:
        yield ""
    finally:
        _held.pop(directory.rstrip("/") + "/", None)
        held.release()


def check_held(url: str) -> None:
    """Raises: StoppedError if a lease that protects this place was lost to another run."""
    for prefix, held in list(_held.items()):
        if (url + "/").startswith(prefix) and url != held.url:
            held.check()


def _now() -> float:
    """Returns seconds of a clock that goes on while the machine is suspended, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _this_process() -> Holder:
    """Returns what another process needs to see whether this one is alive."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine": _machine(),
        "began": _began(os.getpid()),
    }


def _machine() -> str:
    """Returns a name of this boot of this machine, and of the container; "" if unknown."""
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return f"{stream.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _began(pid: int) -> str:
    """Returns when a process of this machine began, in clock ticks since the boot; "" if there is no such process."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
            return "" if fields[0] in "ZX" else fields[19]
    return ""


def _read(content: bytes) -> Holder:
    """Returns the JSON of a lease; one without a name, which nobody has, if it is damaged."""
    with contextlib.suppress(ValueError, RecursionError):
        about = json.loads(content)
        if isinstance(about, dict):
            return {"name": ""} | about
    return {"name": ""}


def _patience(other: Holder, age: float) -> float:
    """Returns the seconds to watch a lease before it counts as abandoned."""
    if (
        other.get("machine")
        and other["machine"] == _machine()
        and other.get("began") != _began(other.get("pid", 0))
    ):
        return 0.0  # a process of this machine that has ended
    life = other.get("expire_seconds")
    if not isinstance(life, (int, float)) or not 0 < life <= _LONGEST:
        life = EXPIRE_SECONDS
    return max(life - age, 1.5 * RENEW_SECONDS)  # the clocks of two machines may differ by any time


def _describe(other: Holder, age: float) -> str:
    """Returns who holds a lease, how long ago it was renewed, and what that run is doing."""
    doing = f", {str(other['doing'])[:200]}" if other.get("doing") else ""
    return f"process {other.get('pid', '?')} on {other.get('host', 'an unknown host')}, renewed {age:.0f} s ago{doing}"
