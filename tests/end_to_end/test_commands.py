# SPDX-License-Identifier: Apache-2.0
"""The commands as a user types them: raw text to filled blanks, and what they say when something is wrong."""

import json

import pytest
from builders import write_corpus
from commands import assert_one_line, run_python, variables

SMALL = (
    "--config.model.hidden_size=32 --config.model.num_heads=2 --config.model.intermediate_size=64 "
    "--config.data.batch_size=8 --config.optimizer.warmup_steps=2 --config.report.every_steps=5 "
    "--config.report.tensorboard=False --config.train.num_steps=20 --config.eval.every_steps=10"
).split()


def run(repository, *arguments):
    return run_python(arguments, repository, environment=variables(repository))


@pytest.fixture(scope="module")
def trained(repository, tmp_path_factory):
    """Returns the work directory of a run whose tokenizer and data set are made by the commands."""
    folder = tmp_path_factory.mktemp("commands")
    write_corpus(folder / "text.txt")
    options = ("--max_seq_length=32", "--duplicates=2", "--holdout_rate=0.1", "--workers=1")
    places = (f"--tokenizer={folder}/tokenizer", f"--output={folder}/data")
    for command in (
        ("build_vocab", f"--input={folder}/text.txt", f"--output={folder}/tokenizer", "--vocab_size=200"),
        ("prepare_corpus", f"--input={folder}/text.txt", *places, *options),
        ("train", "--config=pretrain:tiny", f"--config.data.path={folder}/data", f"--workdir={folder}/run", *SMALL),
    ):
        result = run(repository, "-m", "bert_jax", *command)
        assert result.returncode == 0, result.stderr
    assert "eval  20/20" in result.stderr and "trained to step 20" in result.stderr
    return folder / "run"


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
