# SPDX-License-Identifier: Apache-2.0
"""Profiles of a few training steps, for TensorBoard and Perfetto: at configured steps, or on request."""

from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import jax

from bert_jax.devices.job import this_job
from bert_jax.storage.places import Place, RemotePath, scratch
from bert_jax.training.report import Reporter

Item = TypeVar("Item")

ASK = "profile_now"  # creating this file in the work directory requests a profile of the next steps
_STEPS_WHEN_ASKED = 5


def profiled(
    batches: Iterator[Item],
    first_step: int,
    in_flight: int,
    steps: tuple[int, int],
    every: int,
    reporter: Reporter,
    workdir: Place,
) -> Generator[Item]:
    """Yields the batches, and profiles device and host during some of the steps between them.

    Args:
      batches: one for each step.
      first_step: the number of steps taken before the first batch.
      in_flight: the number of steps that the loop dispatches before it waits for the first of them. A profile is that
        many steps longer, so that it holds the requested steps to their end.
      steps: (100, 105) profiles steps 101 to 105; (0, 0) none.
      every: steps between checks for the file `ASK`; only the first process checks.
      reporter: prints where a profile was written.
      workdir: profiles are written to its directory "profile", by each process for its own host.
    """
    first, last = steps
    step, until = first_step, 0  # `until` is the step before which a profile ends
    with (
        scratch(workdir)
        if isinstance(workdir, RemotePath)
        else nullcontext(workdir / "profile") as folder
    ):
        try:
            for batch in batches:
                if until and step >= until:
                    until = _stop(reporter, Path(folder), workdir)
                asked = (
                    not until
                    and step % every == 0
                    and this_job().is_first
                    and (workdir / ASK).exists()
                )
                if not until and step == first < last:
                    until = _start(Path(folder), last + in_flight)
                elif asked:
                    (workdir / ASK).unlink(missing_ok=True)
                    until = _start(Path(folder), step + _STEPS_WHEN_ASKED + in_flight)
                step += 1
                yield batch
        finally:
            if until:
                _stop(reporter, Path(folder), workdir)


def _start(folder: Path, until: int) -> int:
    jax.profiler.start_trace(folder, create_perfetto_trace=True)
    return until


def _stop(reporter: Reporter, folder: Path, workdir: Place) -> int:
    jax.profiler.stop_trace()
    if isinstance(workdir, RemotePath):
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            (workdir / "profile" / path.relative_to(folder).as_posix()).put(path)
    reporter.message(
        f"profile written to {workdir / 'profile'}: for tensorboard --logdir, or ui.perfetto.dev"
    )
    return 0
