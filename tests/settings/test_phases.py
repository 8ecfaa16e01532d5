# SPDX-License-Identifier: Apache-2.0
"""Two phases in one run: which steps are whose, what may change, and whole runs that stop anywhere and resume."""

import dataclasses

import jax
import numpy as np
import pytest
from builders import make_dataset, message, tiny_run
from whole_runs import ONE_DEVICE, assert_same_state, losses, stop_at, train

from bert_jax.batches.load import train_batches
from bert_jax.batches.order import train_rows
from bert_jax.devices.sharding import make_mesh
from bert_jax.settings.phases import may_change, phases_of, rows_before
from bert_jax.settings.pretraining import (
    MaskingConfig,
    MeshConfig,
    OptimizerConfig,
    Phase2Config,
    TrainConfig,
)
from bert_jax.settings.rules import to_dict
from bert_jax.training.optim import learning_rate_at
from bert_jax.training.phases import open_corpora
from bert_jax.training.report import read_metrics
from bert_jax.training.train import begin_stage

SECOND = Phase2Config(num_steps=5, batch_size=8, max_predictions=9, learning_rate=5e-4, warmup_steps=2)


FALLING = MaskingConfig(rate=0.3, end_rate=0.1)


@pytest.fixture(scope="module")
def longer_rows(tmp_path_factory):
    """Returns a data set of the same text in rows of 48 tokens."""
    return make_dataset(tmp_path_factory.mktemp("longer"), row_length=48)


def two_phases(toy_data, path="somewhere", num_steps=7, second=SECOND, **sections):
    second = dataclasses.replace(second, path=str(path))
    return tiny_run(toy_data, mesh=ONE_DEVICE, train=TrainConfig(num_steps=num_steps), phase2=second, **sections)


def rates(config):
    """Returns the learning rate at each step of a run."""
    found = []
    for phase in phases_of(config):
        rate = learning_rate_at(phase.config.optimizer, phase.train.num_steps, phase.schedule_start)
        found += [float(rate(step)) for step in range(phase.first_step, phase.last_step)]
    return found


def test_a_run_without_a_second_phase_has_one():
    config = tiny_run("data")
    (phase,) = phases_of(config)
    assert phase.config == config and (phase.first_step, phase.last_step) == (0, 12)
    assert phase.train == config.train and not phase.resets_moments


def test_a_phase_takes_from_the_first_what_it_does_not_set():
    second = phases_of(two_phases("data", second=Phase2Config(num_steps=5)))[1]
    assert (second.first_step, second.last_step, second.number) == (7, 12, 2)
    config = second.config
    assert (config.data.path, config.data.batch_size, config.train.num_steps) == ("somewhere", 16, 5)
    assert (config.masking.max_predictions, config.optimizer.learning_rate) == (5, 1e-3)
    assert config.optimizer.warmup_steps == 0  # a warm-up is of a phase
    changed = phases_of(two_phases("data", second=dataclasses.replace(SECOND, accumulate=4)))[1].config
    assert (changed.data.batch_size, changed.train.accumulate, changed.masking.max_predictions) == (8, 4, 9)
    assert (changed.data.seed, changed.model) == (config.data.seed, config.model)


def test_the_rate_restarts_or_goes_on():
    def of(optimizer, num_steps):
        rate = learning_rate_at(optimizer, num_steps)
        return [float(rate(step)) for step in range(num_steps)]

    config = two_phases("data")
    own = OptimizerConfig(learning_rate=5e-4, warmup_steps=2)
    assert rates(config) == of(config.optimizer, 7) + of(own, 5) and rates(config)[7] == 0
    goes_on = two_phases("data", second=Phase2Config(num_steps=5, schedule="continue"))
    assert rates(goes_on) == of(config.optimizer, 12)


def test_the_rate_of_masks_falls_through_both_phases(toy_data, longer_rows):
    config = two_phases(toy_data, longer_rows, masking=FALLING)
    with jax.set_mesh(mesh := make_mesh(MeshConfig(), jax.devices()[:1])):
        phases = open_corpora(config, mesh).phases
    found = []
    for opened, steps in zip(phases, (range(7), range(7, 12))):
        data = opened.phase.config.data
        batch = jax.device_get(next(train_batches(opened.dataset.train, 0, 16, data.seed, mesh, 0)))
        masked = [jax.jit(opened.objective.prepare)(batch, np.int32(step)) for step in steps]
        lengths = (batch.sequence_ids > 0).sum(axis=1)
        most = opened.phase.config.masking.limit(opened.dataset.row_length)
        for step, each in zip(steps, masked):
            wanted = np.clip(np.round(lengths * (0.3 - 0.2 * step / 12)), 1, most)
            np.testing.assert_array_equal(each.mlm_weights.sum(axis=1), wanted)
            found.append(float(each.mlm_weights.sum()))
    assert found[:7] == sorted(found[:7], reverse=True) and found[0] > found[6]
    assert found[7:] == sorted(found[7:], reverse=True) and found[7] > found[11]


def test_the_same_data_go_on_where_the_first_phase_left_off():
    """7 batches of 16 and 5 of 8 are 152 places of the same order, over the edge of an epoch of 50 rows."""
    phases = phases_of(two_phases("data"))
    assert rows_before(phases, ["a", "b"]) == [0, 0] and rows_before(phases, ["a", "a"]) == [0, 112]
    batches = [train_rows(step, np.arange(16), 16, 50, seed=2) for step in range(7)]
    batches += [train_rows(step, np.arange(8), 8, 50, seed=2, rows_before=112) for step in range(5)]
    in_one_go = train_rows(0, np.arange(152), 152, 50, seed=2)
    np.testing.assert_array_equal(np.concatenate(batches, axis=1), in_one_go)


def test_what_may_change_follows_from_where_the_run_is():
    before = to_dict(two_phases("data"))
    for steps in (0, 4, 7):  # the second phase has not begun
        assert {"phase2", "train.num_steps"} <= set(may_change(before, two_phases("data", num_steps=9), steps))
    assert "train.num_steps" in message(may_change, before, two_phases("data", num_steps=6), 7)
    later = may_change(before, two_phases("data"), 8)
    assert "phase2.num_steps" in later and not {"phase2", "train.num_steps"} & set(later)
    for undone in (two_phases("data", num_steps=9), tiny_run("data", train=TrainConfig(num_steps=7))):
        assert "keep train.num_steps=7" in message(may_change, before, undone, 8)
    alone = to_dict(tiny_run("data"))
    del alone["phase2"]  # as a run of an earlier version
    assert "phase2" in may_change(alone, two_phases("data", num_steps=12), 12)


def test_moments_are_reset_at_the_first_step_of_their_phase_alone(moments_state):
    phase = phases_of(two_phases("data", second=dataclasses.replace(SECOND, keep_moments=False)))[1]
    inside = moments_state._replace(step=np.int32(8))
    assert begin_stage(phase, inside, inside) is inside
    kept = phases_of(two_phases("data"))[1]
    assert begin_stage(kept, moments_state, moments_state) is moments_state
    reset = begin_stage(phase, moments_state, moments_state)
    assert reset.params is moments_state.params and int(reset.step) == 7
    counts = [int(leaf) for leaf in jax.tree.leaves(reset.optimizer) if not leaf.shape]
    assert sorted(counts) == [0, 7]  # the one that corrects the bias, and the one that the rate follows
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(reset.optimizer) if leaf.shape)


@pytest.fixture(scope="module")
def moments_state():
    """Returns a state at step 7 with an optimizer that has counted to 7 and means of ones."""
    from bert_jax.training.optim import make_optimizer
    from bert_jax.training.step import TrainState

    params = {"mlm": {"transform": {"kernel": jax.numpy.ones((2, 2))}}}
    optimizer = make_optimizer(OptimizerConfig(bias_correction=True), 12).init(params)
    full = jax.tree.map(lambda leaf: jax.numpy.full_like(leaf, 1 if leaf.shape else 7), optimizer)
    return TrainState(jax.numpy.int32(7), params, full)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"path": ""}, "phase2.path is empty"),
        ({"path": "nowhere"}, "nowhere does not exist; give a data set"),
        ({"max_predictions": 0}, "is 5 for both; set phase2.max_predictions"),
        ({"batch_size": 10, "accumulate": 4}, "batch_size 10 is not divisible by"),
        ({"schedule": "continue"}, "phase2.schedule continue has no learning_rate"),
        ({"schedule": "again"}, "one of restart, continue"),
        ({"num_steps": -1}, "phase2.num_steps -1 is"),
    ],
)
def test_a_second_phase_that_cannot_be_is_refused_before_the_first_begins(
    toy_data, longer_rows, tmp_path, change, expected
):
    second = dataclasses.replace(SECOND, **({"path": str(longer_rows)} | change))
    config = dataclasses.replace(two_phases(toy_data), phase2=second)
    assert expected in message(train, config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_of_another_kind_are_refused(toy_data, tmp_path):
    alone = make_dataset(tmp_path, next_sentence="none")
    assert "with none; prepare both alike" in message(train, two_phases(toy_data, alone), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# SIGTERM comes while this step is reported, some steps after it was dispatched.
STOPS = {"in the first": 3, "at the end of the first": 7, "in the second": 8}


@pytest.fixture(scope="module")
def whole(toy_data, longer_rows, tmp_path_factory):
    """Returns configuration, work directory and result of a run of two phases that nothing interrupted."""
    config = two_phases(toy_data, longer_rows, second=dataclasses.replace(SECOND, keep_moments=False))
    workdir = tmp_path_factory.mktemp("phases") / "run"
    return config, workdir, train(config, workdir)


@pytest.mark.slow
def test_a_run_goes_through_both_phases(whole):
    config, workdir, result = whole
    assert result.step == 12 and int(result.state.step) == 12
    records = list(read_metrics(workdir / "metrics.jsonl"))
    trained = [(r["step"], r["phase"]) for r in records if r["kind"] == "train"]
    assert trained == list(zip(range(1, 13), [1] * 7 + [2] * 5))
    found = [r["learning_rate"] for r in records if r["kind"] == "train"]
    np.testing.assert_allclose(found, rates(config), rtol=1e-6)
    evaluations = [(r["step"], r["phase"]) for r in records if r["kind"] == "eval"]
    assert evaluations == [(0, 1), (6, 1), (7, 1), (12, 2)]
    assert max(path.name for path in (workdir / "checkpoints").iterdir() if path.is_dir()) == "00000012"


@pytest.mark.slow
@pytest.mark.parametrize("step", STOPS.values(), ids=STOPS)
def test_a_stop_anywhere_changes_nothing(whole, tmp_path, monkeypatch, step):
    config, workdir, uninterrupted = whole
    with monkeypatch.context() as patch:
        stop_at(patch, step)
        stopped = train(config, tmp_path / "run")
    assert stopped.signal and step <= stopped.step < 12
    resumed = train(config, tmp_path / "run")
    assert_same_state(resumed.state, uninterrupted.state)
    assert losses(tmp_path / "run") == losses(workdir)
    assert losses(tmp_path / "run", "eval") == losses(workdir, "eval")


@pytest.mark.slow
def test_eight_devices_go_through_both_phases_like_one(whole, tmp_path):
    config, workdir, _ = whole
    divided = dataclasses.replace(config.train, zero1="on")
    train(dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2, tensor=2), train=divided), tmp_path / "run")
    ours, theirs = losses(tmp_path / "run"), losses(workdir)
    assert sorted(ours) == sorted(theirs) == list(range(1, 13))
    for step in theirs:
        np.testing.assert_allclose(ours[step], theirs[step], rtol=2e-4, err_msg=f"step {step}")


@pytest.mark.slow
def test_fewer_masks_are_the_same_after_stops_and_on_eight_devices(toy_data, longer_rows, tmp_path, monkeypatch):
    config = two_phases(toy_data, longer_rows, masking=FALLING)
    uninterrupted = train(config, tmp_path / "whole")
    for step in (3, 8):
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            assert step <= train(config, tmp_path / "run").step < 12
    assert_same_state(train(config, tmp_path / "run").state, uninterrupted.state)
    divided = dataclasses.replace(config.train, zero1="on")
    train(dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2, tensor=2), train=divided), tmp_path / "eight")
    ours, theirs = losses(tmp_path / "eight"), losses(tmp_path / "whole")
    for step in theirs:
        np.testing.assert_allclose(ours[step], theirs[step], rtol=2e-4, err_msg=f"step {step}")


@pytest.mark.slow
def test_a_second_phase_may_be_added_to_a_run_that_is_done(whole, toy_data, tmp_path):
    config, _, uninterrupted = whole

    def with_second(**changes):
        return dataclasses.replace(config, phase2=dataclasses.replace(config.phase2, **changes))

    assert train(dataclasses.replace(config, phase2=Phase2Config()), tmp_path / "run").step == 7
    assert_same_state(train(config, tmp_path / "run").state, uninterrupted.state)
    assert train(with_second(num_steps=6), tmp_path / "run").step == 13
    problem = "belongs to a run with another phase2.learning_rate"
    assert problem in message(train, with_second(learning_rate=1e-4), tmp_path / "run")
    problem = "in its second phase, on other data than phase2.path "
    assert problem in message(train, with_second(path=str(toy_data)), tmp_path / "run")


@pytest.mark.parametrize("name", [pytest.param("adamw", marks=pytest.mark.slow), "muon"])
def test_moments_in_bfloat16_are_restored_bit_for_bit(toy_data, tmp_path, monkeypatch, name):
    optimizer = OptimizerConfig(name=name, learning_rate=1e-3, warmup_steps=3, state_dtype="bfloat16")
    config = tiny_run(toy_data, mesh=ONE_DEVICE, optimizer=optimizer, train=TrainConfig(num_steps=6))
    uninterrupted = train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        train(config, tmp_path / "run")
    resumed = train(config, tmp_path / "run")
    assert_same_state(resumed.state, uninterrupted.state)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(resumed.state.optimizer) if leaf.shape}
    assert dtypes == {"bfloat16", "float32"}
    wide = dataclasses.replace(config, optimizer=dataclasses.replace(optimizer, state_dtype="float32"))
    assert "another optimizer.state_dtype" in message(train, wide, tmp_path / "run")
