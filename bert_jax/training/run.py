# SPDX-License-Identifier: Apache-2.0
"""Opening a run: checks, lock, restore, reporter and signals, for pre-training and fine-tuning alike."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.checkpoints.states import Checkpoints, Notes, Restored, checkpoint_steps
from bert_jax.devices import cluster
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.settings.rules import to_dict
from bert_jax.storage.places import Place
from bert_jax.storage.writing import write_json
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.report import Reporter
from bert_jax.training.step import TrainState
from bert_jax.training.workdir import check_workdir, common, locked


@dataclass
class Run:
    """A run that holds the lock of its work directory. `open_run` makes it."""

    workdir: Place
    checkpoints: Checkpoints
    reporter: Reporter
    preemption: cluster.Preemption
    restored: Restored  # the state to resume from, if there is one
    start: Pretrained | None  # the model to start from; None if the run resumes or starts from random parameters

    @property
    def notes(self) -> Notes:
        """The notes of the checkpoint that the run resumes from; {} if there is no checkpoint."""
        return self.restored.notes

    def first_state(self, make: Callable[[Pretrained | None], TrainState]) -> TrainState:
        """Returns the restored state, or the one that `make` returns for the model to start from.

        The run keeps no reference to it, so that the first step can reuse its memory. Call it once.
        """
        state = self.restored.state
        self.restored = self.restored._replace(state=None)
        return make(self.start) if state is None else state

    def describe_start(self, start: str) -> str:
        """Returns a line about the checkpoint that the run resumes from, or `start` if there is no checkpoint."""
        if self.restored.state is None:
            return "; ".join([*self.restored.passed_over, start])
        line = f"resume from step {int(self.restored.state.step)}: parameters, optimizer and data order"
        return "; ".join([*self.restored.passed_over, line])

    def was_stopped(self, signal: int, step: int) -> bool:
        """Returns whether a signal ended the run at this step, and prints a line if so."""
        if signal:
            self.reporter.message(f"stopped by signal {signal} after step {step}; the same command resumes")
        return bool(signal)


@contextlib.contextmanager
def open_run(
    config: PretrainConfig | FinetuneConfig,
    workdir: Place,
    about: Mapping[str, object],
    tokenizer: Tokenizer,
    abstract: TrainState,
    load: Callable[[], Pretrained | None],
    last_step: int,
    same: Mapping[str, object] | None = None,
) -> Iterator[Run]:
    """Opens a work directory for a run, yields the run, and closes everything when the block ends.

    Signals are recorded from the beginning, so that Ctrl-C does not interrupt the compiler. All checks come before the
    first write.

    Args:
      config: the resolved settings, with the values that follow from the data.
      workdir: the work directory, on a disk or in an object store; it is created if missing.
      about: further JSON values that identify the run: its model, and the fingerprint of its data.
      tokenizer: saved in the work directory.
      abstract: shapes, dtypes and shardings of the state.
      load: returns the model to start from, or None for random parameters. It is called if there is no checkpoint.
      last_step: the number of steps of the run.
      same: further values that must be equal on all processes, beside the settings and `about`.

    Raises: InputError if the work directory belongs to another run or is in use, if the processes differ, or if no
      checkpoint is undamaged.
    """
    identity = {"format": 1, **about, "run": to_dict(config), "tokenizer": tokenizer.fingerprint}
    keep = config.checkpoint.keep_last, max(config.checkpoint.keep_best, int(isinstance(config, FinetuneConfig)))
    with contextlib.ExitStack() as stack:
        preemption = stack.enter_context(cluster.Preemption())
        check_workdir(workdir, identity, config)
        cluster.check_same({**common(workdir, identity), **(same or {})})
        resumes = cluster.first_says(len(checkpoint_steps(workdir / "checkpoints"))) > 0
        start = None if resumes else load()
        stack.enter_context(locked(workdir))
        sealed = {"tokenizer": tokenizer.fingerprint}
        checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", *keep, about=sealed))
        restored = checkpoints.restore(abstract)
        if resumes and restored.state is None:  # killed in its first save
            start = load()
        if cluster.is_first():
            write_json(workdir / "config.json", identity)
            tokenizer.save(workdir / "tokenizer")
        first_step = 0 if restored.state is None else int(restored.state.step)
        shown = {"progress": config.report.progress, "tensorboard": config.report.tensorboard}
        reporter = Reporter(workdir, last_step, first_step, **shown, enabled=cluster.is_first())
        stack.enter_context(reporter)
        checkpoints.before_seal = reporter.publish  # so that the bucket's records reach to each checkpoint
        yield Run(workdir, checkpoints, reporter, preemption, restored, start)
        checkpoints.close()
