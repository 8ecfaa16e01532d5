# SPDX-License-Identifier: Apache-2.0
"""The life of a pod job on one machine: the commands of docs/tutorials/tpu_pod.md, a server in place of the bucket.

PYTHONPATH=tests python -m benchmarks.pod_life --text='text/*.txt.gz' --output=DIR

Several processes pre-train from Parquet into the bucket, are killed twice, and go on as half as many. The model is
fine-tuned from the bucket and converted. An undisturbed run on the local disk is the comparison. Writes
DIR/pod_life.json, prints a table, and leaves the output of every command in DIR.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from absl import flags
from buckets import Server, free_port, serving, variables  # pyright: ignore[reportMissingImports]

import bert_jax
from bert_jax.batch import pad_rows
from bert_jax.data.sources.corpus import iterate_documents
from bert_jax.errors import InputError
from bert_jax.model.objective import pretraining_forward
from bert_jax.tools import cli
from bert_jax.training.report import read_metrics

_TEXT = flags.DEFINE_string("text", "python-docs", "text files, as prepare_corpus takes them; they become Parquet")
_DOCUMENTS = flags.DEFINE_integer("documents", 4000, "documents to take at most", lower_bound=10)
_OUTPUT = flags.DEFINE_string("output", "", "a new directory for outputs and the record")
_PROCESSES = flags.DEFINE_integer("num_processes", 4, "of the job, a device each", lower_bound=2)
_STEPS = flags.DEFINE_integer("num_steps", 240, "of the run", lower_bound=48)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "rows of the global batch", lower_bound=4)
_TASK = flags.DEFINE_string("task", "", "NAME=SOURCE of the task to fine-tune on; empty is a task of Python's docs")
_TRANSFORMERS = flags.DEFINE_string("transformers", "", "a Python with transformers and torch, to load the model by")

_TRANSFORMERS_PROGRAM = """
import sys, numpy, torch, transformers
model = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[1]).eval()
ids = torch.tensor(numpy.load(sys.argv[2]))
with torch.no_grad():
    numpy.save(sys.argv[3], model(input_ids=ids).logits.numpy())
"""


class Life:
    """The commands of one life, with their seconds."""

    def __init__(self, output: Path, server: Server) -> None:
        self.output, self.server = output, server
        self.bucket = server.make_bucket("pod")
        self.environment = {
            **os.environ,
            **server.environment,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "BERT_JAX_CACHE": str(output / "cache"),
        }
        self.seconds: dict[str, float] = {}

    def call(self, name: str, *arguments: str) -> str:
        """Runs one command to its end and returns what it printed."""
        started = time.monotonic()
        command = [sys.executable, "-m", "bert_jax", *arguments]
        done = subprocess.run(command, env=self.environment, text=True, capture_output=True)
        (self.output / f"{name}.log").write_text(" ".join(arguments) + "\n" + done.stdout + done.stderr)
        if done.returncode:
            raise InputError(f"{' '.join(arguments)} ended with {done.returncode}; see {self.output / name}.log")
        self.seconds[name] = time.monotonic() - started
        return done.stdout + done.stderr

    def train(self, name: str, workdir: str, count: int, kill_at: int = 0, victims: Sequence[int] = ()) -> list[int]:
        """Runs the job on `count` processes to its end, or kills some once they have taken a step; returns statuses."""
        started, port = time.monotonic(), free_port()
        data = f"{self.bucket}/data128"
        command = [
            *(sys.executable, "-m", "bert_jax", "train", "--config=pretrain:tiny", f"--workdir={workdir}"),
            *(f"--config.data.path={data}", f"--config.data.batch_size={_BATCH_SIZE.value}"),
            "--config.data.stream=on",
            f"--config.train.num_steps={_STEPS.value}",
            f"--config.optimizer.warmup_steps={_STEPS.value // 10}",
            f"--config.checkpoint.every_steps={_STEPS.value // 8}",
            f"--config.checkpoint.keep_every={_STEPS.value // 2}",
            f"--config.eval.every_steps={_STEPS.value // 4}",
            *("--config.report.every_steps=1", "--config.report.progress=False"),
        ]
        processes, logs = [], []
        for number in range(count):
            joining = [f"--coordinator=localhost:{port}", f"--num_processes={count}", f"--process_id={number}"]
            logs.append(self.output / f"{name}-{number}.log")
            environment = self.environment | {"BERT_JAX_CACHE": str(self.output / f"cache-{number}")}
            with logs[-1].open("w") as log:
                arguments = command + (joining if count > 1 else ["--distributed=off"])
                processes.append(subprocess.Popen(arguments, env=environment, stdout=log, stderr=log))
        while kill_at and last_step(logs[0]) < kill_at and all(process.poll() is None for process in processes):
            time.sleep(0.1)
        for number in victims:
            processes[number].send_signal(signal.SIGKILL)
        codes = [process.wait() for process in processes]
        if any(code not in ((0,) if not kill_at else (-9, 75, 134, -6)) for code in codes):
            raise InputError(f"the processes of {name} ended with {codes}; see {self.output}/{name}-*.log")
        self.seconds[name] = time.monotonic() - started
        return codes

    def size(self, url: str) -> int:
        """Returns the bytes of all objects below a URL."""
        return sum(len(self.server.read(f"{url}/{name}")) for name in self.server.names(url))


def last_step(log: Path) -> int:
    """Returns the last step that a log tells of."""
    return max((int(step) for step in re.findall(r"^train +(\d+)/", log.read_text(), re.M)), default=0)


def losses(workdir: Path) -> dict[int, float]:
    """Returns the loss of every step."""
    return {line["step"]: line["loss"] for line in read_metrics(workdir / "metrics.jsonl") if line["kind"] == "train"}


def main() -> None:
    """Lives the life, and writes its record."""
    if not _OUTPUT.value or Path(_OUTPUT.value).exists():
        raise InputError(f"--output={_OUTPUT.value}: give a new directory")
    output = Path(_OUTPUT.value).resolve()
    output.mkdir(parents=True)
    with serving() as server:
        life = Life(output, server)
        record = {"documents": prepare(life), **pretrain(life), **use(life)}
    record["seconds"] = {name: round(seconds, 1) for name, seconds in life.seconds.items()}
    (output / "pod_life.json").write_text(json.dumps(record, indent=1))
    for name, value in record.items():
        print(f"| {name} | {value} |")


def prepare(life: Life) -> int:
    """Makes Parquet of the text, and of that a vocabulary and data in the bucket; returns the number of documents."""
    texts = [" ".join(lines) for _, lines in zip(range(_DOCUMENTS.value), iterate_documents(_TEXT.value))]
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    for part in range(2):
        rows = table.slice(part * len(texts) // 2, len(texts) // 2)
        pyarrow.parquet.write_table(rows, life.output / f"text-{part}.parquet", row_group_size=256)
    source = f"--input={life.output}/text-*.parquet"
    life.call("build_vocab", "build_vocab", source, f"--output={life.bucket}/vocab", "--vocab_size=4096")
    tokenizer, data = f"--tokenizer={life.bucket}/vocab", f"--output={life.bucket}/data128"
    life.call("prepare_corpus", "prepare_corpus", source, tokenizer, data, "--max_seq_length=128", "--duplicates=1",
              "--holdout_rate=0.02", "--shards=8")  # fmt: skip
    return len(texts)


def pretrain(life: Life) -> dict[str, Any]:
    """Trains undisturbed on the disk, and into the bucket with two kills and half of the processes in the end."""
    many, steps = _PROCESSES.value, _STEPS.value
    whole, bucket = life.output / "whole", f"{life.bucket}/runs/base"
    life.train("undisturbed", str(whole), many)
    statuses = [
        life.train("killed one", bucket, many, kill_at=3 * steps // 8 + 2, victims=[many - 1]),
        life.train("killed all", bucket, many, kill_at=5 * steps // 8 + 2, victims=range(many)),
    ]
    life.train("resumed by half", bucket, many // 2)
    ours = life.output / "bucket"
    ours.mkdir()
    (ours / "metrics.jsonl").write_bytes(life.server.read(f"{bucket}/metrics.jsonl"))
    before, after = losses(whole), losses(ours)
    differences = {step: abs(before[step] - after[step]) for step in before}
    same = next((step for step in sorted(before) if differences[step]), steps + 1) - 1
    heldout = [
        [line["loss"] for line in read_metrics(place / "metrics.jsonl") if line["kind"] == "eval"][-1]
        for place in (whole, ours)
    ]
    log = (life.output / "resumed by half-0.log").read_text()
    return {
        "statuses after the kills": statuses,
        "steps": sorted(after) == sorted(before) and len(after),
        "first steps with the same loss, bit for bit": same,
        "largest difference of a loss": max(differences.values()),
        "held-out loss, undisturbed and in the bucket": heldout,
        "goodput": next(line for line in log.splitlines() if line.startswith("goodput")),
        "bytes of the data": life.size(f"{life.bucket}/data128"),
        "bytes of a checkpoint": life.size(f"{bucket}/checkpoints/{steps:08d}"),
        "bytes of the model": life.size(f"{bucket}/pretrained"),
        "revisions": sorted({name.split("/")[0] for name in life.server.names(f"{bucket}/revisions")}),
    }


def use(life: Life) -> dict[str, Any]:
    """Fine-tunes from the bucket into it, converts, and compares with transformers if there is one."""
    start = f"{life.bucket}/runs/base"
    name, _, source = _TASK.value.partition("=")
    if not name:
        life.call("make_docs_task", "make_docs_task", f"--output={life.output / 'areas'}")
        name, source = "classification", str(life.output / "areas")
    life.call("finetune", "finetune", f"--config=finetune:{name}", f"--config.data.source={source}",
              f"--config.init_checkpoint={start}", f"--workdir={life.bucket}/runs/task", "--config.train.num_epochs=1",
              "--config.optimizer.learning_rate=5e-4", "--config.task.max_seq_length=64",
              "--distributed=off")  # fmt: skip
    results = json.loads(life.server.read(f"{life.bucket}/runs/task/results.json"))
    life.call("convert", "convert_checkpoint", f"--input={start}", "--to=hf", f"--output={life.bucket}/hf", "--verify")
    found = {"fine-tuned": {results["metric"]: results["metrics"][results["metric"]], "constant": results["constant"]}}
    if not _TRANSFORMERS.value:
        return found
    local = life.output / "hf"
    for each in life.server.names(f"{life.bucket}/hf"):
        (local / each).parent.mkdir(parents=True, exist_ok=True)
        (local / each).write_bytes(life.server.read(f"{life.bucket}/hf/{each}"))
    np.save(life.output / "ids.npy", np.random.default_rng(0).integers(5, 4000, (4, 64)))
    files = [str(life.output / name) for name in ("ids.npy", "theirs.npy")]
    subprocess.run([_TRANSFORMERS.value, "-c", _TRANSFORMERS_PROGRAM, str(local), *files], check=True)
    ids, theirs = (np.load(file) for file in files)
    with variables(life.server.environment):
        bert = bert_jax.load_pretrained(start)
    return found | {"largest difference of logits to transformers": float(np.abs(logits(bert, ids) - theirs).max())}


def logits(bert: bert_jax.Pretrained, ids: np.ndarray) -> np.ndarray:
    """Returns the logits [B, L, V] of every position of rows of token ids [B, L]."""
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    batch = pad_rows(list(ids), ids.shape[1])._replace(mlm_positions=positions)
    output = pretraining_forward(bert.config, bert.params, batch)
    return np.asarray(output.mlm_logits)[..., : bert.config.vocab_size]


if __name__ == "__main__":
    cli.run(main)
