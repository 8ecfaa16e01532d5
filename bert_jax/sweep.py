# SPDX-License-Identifier: Apache-2.0
"""A grid of fine-tuning runs in one command: every seed with every learning rate, and what they come to."""

import dataclasses
from typing import NamedTuple

from bert_jax.finetune_config import FinetuneConfig, SweepConfig


class Run(NamedTuple):
    """One point of the grid."""

    name: str
    config: FinetuneConfig


class Outcome(NamedTuple):
    """What a run came to."""

    name: str
    seed: int
    learning_rate: float
    score: float
    step: int
    seconds: float
    degenerate: bool


class SweepResult(NamedTuple):
    """What the grid came to."""

    outcomes: list[Outcome]
    metric: str
    signal: int  # the signal that ended it early, or 0


def plan(config: FinetuneConfig) -> list[Run]:
    """Returns the runs of the grid: for each learning rate, each seed; a seed is that of head, dropout and order."""
    seeds = range(config.sweep.seeds) if config.sweep.seeds else [config.train.seed]
    rates = config.sweep.rates() or (config.optimizer.learning_rate,)
    runs = []
    for rate in rates:
        for seed in seeds:
            data_seed = seed if config.sweep.seeds else config.data.seed
            one = dataclasses.replace(
                config,
                optimizer=dataclasses.replace(config.optimizer, learning_rate=rate),
                train=dataclasses.replace(config.train, seed=seed),
                data=dataclasses.replace(config.data, seed=data_seed),
                sweep=SweepConfig(),
            )
            runs.append(Run(f"rate{rate:g}_seed{seed}", one))
    return runs


def run(config: FinetuneConfig, workdir: Path, devices: Sequence[Any] | None = None) -> SweepResult:
    """Trains every run of the grid, reports them all, and keeps the model of the best in `finetuned/`.

    Runs are below `runs/`; one that has finished is not trained again when the command is given again. A run is named
    degenerate if it is no better than the same answer to everything, or did not stay finite. Source: Mosbach et al.
    2021, "On the Stability of Fine-tuning BERT".

    Raises: InputError as `finetune.run`.
    """
    config.validate()
    identity = {"dataset": None, "run": to_dict(config)}
    check_workdir(workdir, identity, FinetuneConfig, (*FINETUNE_RESUMABLE_CHANGES, "sweep"))
    runs = plan(config)
    if config.sweep.together:
        results = together.train(config, runs, workdir, devices)
    else:
        results = []
        for one in runs:
            result = _finished(workdir, one) or _train(workdir, one, identity, devices)
            if result.signal:
                return SweepResult([], result.metric, result.signal)
            results.append(result)
    outcomes = [judge(one, result) for one, result in zip(runs, results)]
    best = max(outcomes, key=lambda outcome: outcome.score if not math.isnan(outcome.score) else -math.inf)
    shutil.rmtree(workdir / FINETUNED, ignore_errors=True)
    if (kept := workdir / "runs" / best.name / FINETUNED).is_dir():
        shutil.copytree(kept, workdir / FINETUNED)
    metric = results[0].metric
    write_json(workdir / "sweep.json", {"metric": metric, "runs": [outcome._asdict() for outcome in outcomes]})
    for line in describe(outcomes, metric, best):
        print(line, file=sys.stderr, flush=True)
    return SweepResult(outcomes, metric, 0)
