# SPDX-License-Identifier: Apache-2.0
"""The job: the processes that train together, and what they agree on.

`this_job()` returns it. Every agreement has a topic, such as "free disk", and agreements on a topic are numbered. They
go through the key-value store of JAX's coordination service, not through devices, whose collectives wait for half a
minute on CPUs and for ever elsewhere. A process that waits for one that waits for it on another topic gets an
error with both topics.
"""

import contextlib
import hashlib
import itertools
import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax

from bert_jax.devices.members import Members, Store, leave
from bert_jax.errors import InputError, one_line
from bert_jax.settings.rules import changed_keys, value_at

AGREE_SECONDS = 1800.0  # how long processes wait for one that has nothing to do
_LOST_SECONDS = 60.0  # without a sign of life, in programs that have joined by themselves


class Job:
    """A process by itself, which agrees with itself: the null job. `Several` is a job of several processes."""

    index = 0
    count = 1
    ends_all = True  # whether an error in one process ends the others

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which writes all files that are written once."""
        return self.index == 0

    @property
    def is_several(self) -> bool:
        """Whether there are other processes."""
        return self.count > 1

    def exchange(self, topic: str, value: str = "") -> list[str]:
        """Returns the values of all processes, by process number, once all have given theirs.

        Raises: InputError if another process fails meanwhile, or agrees on other topics than this one.
        """
        self._refuse_several()
        return [value]

    def broadcast_text(self, topic: str, text: str) -> str:
        """Returns the first process's text, on every process. The first does not wait for the others."""
        self._refuse_several()
        return text

    def name(self, number: int) -> str:
        """Returns "process 1 (its host)"."""
        return f"process {number}"

    def should_stop(self) -> bool:
        """Returns whether a process was asked to end; with several, on all of them at the same call."""
        return False

    def leave_hanging(self, status: int, line: str) -> None:
        """Ends this process with an exit status, and then the other processes of the job, which print the line."""
        leave(status)

    def end(self, status: int, line: str) -> None:
        """Ends this process with an error line and an exit status, from any thread; the other processes end too."""
        leave(status, line)

    def broadcast_int(self, topic: str, value: int) -> int:
        """Returns the first process's value, on every process."""
        return int(self.broadcast_text(topic, str(int(value))))

    def any_process(self, topic: str, value: bool) -> bool:
        """Returns whether `value` is true on any process."""
        return "yes" in self.exchange(topic, "yes" if value else "no")

    def first_does(self, what: str, action: Callable[[], Any]) -> Any:
        """Runs `action` on the first process while the others wait; returns its JSON value on every process.

        `what` completes "the first process could not ..."; it is the topic. Raises: InputError, on every process, if
        the action failed.
        """
        failure = None
        value = None
        if self.is_first:
            try:
                value = action()
            except (InputError, OSError) as error:
                failure = error
        # A failure is broadcast as well, or the others would wait for a value that does not come.
        failed, value = json.loads(
            self.broadcast_text(what, json.dumps([failure is not None, value]))
        )
        if failed:
            raise failure or InputError(
                f"the first process could not {what}; its own message says why"
            )
        return value

    def all_do(self, what: str, action: Callable[[], object]) -> None:
        """Runs `action` on every process, and waits for all.

        `what` completes "process 1 could not ..."; it is the topic. Raises: the error, or with several processes
        InputError on every one, with the first process that failed and its reason.
        """
        failure: InputError | OSError | None = None
        try:
            action()
        except (InputError, OSError) as error:
            failure = error
        reason = "" if failure is None else getattr(failure, "strerror", None) or one_line(failure)
        problems = self.exchange(what, reason)
        if failure is not None and not self.is_several:
            raise failure
        for number, problem in enumerate(problems):
            if problem:
                raise InputError(
                    f"{self.name(number)} could not {what}: {problem}; permit it to all"
                ) from failure

    def check_same(self, what: Mapping[str, object]) -> None:
        """Checks that all processes have the same code and the same values. `what` maps names to values, also nested.

        Raises: InputError, on every process, with the process that differs, the name and both values.
        """
        what = {"code of bert_jax": _code_digest(), "jax": jax.__version__, **what}
        text = json.dumps(what, sort_keys=True, default=str)
        # Compare digests first: the values of hundreds of processes would be too much for the first process to send.
        if (
            len(
                set(
                    self.exchange(
                        "digest of what is the same", hashlib.sha256(text.encode()).hexdigest()
                    )
                )
            )
            == 1
        ):
            return
        mappings = [json.loads(reply) for reply in self.exchange("what is the same", text)]
        for number, other in enumerate(mappings):
            names = changed_keys(mappings[0], other)
            if names:
                theirs, ours = (value_at(mapping, names[0]) for mapping in (other, mappings[0]))
                both = f"{self.name(number)} has {names[0]} {theirs!r}, and {self.name(0)} has {ours!r}"
                raise InputError(f"{both}; run the same command with the same code and data on all")

    def check_shared(self, directory: Any) -> None:
        """Checks that all processes see the first one's directory and can write there.

        Raises: InputError, on every process, with the first process that cannot.
        """
        if not self.is_several:
            return
        name = f".seen-{self.broadcast_text('name of a sign', uuid.uuid4().hex)}"
        own, first = (directory / f"{name}_{number}" for number in (self.index, 0))
        try:
            self.all_do(f"write into {directory}", own.touch)
            deadline = time.monotonic() + 30  # some file systems show a new file late
            while not (seen := first.exists()) and time.monotonic() < deadline:
                time.sleep(0.1)
            answers = self.exchange("sign is seen", "yes" if seen else "no")
        finally:
            with contextlib.suppress(InputError, OSError):
                own.unlink(missing_ok=True)
        if "no" in answers:
            blind = f"{self.name(answers.index('no'))} does not see what {self.name(0)} writes into {directory}"
            raise InputError(f"{blind}; give a directory that all processes share")

    def _refuse_several(self) -> None:
        if jax.process_count() > 1:
            raise InputError(
                f"{jax.process_count()} processes need jax.distributed.initialize() before JAX is used"
            )


class Several(Job):
    """A job of several processes, as seen by this one."""

    def __init__(
        self,
        store: Store,
        index: int,
        count: int,
        lost_seconds: float = 0,
        agree_seconds: float = AGREE_SECONDS,
    ) -> None:
        """`store` is the client of JAX's coordination service; without `lost_seconds` nobody watches the others.

        After `agree_seconds` nobody waits any longer for a process where no work is under way.
        """
        self.index = index
        self.count = count
        self.ends_all = lost_seconds > 0
        self.agree_seconds = agree_seconds
        self.members = Members(store, index, count, lost_seconds)
        self._times: Counter[str] = Counter()  # agreements of this process on each topic
        self._asked = itertools.count()

    def exchange(self, topic: str, value: str = "") -> list[str]:
        values = self._hear(topic, value, range(self.count))
        return [values[number] for number in range(self.count)]

    def broadcast_text(self, topic: str, text: str) -> str:
        return self._hear(topic, text, range(1))[0]

    def name(self, number: int) -> str:
        return self.members.name(number)

    def should_stop(self) -> bool:
        from jax.experimental import multihost_utils

        # JAX lets all processes stop at a number that none has reached yet. This number counts calls, not steps: steps
        # restart in each run of a grid, so a signal in the last step of a run would be missed or noticed too late.
        return multihost_utils.reached_preemption_sync_point(next(self._asked))

    def leave_hanging(self, status: int, line: str) -> None:
        self.members.tell_hang(line)
        leave(status)

    def end(self, status: int, line: str) -> None:
        if self.ends_all:
            self.members.tell_failure(line, status)
            with contextlib.suppress(Exception):  # of JAX's client, without a type
                self.members.outlast()
        leave(status, line)

    def _hear(self, topic: str, value: str, speakers: range) -> dict[int, str]:
        """Returns {process: value} of the speakers, which may include this process."""
        self._times[topic] += 1
        key = f"topic/{quote(topic, safe='')}/{self._times[topic]}"
        # all of them read all values from the first
        pause = 0.002
        longest = 0.05 * max(1.0, self.count / 16)
        if self.index in speakers:
            self.members.set(f"{key}/{self.index}", value)
        if len(values := self.members.get(key)) < len(speakers):
            # so that a process which waits for this one sees that both wait for each other
            self.members.set(f"waits/{self.index}", f"{self._times[topic]} {topic}")
        worked = looked = time.monotonic()  # when the others last worked
        while len(values := self.members.get(key)) < len(speakers):
            failure = self.members.failure_of_another()
            # else it gave its value before it failed
            if failure and len(self.members.get(key)) < len(speakers):
                raise failure
            if time.monotonic() - looked > self.members.pause:
                looked = time.monotonic()
                missing = [number for number in speakers if number not in values]
                self._check_order(topic, missing)
                worked = self._check_alive(topic, missing, worked)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return values

    def _check_order(self, topic: str, missing: list[int]) -> None:
        """Raises: InputError if a process that this one waits for is itself waiting for this one."""
        for number, told in self.members.get("waits").items():
            times, _, other = told.partition(" ")
            if number in missing and int(times) > self._times[other]:
                waits = (
                    f"{self.name(self.index)} waits for {self.name(number)} to agree on {topic!r}"
                )
                raise InputError(
                    f"{waits}, and that one for this one on {other!r}; run the same code on all"
                )

    def _check_alive(self, topic: str, missing: list[int], worked: float) -> float:
        """Returns when each missing process last had work under way, in which it may take as long as its limit.

        Raises: LostProcessError if one is dead; InputError if one has had nothing to do for `agree_seconds`.
        """
        doing = self.members.doing()
        idle = [number for number in missing if not doing.get(number)]
        silences = {} if self.ends_all else self.members.silences()  # the watch does that elsewhere
        for number in missing:
            if number in doing and silences.get(number, 0) > _LOST_SECONDS:
                raise self.members.lost(number, silences[number])
        if idle and time.monotonic() - worked > self.agree_seconds:
            waited = f"to agree on {topic!r} within {self.agree_seconds:g} s, and no work is under way there"
            raise InputError(f"{self.name(idle[0])} has not come {waited}; see its own messages")
        return worked if idle else time.monotonic()


_ALONE = Job()
_job: Several | None = None
_making = threading.Lock()


def this_job() -> Job:
    """Returns the job that this process belongs to.

    A program that has called jax.distributed.initialize itself agrees with the others too. How it ends is its own
    business, so the others are not watched.
    """
    return _job or open_job(0) or _ALONE


def open_job(lost_seconds: float, agree_seconds: float = AGREE_SECONDS) -> Several | None:
    """Returns the job of the processes that JAX has joined; None if it has not joined any.

    With `lost_seconds` the processes watch each other, and end if one gives no sign of life for so long.
    """
    global _job
    try:
        # has no public name: Orbax takes it from here too
        from jax._src.distributed import global_state as state
    except ImportError:
        return None
    # Threads of a run may ask at once, and each job watches the others with threads of its own.
    with _making:
        if _job is None and state.client is not None and state.num_processes > 1:
            _job = Several(
                state.client, state.process_id, state.num_processes, lost_seconds, agree_seconds
            )
    return _job


def _code_digest() -> str:
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
