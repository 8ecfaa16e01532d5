# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at random moments: every run ends with the bits, the records and the files of an undisturbed one."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from builders import make_learner, make_topics

import bert_jax
from bert_jax.checkpoints.sealed import SEAL, checkpoint_steps, find_damage
from bert_jax.training.report import read_metrics

pytestmark = pytest.mark.slow
KILLS = 10  # of each of the two seeds of each kind


@pytest.fixture(scope="module")
def inputs(toy_data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("inputs")
    return {"pretrain": (toy_data, "none"), "finetune": (make_topics(directory / "topics"), make_learner(directory))}


def run(repository, inputs, kind, workdir, seed, kills=0, events=0, seconds=0.0):
    """Returns how often the run was killed, by what it was doing, and the events and seconds of its last attempt."""
    numbers = (str(seed), str(kills), str(events), str(seconds))
    command = [sys.executable, "tests/kills.py", kind, *map(str, inputs[kind]), str(workdir), *numbers]
    environment = os.environ | {"PYTHONPATH": f"{repository}{os.pathsep}{repository / 'tests'}"}
    done = subprocess.run(command, cwd=repository, env=environment, timeout=1500, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=["pretrain", "finetune"])
def undisturbed(request, repository, inputs, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed") / request.param
    whole = run(repository, inputs, request.param, workdir, 0)
    assert whole["killed"] == {} and whole["events"] > 100
    return request.param, workdir, whole["events"], whole["seconds"]


def records(workdir):
    """Returns what is reported, without what a clock says."""
    clock = ("time", "data_wait", "flops_per_second", "tokens_per_second", "sequences_per_second", "mfu")
    found = read_metrics(workdir / "metrics.jsonl")
    return [{name: value for name, value in record.items() if name not in clock} for record in found]


def left_behind(workdir):
    """Returns the names of all that is in a work directory, but for what Orbax names and damaged checkpoints."""
    inside_orbax = ("state", "params")
    paths = [path.relative_to(workdir) for path in workdir.rglob("*")]
    return {
        str(path)
        for path in paths
        if not set(path.parent.parts) & set(inside_orbax) and path.parts[0] != "damaged" and path.name != "state"
    }


@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_that_is_killed_ends_as_an_undisturbed_one(repository, inputs, undisturbed, tmp_path, seed):
    kind, whole, events, seconds = undisturbed
    workdir = tmp_path / kind
    killed = run(repository, inputs, kind, workdir, seed, KILLS, events, seconds)["killed"]
    print(kind, seed, killed)
    assert sum(killed.values()) >= KILLS // 2
    # Bits: of the model, and of every checkpoint that is kept.
    ours, theirs = (bert_jax.load_pretrained(path).params for path in (workdir, whole))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    steps = checkpoint_steps(whole / "checkpoints")
    assert checkpoint_steps(workdir / "checkpoints") == steps and len(steps) in (2, 3)
    for step in steps:
        path = workdir / "checkpoints" / f"{step:08d}"
        assert find_damage(path) is None
        seals = [json.loads((one / "checkpoints" / path.name / SEAL).read_text()) for one in (workdir, whole)]
        for name in ("metric", "notes", "arrays", "tokenizer"):
            assert seals[0][name] == seals[1][name], (step, name)
    # Records and files.
    assert records(workdir) == records(whole)
    assert left_behind(workdir) == left_behind(whole)
    damaged = workdir / "damaged"
    assert not damaged.exists() or len(list(damaged.iterdir())) <= 2
    if kind == "finetune":
        results = [json.loads((path / "results.json").read_text()) | {"seconds": 0} for path in (workdir, whole)]
        assert results[0] == results[1]
        for path in (whole / "predictions").iterdir():
            assert (workdir / "predictions" / path.name).read_bytes() == path.read_bytes()
