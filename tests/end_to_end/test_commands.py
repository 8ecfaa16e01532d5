# SPDX-License-Identifier: Apache-2.0
"""The commands as a user types them: raw text to filled blanks, and what they say when something is wrong."""

import json
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from builders import write_corpus
from commands import assert_one_line, run_python, variables

import bert_jax

TINY = (
    "--config.model.hidden_size=32 --config.model.num_heads=2 --config.model.intermediate_size=64 "
    "--config.data.batch_size=8 --config.optimizer.warmup_steps=2 --config.report.every_steps=5 "
    "--config.eval.every_steps=50 --config.checkpoint.every_steps=10 --config.report.tensorboard=False "
    "--config.train.num_steps=100"
).split()


def run(repository, *arguments):
    return run_python(arguments, repository, environment=variables(repository))


@pytest.fixture(scope="module")
def made(repository, tmp_path_factory):
    """Returns a folder with a tokenizer and a data set made by the commands."""
    folder = tmp_path_factory.mktemp("commands")
    write_corpus(folder / "text.txt")
    for arguments in (
        ("build_vocab", f"--input={folder}/text.txt", f"--output={folder}/tokenizer", "--vocab_size=200"),
        (
            "prepare_corpus",
            f"--input={folder}/text.txt",
            f"--tokenizer={folder}/tokenizer",
            f"--output={folder}/data",
            "--max_seq_length=32",
            "--duplicates=2",
            "--holdout_rate=0.1",
            "--workers=1",
        ),
    ):
        result = run(repository, "-m", f"bert_jax.tools.{arguments[0]}", *arguments[1:])
        assert result.returncode == 0, result.stderr
    return folder


def train(made, workdir, *more):
    return (
        "train.py",
        "--config=configs/pretrain.py:tiny",
        f"--config.data.path={made}/data",
        f"--workdir={workdir}",
        *TINY,
        *more,
    )


@pytest.fixture(scope="module")
def trained(repository, made):
    """Returns the work directory of a finished run."""
    fewer = ("--config.train.num_steps=20", "--config.eval.every_steps=10")
    result = run(repository, *train(made, made / "run", *fewer))
    assert result.returncode == 0, result.stderr
    assert "eval  20/20" in result.stderr and "trained to step 20" in result.stderr
    return made / "run"


def test_text_to_filled_blanks(repository, trained, tmp_path):
    (tmp_path / "texts.txt").write_text("the [MASK] .\n\nthe ban [MASK] [MASK] .\n")
    arguments = (f"--checkpoint={trained}", f"--input={tmp_path}/texts.txt", "--guesses=3")
    result = run(repository, "-m", "bert_jax.tools.predict", *arguments)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "the [MASK] ." and lines[2] == "" and len(lines) == 6
    assert all(line.count("%") == 3 for line in (lines[1], lines[4], lines[5]))
    (tmp_path / "texts.txt").write_text(
        '{"text": "the [MASK] .", "id": 7}\n{hello}\n' + "the [MASK] ." * 400 + "\nthe ban\nthe [MASK]\n"
    )
    result = run(repository, "-m", "bert_jax.tools.predict", *arguments, "--format=json")
    assert_one_line(result, "texts.txt:2 has no [MASK]: '{hello}'", "or give --lines=text")
    (found,) = map(json.loads, result.stdout.splitlines())
    assert found["id"] == 7 and found["input"] == {"text": "the [MASK] .", "id": 7} and len(found["masks"]) == 1
    result = run(repository, "-m", "bert_jax.tools.predict", *arguments, "--format=json", "--lines=text")
    assert result.returncode == 0 and result.stderr.count("warning: 1 text has more than") == 1
    first, none, cut, other, last = (len(json.loads(line)["masks"]) for line in result.stdout.splitlines())
    assert (first, none, other, last) == (1, 0, 0, 1) and 0 < cut < 400


@pytest.mark.slow
def test_export_is_the_model_of_the_run_without_its_optimizer(repository, trained, tmp_path):
    paths = (f"--input={trained}", f"--output={tmp_path}/model")
    export = ("-m", "bert_jax.tools.convert_checkpoint", *paths, "--to=bert_jax")
    assert run(repository, *export).returncode == 0
    assert_one_line(run(repository, *export), "exists")
    ours, theirs = (bert_jax.load_pretrained(path).params for path in (trained, tmp_path / "model"))
    for before, after in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(before, after)
    sizes = {
        name: sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        for name, folder in (("run", trained / "checkpoints" / "00000020"), ("model", tmp_path / "model"))
    }
    assert sizes["model"] < sizes["run"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_training_goes_on_with_the_same_command(repository, made, tmp_path, number):
    command = train(made, tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, *command], cwd=repository, env=variables(repository), stderr=subprocess.PIPE, text=True
    )
    deadline = time.time() + 300  # a busy machine
    while not list((tmp_path / "run" / "checkpoints").glob("*/checksums.json")) and time.time() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == (143 if number == signal.SIGTERM else -9), said
    steps = sorted(int(path.parent.name) for path in (tmp_path / "run" / "checkpoints").glob("*/checksums.json"))
    assert steps and steps[-1] < 100
    if number == signal.SIGTERM:
        assert f"stopped by signal 15 after step {steps[-1]}" in said
    result = run(repository, *command)
    assert result.returncode == 0, result.stderr
    assert f"resume from step {steps[-1]}" in result.stderr and "trained to step 100" in result.stderr


def test_help_is_quick_and_needs_no_jax(repository):
    began = time.time()
    command = [sys.executable, "-X", "importtime", "train.py", "--help"]
    result = subprocess.run(command, cwd=repository, env=variables(repository), capture_output=True, text=True)
    assert "workdir" in result.stdout
    modules = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "jax" not in modules and "ml_collections" in modules
    assert time.time() - began < 5  # a second on a quiet machine


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--config.optimizer.learnin_rate=1"], ["learning_rate"]),
        (["--config.optimizr.learning_rate=1"], ["optimizer"]),
        (["--config.train.num_steps=many"], ["many"]),
        (["--config=configs/nothing.py"], ["configs/nothing.py"]),
        (["--config=configs/pretrain.py:tinny"], ["tinny", "tiny"]),
        (["--wrokdir=x"], ["workdir"]),
        (["stray"], ["stray"]),
        pytest.param(["--config.mesh.data=7", "--config.mesh.fsdp=2"], ["devices"], marks=pytest.mark.slow),
    ],
)
def test_bad_flags_are_one_line(repository, made, tmp_path, arguments, parts):
    assert_one_line(run(repository, *train(made, tmp_path / "run", *arguments)), *parts)
    assert not (tmp_path / "run").exists()


def test_missing_flags_say_what_to_give(repository):
    assert_one_line(run(repository, "train.py"), "--config", "--workdir")
    assert_one_line(run(repository, "-m", "bert_jax.tools.predict"), "--checkpoint")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        pytest.param(b"no blank here\n", "no [MASK]", marks=pytest.mark.slow),
        pytest.param(b"\xff\xfe [MASK]\n", "not UTF-8", marks=pytest.mark.slow),
        (None, "No such file or directory; check the path"),
    ],
)
def test_predict_refuses_bad_input(repository, trained, tmp_path, content, part):
    if content is not None:
        (tmp_path / "in.txt").write_bytes(content)
    arguments = (f"--checkpoint={trained}", f"--input={tmp_path}/in.txt")
    assert_one_line(run(repository, "-m", "bert_jax.tools.predict", *arguments), part)
