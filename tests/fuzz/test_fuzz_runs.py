# SPDX-License-Identifier: Apache-2.0
"""Damaged records of runs: read, or refused in one line."""

from pathlib import Path

from builders import tiny_run
from fuzzing import Reader, make_tests

from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.settings.rules import to_dict
from bert_jax.storage.writing import write_json
from bert_jax.tasks.results import FinetuneResult, read_results
from bert_jax.training.report import Reporter, read_metrics
from bert_jax.training.shown import describe
from bert_jax.training.workdir import check_workdir

IDENTITY = {"format": 1, "dataset": "0" * 64, "later_datasets": []}


def make_metrics(directory: Path) -> None:
    with Reporter(directory, 20, progress=False, tensorboard=False) as reporter:
        for step in range(2, 20, 2):
            reporter.log(
                step, "eval" if step % 4 == 0 else "train", {"loss": 3.5 - step / 10, "grad_norm": float("nan")}
            )


def use_metrics(path: Path) -> None:
    """Reads the metrics as a summary does, and as a run that resumes."""
    for record in read_metrics(path / "metrics.jsonl"):
        assert isinstance(record["step"], int) and record["kind"] in ("train", "eval")
        describe({name: value for name, value in record.items() if name not in ("step", "kind", "time")})
    whole = (path / "metrics.jsonl").read_bytes()
    try:
        Reporter(path, 20, 10, progress=False, tensorboard=False).close()
    finally:
        (path / "metrics.jsonl").write_bytes(whole)


def make_run(kind: type):
    def make(directory: Path) -> None:
        config = tiny_run("data") if kind is PretrainConfig else kind()
        write_json(directory / "config.json", IDENTITY | {"run": to_dict(config)})

    return make


def use_run(kind: type):
    config = tiny_run("data") if kind is PretrainConfig else kind()
    identity = IDENTITY | {"run": to_dict(config)}

    def read(path: Path) -> None:
        check_workdir(path, identity, config)

    return read


def make_results(directory: Path) -> None:
    result = FinetuneResult({"accuracy": 0.5, "loss": 0.25}, "accuracy", {"accuracy": 0.5}, 7, 0, 1.5)
    write_json(directory / "results.json", {"task": "sst2"} | result._asdict())


READERS = [
    Reader("metrics", make_metrics, use_metrics, ("metrics.jsonl",), 500),
    Reader("pretrain-config", make_run(PretrainConfig), use_run(PretrainConfig), ("config.json",), 400),
    Reader("finetune-config", make_run(FinetuneConfig), use_run(FinetuneConfig), ("config.json",), 300),
    Reader("results", make_results, read_results, ("results.json",), 200),
]

test_some_damage, test_much_damage = make_tests(READERS)
