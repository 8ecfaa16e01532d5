# SPDX-License-Identifier: Apache-2.0
"""The loop: what is saved, what a checkpoint says of itself, and what a signal leaves for the next run."""

import itertools
import json
import math
import os
import signal
import time

import jax
import jax.numpy as jnp
import pytest

from bert_jax.checkpoints import states
from bert_jax.checkpoints.states import SEAL, Checkpoints
from bert_jax.devices import work
from bert_jax.devices.preemption import Preemption
from bert_jax.devices.sharding import make_mesh, replicated
from bert_jax.devices.watchdog import Watchdog
from bert_jax.errors import DivergedError, InputError
from bert_jax.settings.pretraining import MeshConfig, PretrainConfig, ReportConfig
from bert_jax.training.loop import Due, Progress, Work, due, train_loop
from bert_jax.training.report import Reporter, read_metrics
from bert_jax.training.run import Run
from bert_jax.training.stages import Pace, pace_of
from bert_jax.training.step import Metrics, TrainState


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=1), jax.devices()[:1])


def first_state(mesh):
    return jax.device_put(TrainState(jnp.int32(0), {"x": jnp.zeros(4)}, ()), replicated(mesh))


def counted_step(state, batch):
    state, metrics = train_step(state, batch)
    return state, Metrics.of({**metrics, "sequences": (jnp.float32(4), jnp.float32(1))})


def train_step(state, batch):
    step = state.step + 1
    pairs = {name: (jnp.float32(1), jnp.float32(1)) for name in ("loss", "grad_norm", "learning_rate")}
    return TrainState(step, {"x": state.params["x"] + 1}, ()), Metrics.of(pairs)


def run(
    directory,
    mesh,
    pace,
    losses,
    keep=(2, 1),
    signal_in=(),
    step=train_step,
    keep_revision=None,
    batches=None,
    evaluation=None,
    throughput=lambda counts, seconds: {},
):
    """Returns where the loop ended. `losses` are those of evaluations by their step; `signal_in` are broken off."""
    with Checkpoints(directory / "checkpoints", *keep) as checkpoints:
        state = first_state(mesh)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        restored = checkpoints.restore(abstract)
        state = restored.state or state

        def evaluate(params, stopped=lambda: 0):
            taken = int(params["x"][0])
            if taken in signal_in:
                os.kill(os.getpid(), signal.SIGTERM)
            return None if stopped() else {"loss": losses[taken]}

        start = int(state.step)
        with (
            Reporter(directory, pace.num_steps, start, progress=False, tensorboard=False) as reporter,
            Preemption() as preemption,
        ):
            run = Run(directory, checkpoints, reporter, preemption, restored, None)
            given = iter(batches or itertools.repeat(None))
            kept = keep_revision or (lambda step, params, seen: None)
            work = GivenWork(mesh, step, given, evaluation or evaluate, throughput, kept)
            result = train_loop(run, state, pace, work, restored.notes)
        checkpoints.close()
        return result


class GivenWork(Work):
    def __init__(self, mesh, step, batches, evaluation, throughput, kept):
        self.mesh, self.train_step, self.batches, self.evaluation = mesh, step, batches, evaluation
        self._throughput, self._kept = throughput, kept

    def throughput(self, counts, seconds):
        return self._throughput(counts, seconds)

    def keep_revision(self, step, params, seen):
        self._kept(step, params, seen)


def seals(directory):
    paths = sorted((directory / "checkpoints").glob(f"*/{SEAL}"))
    return {int(path.parent.name): json.loads(path.read_text()) for path in paths}


def test_every_evaluation_that_is_the_best_so_far_is_kept(mesh, tmp_path):
    """Evaluations come every 5 steps and checkpoints every 7: they meet at 35 only."""
    losses = dict(zip(range(5, 41, 5), (5.0, 1.0, 2.0, 3.0, 0.5, 4.0, 5.0, 6.0)))
    run(tmp_path, mesh, Pace(40, 40, 5, 7, False), losses)
    kept = seals(tmp_path)
    assert sorted(kept) == [25, 35, 40] and kept[25]["metric"] == 0.5
    assert Checkpoints(tmp_path / "checkpoints").best_step() == 25


def test_an_evaluation_that_takes_long_does_not_hang_while_its_batches_end(mesh, tmp_path, monkeypatch):
    hung = []
    monkeypatch.setattr("bert_jax.devices.job.Job.leave_hanging", lambda job, status, line: hung.append(line))

    def evaluation(params, stopped):
        for _ in range(16):
            time.sleep(0.1)
            assert not stopped()
        return {"loss": 1.0}

    with Watchdog(1):
        run(tmp_path, mesh, Pace(2, 1, 0, 0, False), {}, evaluation=evaluation)
    assert not hung
    stuck = lambda params, stopped: time.sleep(1.6) or {"loss": 1.0}  # noqa: E731
    with Watchdog(1):
        run(tmp_path / "stuck", mesh, Pace(2, 1, 0, 0, False), {}, evaluation=stuck)
    assert hung[0].startswith("evaluation in thread MainThread for ")


def test_a_save_that_takes_long_does_not_hang_and_one_that_stands_still_does(mesh, tmp_path, monkeypatch):
    """The wait in `end`, and the wait of the next save for the one before it."""
    hung = []
    monkeypatch.setattr("bert_jax.devices.job.Job.leave_hanging", lambda job, status, line: hung.append(line))
    seal = states.seal
    monkeypatch.setattr(states, "seal", lambda *arguments: (time.sleep(1.6), seal(*arguments)))
    with Watchdog(1):
        run(tmp_path / "slow", mesh, Pace(4, 1, 0, 2, False), {4: 1.0})
    assert not hung and sorted(seals(tmp_path / "slow")) == [2, 4]
    monkeypatch.setattr(work, "_OF_DISKS", (1, 0.5))
    with Watchdog(1):
        run(tmp_path / "stuck", mesh, Pace(2, 1, 0, 0, False), {2: 1.0})
    assert hung[0].startswith("sealing in thread seal for ")


def test_a_profile_is_of_the_steps_that_were_set_and_changes_nothing(mesh, tmp_path):
    pace = pace_of(PretrainConfig(report=ReportConfig(every_steps=1, profile_steps="4:5")), 12)
    result = run(tmp_path, mesh, pace, {0: 1.0, 12: 1.0})
    assert result.state.params["x"].tolist() == [12] * 4
    names = {path.suffixes[-1] for path in (tmp_path / "profile").rglob("*") if path.is_file()}
    assert {".pb", ".gz"} <= names


def test_what_the_first_process_found_decides_what_is_best(mesh, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "bert_jax.devices.job.Job.broadcast_text", lambda job, topic, text: {"2.0": "0.5"}.get(text, text)
    )
    run(tmp_path, mesh, Pace(8, 40, 2, 0, False), {2: 3.0, 4: 2.0, 6: 1.0, 8: 1.5}, keep=(1, 1))
    assert sorted(seals(tmp_path)) == [4, 8]


def test_a_rank_that_is_no_number_is_never_best():
    progress = Progress(step=0, finished=0)
    ranks = [math.nan, None, 2.0, math.nan, -math.inf, 1.0]
    assert [progress.note_rank(rank, 1) for rank in ranks] == [False, False, True, False, False, True]
    assert progress.best == [1.0]


def test_two_best_are_kept_where_two_are_asked_for_and_none_where_none_is(mesh, tmp_path):
    losses = dict(zip(range(2, 13, 2), (5.0, 1.0, 2.0, 2.0, 3.0, 4.0)))
    run(tmp_path / "two", mesh, Pace(12, 40, 2, 0, False), losses, keep=(2, 2))
    assert sorted(seals(tmp_path / "two")) == [4, 6, 12]
    run(tmp_path / "none", mesh, Pace(12, 40, 2, 0, False), losses, keep=(2, 0))
    assert sorted(seals(tmp_path / "none")) == [12]


def test_what_is_best_is_known_after_a_stop(mesh, tmp_path):
    """Stopped after step 6, where the best is that of step 4: step 8 is no better, and is not saved."""
    losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5, 10: 0.5, 12: 2.0}
    run(tmp_path, mesh, Pace(6, 40, 2, 3, False), losses, keep=(3, 1))
    run(tmp_path, mesh, Pace(12, 40, 2, 0, False), losses, keep=(9, 1))
    assert sorted(seals(tmp_path)) == [3, 4, 6, 10, 12]


def test_a_checkpoint_counts_the_steps_before_it_and_no_later_ones(mesh, tmp_path, monkeypatch):
    """The sealing thread writes what is unreported when its turn comes; the window has gone on by then."""
    saved = []
    save = Checkpoints.save

    def note(self, step, state, metric=None, notes=None, phase=0):
        save(self, step, state, metric, notes, phase)
        saved.append((step, notes))

    monkeypatch.setattr(Checkpoints, "save", note)
    run(tmp_path, mesh, Pace(20, 100, 0, 4, False), {20: 1.0})
    assert [(step, notes["unreported"].get("loss")) for step, notes in saved] == [
        *((step, [step, step]) for step in (4, 8, 12, 16)),
        (20, None),  # the last steps are reported before they are saved
    ]


@pytest.mark.parametrize("killed", [False, True])
def test_an_evaluation_that_was_made_up_for_reaches_its_checkpoint(mesh, tmp_path, monkeypatch, killed):
    losses = {4: 1.0, 8: 2.0, 12: 3.0}
    pace = Pace(12, 1, 4, 4, False, break_off=True)
    assert run(tmp_path, mesh, pace, losses, signal_in=(4,)).signal == signal.SIGTERM
    assert seals(tmp_path)[4]["metric"] is None
    if killed:  # when the evaluation is told, and its checkpoint does not know of it yet
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Checkpoints, "add_metric", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            run(tmp_path, mesh, pace, losses)
    run(tmp_path, mesh, pace, losses)
    kept = seals(tmp_path)
    assert sorted(kept) == [4, 8, 12] and kept[4]["metric"] == 1.0 and not kept[4]["notes"]["overdue"]
    evaluated = [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl") if record["kind"] == "eval"]
    assert evaluated == [4, 8, 12]


def test_parameters_that_are_not_finite_are_no_revision(mesh, tmp_path):
    """The loss and the gradient of the step that made them were finite."""

    def ruin(state, batch):
        state, metrics = train_step(state, batch)
        return state._replace(params={"x": jnp.where(state.step == 4, jnp.inf, state.params["x"])}), metrics

    kept = []
    with pytest.raises(DivergedError, match="a parameter is not finite after step 4"):
        run(tmp_path, mesh, Pace(8, 1, 0, 0, keep=2), {}, step=ruin, keep_revision=lambda step, *_: kept.append(step))
    assert kept == [0, 2]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (1, Due(False, False, False)),
        (4, Due(False, True, False)),
        (5, Due(True, False, False)),
        (6, Due(False, False, True)),
        (20, Due(True, True, False)),
        (60, Due(True, True, True)),
        (61, Due(True, True, False)),  # the last one
    ],
)
def test_what_is_due_depends_on_the_step_alone(step, expected):
    assert due(step, Pace(61, 1, 5, 4, keep=6)) == expected


class Calls:
    """Steps that note the size of each call; the loss of step `bad` is not finite."""

    def __init__(self, bad=0):
        self.sizes, self.bad = [], bad

    def step(self, state, *batches):
        self.sizes.append(len(batches))
        if len(batches) == 1:
            return self.take(state, *batches)
        told = []
        for batch in batches:
            state, metrics = self.take(state, batch)
            told.append(metrics.table)
        return state, Metrics(jnp.stack(told), metrics.names)

    def take(self, state, batch):
        state, metrics = train_step(state, batch)
        loss = jnp.where(state.step == self.bad, jnp.nan, state.step.astype(jnp.float32))
        return state, Metrics.of({name: (loss, jnp.float32(1)) for name in metrics})


def reports(directory):
    return {r["step"]: r["loss"] for r in read_metrics(directory / "metrics.jsonl") if r["kind"] == "train"}


def test_several_steps_a_call_end_where_something_is_due(mesh, tmp_path):
    calls = Calls()
    pace = Pace(23, 12, 0, 16, steps_per_call=4)
    assert run(tmp_path, mesh, pace, {23: 1.0}, step=calls.step).step == 23
    assert calls.sizes == [4, 4, 4, 4, 4, 1, 1, 1]
    assert reports(tmp_path) == {12: 6.5, 23: 18.0}  # the means of 1 to 12, and of the rest
    calls = Calls()  # a report inside of every second call
    run(tmp_path / "other", mesh, Pace(12, 6, 0, 0, steps_per_call=4), {12: 1.0}, step=calls.step)
    assert calls.sizes == [4, 1, 1, 1, 1, 4]
    assert reports(tmp_path / "other") == {6: 3.5, 12: 9.5}


def test_the_last_steps_are_reported_once(mesh, tmp_path):
    """Also if the run ends before its first report, is given again, and goes on."""
    for steps in (3, 3, 7):
        calls = Calls()
        run(tmp_path, mesh, Pace(steps, 5, 0, 0), {steps: 1.0}, step=calls.step)
        assert reports(tmp_path) == {3: 2.0, **({5: 4.5, 7: 6.5} if steps == 7 else {})}


def test_steps_before_a_kill_are_in_the_report_after_it(mesh, tmp_path):
    def ending(count):
        yield from itertools.repeat(None, count)
        raise KeyboardInterrupt

    pace = Pace(12, 10, 0, 6)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, mesh, pace, {}, step=Calls().step, batches=ending(8))
    run(tmp_path, mesh, pace, {12: 1.0}, step=Calls().step)
    assert reports(tmp_path) == {10: 5.5, 12: 11.5}


def test_the_last_steps_of_a_run_that_ends_early_are_reported_once(mesh, tmp_path):
    losses = {3: 1.0, 6: 2.0, 8: 3.0}
    for steps, patience in ((30, 1), (30, 1), (8, 0)):
        run(tmp_path, mesh, Pace(steps, 5, 3, 0, False, patience=patience), losses, step=Calls().step)
        assert reports(tmp_path) == {5: 3.0, 6: 6.0, **({8: 7.5} if steps == 8 else {})}


def test_a_seal_that_fails_is_told_at_the_next_report(mesh, tmp_path, monkeypatch):
    """The next save may be hours away."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(states, "seal", full)
    calls, wait = Calls(), itertools.chain(itertools.repeat(0.0, 200), itertools.repeat(0.05))
    with pytest.raises(InputError, match=r"cannot write a checkpoint to .*: No space left on device"):
        run(tmp_path, mesh, Pace(400, 1, 0, 200), {}, step=calls.step, batches=(time.sleep(each) for each in wait))
    assert 200 <= len(calls.sizes) < 399


def test_batches_of_different_shapes_are_not_taken_in_one_call(mesh, tmp_path):
    calls = Calls()
    batches = [{"x": jnp.zeros(size)} for size in (1, 1, 1, 2, 3, 3, 3, 3)]
    pace = Pace(8, 100, 0, 0, steps_per_call=4)
    run(tmp_path, mesh, pace, {8: 1.0}, step=calls.step, batches=batches)
    assert calls.sizes == [1, 1, 1, 1, 4]


def test_the_time_of_a_new_shape_is_no_speed(mesh, tmp_path):
    seen, timed = set(), []

    def step(state, batch):
        time.sleep(0 if batch.shape in seen else 0.2)  # as long as a program takes to compile
        seen.add(batch.shape)
        return counted_step(state, batch)

    lengths = [8, 8, 16, 8, 16, 24, 8, 16, 24, 32, 8, 8]
    batches = [jnp.zeros(length) for length in lengths]
    measure = lambda counts, seconds: timed.append(seconds) or {}  # noqa: E731
    run(tmp_path, mesh, Pace(12, 3, 0, 0, False), {12: 1.0}, step=step, batches=batches, throughput=measure)
    assert len(seen) == 4 and len(timed) == 4 and max(timed) < 0.2


def test_a_loss_that_is_not_finite_inside_a_call_is_named_with_its_step(mesh, tmp_path):
    calls = Calls(bad=7)
    pace = Pace(20, 100, 0, 4, steps_per_call=4)
    with pytest.raises(DivergedError, match=r"loss is nan at step 7; losses were finite until step 6, .* of step 4"):
        run(tmp_path, mesh, pace, {20: 1.0}, step=calls.step)
    assert sorted(seals(tmp_path)) == [4]
