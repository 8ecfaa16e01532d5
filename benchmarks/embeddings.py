# SPDX-License-Identifier: Apache-2.0
"""Embeddings beside sentence-transformers: both train from one start on the same pairs, and embed the same texts.

    python -m venv peers && peers/bin/pip install 'sentence-transformers[train]==6.2.0' onnx onnxruntime onnxscript
    python -m benchmarks.embeddings --start=MINILM --stsb=STS-B --sick=SICK --squad=dev-v1.1.json --output=DIR \
        --peer_python=peers/bin/python

Learnt are every second pair of STS-B and SICK, which are graded (CoSENT, at most 64 tokens a text), and every third
question of the first 28 articles of SQuAD with its paragraph (InfoNCE, 128 tokens); the texts of its other articles are
searched. One epoch in float32 with dropout, batches of 64 pairs, temperature 0.05 (there a scale of 20), AdamW without
weight decay, a tenth of the steps to warm up, and linear decay. Its batches of SQuAD have no text twice; in ours equal
texts are not negatives of each other. Steps that compile, and its first, are not timed. One function scores them all.

DIR/SIDE/seedN/evaluations has what was measured, as `tables --collect` reads it. A run that is there is not made again,
so the same command goes on where it was ended.
"""

import contextlib
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

import bert_jax
from benchmarks import tables, timing
from benchmarks.peer_workers import WORKER, Peers, ask
from bert_jax.devices.allocator import reuse_freed_memory
from bert_jax.settings.finetuning import FinetuneConfig, TaskConfig
from bert_jax.settings.rules import from_dict
from bert_jax.storage.writing import write_json
from bert_jax.tasks.embeddings.read import TextsExample, read_texts
from bert_jax.tasks.embeddings.task import Embedded, EmbeddingTask
from bert_jax.tools import cli
from bert_jax.training.report import METRICS_FILE, read_metrics

START = flags.DEFINE_string("start", None, "the model that both start from", required=True)
STSB, SICK, SQUAD = (
    flags.DEFINE_string(name, "", "data; without, left out") for name in ("stsb", "sick", "squad")
)
OUTPUT = flags.DEFINE_string("output", None, "directory of what is measured", required=True)
PEER = flags.DEFINE_string(
    "peer_python", "", "a Python with sentence-transformers; without it, ours alone"
)
SEEDS = flags.DEFINE_integer("seeds", 3, "runs of each side and task", lower_bound=1)
LIMIT = flags.DEFINE_integer("limit", 10**6, "pairs of a data set, to try it", lower_bound=2)
RATE = flags.DEFINE_float(
    "learning_rate", 2e-5, "of both; a small model needs more", lower_bound=0.0
)
ROUNDS = flags.DEFINE_integer("rounds", 5, "turns of embedding 1,000 texts", lower_bound=1)

LENGTHS = {"graded": 64, "squad": 128}
TRAINING = {"epochs": 1, "batch_size": 64, "warmup_rate": 0.1, "temperature": 0.05}
TASK = TaskConfig(name="embeddings")
SIDES = ("start", "ours", "theirs", "onnx")
Sets = dict[str, list[TextsExample]]
Work = dict[str, Any]


def read(task: str) -> Sets:
    """Returns the pairs to "train" on, and dev sets by name; scores are from 0 to 1. {} if no data are given."""
    sets: Sets = {}
    if task == "squad" and SQUAD.value:
        source = f"train={SQUAD.value}[:28],dev={SQUAD.value}[28:]"
        every = {"train": ("train", 3), task: ("dev", 1)}
        sets = {
            name: read_texts(TASK, source, split)[::step][: LIMIT.value]
            for name, (split, step) in every.items()
        }
    sick = SICK.value and f"{SICK.value}/SICK_train.txt,{SICK.value}/SICK_trial.txt"
    for name, source, least in (("stsb", STSB.value, 0), ("sick", sick, 1)):
        for split in ("train", "dev") if task == "graded" and source else ():
            pairs = read_texts(TASK, source, split)[:: 2 if split == "train" else 1][: LIMIT.value]
            pairs = [
                pair._replace(score=((pair.score or 0) - least) / (5 - least)) for pair in pairs
            ]
            sets.setdefault(name if split == "dev" else split, []).extend(pairs)
    return sets


def work_of(task: str, sets: Sets, seed: int, folder: str) -> Work:
    """Returns the settings and texts that both sides need."""
    pairs: Work = {
        f"sentence{index + 1}": [pair.texts[index] for pair in sets["train"]] for index in (0, 1)
    }
    if sets["train"][0].score is not None:
        pairs["score"] = [pair.score for pair in sets["train"]]
    texts = [
        text
        for name in sorted(sets.keys() - {"train"})
        for pair in sets[name]
        for text in pair.texts
    ]
    known = {
        "start": START.value,
        "threads": timing.num_cores(),
        "seed": seed,
        "max_seq_length": LENGTHS[task],
    }
    return {
        **TRAINING,
        "learning_rate": RATE.value,
        **known,
        "pairs": pairs,
        "texts": list(dict.fromkeys(texts)),
        "vectors": f"{folder}/vectors.npy",
    }


def start(work: Work, folder: str) -> tuple[dict[str, float], np.ndarray]:
    """Returns the vectors of the model that both start from."""
    bert = bert_jax.load_pretrained(work["start"])
    return {}, bert_jax.sentence_embeddings(
        bert, work["texts"], max_seq_length=work["max_seq_length"]
    )


def ours(work: Work, folder: str) -> tuple[dict[str, float], np.ndarray]:
    """Returns how fast we have trained, and the vectors of all texts after it."""
    rows = (dict(zip(work["pairs"], row)) for row in zip(*work["pairs"].values()))
    Path(folder, "train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    values = {
        "init_checkpoint": work["start"],
        "task": {"name": "embeddings", "max_seq_length": work["max_seq_length"],
                 "embedding": {"temperature": work["temperature"]}},
        "data": {"path": f"{folder}/train.jsonl", "batch_size": work["batch_size"], "seed": work["seed"]},
        "optimizer": {"learning_rate": work["learning_rate"], "warmup_rate": work["warmup_rate"], "warmup_steps": 0,
                      "epsilon": 1e-8, "weight_decay": 0.0, "bias_correction": True},
        "train": {"num_epochs": work["epochs"], "seed": work["seed"]},
        "report": {"every_steps": 10**6, "tensorboard": False, "progress": False},
    }  # fmt: skip
    with timing.Clock() as clock:
        bert_jax.finetune(from_dict(FinetuneConfig, values), f"{folder}/run")
    rate = (
        read_metrics(f"{folder}/run/{METRICS_FILE}", ["train"])[-1].get("sequences_per_second", 0.0)
        / 2
    )
    vectors = bert_jax.sentence_embeddings(bert_jax.load_pretrained(f"{folder}/run"), work["texts"])
    return {"seconds": clock.seconds, "pairs_per_second": rate}, vectors


def theirs(work: Work, folder: str) -> tuple[dict[str, float], np.ndarray]:
    """Returns the same of the peer, in a process of its own."""
    with Peers(PEER.value, work, [], WORKER.with_name("embeddings.py")) as peer:
        speed = ask(peer, "train")
        ask(peer, "eager:float32")
        return speed, np.load(work["vectors"])


def write(side: str, seed: int, name: str, metrics: dict[str, float]) -> None:
    """Writes the metrics of a side."""
    path = Path(OUTPUT.value, side, f"seed{seed}", "evaluations", f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"metrics": metrics})


def measure(task: str, sets: Sets, side: str, seed: int) -> None:
    """Trains a side, if it is one, and writes its scores and its speed, unless that is done."""
    if (done := Path(OUTPUT.value, side, f"seed{seed}", f"{task}.json")).exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        work = work_of(task, sets, seed, folder)
        speed, vectors = {"start": start, "ours": ours, "theirs": theirs}[side](work, folder)
    of_text = dict(zip(work["texts"], vectors))
    for name in sets.keys() - {"train"}:
        predictions = [
            Embedded(np.stack([of_text[text] for text in pair.texts])) for pair in sets[name]
        ]
        write(side, seed, name, EmbeddingTask(TASK).score(sets[name], predictions))
    if speed:
        write(side, seed, f"{task}_training", speed)
    about = {name: work[name] for name in (*TRAINING, "learning_rate", "max_seq_length", "threads")}
    sizes = {name: len(examples) for name, examples in sets.items()}
    write_json(
        done,
        {
            "settings": about,
            "start": Path(START.value).name,
            "pairs": sizes,
            **timing.environment(),
        },
    )


def embed(task: str, work: Work) -> None:
    """Writes the texts a second of each side, in turns; the first turn does not count."""
    texts = np.random.default_rng(0).permutation(work["texts"])[:1000].tolist()
    bert = bert_jax.load_pretrained(work["start"])
    turns = {
        "ours": partial(
            bert_jax.sentence_embeddings, bert, texts, max_seq_length=work["max_seq_length"]
        )
    }
    with contextlib.ExitStack() as stack:
        if PEER.value:
            given = PEER.value, work | {"texts": texts}, [], WORKER.with_name("embeddings.py")
            peer = stack.enter_context(Peers(*given))
            turns |= {
                side: partial(ask, peer, f"{mode}:float32")
                for side, mode in (("theirs", "eager"), ("onnx", "onnx"))
            }
        for number in range(-1, ROUNDS.value):
            for side in list(turns)[:: 1 - 2 * (number % 2)]:
                with timing.Clock() as clock:
                    turns[side]()
                if number >= 0:
                    write(
                        side,
                        number,
                        f"{task}_embedding",
                        {"texts_per_second": len(texts) / clock.seconds},
                    )
    write_json(Path(OUTPUT.value, f"{task}_embedding.json"), timing.environment())


def table() -> list[str]:
    """Returns a table of all measurements: means, differences over seeds, and how many times as fast by medians."""
    record = tables.collect(sorted(Path(OUTPUT.value).glob("*/seed*")), {"units": []})
    columns = {f"{name}.{metric}" for unit in record["units"] for name, scores in unit.get("evaluations", {}).items()
               for metric in scores["metrics"]}  # fmt: skip
    rows = [["", *SIDES, "ours - theirs", "ours is", "times"]]
    for column in sorted(columns):
        values = [tables.values_of(record, side, f"evaluation:{column}") for side in SIDES]
        medians = [
            statistics.median(runs.values())
            for runs in values
            if runs and column.endswith("_per_second")
        ]
        times = f"{medians[0] / max(medians[1:]):.2f}" if len(medians) > 1 else ""
        rows.append([column, *map(tables.cell, values), *tables.told_apart(*values[1:3]), times])
    return timing.table(rows)


def main() -> None:
    """Makes the runs that are not there yet, and prints a table of all."""
    reuse_freed_memory()  # as the commands do
    sides = ["ours", "theirs"] if PEER.value else ["ours"]
    for task in LENGTHS:
        if not (sets := read(task)):
            continue
        measure(task, sets, "start", 0)
        for seed in range(SEEDS.value):
            for side in sides[:: 1 - 2 * (seed % 2)]:
                measure(task, sets, side, seed)
        with tempfile.TemporaryDirectory() as folder:
            if not Path(OUTPUT.value, f"{task}_embedding.json").exists():
                embed(task, work_of(task, sets, 0, folder))
    print("\n".join(table()))


if __name__ == "__main__":
    cli.run(main)
