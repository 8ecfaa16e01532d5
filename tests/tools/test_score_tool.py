# SPDX-License-Identifier: Apache-2.0
"""The command that scores files: official numbers as JSON, or one line that says what is wrong."""

import json
import subprocess
import sys

import pytest
from builders import write
from commands import run_python


def score(repository, *arguments):
    return run_python(["-m", "bert_jax.tools.score", *arguments], repository)


@pytest.fixture
def files(tmp_path):
    """Returns the options that name a file of data and one of predictions."""
    question = '{"id": "N", "question": "?", "answers": [{"text": "N", "answer_start": 0}]}'
    qas = ", ".join(question.replace("N", name) for name in "xy")
    data = write(tmp_path / "data.json", f'{{"data": [{{"paragraphs": [{{"context": "x y", "qas": [{qas}]}}]}}]}}')
    write(tmp_path / "odds.json", '{"x": -1.5, "y": 3}')
    predictions = write(tmp_path / "predictions.json", '{"x": "x"}')
    return f"--data={data}", f"--predictions={predictions}"


def test_scores_and_what_is_missing(repository, files):
    done = score(repository, "--task=squad1", *files)
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"exact_match": 50, "f1": 50, "total": 2}
    assert "predictions.json lacks 1 questions" in done.stderr and done.stderr.count("\n") == 1


def test_squad2_with_odds(repository, files, tmp_path):
    done = score(repository, "--task=squad2", *files, f"--na_prob_file={tmp_path / 'odds.json'}")
    scores = json.loads(done.stdout)
    assert (scores["best_f1"], scores["best_f1_thresh"], scores["HasAns_total"]) == (50, -1.5, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task=squad3"], "error: --task 'squad3' has no official score; use squad1, squad2, glue:NAME or ner"),
        (["--task="], "error: --task is needed"),
        (["--task=squad1", "--na_prob_file=x"], "error: --na_prob_file x is for squad2"),
        (["--task=squad2", "--na_prob_thresh=0.5"], "error: --na_prob_thresh 0.5 is for squad2 with --na_prob_file"),
    ],
)
def test_one_line_of_what_is_wrong(repository, files, arguments, message):
    done = score(repository, *files, *arguments)
    assert done.returncode == 1 and message in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


def test_no_jax(repository, files):
    code = (
        "import sys; from bert_jax.tools import score; from bert_jax.tasks.squad import score;"
        "print(sorted({'jax', 'flax', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, cwd=repository)
    assert done.stdout == "[]\n", done.stderr
