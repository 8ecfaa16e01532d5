# SPDX-License-Identifier: Apache-2.0
"""The jobs of each stage of `benchmarks.gpu`: what is run, at which sizes, and what it leaves.

A unit is one measurement in a directory of its own, finished when its last output exists. Those of stage 3 are made by
`benchmarks.ablations`, which has a queue of its own.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.jobs import Job, Unit

BENCH, TESTS, PROFILE, ARCHIVE = "bench.json", "tests.xml", "profile.json", "profile.tar.xz"
ATTENTIONS = ("plain", "fused")
MAX_PER_ROW = 8  # sequences in a packed row
# torch compiles for the attention that it meets first, so there is one compiled mode.
PEERS = "eager:bfloat16:cudnn,eager:bfloat16:flash,eager:bfloat16,compile:bfloat16:cudnn"
# Names of minimal pairs -> where they are in the kit's data, and their baselines.
PAIRS = {
    "blimp": ("pairs/blimp.jsonl.gz", "pairs/baselines/blimp/baselines.tsv"),
    "zorro": ("pairs/zorro", "pairs/baselines/zorro/roberta_base.tsv"),
}
# Tasks of ablations.TASKS -> a file that tells whether the kit has its data.
TASKS = {
    "sst2": "tasks/glue/SST-2/train.tsv", "mrpc": "tasks/glue/MRPC/train.tsv", "cola": "tasks/glue/CoLA/train.tsv",
    "rte": "tasks/glue/RTE/train.tsv", "stsb": "tasks/glue/STS-B/train.tsv",
    "ner": "tasks/wnut17/wnut17train.conll", "squad1": "tasks/squad/dev-v1.1.json",
}  # fmt: skip


class Scale(NamedTuple):
    """How large everything is; a rehearsal is tiny."""

    rows: Mapping[tuple[str, int], int]  # (size, tokens of a row) -> rows of a batch
    packed_length: int
    steps: int  # of a round
    rounds: int
    vocab_size: int  # of random rows
    size: str  # of stage 3, and of the rows that are measured once
    batch_size: int  # of stage 3
    epochs: float
    seeds: int
    limit: int  # minimal pairs of each paradigm; 0 is all
    task_epochs: float
    save_every: int  # steps of stage 3 between checkpoints, beside the one at a stop

    @property
    def lengths(self) -> list[int]:
        return sorted({length for _, length in self.rows})

    @property
    def sizes(self) -> list[str]:
        return list(dict.fromkeys(size for size, _ in self.rows))


REAL = Scale(
    rows={("base", 128): 256, ("base", 512): 64, ("large", 128): 128, ("large", 512): 32},
    packed_length=512, steps=20, rounds=5, vocab_size=30_522, size="base", batch_size=256, epochs=10, seeds=3, limit=0,
    task_epochs=3, save_every=2_000,
)  # fmt: skip
REHEARSAL = Scale(
    rows={("tiny", 64): 4},
    packed_length=256, steps=1, rounds=2, vocab_size=500, size="tiny", batch_size=16, epochs=0.35, seeds=2, limit=20,
    task_epochs=0.5, save_every=20,
)  # fmt: skip


class Row(NamedTuple):
    """A row of a table: its name, and the flags of benchmarks.bench that measure it."""

    name: str
    flags: tuple[str, ...]


def table_rows(scale: Scale) -> Iterator[Row]:
    """Yields the rows of stage 1 on random rows of tokens: sizes, lengths, both attentions; then what is asked once."""
    for size, length in scale.rows:
        for attention in ATTENTIONS:
            yield table_row(scale, size, length, attention)
    size, longest = scale.size, scale.lengths[-1]
    yield table_row(scale, size, longest, "plain", "scan", "--config.model.unroll=1")
    yield table_row(scale, size, longest, "fused", "residual", "--config.model.residual=fused")
    yield table_row(scale, size, scale.lengths[0], "plain", "float32", "--precisions=float32")


def table_row(scale: Scale, size: str, length: int, attention: str, more: str = "", *settings: str) -> Row:
    """Returns a row of the table; `more` is the end of its name, for `settings` that stand after the usual ones."""
    name = "-".join(filter(None, (size, str(length), attention, more)))
    data = (f"--batch_size={scale.rows[size, length]}", f"--length={length}", f"--vocab_size={scale.vocab_size}")
    return Row(name, (*model_flags(scale, size, attention), *predictions(length), *data, *settings))


def model_flags(scale: Scale, size: str, attention: str) -> tuple[str, ...]:
    """Returns the flags that all rows of a size share."""
    return (
        "--what=train", f"--config=configs/pretrain.py:{size}", f"--config.model.attention={attention}",
        "--precisions=bfloat16", f"--steps={scale.steps}", f"--rounds={scale.rounds}",
    )  # fmt: skip


def predictions(length: int) -> tuple[str, ...]:
    """Returns the setting of masked tokens of a row: 20 of 128 and 80 of 512, as the paper."""
    return (f"--config.masking.max_predictions={length * 5 // 32}",)


def bench_job(directory: Path, flags: Sequence[str]) -> Job:
    """Returns the job that measures a row."""
    output = directory / BENCH
    return Job("bench", (sys.executable, "-m", "benchmarks.bench", *flags, f"--output={output}"), output)


def stage1(work: Path, scale: Scale) -> Iterator[Unit]:
    """Yields the GPU's tests, the table of step times, and a profile."""
    tests, profile = work / "tests", work / "profile"
    # Other tests compile with a low optimization level, as a rehearsal does; and one test starts processes of its own,
    # which need memory of the GPU.
    level = 0 if scale is REHEARSAL else 3
    command = ("env", f"XLA_FLAGS=--xla_backend_optimization_level={level}", "XLA_PYTHON_CLIENT_PREALLOCATE=false")
    command += ("PYTEST_DISABLE_PLUGIN_AUTOLOAD=1",)  # plugins of that machine may warn, and warnings are errors
    command += (sys.executable, "-m", "pytest", "-m", "gpu", "tests/devices/test_gpu.py", "-p", "no:cacheprovider")
    yield Unit("tests", 0, tests, (Job("tests", (*command, f"--junitxml={tests / TESTS}"), tests / TESTS),))
    for row in table_rows(scale):
        yield Unit(row.name, 0, work / row.name, (bench_job(work / row.name, row.flags),))
    data, length = work.parent / "data" / "pretrain", scale.packed_length
    size, batch = scale.size, scale.batch_size
    name = f"{size}-data"
    flags = (*model_flags(scale, size, "plain"), f"--data={data}", f"--batch_size={batch}")
    yield Unit(name, 0, work / name, (bench_job(work / name, flags),))
    packed = work.parent / f"packed{length}"
    pack = (sys.executable, "-m", "bert_jax.tools.pack_dataset", f"--data={data}", f"--output={packed}")
    pack += (f"--max_per_row={MAX_PER_ROW}", f"--row_length={length}")
    for attention in ATTENTIONS:
        name = f"{size}-{length}-packed-{attention}"
        flags = (*model_flags(scale, size, attention), f"--data={packed}", f"--batch_size={max(2, batch // 4)}")
        jobs = (Job("pack", pack, packed / "manifest.json"), bench_job(work / name, flags))
        yield Unit(name, 0, work / name, jobs)
    yield profile_unit(profile, data, scale)


def profile_unit(directory: Path, data: Path, scale: Scale) -> Unit:
    """Returns the profile of five steps of training."""
    run = directory / "run"
    train = (
        *(sys.executable, "train.py", f"--config=configs/pretrain.py:{scale.size}", f"--workdir={run}"),
        *(f"--config.data.path={data}", f"--config.data.batch_size={scale.batch_size}"),
        *("--config.model.compute_dtype=bfloat16", "--config.train.num_steps=20", "--config.report.every_steps=5"),
        *("--config.report.profile_steps=10:15", "--config.report.progress=False", "--config.report.tensorboard=False"),
        *("--config.optimizer.warmup_steps=10", "--config.eval.every_steps=0", "--config.checkpoint.every_steps=0"),
    )
    output = directory / PROFILE
    read = (sys.executable, "-m", "benchmarks.gpu_profile", f"--workdir={run}", f"--output={output}")
    read += (f"--archive={directory / ARCHIVE}",)
    return Unit("profile", 0, directory, (Job("train", train, run / "pretrained"), Job("read", read, output)))


def stage2(
    work: Path, scale: Scale, attentions: Mapping[tuple[str, int], str], peer_python: str = sys.executable
) -> Iterator[Unit]:
    """Yields each size and length beside torch; `attentions` are ours, "plain" where nothing is said."""
    for size, length in scale.rows:
        row = table_row(scale, size, length, attentions.get((size, length), "plain"), "torch")
        flags = (*row.flags, f"--compare={PEERS}", f"--peer_python={peer_python}")
        name = f"{size}-{length}-torch"
        yield Unit(name, 0, work / name, (bench_job(work / name, flags),))


def faster_attentions(records: Mapping[str, Any], scale: Scale) -> dict[tuple[str, int], str]:
    """Returns for each size and length the attention whose step took less time in the records of stage 1."""
    found = {}
    for size, length in scale.rows:
        times = {}
        for attention in ATTENTIONS:
            record = records.get(f"{size}-{length}-{attention}")
            if record:
                times[attention] = record["figures"][0]["step_seconds"]["median"]
        if times:
            found[size, length] = min(times, key=times.__getitem__)
    return found


def stage3(work: Path, data: Path, scale: Scale, tokens: int, rate: float, more: Sequence[str]) -> list[str]:
    """Returns the command of the queue that pre-trains, scores and fine-tunes, seed after seed.

    Args:
      work: where its units go.
      data: the kit's data.
      scale: sizes and lengths.
      tokens: that the training split has.
      rate: the learning rate of pre-training.
      more: further flags of benchmarks.ablations.
    """
    pairs = [f"{name}={data / path}={data / base}" for name, (path, base) in PAIRS.items() if (data / path).exists()]
    tasks = [name for name, path in TASKS.items() if (data / path).exists()]
    return [
        *(sys.executable, "-m", "benchmarks.ablations", "--runs=table6", f"--root={work / 'runs'}"),
        *(f"--sizes={scale.size}", f"--seeds={scale.seeds}", f"--data={data / 'pretrain'}", "--feature_task="),
        *(f"--tokens={max(1.0, tokens * scale.epochs):.0f}", f"--batch_size={scale.batch_size}"),
        *(f"--learning_rate={rate:g}", f"--save_every={scale.save_every}", f"--limit={scale.limit}"),
        *(f"--tasks={','.join(tasks)}", f"--task_data={data / 'tasks'}", f"--task_epochs={scale.task_epochs}"),
        *("--task_learning_rate=5e-5", f"--pairs={','.join(pairs)}", f"--records={work / 'records'}"),
        *("--set=--config.model.compute_dtype=bfloat16", "--set_task=--config.model.compute_dtype=bfloat16"),
        *more,
    ]
