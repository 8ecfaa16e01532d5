# SPDX-License-Identifier: Apache-2.0
"""Mutual monitoring of the processes of a job: if one fails or dies, all end, and each reports which one it was.

Without this, a process that waits in a collective for a dead one would wait for ever. Each process writes a growing
counter (its heartbeat) into the key-value store of JAX's coordination service, and a thread reads those of the others.
The store also carries error messages, and values that processes exchange before any device is used.
"""

import atexit
import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from typing import NoReturn, Protocol

from bert_jax.devices.work import describe
from bert_jax.errors import InputError, LostProcessError

_PREFIX = "bert_jax"
_BEAT_SECONDS = 1.0  # longer for many processes, since all of them read from the first
# Time for the main thread to end by itself after another process has failed. It cannot while it waits in a collective.
_GRACE_SECONDS = 5.0
# Time for the main thread to end after this process itself has failed, to finish what it is writing.
_LEAVE_SECONDS = 20.0
_HANG_PAUSES = 5  # between two looks: how long a process that hangs waits for the others to hear it
HANG_STATUS = 76  # exit status of a process that ends because nothing was finished for too long


class Store(Protocol):
    """The key-value store of JAX's coordination service: the methods of its client that are used here."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


class Members:
    """The other processes of the job, as seen by this one. Each process makes one object when it joins."""

    def __init__(self, client: Store, index: int, count: int, lost_seconds: float) -> None:
        """Starts the threads; `client` is that of JAX's coordination service.

        If `lost_seconds` is 0 this process reports what it is doing, and watches nobody.
        """
        self.index = index
        self.count = count
        self.lost_seconds = lost_seconds
        self._client = client
        self.pause = _BEAT_SECONDS * max(1.0, count / 64)  # seconds between two looks at the others
        others = [number for number in range(count) if number != index]
        # {process: (when, beat)}
        self._beats: dict[int, tuple[float, str]] = dict.fromkeys(others, (0.0, ""))
        # when this process failed itself, and its exit status then
        self._failed_at = 0.0
        self._status = 1
        self._ended = threading.Event()
        self.set(f"name/{index}", socket.gethostname())
        self._answered = time.monotonic()  # when the store did
        self._threads = [
            threading.Thread(target=target, name="members", daemon=True)
            for target in ((self._watch, self._watch_store) if lost_seconds else (self._say,))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # before JAX closes its client

    def tell_failure(self, line: str, status: int) -> None:
        """Tells the others that this process ends, and why, unless it ends because another has failed."""
        self._failed_at = time.monotonic()
        self._status = status
        # of JAX's client, without a type: the first process is gone
        with contextlib.suppress(Exception):
            if not self.failure_of_another():
                self.set(f"failed/{self.index}", f"{status} {line[:1000] or 'an error'}")

    def tell_hang(self, line: str) -> None:
        """Tells the others that this process ends because it hangs, and where; waits until they have read it."""
        # of JAX's client, without a type: the first process is gone
        with contextlib.suppress(Exception):
            self.set(f"hang/{self.index}", line)
            time.sleep(_HANG_PAUSES * self.pause)

    def outlast(self) -> None:
        """Waits until the other processes have ended, if this is the first: they read the cause from its store.

        JAX aborts processes that outlive the store. Waits no longer than such a process takes to end by itself, on a
        busy machine too.
        """
        if self.index:
            return
        last = {self.index: ""}
        changed = time.monotonic()
        deadline = changed + 2 * _GRACE_SECONDS + 5 * self.pause
        while time.monotonic() < min(deadline, changed + 5 * self.pause):
            beats = self.get("beat") | {self.index: ""}
            self._answered = time.monotonic()  # the watch may be what waits here
            if beats != last:
                last = beats
                changed = time.monotonic()
            time.sleep(self.pause / 4)

    def find_cause(self) -> InputError | None:
        """Returns the failure of another process that caused an error in a collective; None if all are alive.

        It is a LostProcessError if a process gives no sign of life, or an InputError with the message of one that
        failed. Waits some seconds, since the last heartbeat of a process that has just died is still recent.
        """
        deadline = time.monotonic() + 10 * self.pause
        while time.monotonic() < deadline:
            cause = None
            try:
                for number, silence in self.silences().items():
                    if silence > 6 * self.pause:
                        cause = cause or self.lost(number, silence)
                cause = self.failure_of_another() or cause  # which says more
            except Exception as error:  # noqa: BLE001 - of JAX's client, whose errors have no type of their own
                cause = LostProcessError(_unreachable(error))
            if cause:
                # From now on the main thread ends this process, and the watch only if that takes long.
                self._failed_at = time.monotonic()
                self._status = cause.STATUS
                return cause
            time.sleep(0.1)
        return None

    def name(self, number: int) -> str:
        """Returns "process 1 (its host)"."""
        return f"process {number} ({self.get('name').get(number, 'unknown host')})"

    def close(self) -> None:
        """Ends the monitoring. Call it when all processes have finished."""
        self._ended.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(f"{_PREFIX}/{key}", value, allow_overwrite=True)

    def get(self, topic: str) -> dict[int, str]:
        """Returns {process: value} of a topic."""
        pairs = self._client.key_value_dir_get(f"{_PREFIX}/{topic}/")
        return {int(key.rpartition("/")[2]): value for key, value in pairs}

    def failure_of_another(self) -> InputError | None:
        """Returns the error of another process that has failed, with the exit status of that process."""
        failed = {
            number: told for number, told in self.get("failed").items() if number != self.index
        }
        if not failed:
            return None
        number = min(failed)
        # by number, and not by time: no two clocks agree, and all processes shall name the same one
        status, _, line = failed[number].partition(" ")
        if int(status) == LostProcessError.STATUS:
            return LostProcessError(line)  # it names the process that is lost
        return InputError(f"{self.name(number)} ended: {line}")

    def doing(self) -> dict[int, str]:
        """Returns what each process was doing at its last heartbeat, "" if nothing, without those that had none."""
        return {number: beat.partition(" ")[2] for number, beat in self.get("beat").items()}

    def silences(self) -> dict[int, float]:
        """Returns the seconds since the last new heartbeat of each other process."""
        now = time.monotonic()
        beats = self.get("beat")
        for number, (_, before) in self._beats.items():
            if beats.get(number, "") != before or not self._beats[number][0]:
                self._beats[number] = (now, beats.get(number, ""))
        return {number: now - when for number, (when, _) in self._beats.items()}

    def lost(self, number: int, seconds: float) -> LostProcessError:
        """Returns the error for a process that gives no sign of life."""
        doing = self._beats[number][1].partition(" ")[2]
        silent = f"{self.name(number)} has not been heard of for {seconds:.0f} s{doing and f', last in {doing}'}"
        return LostProcessError(
            f"{silent}; the same command on all resumes from the last checkpoint"
        )

    def _say(self) -> None:
        """Reports what this process is doing, with a number that grows."""
        beat = 0
        while not self._ended.wait(self.pause):
            beat += 1
            # of JAX's client, without a type: the first process is gone
            with contextlib.suppress(Exception):
                self.set(f"beat/{self.index}", f"{beat} {describe()}")

    def _watch(self) -> None:
        failed_since = 0.0
        beat = 0
        others = tuple(self._beats)
        looked = time.monotonic()
        while not self._ended.wait(self.pause):
            beat += 1
            now = time.monotonic()
            # this process itself was suspended, so missed heartbeats prove nothing
            if now - looked > 5 * self.pause:
                self._beats = dict.fromkeys(others, (0.0, ""))
            looked = now
            if self._failed_at and now - self._failed_at > _LEAVE_SECONDS:
                leave(self._status)
            try:
                self.set(f"beat/{self.index}", f"{beat} {describe()}")
                failure = self.failure_of_another()
                silences = self.silences()
                told = {
                    number: line
                    for number, line in self.get("hang").items()
                    if number != self.index
                }
                hanging = [f"{self.name(number)} hangs: {line}" for number, line in told.items()]
            except Exception as error:  # noqa: BLE001 - of JAX's client, whose errors have no type of their own
                if self._failed_at or self._ended.is_set():
                    continue
                leave(LostProcessError.STATUS, _unreachable(error))
            self._answered = time.monotonic()
            if hanging:
                say_stacks(f"{hanging[0]}. What the threads here were doing:")
                # JAX aborts those that outlive the store, such as the one that waits in tell_hang
                if self.index == 0:
                    time.sleep(_HANG_PAUSES * 1.5 * self.pause)
                leave(HANG_STATUS)
            if failure:
                failed_since = failed_since or now
                if now - failed_since > _GRACE_SECONDS and not self._failed_at:
                    self._leave_last(failure.STATUS, str(failure))
            # A process that has failed falls silent too. Its own words say more.
            for number, silence in silences.items() if not failure and not self._failed_at else ():
                if silence > self.lost_seconds:
                    line = str(self.lost(number, silence))
                    self.tell_failure(line, LostProcessError.STATUS)
                    self._leave_last(LostProcessError.STATUS, line)

    def _leave_last(self, status: int, line: str) -> None:
        """Ends this process; if it is the first, after the others."""
        with contextlib.suppress(Exception):  # of JAX's client, without a type
            self.outlast()
        leave(status, line)

    def leave_lost(
        self, why: str = "is gone, or this process was suspended until the others had ended"
    ) -> None:
        """Ends this process because the first one is gone, or does not answer."""
        status = self._status if self._failed_at else LostProcessError.STATUS
        leave(status, f"process 0 {why}; the same command on all resumes from the last checkpoint")

    def _watch_store(self) -> None:
        """Checks that the first process answers at all. A separate thread, since a read from one that hangs blocks."""
        looked = time.monotonic()
        while not self._ended.wait(self.pause):
            if time.monotonic() - looked > 5 * self.pause:  # this process itself was suspended
                self._answered = time.monotonic()
            looked = time.monotonic()
            silence = time.monotonic() - self._answered
            if silence > self.lost_seconds:
                self.leave_lost(
                    f"has not answered for {silence:.0f} s: it hangs, or cannot be reached"
                )


def _unreachable(error: Exception) -> str:
    reason = " ".join(str(error).split())[:200]
    return f"process 0 cannot be reached: {reason}; the same command on all resumes from the last checkpoint"


def say_stacks(line: str) -> None:
    """Prints a line and the stacks of all threads on stderr, if stderr is open."""
    with contextlib.suppress(AttributeError, OSError, ValueError, RuntimeError):
        print(f"error: {line}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)


_leaving = threading.RLock()  # never released; a signal may interrupt a thread that has it


def leave(status: int, line: str = "") -> NoReturn:
    """Ends this process at once, from any thread, without waiting for the other threads. The first one has its line."""
    _leaving.acquire(timeout=_GRACE_SECONDS)  # the first one may hang in a write that nobody reads
    # A stream may be closed, have no reader, or be in the middle of a write that a signal has interrupted.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if line:
            print(f"error: {line}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(status)
