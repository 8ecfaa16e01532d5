# SPDX-License-Identifier: Apache-2.0
"""Measures how long people wait: one text, a paragraph, a set of them, the first answer; beside torch and ONNX Runtime.

    python -m benchmarks.answers --model=DIR --classifier=DIR --input=FILE --table=FILE --peer_python=PATH --output=FILE

The model is one of sentence-transformers with mean pooling, the classifier one of transformers with the same encoder;
--input has a text on each line. All sides compute float32 with all cores, in processes of their own (peers/answers.py),
and take turns of one request, or of --in_a_row; onnx-int8 multiplies in 8 bits, and the share of texts that then have
the same nearest neighbor stands beside it. A ratio is that of the medians. "First answer" is a whole new process,
from its start to its answer, after one that nothing was kept of (cold) and one more (warm). With --table, which has a
header, texts and labels, its first 1,000 rows are learnt in 3 epochs of batches of 32, and the next 200 evaluated after
each: by the command `finetune`, cold and warm, and by transformers' Trainer, which saves nothing. --before=CHECKOUT
measures an earlier commit of ours too, as a side of its own.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from benchmarks.timing import CHECKOUT, environment, table
from bert_jax.errors import InputError
from bert_jax.storage.writing import write_json
from bert_jax.tools import cli

MODEL = flags.DEFINE_string("model", "", "a directory of sentence-transformers")
CLASSIFIER = flags.DEFINE_string(
    "classifier", "", "a directory of transformers: a classifier with the same encoder"
)
INPUT = flags.DEFINE_string("input", "", "a file with a text on each line")
PEER_PYTHON = flags.DEFINE_string(
    "peer_python", "", "a Python with sentence-transformers, torch, onnxruntime"
)
PAUSE = flags.DEFINE_float(
    "pause", 0.0, "seconds before a turn, in which the threads of others cease to spin", 0.0
)
IN_A_ROW = flags.DEFINE_integer(
    "in_a_row", 1, "requests of a turn: one process answers them one after another", 1
)
TABLE = flags.DEFINE_string(
    "table", "", "a file of tab-separated texts and labels to fine-tune on; without, left out"
)
BEFORE = flags.DEFINE_string("before", "", "a checkout of an earlier commit of bert_jax")
OUTPUT = flags.DEFINE_string("output", "", "JSON file to write")
ROUNDS = flags.DEFINE_integer(
    "rounds", 40, "requests of one text; of sets an eighth", lower_bound=8
)

ROUNDED = "onnx-int8"  # whose answers are others
PEERS = ("torch", "onnx", ROUNDED)
WORKER = CHECKOUT / "benchmarks" / "peers" / "answers.py"
PARAGRAPH = 200  # words
APART = 5e-3  # numbers of a unit vector, or probabilities, of two sides at most
NEIGHBORS = 1000  # texts among which nearest neighbors are compared
# Name -> kind of text, texts of a request.
REQUESTS = {
    "one short text": ("short", 1), "one paragraph": ("paragraph", 1), "256 short texts": ("short", 256),
    "24 paragraphs": ("paragraph", 24), "32 paragraphs": ("paragraph", 32),
}  # fmt: skip


def sides() -> list[str]:
    """Returns the names of all sides."""
    return ["bert_jax", *(["before"] if BEFORE.value else []), *PEERS]


def variables(side: str, cache: str) -> dict[str, str]:
    """Returns the environment of a side's processes."""
    checkout = os.path.abspath(BEFORE.value) if side.startswith("before") else str(CHECKOUT)
    return os.environ | {
        "PYTHONPATH": checkout,
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PLATFORMS": "cpu",
    }


class Side:
    """A process that answers."""

    def __init__(self, name: str, cache: str) -> None:
        python = PEER_PYTHON.value if name in PEERS else sys.executable
        kind = name if name in PEERS else "bert_jax"
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            [python, str(WORKER), kind, MODEL.value, CLASSIFIER.value], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=variables(name, cache),
        )  # fmt: skip

    def ask(self, work: str, texts: list[str], show: bool = False) -> dict[str, Any]:
        """Returns the answer to one request. Raises: InputError if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"work": work, "texts": texts, "show": show}) + "\n")
        self._process.stdin.flush()
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise InputError(
            f"{self._process.args!r} has ended with status {self._process.wait()}; run it by hand to see why"
        )

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def texts_of(lines: list[str]) -> dict[str, list[str]]:
    """Returns short texts, and paragraphs of PARAGRAPH words made of them."""
    words = " ".join(lines).split()
    cuts = range(0, len(words) - PARAGRAPH, PARAGRAPH)
    return {
        "short": lines,
        "paragraph": [" ".join(words[start : start + PARAGRAPH]) for start in cuts],
    }


def check(texts: dict[str, list[str]], cache: str) -> dict[str, float]:
    """Returns the largest difference of a number in the answers of two sides, by work, and what 8 bits keep.

    Raises: InputError if two sides do not answer alike: then how fast they are says nothing.
    """
    asked = [*texts["short"][:24], *texts["paragraph"][:8]]
    processes = {name: Side(name, f"{cache}/{name}") for name in sides()}
    differences = {}
    for work in ("embed", "classify"):
        answers = {
            name: np.array(side.ask(work, asked, show=True)["answers"])
            for name, side in processes.items()
        }
        for name, found in answers.items():
            if name == ROUNDED:
                continue
            apart = float(np.abs(found - answers["bert_jax"]).max())
            if not apart < APART:
                raise InputError(
                    f"{name} does not answer as bert_jax does: {work} differs by {apart:.2g}"
                )
            differences[work] = max(differences.get(work, 0.0), apart)
    some = [*dict.fromkeys(texts["short"])][:NEIGHBORS]
    nearest = {
        name: nearest_others(processes[name].ask("embed", some, show=True)["answers"])
        for name in ("bert_jax", ROUNDED)
    }
    differences["nearest kept"] = float(np.mean(nearest["bert_jax"] == nearest[ROUNDED]))
    for process in processes.values():
        process.close()
    return differences


def nearest_others(vectors: list[list[float]]) -> np.ndarray:
    """Returns the number of the nearest other vector of each, [n], by their products."""
    numbers = np.array(vectors)
    products = numbers @ numbers.T
    np.fill_diagonal(products, -np.inf)
    return products.argmax(axis=1)


def measure(texts: dict[str, list[str]], cache: str) -> list[dict[str, Any]]:
    """Returns the seconds of each request by work, request and side; the sides take turns."""
    processes = {name: Side(name, f"{cache}/{name}") for name in sides()}
    results = []
    for work in ("embed", "classify"):
        for name, (kind, count) in REQUESTS.items():
            rounds = ROUNDS.value if count == 1 else ROUNDS.value // 8
            pool = texts[kind]
            take = [
                [pool[(n * count + k) % len(pool)] for k in range(count)] for n in range(rounds + 3)
            ]
            first = {
                side: process.ask(work, take[0])["seconds"] for side, process in processes.items()
            }
            answers: dict[str, list[dict[str, Any]]] = {side: [] for side in processes}
            for number, start in enumerate(range(1, len(take), IN_A_ROW.value)):
                for side in processes if number % 2 else reversed(processes):
                    time.sleep(PAUSE.value)
                    turn = take[start : start + IN_A_ROW.value]
                    answers[side] += [processes[side].ask(work, request) for request in turn]
            for side, kept in answers.items():
                seconds = sorted(reply["seconds"] for reply in kept[2:])
                results.append({
                    "work": work, "request": name, "side": side, "texts": count, "first": first[side],
                    "p50": statistics.median(seconds), "p95": seconds[round(0.95 * (len(seconds) - 1))],
                    "cpu": statistics.median(reply["cpu_seconds"] for reply in kept[2:]), "memory": kept[-1]["memory"],
                    "seconds": seconds,
                })  # fmt: skip
            print(f"{work}, {name}: measured", file=sys.stderr)
    for process in processes.values():
        process.close()
    return results


def first_answers(texts: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Returns the seconds from the start of a process to its first answer, and its memory after twenty single texts."""
    results = []
    with tempfile.TemporaryDirectory() as cache:
        for temperature in ("cold", "warm", "warm", "warm"):
            for side in sides():
                process = Side(side, f"{cache}/{side}")
                process.ask("classify", texts["short"][:1])
                seconds = time.perf_counter() - process.started
                memory = max(
                    process.ask("classify", [text])["memory"] for text in texts["short"][1:21]
                )
                process.close()
                results.append(
                    {"side": side, "cache": temperature, "seconds": seconds, "memory": memory}
                )
    return results


def trainings(folder: Path) -> list[dict[str, Any]]:
    """Returns the wall and CPU seconds of fine-tuning on --table: whole processes, from start to end."""
    header, *rows = Path(TABLE.value).read_text("utf-8").splitlines()[:1201]
    if len(rows) < 1200:
        raise InputError(f"--table {TABLE.value} has {len(rows)} rows; 1,200 are needed")
    for name, some in (("train", rows[:1000]), ("dev", rows[1000:])):
        (folder / f"{name}.tsv").write_text("\n".join([header, *some, ""]), encoding="utf-8")
    settings = {
        "data.path": folder,
        "init_checkpoint": MODEL.value,
        "data.batch_size": 32,
        "train.num_epochs": 3,
    }
    ours = [sys.executable, "-P", "-m", "bert_jax", "finetune", "--config=finetune:classification"]
    ours += [f"--config.{name}={value}" for name, value in settings.items()]
    theirs = [PEER_PYTHON.value, str(WORKER), "train", MODEL.value, str(folder)]
    earlier = ["before"] if BEFORE.value else []
    turns = [
        [f"{side}, {how}" for side in ("bert_jax", *earlier)] for how in ("cold", "warm", "warm")
    ]
    results = []
    for number, name in enumerate(
        [*turns[0], "transformers", *turns[1], "transformers", *turns[2]]
    ):
        command = theirs if name == "transformers" else [*ours, f"--workdir={folder}/run{number}"]
        environ = variables(name, str(folder / name.partition(",")[0]))
        start, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            command, check=True, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        seconds, end = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
        results.append({"side": name, "seconds": seconds, "cpu_seconds": cpu})
        print(f"fine-tuning, {name}: measured", file=sys.stderr)
    return results


def lines_of(
    requests: list[dict[str, Any]], first: list[dict[str, Any]], trained: list[dict[str, Any]]
) -> list[str]:
    """Returns tables for people."""
    rows = [
        [
            "",
            *(f"{side} ms" for side in sides()),
            "p95 of ours",
            *(f"times {side}'s" for side in sides()[1:]),
        ]
    ]
    for work, name in dict.fromkeys((one["work"], one["request"]) for one in requests):
        by_side = {
            one["side"]: one for one in requests if (one["work"], one["request"]) == (work, name)
        }
        p50 = {side: by_side[side]["p50"] for side in sides()}
        rows.append([
            f"{work}, {name}", *(f"{1e3 * p50[side]:,.1f}" for side in p50), f"{1e3 * by_side['bert_jax']['p95']:,.1f}",
            *(f"{p50['bert_jax'] / p50[side]:.2f}" for side in sides()[1:]),
        ])  # fmt: skip
    starts = [["", *sides()]]
    for cache in ("cold", "warm"):
        by_side = {
            side: [one for one in first if (one["side"], one["cache"]) == (side, cache)]
            for side in sides()
        }
        least = [min(one["seconds"] for one in group) for group in by_side.values()]
        starts.append([f"first answer, {cache}, s", *(f"{seconds:.2f}" for seconds in least)])
    starts.append(
        [
            "memory, one at a time, MB",
            *(f"{group[-1]['memory'] / 1e6:,.0f}" for group in by_side.values()),
        ]
    )
    runs = [["1,000 texts, 3 epochs", "s", "CPU s"]]
    for side in dict.fromkeys(run["side"] for run in trained):
        best = min((run for run in trained if run["side"] == side), key=lambda run: run["seconds"])
        runs.append([side, f"{best['seconds']:.1f}", f"{best['cpu_seconds']:.1f}"])
    return [*table(rows), "", *table(starts), *(["", *table(runs)] if trained else [])]


def main() -> None:
    """Measures, prints tables and writes JSON."""
    for flag in (MODEL, CLASSIFIER, INPUT, PEER_PYTHON):
        if not flag.value:
            raise InputError(f"--{flag.name} is needed; --help says what it is")
    lines = [
        line.strip() for line in Path(INPUT.value).read_text("utf-8").splitlines() if line.strip()
    ]
    texts = texts_of(lines)
    if len(texts["paragraph"]) < 40:
        raise InputError(
            f"--input {INPUT.value} has {len(texts['paragraph'])} paragraphs of {PARAGRAPH} words; 40 are needed"
        )
    subprocess.run(
        [PEER_PYTHON.value, str(WORKER), "export", MODEL.value, CLASSIFIER.value], check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        differences = check(texts, folder)
    first = first_answers(texts)
    with tempfile.TemporaryDirectory() as folder:
        requests = measure(texts, f"{folder}/kept")
        trained = trainings(Path(folder)) if TABLE.value else []
    print("\n".join(lines_of(requests, first, trained)))
    if OUTPUT.value:
        write_json(
            Path(OUTPUT.value),
            {
                **environment(),
                "differences": differences,
                "requests": requests,
                "first": first,
                "trained": trained,
            },
        )


if __name__ == "__main__":
    cli.run(main)
