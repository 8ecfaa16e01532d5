# SPDX-License-Identifier: Apache-2.0
"""Opening a run: checks, lock, restore, reporter and signals, for pre-training and fine-tuning alike."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from bert_jax.checkpoints.arrays import state_bytes
from bert_jax.checkpoints.model_card import ABOUT
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.checkpoints.states import Checkpoints, Restored, checkpoint_steps
from bert_jax.devices import work
from bert_jax.devices.job import this_job
from bert_jax.devices.preemption import Preemption
from bert_jax.devices.watchdog import Watchdog
from bert_jax.errors import InputError, without_secrets
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.rules import LARGEST, to_dict
from bert_jax.storage.places import Place
from bert_jax.storage.writing import write_json
from bert_jax.training import goodput
from bert_jax.training.about import record_of_run
from bert_jax.training.boards import open_boards
from bert_jax.training.report import Reporter
from bert_jax.training.stages import Training
from bert_jax.training.step import TrainState
from bert_jax.training.workdir import FORMAT, began_before, check_workdir, common, locked

_BEFORE_ABOUT = (
    f"warning: this run has no {ABOUT}, as version 0.1 left it: from here on it draws other masks and dropout for its "
    "seed, so that it does not end with the same bits as without a stop"
)


@dataclass
class Run:
    """A run that holds the lock of its work directory. `open_run` makes it."""

    workdir: Place
    checkpoints: Checkpoints
    reporter: Reporter
    preemption: Preemption
    restored: Restored  # the state to resume from, if there is one
    # the model to start from; None if the run resumes or starts from random parameters
    start: Pretrained | None
    clock: goodput.Clock = field(default_factory=goodput.Clock)
    step: int = 0  # the last step that is known to be finished

    def first_state(self, make: Callable[[Pretrained | None], TrainState]) -> TrainState:
        """Returns the restored state, or the one that `make` returns for the model to start from.

        The run keeps no reference to either, so that the first step can reuse their memory. Call it once.
        """
        state = self.restored.state
        start = self.start
        self.restored, self.start = self.restored._replace(state=None), None
        return make(start) if state is None else state

    def announce(self, lines: Sequence[str], start: str) -> None:
        """Prints lines about the run, and a last one: the checkpoint that it resumes from, or else `start`."""
        state = self.restored.state
        if state is not None:
            start = f"resume from step {int(state.step)}: parameters, optimizer and data order"
            if this_job().is_first and not (self.workdir / ABOUT).exists():
                lines = (*lines, _BEFORE_ABOUT)
        for line in (*lines, *self.restored.passed_over, start):
            self.reporter.message(line)

    def note_data(self, data: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Writes about.json for the model card: name and manifest of the run's data sets, its software and devices.

        Raises: InputError, on every process, if it cannot be written.
        """
        devices = jax.devices()
        about = record_of_run(
            without_secrets(list(data)), f"{len(devices)} x {devices[0].device_kind}"
        )
        this_job().first_does(f"write {ABOUT}", lambda: write_json(self.workdir / ABOUT, about))

    def report_goodput(self) -> dict[str, float]:
        """Records the seconds of the run in each phase until now, and returns them."""
        record = self.clock.record()
        self.reporter.log(self.step, goodput.KIND, record)
        return record

    def report_stop(self, signal: int, step: int) -> bool:
        """Prints a line if a signal ended the run at this step, and returns whether one did."""
        if signal:
            self.reporter.message(
                f"stopped by signal {signal} after step {step}; the same command resumes"
            )
        return bool(signal)


def draws_dropout(config: Any) -> bool:
    """Returns whether the settings of a run have dropout."""
    return config.model.hidden_dropout_rate > 0 or config.model.attention_dropout_rate > 0


@contextlib.contextmanager
def open_run(
    training: Training, workdir: Place, load: Callable[[], Pretrained | None], started: float = 0.0
) -> Iterator[Run]:
    """Opens a work directory for a run, yields the run, and closes everything when the block ends.

    Signals are recorded from the beginning, so that Ctrl-C does not interrupt the compiler. All checks come before the
    first write. `load` returns the model to start from, or None for random parameters; it is called if there is no
    checkpoint. `started` is when the command began, in seconds since the epoch; 0 is now.

    Raises: InputError if the work directory belongs to another run or is in use, if the processes differ, if no
      checkpoint is undamaged, or if there are too many steps to count, or fewer than the run has taken.
    """
    config = training.config
    tokenizer = training.tokenizer
    abstract = training.abstract
    clock = goodput.Clock(started)
    last_step = training.stages[-1].pace.num_steps
    if last_step > LARGEST:
        raise InputError(
            f"the run has {last_step:,} steps, which devices cannot count; train for {LARGEST:,} at most"
        )
    settings = without_secrets(to_dict(config))
    identity = {
        "format": FORMAT,
        **training.identity,
        "run": settings,
        "tokenizer": tokenizer.fingerprint,
    }
    keep = (
        config.checkpoint.keep_last,
        max(config.checkpoint.keep_best, int(isinstance(config, FinetuneConfig))),
    )
    with contextlib.ExitStack() as stack:
        preemption = stack.enter_context(Preemption())
        work.on_compiled.append(clock.compiled)
        stack.callback(work.on_compiled.remove, clock.compiled)
        stack.enter_context(Watchdog(config.train.hang_seconds))
        # and the work after the training loop
        stack.enter_context(work.under_way("start", state_bytes(abstract)))
        # All checks before the lock and before the first write: a command that is refused leaves
        # nothing, and takes nobody's directory.
        check_workdir(workdir, identity, config)
        everywhere = {**common(workdir, identity), **training.same}
        this_job().check_same(everywhere)
        resumes = (
            this_job().broadcast_int(
                "number of checkpoints", len(checkpoint_steps(workdir / "checkpoints"))
            )
            > 0
        )
        former_dropout = resumes and draws_dropout(config) and began_before(workdir)
        start = None if resumes else load()
        stack.enter_context(locked(workdir))
        sealed = {"tokenizer": tokenizer.fingerprint}
        checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", *keep, about=sealed))
        restored = checkpoints.restore(abstract)
        if resumes and restored.state is None:  # killed in its first save
            start = load()
        first_step = 0 if restored.state is None else int(restored.state.step)
        if first_step > last_step:
            taken = f"the run of {workdir} has taken {first_step:,} steps, and the settings ask for {last_step:,}"
            raise InputError(
                f"{taken}; ask for as many steps or epochs as it has taken, or give another workdir"
            )
        # After the restore: a run that cannot go on leaves its directory as it was.
        if this_job().is_first:
            write_json(workdir / "config.json", identity)
            tokenizer.save(workdir / "tokenizer")
        shown = {"progress": config.report.progress, "tensorboard": config.report.tensorboard}
        reporter = Reporter(workdir, last_step, first_step, **shown, enabled=this_job().is_first)
        stack.enter_context(reporter)
        if this_job().is_first:
            reporter.boards += open_boards(config.report.to, workdir, settings)
        if former_dropout:
            reporter.message(
                f"note: from step {first_step} on dropout draws other bits than the version that began this run"
            )
        if reporter.carried is not None:
            clock.resume(reporter.carried)
        run = Run(workdir, checkpoints, reporter, preemption, restored, start, clock, first_step)
        del restored, start  # the run gives them away
        # so that the bucket's records reach to each checkpoint
        checkpoints.before_seal = reporter.publish
        run.report_goodput()  # an attempt counts, also one that is killed before its first report
        reporter.publish()
        yield run
        with clock.phase("saving"):
            checkpoints.close()
        line = goodput.describe(run.report_goodput())
        reporter.message(line + ("; by the first process's clock" if this_job().is_several else ""))
