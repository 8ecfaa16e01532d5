# SPDX-License-Identifier: Apache-2.0
"""The four kinds of search model beside BM25 and sentence-transformers, all trained on the same pairs.

    python -m venv peers && peers/bin/pip install 'sentence-transformers[train]==6.2.0'
    bert_jax convert_checkpoint --input=models/bert-mini-en --output=START --to=hf
    python -m benchmarks.search_models --start=START --squad=dev-v1.1.json --output=DIR --peer_python=peers/bin/python

Learnt is every third question of the first 28 articles of SQuAD with its paragraph and three hard negatives. Those are
mined once, by a dense model that was trained on the pairs alone (ours, seed 0): at least 5 % below the positive. Dense
and multi-vector models and sparse ones learn the pair and its first negative (InfoNCE), a reranker all four passages
(ListNet). Asked is every fourth question of the other ten articles; the paragraphs of all 38 are searched. A reranker
orders the first 20 of BM25. Both sides: one epoch in float32 without dropout, batches of 32 pairs or 8 queries, AdamW
without weight decay, a tenth of the steps to warm up, linear decay, texts of at most 128 tokens.

DIR/SIDE/seedN/evaluations has what was measured, as `tables --collect` reads it. A run that is there is not made again,
so the same command goes on where it was ended.
"""

import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

import bert_jax
from benchmarks import tables, timing
from benchmarks.bm25 import bm25
from benchmarks.peer_workers import WORKER, Peers, ask
from bert_jax.devices.allocator import reuse_freed_memory
from bert_jax.settings.finetuning import FinetuneConfig, TaskConfig
from bert_jax.settings.rules import from_dict
from bert_jax.storage.writing import write_json
from bert_jax.tasks.embeddings.read import read_texts
from bert_jax.tasks.scores import ranking_scores
from bert_jax.tools import cli
from bert_jax.training.report import METRICS_FILE, read_metrics

KINDS = ("dense", "sparse", "multi_vector", "reranker")
START = flags.DEFINE_string("start", None, "the model that both start from", required=True)
SQUAD = flags.DEFINE_string("squad", None, "SQuAD's file of 38 articles or more", required=True)
OUTPUT = flags.DEFINE_string("output", None, "directory of what is measured", required=True)
PEER = flags.DEFINE_string(
    "peer_python", "", "a Python with sentence-transformers; without it, ours alone"
)
KIND = flags.DEFINE_list("kinds", list(KINDS), "which kinds, in this order")
SEEDS = flags.DEFINE_integer("seeds", 3, "runs of each side and kind", lower_bound=1)
LIMIT = flags.DEFINE_integer("limit", 10**6, "pairs and questions, to try it", lower_bound=2)
RATE = flags.DEFINE_float("learning_rate", 3e-4, "of both", lower_bound=0.0)
LENGTH, CANDIDATES, NEGATIVES = 128, 20, 3
TASK = TaskConfig(name="embeddings")
Work = dict[str, Any]


class Data(NamedTuple):
    """What is learnt and what is searched."""

    pairs: list[tuple[str, str]]  # questions and paragraphs to learn
    questions: list[str]  # to score
    passages: list[str]
    right: list[int]  # of each question, the number of its paragraph


def read(squad: str, limit: int) -> Data:
    """Returns the questions and paragraphs of SQuAD's file; at most `limit` of either."""
    train, dev = (
        read_texts(TASK, f"train={squad}[:28],dev={squad}[28:]", split)
        for split in ("train", "dev")
    )
    learnt, asked = train[::3][:limit], dev[::4][:limit]
    passages = list(dict.fromkeys(pair.texts[1] for pair in (*asked, *dev, *train)))
    number_of = {text: number for number, text in enumerate(passages)}
    return Data(
        pairs=[(pair.texts[0], pair.texts[1]) for pair in learnt],
        questions=[pair.texts[0] for pair in asked],
        passages=passages,
        right=[number_of[pair.texts[1]] for pair in asked],
    )


def best(scores: np.ndarray, most: int) -> np.ndarray:
    """Returns the numbers [questions, most] of the passages with the largest scores."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :most]


def ours(work: Work, folder: str) -> dict[str, float]:
    """Returns how fast we have trained, in a process of its own too, and leaves the model and the scores."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(train_ours, work, folder).result()


def train_ours(work: Work, folder: str) -> dict[str, float]:
    """Does the work of `ours`."""
    reuse_freed_memory()  # as the commands do
    is_reranker = work["kind"] == "reranker"
    rows = []
    for question, positive, *negatives in work["rows"]:
        if is_reranker:
            row = {"query": question, "positive": positive, "negative": negatives}
        else:
            row = {"anchor": question, "positive": positive, "negative": negatives[:1]}
        rows.append(json.dumps(row) + "\n")
    Path(folder, "train.jsonl").write_text("".join(rows), encoding="utf-8")
    task: dict[str, Any] = {"name": "embeddings", "max_seq_length": LENGTH}
    if is_reranker:
        task |= {"name": "reranking", "ranking": {"loss": "listnet"}}
    else:
        task["embedding"] = {"kind": work["kind"]}
    if work["kind"] == "multi_vector":
        task["embedding"] |= {"query_expansion": 0, "skipped_words": ""}
    values = {
        "init_checkpoint": work["start"],
        "task": task,
        "model": {"hidden_dropout_rate": 0.0, "attention_dropout_rate": 0.0},
        "data": {
            "path": f"{folder}/train.jsonl",
            "batch_size": work["batch_size"],
            "seed": work["seed"],
        },
        "optimizer": {
            "learning_rate": work["learning_rate"],
            "warmup_rate": 0.1,
            "warmup_steps": 0,
            "epsilon": 1e-8,
            "weight_decay": 0.0,
            "bias_correction": True,
        },
        "train": {"num_epochs": 1, "seed": work["seed"]},
        "report": {"every_steps": 10**6, "tensorboard": False, "progress": False},
    }
    with timing.Clock() as clock:
        bert_jax.finetune(from_dict(FinetuneConfig, values), f"{folder}/run")
    last = read_metrics(f"{folder}/run/{METRICS_FILE}", ["train"])[-1]
    of_pair = 1 if is_reranker else 3  # sequences; a pair has a negative
    rate = last.get("sequences_per_second", 0.0) / of_pair
    np.save(work["scores"], our_scores(work, f"{folder}/run"))
    return {"seconds": clock.seconds, "cpu_seconds": clock.cpu_seconds, "pairs_per_second": rate}


def our_scores(work: Work, model: str) -> np.ndarray:
    """Returns the scores of all passages, or of the candidates."""
    if work["kind"] == "reranker":
        pairs = [(question, text) for question, texts in work["candidates"] for text in texts]
        values = [said.value for said in bert_jax.load_predictor(model)(pairs)]
        return np.reshape(values, (len(work["candidates"]), -1))
    bert = bert_jax.load_pretrained(model)
    embed = {
        "dense": bert_jax.sentence_embeddings,
        "sparse": bert_jax.sparse_embeddings,
        "multi_vector": bert_jax.multi_vectors,
    }[work["kind"]]
    queries = embed(bert, work["questions"], kind="query")
    passages = embed(bert, work["passages"], kind="passage")
    if work["kind"] == "multi_vector":
        return bert_jax.maxsim(queries, passages)
    return np.asarray(queries) @ np.asarray(passages).T


def theirs(work: Work, folder: str) -> dict[str, float]:
    """Returns how fast the peer has trained, in a process of its own, and leaves the scores."""
    with Peers(PEER.value, work, [], WORKER.with_name("search_models.py")) as peer:
        return ask(peer, work["kind"])


def mined(data: Data, seconds: dict[str, float]) -> list[list[str]]:
    """Returns each question with its paragraph and its negatives, which are mined once."""
    path = Path(OUTPUT.value, "mined.json")
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            rows = [list(pair) for pair in data.pairs]
            work = work_of("dense", rows, data, 0, folder)
            ours(work, folder)
            bert = bert_jax.load_pretrained(f"{folder}/run")
            with timing.Clock() as clock:
                found = bert_jax.mine_negatives(
                    bert,
                    data.pairs,
                    data.passages,
                    num_negatives=NEGATIVES,
                    limits=bert_jax.Limits(relative_margin=0.05),
                )
        seconds["mining"] = clock.seconds
        rows = [[pair.query, pair.positive, *pair.negatives] for pair in found]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"rows": [row for row in rows if len(row) == 2 + NEGATIVES]})
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def work_of(kind: str, rows: list[list[str]], data: Data, seed: int, folder: str) -> Work:
    """Returns the settings and texts that both sides need."""
    first = best(bm25(data.questions, data.passages), CANDIDATES).tolist()
    return {
        "kind": kind,
        "rows": rows,
        "questions": data.questions,
        "passages": data.passages,
        "candidates": [
            [question, [data.passages[number] for number in numbers]]
            for question, numbers in zip(data.questions, first)
        ],
        "start": str(Path(START.value).resolve()),
        "learning_rate": RATE.value,
        "batch_size": 8 if kind == "reranker" else 32,
        "max_seq_length": LENGTH,
        "threads": timing.num_cores(),
        "seed": seed,
        "scores": f"{folder}/scores.npy",
    }


def score(kind: str, scores: np.ndarray, data: Data) -> dict[str, float]:
    """Returns metrics of the rankings that scores give."""
    numbers = best(scores, 100)
    if kind == "reranker":
        first = best(bm25(data.questions, data.passages), CANDIDATES)
        numbers = np.take_along_axis(first, numbers, axis=1)
    rankings = [
        [float(number == right) for number in found] for found, right in zip(numbers, data.right)
    ]
    return ranking_scores(rankings, [[1.0]] * len(rankings))


def write(side: str, seed: int, name: str, metrics: dict[str, float]) -> None:
    """Writes the metrics of a side."""
    path = Path(OUTPUT.value, side, f"seed{seed}", "evaluations", f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"metrics": metrics})


def measure(kind: str, rows: list[list[str]], data: Data, side: str, seed: int) -> None:
    """Trains a side, and writes its scores and its speed, unless that is done."""
    if (done := Path(OUTPUT.value, side, f"seed{seed}", f"{kind}.json")).exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        work = work_of(kind, rows, data, seed, folder)
        speed = {"ours": ours, "theirs": theirs}[side](work, folder)
        scores = np.load(work["scores"])
    write(side, seed, kind, score(kind, scores, data))
    write(side, seed, f"{kind}_training", speed)
    settings = {name: work[name] for name in ("learning_rate", "batch_size", "threads")}
    sizes = {name: len(getattr(data, name)) for name in ("questions", "passages")}
    about = {"start": Path(START.value).name, "pairs": len(rows), **sizes}
    write_json(done, {"settings": settings, **about, **timing.environment()})


def table() -> list[str]:
    """Returns a table of all measurements: means, and differences over seeds."""
    sides = ("bm25", "ours", "theirs")
    record = tables.collect(sorted(Path(OUTPUT.value).glob("*/seed*")), {"units": []})
    columns = {
        f"{name}.{metric}"
        for unit in record["units"]
        for name, scores in unit.get("evaluations", {}).items()
        for metric in scores["metrics"]
    }
    rows = [["", *sides, "ours - theirs", ""]]
    for column in sorted(columns):
        values = [tables.values_of(record, side, f"evaluation:{column}") for side in sides]
        rows.append([column, *map(tables.cell, values), *tables.told_apart(*values[1:])])
    return timing.table(rows)


def main() -> None:
    """Makes the runs that are not there yet, and prints a table of all."""
    data = read(SQUAD.value, LIMIT.value)
    seconds: dict[str, float] = {}
    rows = mined(data, seconds)
    write("bm25", 0, "first", score("bm25", bm25(data.questions, data.passages), data) | seconds)
    sides = ["ours", "theirs"] if PEER.value else ["ours"]
    for seed in range(SEEDS.value):
        for kind in KIND.value:
            for side in sides[:: 1 - 2 * (seed % 2)]:
                measure(kind, rows, data, side, seed)
    print("\n".join(table()))


if __name__ == "__main__":
    cli.run(main)
