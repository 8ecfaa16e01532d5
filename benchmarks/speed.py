# SPDX-License-Identifier: Apache-2.0
"""Measured speed, for docs/benchmarks.md: a queue of `benchmarks.bench`. Starting it again resumes it.

    python -m benchmarks.speed --root=speed --task_data=DIR --peer_python=peers/bin/python
    python -m benchmarks.speed ... --only='infer*'    # some of them
    python -m benchmarks.speed ... --commands         # what would run

`--task_data` has `glue/SST-2`, `glue/MRPC`, `glue/QQP`, `wikipedia_en/wiki_en-00.txt.gz` and further ones, and
`vocab/bert-base-uncased-vocab.txt`. Leave the machine alone meanwhile. `benchmarks.results draw` makes the tables of
docs/benchmarks.md of the record.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from benchmarks.jobs import Job, Unit
from benchmarks.queues import ROOT, run_queue
from bert_jax.errors import InputError
from bert_jax.tools import cli

TEXT, VOCABULARY = "{data}/wikipedia_en/wiki_en-0[0-3].txt.gz", "{data}/vocab/bert-base-uncased-vocab.txt"
TASKS = {"sst2": "SST-2", "mrpc": "MRPC", "qqp": "QQP"}
TORCH = "eager:float32,eager:bfloat16"
UNPADDED = "eager:bfloat16:unpadded"

TASK_DATA = flags.DEFINE_string("task_data", "", "a directory with glue, wikipedia_en and vocab")
PEER_PYTHON = flags.DEFINE_string("peer_python", "", "a Python that has benchmarks/peers/requirements.txt")


class Measurement(NamedTuple):
    """What is measured: the arguments of `benchmarks.bench`, with {data} for the directory of data."""

    name: str
    arguments: tuple[str, ...]
    compare: str = ""
    rows: bool = False  # whether it reads the rows that the text is prepared to, as {rows}

    def command(self, data: str, rows: Path) -> tuple[str, ...]:
        """The command, without its output and the peers' Python."""
        arguments = tuple(argument.format(data=data, rows=rows) for argument in self.arguments)
        compare = (f"--compare={self.compare}",) if self.compare else ()
        return (sys.executable, "-m", "benchmarks.bench", *arguments, *compare)


def _of_task(what: str, size: str, task: str, compare: str) -> Measurement:
    arguments = (
        *(f"--what={what}", f"--config=configs/pretrain.py:{size}", f"--task={task}"),
        *(f"--data={{data}}/glue/{TASKS[task]}", f"--tokenizer={VOCABULARY}", "--batch_size=32", "--steps=4"),
        "--precisions=float32,bfloat16",
    )
    return Measurement(f"{what}_{size}_{task}", arguments, compare)


def _of_training(size: str, rows: int, steps: int) -> Measurement:
    arguments = (
        *("--what=train", f"--config=configs/pretrain.py:{size}", f"--config.data.batch_size={rows}"),
        *(f"--steps={steps}", "--precisions=float32,bfloat16"),
    )
    return Measurement(f"train_{size}", arguments, TORCH)


MEASUREMENTS = (
    *(_of_task("finetune", "base", task, f"{TORCH},{UNPADDED}") for task in TASKS),
    *(_of_task("infer", "base", task, f"{TORCH},{UNPADDED},onnx") for task in TASKS),
    _of_task("finetune", "small", "sst2", f"{TORCH},{UNPADDED}"),
    _of_task("infer", "small", "sst2", f"{TORCH},{UNPADDED},onnx"),
    _of_training("base", 8, 1),
    _of_training("tiny", 32, 4),
    Measurement("prepare", ("--what=prepare", f"--input={TEXT}", f"--tokenizer={VOCABULARY}")),
    Measurement("tokenize", ("--what=tokenize", f"--input={TEXT}", f"--tokenizer={VOCABULARY}")),
    Measurement("loader", ("--what=loader", "--data={rows}"), rows=True),
)


def unit_of(measurement: Measurement, root: Path, data: str, peer_python: str) -> Unit:
    """Returns the unit of a measurement: rows of text if it needs them, and the file with its figures."""
    directory, rows = root / measurement.name, root / "rows"
    jobs = []
    if measurement.rows:
        prepare = (sys.executable, "-m", "bert_jax.tools.prepare_corpus", f"--input={TEXT.format(data=data)}")
        prepare += (f"--tokenizer={VOCABULARY.format(data=data)}", f"--output={rows}", "--max_seq_length=128")
        jobs.append(Job("rows", (*prepare, "--duplicates=1"), rows / "manifest.json"))
    output = directory / "bench.json"
    command = (*measurement.command(data, rows), f"--output={output}")
    if measurement.compare:
        command += (f"--peer_python={peer_python}",)
    return Unit(measurement.name, 0, directory, (*jobs, Job("bench", command, output)))


def read_measurement(output: Path, data: str, root: Path) -> dict[str, Any]:
    """Returns the record of a measurement. Directories of this machine are left out of its command."""
    return json.loads(output.read_text(encoding="utf-8").replace(f"{data}/", "").replace(f"{root}/", ""))


def main() -> int:
    """Runs the measurements that wait; returns 1 if one failed."""
    data, root = TASK_DATA.value, Path(ROOT.value)
    if not data or not PEER_PYTHON.value:
        raise InputError("--task_data and --peer_python are needed: the data, and the Python of the peers")
    units = [unit_of(each, root, data, PEER_PYTHON.value) for each in MEASUREMENTS]
    return run_queue(units, lambda _, output: read_measurement(output, data, root), "speed")


if __name__ == "__main__":
    cli.run(main)
