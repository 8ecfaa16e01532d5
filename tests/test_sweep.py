# SPDX-License-Identifier: Apache-2.0
"""A grid of runs: what is in it, and what it reports."""

import dataclasses
import functools
import json
import math
import signal

import jax
import pytest
from builders import make_learner, make_topics, topics_run

import bert_jax
from bert_jax.checkpoints.states import seal
from bert_jax.errors import DivergedError, InputError
from bert_jax.finetuning import finetune
from bert_jax.settings.finetuning import FinetuneTrainConfig, ProbeConfig, SweepConfig
from bert_jax.sweep import describe, plan, sweep
from bert_jax.tasks.results import FinetuneResult
from bert_jax.training.loop import LoopResult


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    return make_topics(tmp_path_factory.mktemp("topics"), 96, 40)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return make_learner(tmp_path_factory.mktemp("start"))


def grid(topics, start, **changes):
    config = topics_run(topics, start, train=FinetuneTrainConfig(num_epochs=2.0))
    return dataclasses.replace(config, sweep=SweepConfig(**{"seeds": 2, "learning_rates": "3e-3,1e-3"} | changes))


def test_the_grid_is_every_rate_with_every_seed(topics, start):
    runs = plan(grid(topics, start))
    assert list(runs) == ["rate0.003_seed0", "rate0.003_seed1", "rate0.001_seed0", "rate0.001_seed1"]
    one = runs["rate0.001_seed1"]
    assert (one.optimizer.learning_rate, one.train.seed, one.data.seed) == (1e-3, 1, 1)
    assert one.sweep == SweepConfig()
    assert list(plan(grid(topics, start, seeds=0))) == ["rate0.003_seed0", "rate0.001_seed0"]


def test_rates_that_are_equal_in_six_digits_have_runs_of_their_own(topics, start):
    runs = plan(grid(topics, start, seeds=0, learning_rates="1e-3,1.0000001e-3,0.00123456789,1.5e-5"))
    assert list(runs) == ["rate0.001_seed0", "rate0.0010000001_seed0", "rate0.00123456789_seed0", "rate1.5e-05_seed0"]


@pytest.mark.slow
def test_results_of_a_finished_run_stay_while_the_command_is_given_again(topics, start, tmp_path, monkeypatch):
    config = topics_run(topics, start, train=FinetuneTrainConfig(num_epochs=1.0))
    finetune(config, tmp_path / "run", jax.devices()[:1])
    before = json.loads((tmp_path / "run" / "results.json").read_text())

    def killed(*_):
        raise KeyboardInterrupt

    for epochs, stay in ((1.0, True), (2.0, False)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("bert_jax.finetuning.finish", killed)
            longer = dataclasses.replace(config, train=FinetuneTrainConfig(num_epochs=epochs))
            finetune(longer, tmp_path / "run", jax.devices()[:1])
        assert (tmp_path / "run" / "results.json").exists() == stay
        if stay:
            assert json.loads((tmp_path / "run" / "results.json").read_text()) == before


def test_rates_that_are_none(topics, start):
    for rates in ("fast", "1e-3,-1", "0"):
        with pytest.raises(InputError, match="is not numbers from 1e-37"):
            grid(topics, start, learning_rates=rates).validate()


def result(score, constant=0.5):
    return FinetuneResult({"accuracy": score}, "accuracy", {"accuracy": constant}, 7, 0, 1.0)


def test_the_report_has_every_run_and_the_usual_figures(topics, start, tmp_path, monkeypatch):
    scores = {(3e-3, 0): 0.9, (3e-3, 1): 0.5, (1e-3, 0): 0.7, (1e-3, 1): math.nan}

    def fake(config, workdir, devices, task, head):
        score = scores[config.optimizer.learning_rate, config.train.seed]
        if math.isnan(score):
            raise DivergedError("loss is nan at step 3")
        (workdir / "finetuned").mkdir(parents=True)
        (workdir / "finetuned" / "name").write_text(workdir.name)
        seal(workdir / "finetuned", {"arrays": {"x": ["float32", [1]]}})
        return result(score)

    monkeypatch.setattr("bert_jax.sweep.finetune", fake)
    told = sweep(grid(topics, start), tmp_path / "grid")
    assert [outcome.degenerate for outcome in told.outcomes] == [False, True, False, True]
    text = "\n".join(describe(told.outcomes, "accuracy"))
    assert "rate0.003_seed1    0.5000     7        1  degenerate" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["all"] == ["4", "0.7000", "0.2000", "0.7000", "0.9000", "2"]
    assert rows["0.003"] == ["2", "0.7000", "0.2828", "0.7000", "0.9000", "1"]
    assert rows["0.001"] == ["2", "0.7000", "0.0000", "0.7000", "0.7000", "1"]
    assert "the best is rate0.003_seed0" in text
    assert (tmp_path / "grid" / "finetuned" / "name").read_text() == "rate0.003_seed0"
    stored = json.loads((tmp_path / "grid" / "sweep.json").read_text())
    assert [run["score"] for run in stored["runs"]] == [0.9, 0.5, 0.7, None]
    # A model that is damaged takes no other's place.
    (tmp_path / "grid" / "runs" / "rate0.003_seed0" / "finetuned" / "name").write_text("rate0.003_seed1")
    kept = {f"rate{rate:g}_seed{seed}": result(score) for (rate, seed), score in scores.items()}
    monkeypatch.setattr("bert_jax.sweep._result_of", lambda workdir, *_: kept[workdir.name])
    with pytest.raises(InputError, match=r"rate0.003_seed0/finetuned, the best model, is damaged: file name"):
        sweep(grid(topics, start), tmp_path / "grid")
    assert (tmp_path / "grid" / "finetuned" / "name").read_text() == "rate0.003_seed0"


def test_a_grid_is_compared_over_all_processes_before_anything_is_written(topics, start, tmp_path, monkeypatch):
    compared = []

    def check_same(job, what):
        compared.append(what)
        raise InputError("process 1 has another one")

    monkeypatch.setattr("bert_jax.devices.job.Job.check_same", check_same)
    with pytest.raises(InputError, match="process 1 has another one"):
        sweep(grid(topics, start), tmp_path / "grid")
    assert compared[0]["run"]["sweep"] == {"seeds": 2, "learning_rates": "3e-3,1e-3"}
    assert "source" not in compared[0]["run"]["data"]  # where the data lie is each process's own affair
    assert not (tmp_path / "grid").exists()


@pytest.mark.slow
def test_a_grid_is_trained_once_and_leaves_its_best(topics, start, tmp_path, monkeypatch):
    """Of probes, whose encoder is frozen: the settings of a run say that after it has begun."""
    config = dataclasses.replace(grid(topics, start, learning_rates=""), train=FinetuneTrainConfig(num_epochs=4.0))
    probe = ProbeConfig(features="last", kind="linear")
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, probe=probe))
    told = sweep(config, tmp_path / "grid", jax.devices()[:1])
    assert len(told.outcomes) == 2
    best = max(told.outcomes, key=lambda outcome: outcome.score)
    lines = [line.split("\t") for line in (topics / "dev.tsv").read_text().splitlines()]
    found = bert_jax.load_predictor(tmp_path / "grid")([line[lines[0].index("sentence")] for line in lines[1:]])
    labels = [line[lines[0].index("label")] for line in lines[1:]]
    right = sum(one.label == label for one, label in zip(found, labels, strict=True))
    assert right / len(labels) == pytest.approx(best.score)
    assert not list((tmp_path / "grid").rglob("checkpoints"))
    monkeypatch.setattr("bert_jax.sweep.finetune", None)  # nothing is trained again
    again = sweep(config, tmp_path / "grid", jax.devices()[:1])
    assert again.outcomes == told.outcomes and best in again.outcomes


@pytest.mark.slow
def test_results_are_those_of_the_settings_and_data_that_are_asked_for(topics, start, tmp_path, monkeypatch):
    def wanted(seeds, epochs, **train):
        config = grid(topics, start, learning_rates="", seeds=seeds)
        return dataclasses.replace(config, train=FinetuneTrainConfig(num_epochs=epochs, **train))

    (first,) = sweep(wanted(1, 1.0), tmp_path / "grid", jax.devices()[:1]).outcomes
    with monkeypatch.context() as patch:  # settings that change no result: nothing is trained again
        patch.setattr("bert_jax.sweep.finetune", None)
        assert sweep(wanted(1, 1.0, hang_seconds=600, steps_per_call=2), tmp_path / "grid").outcomes == [first]
    with monkeypatch.context() as patch:  # more epochs, and a signal before the end
        patch.setattr("bert_jax.finetuning.run_stages", lambda run, *_: LoopResult(None, 1, signal.SIGTERM, None))
        assert sweep(wanted(1, 2.0), tmp_path / "grid", jax.devices()[:1]).signal == signal.SIGTERM
    (longer,) = sweep(wanted(1, 2.0), tmp_path / "grid", jax.devices()[:1]).outcomes
    assert longer.step == 2 * first.step
    (tmp_path / "grid" / "runs" / longer.name / "checkpoints").mkdir()  # as a kill before its deletion leaves it
    lines = (topics / "train.tsv").read_text().splitlines(keepends=True)
    monkeypatch.setattr("bert_jax.sweep.finetune", functools.partial(trained_on, topics, lines[:-4]))
    with pytest.raises(InputError, match=r"_seed0 and .*_seed1 were trained on different data; give another workdir"):
        sweep(wanted(2, 2.0), tmp_path / "grid", jax.devices()[:1])
    assert not (tmp_path / "grid" / "runs" / longer.name / "checkpoints").exists()


def trained_on(topics, lines, config, workdir, devices, **own):
    """Fine-tunes after the training file has been replaced."""
    whole = (topics / "train.tsv").read_text()
    (topics / "train.tsv").write_text("".join(lines))
    try:
        return finetune(config, workdir, devices, **own)
    finally:
        (topics / "train.tsv").write_text(whole)


def test_a_grid_with_nothing_to_evaluate_on_says_so(topics, start, tmp_path, capsys):
    (tmp_path / "topics").mkdir()
    for name in ("train.tsv", "test.tsv"):
        (tmp_path / "topics" / name).write_bytes((topics / name).read_bytes())
    one_run = grid(tmp_path / "topics", start, seeds=1, learning_rates="")
    task = dataclasses.replace(one_run.task, probe=ProbeConfig(features="last", kind="linear"))  # of little work
    config = dataclasses.replace(one_run, task=task, train=FinetuneTrainConfig(num_epochs=1.0))
    (outcome,) = sweep(config, tmp_path / "grid", jax.devices()[:1]).outcomes
    told = capsys.readouterr().err
    assert math.isnan(outcome.score) and outcome.step > 0 and not outcome.degenerate
    predictions = tmp_path / "grid" / "runs" / "rate0.005_seed0" / "predictions"
    assert f"rate0.005_seed0/finetuned, its predictions in {predictions}; there was nothing to evaluate on\n" in told
    assert "the best is none: there was nothing to evaluate on\n" in told
    assert "finite" not in told and predictions.exists()
    assert json.loads((tmp_path / "grid" / "sweep.json").read_text())["runs"][0]["score"] is None
    assert not (tmp_path / "grid" / "finetuned").exists()
