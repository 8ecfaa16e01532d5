# SPDX-License-Identifier: Apache-2.0
"""Training states and parameters on disk. The only home of Orbax.

A checkpoint is complete once it is sealed: `checksums.json` lists every file with its size and checksum, and every
array with its shape and dtype. The checksums are needed because Orbax restores damaged files without an error.
"""

import contextlib
import math
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import orbax.checkpoint as ocp

from bert_jax.batch import PyTree
from bert_jax.checkpoints import remains
from bert_jax.checkpoints.arrays import (
    cannot_write_checkpoint,
    check_arrays,
    check_readable,
    describe,
    restore_tree,
    silence_background,
    state_bytes,
)
from bert_jax.checkpoints.sealed import (
    SEAL,
    checkpoint_steps,
    find_damage,
    newest_whole,
    read_seal,
    seal,
    state_place,
    write_seal,
)
from bert_jax.devices.job import this_job
from bert_jax.devices.work import under_way
from bert_jax.errors import InputError
from bert_jax.storage.answers import told_if_slow
from bert_jax.storage.places import Place, RemotePath, to_place
from bert_jax.storage.stores import check_writable, see_writes_of_others

_NONE = -1  # in place of a step

# JSON that is saved with a state; `training.loop.Progress` defines it
Notes: TypeAlias = Mapping[str, Any]


class Restored(NamedTuple):
    """A restored state."""

    state: PyTree  # None if no checkpoint was ever sealed
    notes: Notes  # as given to `save`
    passed_over: list[str]  # a line about each newer checkpoint that is damaged


class _Manager(ocp.CheckpointManager):
    """Orbax's manager, which would otherwise wait for ever in two cases.

    It would ask JAX at every save whether to stop, with the number of the step. JAX lets all processes stop at a number
    that none has asked with yet, and `devices.preemption` counts otherwise. And a process that cannot write would wait
    for the others, which wait for it.
    """

    def reached_preemption(self, step: int) -> bool:
        return False

    def _wait_for_checkpointers(self) -> None:
        with self._ending_all():
            super()._wait_for_checkpointers()

    def _finalize_checkpoint(self, step: int) -> Any:
        with self._ending_all():
            return super()._finalize_checkpoint(step)

    @contextlib.contextmanager
    def _ending_all(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if this_job().is_several:
                this_job().end(
                    InputError.STATUS,
                    str(cannot_write_checkpoint(to_place(str(self.directory)), error)),
                )
            raise


class Checkpoints:
    """The checkpoints of a run. They are written and sealed in the background, and old ones are deleted.

    The newest `keep_last` and the `keep_best` with the lowest metric are kept. A checkpoint is deleted only after a
    newer one is sealed. With several processes only the first lists, seals, moves and deletes checkpoints; the others
    follow it. `about` is JSON that is stored in every seal, such as the fingerprint of the tokenizer.

    The directory may be in an object store. `before_seal` is called on the first process, in the background, after a
    checkpoint is written and before it counts.
    """

    before_seal: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self,
        directory: Place,
        keep_last: int = 2,
        keep_best: int = 1,
        about: Mapping[str, object] | None = None,
    ) -> None:
        self.directory = directory.absolute()
        self.keep_last = keep_last
        self.keep_best = keep_best
        self._about = dict(about or {})
        self._sealing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._bytes = 0  # of the state that is saved
        # A run that lost its lease while it was suspended may still be writing a save: to names that are not ours.
        own = f"state-{this_job().broadcast_text('name of states', uuid.uuid4().hex[:8])}"
        self._name = own if isinstance(directory, RemotePath) else "state"
        self._manager = self._open()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the seal in progress, also when the run failed: until then the directory is in use."""
        if self._sealing is not None:
            with under_way("saving", self._bytes, waits_for=self._sealing):
                self._sealing.join()

    def _open(self) -> ocp.CheckpointManager:
        if isinstance(self.directory, RemotePath):
            see_writes_of_others()
        silence_background()
        if this_job().is_first and self.directory.is_dir():
            remains.sweep_checkpoints(self.directory, [self._path(step) for step in self.steps()])
        # Orbax lists the directory when it opens it: nobody does while the first process deletes
        # there.
        this_job().exchange("remains of checkpoints swept")
        options = ocp.CheckpointManagerOptions(
            step_format_fixed_length=8,
            cleanup_tmp_directories=True,
            # else a process that still sees a moved directory would skip a save
            single_host_load_and_broadcast=True,
        )
        return _Manager(str(self.directory), options=options)

    def save(
        self,
        step: int,
        state: PyTree,
        metric: float | None = None,
        notes: Notes | None = None,
        phase: int = 0,
    ) -> None:
        """Starts saving the state after `step` steps.

        `metric` is the held-out loss at that step, if known. Metrics of different phases are not compared: any of a
        later phase is better. `restore` returns the `notes`.
        """
        self.wait()

        def is_saved() -> bool:
            there = step in self.steps()
            if there and not (self._path(step) / SEAL).exists():
                remains.delete(self._path(step))  # of a run that lost its lease
                return False
            return there

        if this_job().first_does("see whether the step is saved", is_saved):
            return
        self._bytes = state_bytes(state)
        self._check_writable(self._bytes)
        # stores raise some of many types
        errors = Exception if isinstance(self.directory, RemotePath) else OSError
        try:
            with under_way("saving", self._bytes):
                self._manager.save(
                    step, args=ocp.args.Composite(**{self._name: ocp.args.PyTreeSave(state)})
                )
        except errors as error:
            raise cannot_write_checkpoint(self.directory, error) from error
        about = {
            "step": step,
            "metric": metric,
            "arrays": describe(state),
            "notes": notes or {},
            "state": self._name,
        }
        about |= self._about
        about |= {"phase": phase} if phase else {}
        self._sealing = threading.Thread(target=self._seal, args=(step, about), name="seal")
        self._sealing.start()

    def _check_writable(self, needed: int) -> None:
        """Raises: InputError, on every process, if one cannot write, has no room, or if the work directory was lost.

        On a disk each process makes a file: the others would wait in Orbax for one that cannot. In a bucket the first
        process makes an object, and asks whether its lease still holds.
        """
        directory = self.directory
        if isinstance(directory, RemotePath):

            def write() -> None:
                # TensorStore would try for minutes what this refuses at once
                directory.check_writable()
                check_writable(str(directory))

            this_job().first_does(f"write to {directory}", write)
            return

        def touch() -> None:
            # a run that is killed here leaves it to the next one
            probe = directory / f".probe-{this_job().index}"
            probe.write_bytes(b"")
            probe.unlink()

        free = shutil.disk_usage(directory).free
        # Orbax would fill the disk before it fails
        if this_job().any_process("disk is full", free < needed):
            room = f"{needed / 1e6:.0f} MB: {self.directory} has {free / 1e6:.0f} MB free"
            raise InputError(
                f"no space for a checkpoint of {room}; what was saved is untouched, free some"
            )
        try:
            this_job().all_do(f"write to {self.directory}", touch)
        except OSError as error:
            raise cannot_write_checkpoint(self.directory, error) from error

    def _seal(self, step: int, about: dict[str, Any]) -> None:
        with under_way("sealing", self._bytes):
            try:
                with told_if_slow(str(self.directory)):
                    self._manager.wait_until_finished()
                if this_job().is_first:
                    check_readable(state_place(self._path(step), about), about["arrays"])
                    self.before_seal()
                    seal(self._path(step), about, self._name + "/")
            except Exception as error:  # noqa: BLE001 - handed to the main thread by wait()
                self._failure = error
                return
            if this_job().is_first:
                # failed deletions are tried again after the next save
                with contextlib.suppress(Exception):
                    self._delete_surplus()

    def add_metric(self, step: int, metric: float, notes: Notes) -> None:
        """Adds a metric that was computed after the save to a sealed checkpoint, and replaces its notes."""
        self.wait()
        if this_job().is_first:
            self.before_seal()
            write_seal(
                self._path(step), read_seal(self._path(step)) | {"metric": metric, "notes": notes}
            )

    def check(self) -> None:
        """Raises: InputError, on the process that failed, if a save could not be written or sealed."""
        if self._failure is not None and this_job().ends_all:
            raise cannot_write_checkpoint(self.directory, self._failure) from self._failure

    def wait(self) -> None:
        """Waits until the last save is sealed. Raises: InputError, on every process, if it could not be written."""
        if self._sealing is None:
            return
        with under_way("saving", self._bytes, waits_for=self._sealing):
            self._sealing.join()
            self._sealing = None
            failure, self._failure = self._failure, None
            failed = this_job().any_process("save failed", failure is not None)
        if failed:
            if failure is not None:
                raise cannot_write_checkpoint(self.directory, failure) from failure
            raise InputError(
                f"another process could not write a checkpoint to {self.directory}; it says why"
            )

    def close(self) -> None:
        """Waits for the last save and closes the directory."""
        self.wait()
        if this_job().is_first:  # again: a run may have been killed between its last save and this
            with contextlib.suppress(Exception):  # failed deletions are tried again by the next run
                self._delete_surplus()
        self._manager.close()

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, whole or not, in ascending order."""
        return checkpoint_steps(self.directory)

    def restore(self, abstract_state: PyTree) -> Restored:
        """Returns the newest undamaged state; its `state` is None if no checkpoint was ever sealed.

        `abstract_state` gives shapes, dtypes and shardings; the mesh may differ from the one at the save. Newer
        checkpoints that are damaged or not sealed are moved to "damaged/", where the newest two are kept.

        Raises: InputError if there are sealed checkpoints and all are damaged, or if shapes differ.
        """
        self.wait()
        step, passed_over = this_job().first_does("find a whole checkpoint", self._find_whole)
        if step == _NONE:
            # all of them, or Orbax would not save those steps again
            self._set_aside(_NONE)
            return Restored(None, {}, passed_over)
        path = self._path(step)

        def read() -> list[Any]:  # others may see an older seal, or none yet
            sealed = read_seal(path)
            return [sealed["arrays"], sealed.get("notes", {})]

        arrays, notes = this_job().first_does("read a seal", read)
        check_arrays(path, arrays, describe(abstract_state))
        self._set_aside(step)
        return Restored(self._read(step, abstract_state), notes, passed_over)

    def _find_whole(self) -> tuple[int, list[str]]:
        """Returns the newest undamaged step, and a line about each newer one.

        It is `_NONE` if no checkpoint was ever sealed: the run then ended in its first save.

        Raises: InputError if there are sealed checkpoints and all are damaged.
        """
        try:
            path, passed_over = newest_whole(self.directory)
        except InputError as error:
            if self._sealed():
                raise InputError(f"{error}; remove {self.directory} to start over") from None
            return _NONE, [str(error)] * bool(self.steps())
        return int(path.name), passed_over

    def best_step(self) -> int:
        """Returns the step of the sealed checkpoint with the lowest metric; with equal metrics, the earliest.

        Raises: InputError if no checkpoint has a metric that can be read.
        """
        self.wait()

        def find() -> int:
            return min(
                ((rank, step) for step, rank in self._metrics().items()), default=(None, _NONE)
            )[1]

        best = this_job().first_does("find the best checkpoint", find)
        if best == _NONE:
            raise InputError(f"no checkpoint of {self.directory} has a metric that can be read")
        return best

    def restore_at(self, step: int, abstract_state: PyTree) -> PyTree:
        """Returns the state of a step that has a checkpoint. Raises: InputError, on every process, if it is damaged."""
        self.wait()
        problem = this_job().first_does("check a checkpoint", lambda: find_damage(self._path(step)))
        if problem is not None:
            raise InputError(
                f"checkpoint {self._path(step)} is damaged: {problem}; train again in another workdir"
            )
        return self._read(step, abstract_state)

    def _read(self, step: int, abstract_state: PyTree) -> PyTree:
        with under_way("restoring", state_bytes(abstract_state)):
            path = self._path(step)
            # seen late
            name = this_job().first_does(
                "find a state", lambda: state_place(path, read_seal(path)).name
            )
            return restore_tree(path / name, abstract_state)

    def _set_aside(self, newest_whole: int) -> None:
        """Moves every checkpoint that is newer than the newest undamaged one to "damaged/"."""

        def move() -> bool:
            damaged = [later for later in self.steps() if later > newest_whole]
            for later in damaged:
                remains.set_aside(self._path(later))
            return bool(damaged)

        # Orbax would not save those steps again
        if this_job().first_does("set damaged checkpoints aside", move):
            self._manager.close()
            self._manager = self._open()

    def _sealed(self) -> list[int]:
        """Returns the steps whose checkpoint has a seal, in ascending order."""
        return [step for step in self.steps() if (self._path(step) / SEAL).exists()]

    def _metrics(self) -> dict[int, tuple[int, float]]:
        """Returns (-phase, metric) of every sealed checkpoint that has a metric and whose seal can be read."""
        ranks = {}
        for step in self._sealed():
            with contextlib.suppress(InputError, AttributeError, KeyError, TypeError, ValueError):
                about = read_seal(self._path(step))
                phase = about.get("phase", 0)
                metric = about["metric"]
                if isinstance(metric, (int, float)) and math.isfinite(metric):
                    ranks[step] = (-int(phase), metric)
        return ranks

    def _delete_surplus(self) -> None:
        """Deletes the sealed checkpoints that are neither among the newest nor among the best."""
        sealed = self._sealed()
        best = sorted((rank, step) for step, rank in self._metrics().items())[: self.keep_best]
        keep = set(sealed[-self.keep_last :]) | {step for _, step in best}
        for step in sealed:
            if step not in keep:
                remains.delete(self._path(step))

    def _path(self, step: int) -> Place:
        return self.directory / f"{step:08d}"
