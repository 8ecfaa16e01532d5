# SPDX-License-Identifier: Apache-2.0
"""Profiles of a few training steps, for TensorBoard and Perfetto: at steps that are set, or when somebody asks."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import jax

from bert_jax.devices import cluster
from bert_jax.settings.rules import step_range
from bert_jax.training.report import Reporter

Item = TypeVar("Item")

ASK = "profile_now"  # a file of this name in the work directory asks for a profile of the next steps
_STEPS_WHEN_ASKED = 5


def profiled(
    batches: Iterator[Item], first_step: int, in_flight: int, steps: str, every: int, reporter: Reporter, workdir: Path
) -> Generator[Item]:
    """Yields the batches of steps, and profiles what the device and the host do between some of them.

    Args:
      batches: what the loop takes one of for each step.
      first_step: how many steps were taken before the first of them.
      in_flight: how many steps the loop begins before it waits for the first of them: a profile goes on for as many
        steps more, so that those that were asked for have ended.
      steps: "100:105" profiles steps 101 to 105; "" none.
      every: steps between two looks for the file `ASK`; the first process looks.
      reporter: is told where a profile was written.
      workdir: profiles are written to its directory "profile", by each process for its own host.
    """
    first, last = step_range(steps)
    step, until = first_step, 0  # `until` is the step before which a profile ends
    try:
        for batch in batches:
            if until and step >= until:
                until = _stop(reporter, workdir)
            asked = not until and step % every == 0 and cluster.is_first() and (workdir / ASK).exists()
            if not until and step == first < last:
                until = _start(workdir, last + in_flight)
            elif asked:
                (workdir / ASK).unlink(missing_ok=True)
                until = _start(workdir, step + _STEPS_WHEN_ASKED + in_flight)
            step += 1
            yield batch
    finally:
        if until:
            _stop(reporter, workdir)


def _start(workdir: Path, until: int) -> int:
    jax.profiler.start_trace(workdir / "profile", create_perfetto_trace=True)
    return until


def _stop(reporter: Reporter, workdir: Path) -> int:
    jax.profiler.stop_trace()
    reporter.message(f"profile written to {workdir / 'profile'}: for tensorboard --logdir, or ui.perfetto.dev")
    return 0
