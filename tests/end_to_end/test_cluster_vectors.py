# SPDX-License-Identifier: Apache-2.0
"""Vectors of a corpus by several processes: one is killed, and any number of them goes on to the bytes of one alone."""

import json
import random
import re
import signal

import numpy as np
import pytest
from builders import make_pretrained
from processes import finish, start, wait_until

from bert_jax import load_pretrained, open_vectors, write_vectors

pytestmark = pytest.mark.slow
ROWS, LINES = 16, 1600


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    rng, words = random.Random(0), "ban dar lin bes kut gen mot the".split()
    lines = [json.dumps({"_id": n, "text": " ".join(rng.choices(words, k=8))}) for n in range(LINES)]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    model = make_pretrained(folder)
    return [
        *("-m", "bert_jax", "extract_features", f"--checkpoint={model}", f"--input={folder}/corpus.jsonl"),
        *("--pooling=mean", f"--shard_rows={ROWS}"),
    ]


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.glob("[vt]*-*")}


def test_one_of_several_is_killed(repository, command, tmp_path):
    command = [*command, "--precision=int8"]
    finish(start(repository, [*command, f"--output={tmp_path / 'alone'}/"], 1))
    output = tmp_path / "out"
    running = start(repository, [*command, f"--output={output}/", "--lost_seconds=5"], 4)
    done = lambda: len(list((output / "unfinished").glob("[0-9]*.json")))  # noqa: E731
    wait_until(lambda: done() >= 12, running)
    running[1].send_signal(signal.SIGKILL)
    for process in running:
        process.communicate(timeout=120)
    assert all(process.returncode for process in running)  # none waits for ever
    there = done()
    assert 12 <= there < LINES // ROWS and not (output / "manifest.json").exists()
    told = finish(start(repository, [*command, f"--output={output}/"], 2))
    made = [re.findall(r"^shard (\d+):", text, re.MULTILINE) for text in told]
    assert sum(map(len, made)) == LINES // ROWS - there
    assert max(map(len, made)) - min(map(len, made)) <= 1  # an equal share each
    assert contents(output) == contents(tmp_path / "alone")
    opened = open_vectors(output)
    assert opened.manifest["rows"] == LINES and opened.passages(np.array([LINES - 1]))[LINES - 1][0] == str(LINES - 1)
    told = finish(start(repository, [*command, f"--output={output}/"], 2))
    assert "is already complete" in told[0] and "shard 0:" not in told[1]


def test_a_bucket(command, tmp_path, bucket):
    model, corpus = (argument.partition("=")[2] for argument in command[3:5])
    output = f"{bucket}/vectors"
    write_vectors(load_pretrained(model), corpus, output, "uint8", shard_rows=400)
    write_vectors(load_pretrained(model), corpus, tmp_path / "here", "uint8", shard_rows=400)
    assert contents(open_vectors(output).place) == contents(tmp_path / "here")
    write_vectors(load_pretrained(model), corpus, output, "uint8", shard_rows=400)
