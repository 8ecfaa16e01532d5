# SPDX-License-Identifier: Apache-2.0
"""A grid of fine-tuning runs in one command: every seed with every learning rate, and a report of all."""

import dataclasses
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax

from bert_jax.checkpoints.states import find_damage
from bert_jax.devices.job import this_job
from bert_jax.devices.sharding import Devices
from bert_jax.errors import DivergedError, InputError, without_secrets
from bert_jax.finetuning import finetune
from bert_jax.settings.finetuning import FinetuneConfig, SweepConfig
from bert_jax.settings.rules import affecting, changed_keys, is_among, to_dict
from bert_jax.storage.places import AnyPath, Place, RemotePath, to_place
from bert_jax.storage.resolve import FINETUNED
from bert_jax.storage.urls import local_directory
from bert_jax.storage.writing import new_directory, write_json
from bert_jax.tasks.catalog import USUAL, Own
from bert_jax.tasks.prepare import completed
from bert_jax.tasks.results import FinetuneResult, read_results, table
from bert_jax.training.choices import as_begun, choose_precision
from bert_jax.training.workdir import check_workdir, common, locked, read_identity, settings_of


class Outcome(NamedTuple):
    """The result of one run of the grid."""

    name: str
    seed: int
    learning_rate: float
    # of the best evaluation; NaN if the run did not stay finite, or had nothing to evaluate on
    score: float
    step: int
    seconds: float
    degenerate: bool


class SweepResult(NamedTuple):
    """The result of the grid."""

    outcomes: list[Outcome]
    metric: str
    signal: int  # the signal that ended it early, or 0


def plan(config: FinetuneConfig) -> dict[str, FinetuneConfig]:
    """Returns the runs of the grid by name. A seed applies to the head, the dropout and the order of the data."""
    seeds = range(config.sweep.seeds) if config.sweep.seeds else [config.train.seed]
    runs = {}
    for rate in config.sweep.rates() or (config.optimizer.learning_rate,):
        for seed in seeds:
            data_seed = seed if config.sweep.seeds else config.data.seed
            shown = f"{rate:g}" if float(f"{rate:g}") == rate else repr(rate)
            runs[f"rate{shown}_seed{seed}"] = dataclasses.replace(
                config,
                optimizer=dataclasses.replace(config.optimizer, learning_rate=rate),
                train=dataclasses.replace(config.train, seed=seed),
                data=dataclasses.replace(config.data, seed=data_seed),
                sweep=SweepConfig(),
            )
    return runs


def sweep(
    config: FinetuneConfig, workdir: AnyPath, devices: Devices | None = None, own: Own = USUAL
) -> SweepResult:
    """Trains every run of the grid, reports them all, and keeps the model of the best in `finetuned/`.

    Runs are below `runs/`. When the command is given again, finished runs are not repeated; the grid may have grown.
    A run is degenerate if it is no better than a constant prediction, or if it diverged.
    Source: Mosbach et al. 2021, "On the Stability of Fine-tuning BERT".

    Raises: InputError as `finetune`.
    """
    workdir = to_place(workdir)
    config.validate()
    config = choose_precision(as_begun(config, workdir), (devices or jax.devices())[0])
    identity = {"dataset": None, "run": without_secrets(to_dict(config))}
    check_workdir(workdir, identity, config, ("sweep",))
    # Before any run: processes with other grids would wait for each other.
    this_job().check_same(common(workdir, identity))
    if config.task.name == "embeddings":  # whose finished runs are known by their settings
        config, _ = completed(config)
    runs = plan(config)
    with locked(workdir):
        results: dict[str, FinetuneResult] = {}
        for number, (name, one) in enumerate(runs.items(), 1):
            _say(f"run {number} of {len(runs)}: {name}")
            results[name] = _result_of(workdir / "runs" / name, one, devices, own)
            if signal := results[name].signal:
                return SweepResult([], results[name].metric, signal)
            # at once: the states of a whole grid would take many times the space of its models
            _delete_states(workdir / "runs" / name)
            _check_data(workdir / "runs" / next(iter(runs)), workdir / "runs" / name)
        outcomes = [_judge(name, runs[name], result) for name, result in results.items()]
        # A run that diverged has no metric; its setting may be empty, which leaves the choice to the task.
        metric = next(
            (result.metric for result in results.values() if result.metrics),
            next(iter(results.values())).metric,
        )
        finite = [outcome for outcome in outcomes if not math.isnan(outcome.score)]

        runs_as_json = [outcome._asdict() for outcome in outcomes]
        for shown in runs_as_json:
            if math.isnan(shown["score"]):  # JSON has no NaN
                shown["score"] = None

        def leave() -> None:
            write_json(workdir / "config.json", identity)
            write_json(workdir / "sweep.json", {"metric": metric, "runs": runs_as_json})
            if finite:
                best = max(finite, key=lambda outcome: outcome.score)
                _copy_model(workdir / "runs" / best.name / FINETUNED, workdir / FINETUNED)

        this_job().first_does("write what the grid came to", leave)
        for line in [
            *describe(outcomes, metric),
            *([f"its model is in {workdir / FINETUNED}"] if finite else []),
        ]:
            _say(line)
        return SweepResult(outcomes, metric, 0)


def _say(line: str) -> None:
    if this_job().is_first:
        print(line, file=sys.stderr, flush=True)


def _copy_model(source: Place, target: Place) -> None:
    """Copies a model in place of an older one. Raises: InputError if it is damaged; the older one stays then."""
    files = local_directory(source) if isinstance(source, RemotePath) else source
    problem = find_damage(files)
    if problem:
        raise InputError(
            f"{source}, the best model, is damaged: {problem}; delete {source.parent} to train it again"
        )
    with new_directory(target, replaces=lambda _: True) as temporary:
        shutil.copytree(files, temporary, dirs_exist_ok=True)


def _result_of(
    workdir: Place, config: FinetuneConfig, devices: Devices | None, own: Own
) -> FinetuneResult:
    """Returns the results of a run: those that it left if it has finished, else it is trained."""

    def read() -> FinetuneResult | None:
        result = read_results(workdir)
        if result is None:
            return None
        changed = changed_keys(settings_of(workdir, FinetuneConfig), to_dict(config.resolved()))
        return (
            result
            if all(is_among(name, affecting(FinetuneConfig, "work", "nothing")) for name in changed)
            else None
        )

    # The first process tells the others, so that none of them trains alone.
    if told := this_job().first_does("read the results of a run", read):
        return FinetuneResult(*told)
    try:
        return finetune(config, workdir, devices, task=own.task, head=own.head)
    except DivergedError as error:
        _say(f"{workdir.name} failed: {error}")
        return FinetuneResult({}, config.task.metric or "score", {}, 0, 0, 0.0)


def _delete_states(workdir: Place) -> None:
    if not this_job().is_first:
        return
    if isinstance(workdir, RemotePath):
        (workdir / "checkpoints").delete_all()
    else:
        shutil.rmtree(workdir / "checkpoints", ignore_errors=True)


def _check_data(first: Place, other: Place) -> None:
    """Raises: InputError, on every process, if two runs were trained on different data."""

    def compare() -> None:
        begun = [run for run in (first, other) if (run / "config.json").exists()]
        datasets = [read_identity(run, FinetuneConfig).get("dataset") for run in begun]
        if datasets and datasets[0] != datasets[-1]:
            raise InputError(
                f"{first} and {other} were trained on different data; give another workdir"
            )

    this_job().first_does("compare the data of the runs", compare)


def _judge(name: str, config: FinetuneConfig, result: FinetuneResult) -> Outcome:
    score = result.metrics.get(result.metric, math.nan)
    unmeasured = not result.metrics and result.step > 0  # there was nothing to evaluate on
    degenerate = not unmeasured and not score > result.constant.get(result.metric, -math.inf)
    rate = config.optimizer.learning_rate
    seed = config.train.seed
    return Outcome(name, seed, rate, score, result.step, round(result.seconds, 1), degenerate)


def describe(outcomes: Sequence[Outcome], metric: str) -> list[str]:
    """Returns the report of a grid: every run, and for each learning rate and for all the usual figures.

    Runs that did not stay finite are counted as degenerate and are in no figure.
    """
    rows = [["run", metric, "step", "seconds", ""]]
    for outcome in outcomes:
        mark = "degenerate" if outcome.degenerate else ""
        rows.append(
            [
                outcome.name,
                f"{outcome.score:.4f}",
                str(outcome.step),
                f"{outcome.seconds:.0f}",
                mark,
            ]
        )
    figures = [["", "runs", "mean", "deviation", "median", "best", "degenerate"]]
    rates = sorted({outcome.learning_rate for outcome in outcomes}, reverse=True)
    groups = [
        (f"{rate:g}", [run for run in outcomes if run.learning_rate == rate]) for rate in rates
    ]
    for name, group in [*(groups if len(groups) > 1 else []), ("all", list(outcomes))]:
        scores = [run.score for run in group if not math.isnan(run.score)] or [math.nan]
        deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
        values = (statistics.mean(scores), deviation, statistics.median(scores), max(scores))
        figures.append(
            [
                name,
                str(len(group)),
                *(f"{value:.4f}" for value in values),
                str(sum(run.degenerate for run in group)),
            ]
        )
    finite = [run for run in outcomes if not math.isnan(run.score)]
    why = (
        "no run stayed finite"
        if all(run.degenerate for run in outcomes)
        else "there was nothing to evaluate on"
    )
    best = max(finite, key=lambda run: run.score).name if finite else f"none: {why}"
    return [*table(rows), "", *table(figures), "", f"the best is {best}"]
