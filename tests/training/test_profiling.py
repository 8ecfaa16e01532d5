# SPDX-License-Identifier: Apache-2.0
"""Profiles: at the steps that were set, and when a file asks for one."""

import dataclasses
import itertools

import pytest
from builders import tiny_run
from whole_runs import ONE_DEVICE, assert_same_state, train

from bert_jax.errors import InputError
from bert_jax.settings.pretraining import CheckpointConfig, EvalConfig, ReportConfig
from bert_jax.training import profiling
from bert_jax.training.profiling import ASK, profiled


class Told:
    """Stands in for the reporter and for JAX's profiler; notes before which step each was called."""

    def __init__(self, monkeypatch):
        self.step, self.calls = 0, []
        monkeypatch.setattr(
            profiling.jax.profiler, "start_trace", lambda *_, **__: self.calls.append(("on", self.step))
        )
        monkeypatch.setattr(profiling.jax.profiler, "stop_trace", lambda: self.calls.append(("off", self.step)))

    def message(self, text):
        assert "profile written to" in text

    def count(self):
        for step in itertools.count():
            self.step = step
            yield step


@pytest.mark.parametrize(
    ("steps", "first_step", "calls"),
    [((3, 5), 0, [("on", 3), ("off", 8)]), ((3, 5), 4, []), ((0, 0), 0, []), ((8, 9), 0, [("on", 8), ("off", 9)])],
)
def test_the_steps_that_were_set_are_profiled_until_they_have_ended(monkeypatch, tmp_path, steps, first_step, calls):
    told = Told(monkeypatch)
    batches = itertools.islice(told.count(), first_step, 10)
    assert list(profiled(batches, first_step, 3, steps, 100, told, tmp_path)) == list(range(first_step, 10))
    assert told.calls == calls


def test_a_file_asks_for_a_profile_of_the_next_steps(monkeypatch, tmp_path):
    told = Told(monkeypatch)
    (tmp_path / ASK).touch()
    steps = profiled(told.count(), 0, 3, (0, 0), 4, told, tmp_path)
    taken = list(itertools.islice(steps, 6))
    assert not (tmp_path / ASK).exists() and told.calls == [("on", 0)]
    (tmp_path / ASK).touch()  # another one, which is seen at a step that is looked at, once the first has ended
    taken += list(itertools.islice(steps, 12))
    steps.close()
    assert taken == list(range(18)) and told.calls == [("on", 0), ("off", 8), ("on", 8), ("off", 16)]


@pytest.mark.slow
def test_a_run_is_the_same_with_a_profile(finished, toy_data, tmp_path):
    workdir, plain = finished
    # Nothing is evaluated or saved while it is profiled: each call of Python is an event, and those make a million.
    rare = {"eval": EvalConfig(every_steps=12), "checkpoint": CheckpointConfig(every_steps=12)}
    config = tiny_run(toy_data, mesh=ONE_DEVICE, **rare)
    report = ReportConfig(every_steps=1, tensorboard=False, progress=False, profile_steps="4:5")
    profile = train(dataclasses.replace(config, report=report), tmp_path / "profile")
    assert_same_state(plain.state, profile.state)
    names = {path.suffixes[-1] for path in (tmp_path / "profile" / "profile").rglob("*") if path.is_file()}
    assert {".pb", ".gz"} <= names
    assert not (workdir / "profile").exists()


@pytest.mark.parametrize("steps", ["5", "5:5", "a:b", "5:4", "-1:4", "1:2:3"])
def test_steps_that_are_no_range_are_refused(steps):
    with pytest.raises(InputError, match=r"report\.profile_steps .* is not FIRST:LAST"):
        ReportConfig(profile_steps=steps).validate()
