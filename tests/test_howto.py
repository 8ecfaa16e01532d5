# SPDX-License-Identifier: Apache-2.0
"""The how-to pages: their Python blocks run, and their recipes work with the commands."""

import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from builders import tiny_model

from bert_jax.checkpoints.pretrained import Pretrained, save_pretrained
from bert_jax.inference.pretrained import load_pretrained
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.model.objective import init_params
from bert_jax.text.tokenizer import wordpiece_tokenizer

ROOT = Path(__file__).resolve().parents[1]
HOWTO = ROOT / "docs" / "howto"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def blocks(page: Path) -> list[str]:
    """Returns the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def said_to_print(source: str) -> list[str]:
    """Returns what a page says its programs print, in order: the comments behind print; in a loop several lines."""
    said: list[str] = []
    for line in source.splitlines():
        if match := re.fullmatch(r"( *)print\(.*\)  # (.*)", line):
            said += match[2].split(", ") if match[1] else [match[2]]
    return [line for line in said if line != "..."]


def is_said(line: str, said: str) -> bool:
    """Returns whether a printed line is as the page says; numbers may differ by one in their last decimal place."""
    number = r"-?\d+(?:\.\d*)?"
    if re.split(number, line) != re.split(number, said):
        return False
    for one, other in zip(re.findall(number, line), re.findall(number, said)):
        _, point, decimals = other.partition(".")
        if abs(float(one) - float(other)) > (1.01 * 10.0 ** -len(decimals) if point else 0):
            return False
    return True


def check_prints(source: str, output: str) -> None:
    lines = iter(output.splitlines())
    for said in said_to_print(source):
        assert any(is_said(line, said) for line in lines), f"{said!r} is not printed, or not there:\n{output}"


@pytest.fixture
def place(tmp_path, repository, monkeypatch):
    """Returns an empty directory with an untrained model under the names that pages use."""
    tokenizer = wordpiece_tokenizer(
        [*"[PAD] [UNK] [CLS] [SEP] [MASK] . ?".split(), *LETTERS, *(f"##{letter}" for letter in LETTERS)],
        lowercase=True,
    )
    model = tiny_model(vocab_size=tokenizer.vocab_size, initializer_stddev=0.1)
    bert = Pretrained(model, init_params(model, jax.random.key(0)), tokenizer)
    for name in ("runs/base", "runs/demo/pretrain"):
        save_pretrained(bert, tmp_path / name)
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.setenv("PYTHONPATH", str(repository))
    return tmp_path


def run(place: Path, *command: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], cwd=place, text=True, capture_output=True, **options)


PAGES = [page.stem for page in sorted(HOWTO.glob("*.md")) if blocks(page)]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "devices"), [*((page, 1) for page in PAGES), ("own_loop", 8), ("adapters", 8)])
def test_the_programs_of_a_how_to_run(place, page, devices):
    """On one device; on eight those that step and save by themselves."""
    flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
    source = "\n".join(blocks(HOWTO / f"{page}.md"))
    done = run(place, "-c", source, env=os.environ | {"XLA_FLAGS": flags})
    assert done.returncode == 0, done.stderr[-2000:]
    check_prints(source, done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/start.md", "models/bert-mini-en/README.md"])
def test_the_programs_of_a_page_run(place, page):
    source = "\n".join(blocks(ROOT / page))
    done = run(place, "-c", source)
    assert done.returncode == 0, done.stderr[-2000:]
    if page != "docs/start.md":  # whose model is the demo's
        check_prints(source, done.stdout)


@pytest.mark.slow
def test_the_programs_of_reference_pages_run(place):
    """Those of api.md without its run of BERT-Base, of scoring.md and of finetuning.md."""
    bert = load_pretrained(place / "runs/base")
    params = init_params(bert.config, jax.random.key(0), SEQUENCES, 2)
    labels = {"task": "sequence_classification", "labels": ("negative", "positive")}
    save_pretrained(dataclasses.replace(bert, params=params, **labels), place / "runs/sst2")
    documents = (f"{one} {two} c d .\n{two} f {one} .\n" for one, two in itertools.combinations(LETTERS, 2))
    (place / "text.txt").write_text("\n".join(documents))
    prepare = ["prepare_corpus", "--input=text.txt", "--tokenizer=runs/base/tokenizer", "--output=data128"]
    done = run(place, "-m", "bert_jax", *prepare, "--max_seq_length=64", "--holdout_rate=0.1")
    assert done.returncode == 0, done.stderr[-2000:]
    pages = blocks(ROOT / "docs/api.md")[:1], blocks(ROOT / "docs/scoring.md"), blocks(ROOT / "docs/finetuning.md")
    done = run(place, "-c", "\n".join(["import bert_jax", *itertools.chain(*pages)]))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_an_own_head_trains_resumes_and_predicts_by_the_commands(place):
    (place / "my_head.py").write_text(blocks(HOWTO / "own_head.md")[0])
    rows = "".join(f"{'open' if number % 2 else 'shut'} it\t{number % 2}\n" for number in range(16))
    for name in ("train.tsv", "dev.tsv"):
        (place / name).write_text("text\tlabel\n" + rows)
    command = ["-m", "bert_jax", "finetune", "--config=my_head.py", "--config.checkpoint.every_steps=2"]
    whole = run(place, *command, "--workdir=whole")
    assert whole.returncode == 0, whole.stderr[-2000:]
    child = subprocess.Popen([sys.executable, *command, "--workdir=killed"], cwd=place, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list(place.glob("killed/checkpoints/*")) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    again = run(place, *command, "--workdir=killed")
    assert again.returncode == 0, again.stderr[-2000:]
    predict = ["-m", "bert_jax", "predict", "--recipe=my_head.py", "--format=json"]
    answers = [run(place, *predict, f"--checkpoint={name}", input="open it\nshut it\n") for name in ("whole", "killed")]
    assert answers[0].stdout == answers[1].stdout and len(answers[0].stdout.splitlines()) == 2, answers[0].stderr
    refused = run(place, *predict[:3], "--checkpoint=whole", input="open it\n")
    assert refused.returncode == 1 and refused.stderr == (
        "error: this model has the head 'mean_and_largest' of a recipe, and a model directory runs no code; name the "
        "recipe again, with --recipe=PATH.py, or load_predictor(path, head=get_head())\n"
    )
    encoder = run(place, "-c", "import bert_jax; print(bert_jax.load_pretrained('whole').encode(['it']).hidden.shape)")
    assert encoder.stdout == "(1, 3, 256)\n", encoder.stderr
