# SPDX-License-Identifier: Apache-2.0
"""`score_sentences` and `evaluate` as commands: what they print and write, and what they refuse."""

import json

import pytest
from builders import make_pretrained
from commands import run_python

from bert_jax import load_pretrained, score_sentences


def run(repository, tool, *arguments, text=""):
    return run_python(["-m", f"bert_jax.tools.{tool}", *arguments], repository, text)


@pytest.fixture(scope="module")
def model(pretrained):
    return pretrained


@pytest.mark.slow
def test_sentences(repository, model, tmp_path):
    done = run(repository, "score_sentences", f"--checkpoint={model}", text="ban ber .\n\nthe zebra .\n")
    assert done.returncode == 0, done.stderr
    first, blank, last = done.stdout.splitlines()  # a line for every line
    (one, *rest), (other, *more) = first.split("\t"), last.split("\t")
    expected = score_sentences(load_pretrained(model), ["ban ber .", "the zebra ."])
    assert [float(one), float(other)] == pytest.approx(expected.tolist(), abs=1e-3)
    assert (rest, blank, more) == (["3", "ban ber ."], "", ["3", "the zebra ."])
    assert "2 sentences in" in done.stderr and "1 have unknown words" in done.stderr
    (tmp_path / "in.txt").write_text("ban ber .\n" + "ban " * 70)
    flags = (f"--checkpoint={model}", f"--input={tmp_path / 'in.txt'}")
    done = run(repository, "score_sentences", *flags, "--long_texts=refuse")
    assert done.returncode == 1 and "in.txt:2 has 72 tokens" in done.stderr and done.stderr.count("\n") == 1
    done = run(repository, "score_sentences", *flags)
    assert done.returncode == 0 and done.stderr.count("warning: 1 text has more than 64 tokens") == 1


@pytest.mark.slow
def test_pairs(repository, model, tmp_path):
    (tmp_path / "case-one.txt").write_text("ban ber\nban bir\nthe the\nthe the\n")
    files = f"--pairs={tmp_path}", f"--output={tmp_path / 'out.json'}"
    done = run(repository, "score_sentences", f"--checkpoint={model}", "--method=within_word_l2r", *files)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["method"] == "within_word_l2r" and found["sentences"] == 4 and "Wilson" in found["intervals"]
    (paradigm,) = found["paradigms"]
    assert (paradigm["pairs"], paradigm["ties"]) == (2, 1)
    assert found["overall"]["accuracy"] == paradigm["right"] / 2
    assert done.stdout.splitlines()[-2].startswith("overall")


@pytest.mark.slow
def test_evaluate(repository, tmp_path, toy_data, model):
    done = run(repository, "evaluate", f"--checkpoint={model}", f"--data={toy_data}", f"--output={tmp_path / 'x.json'}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "x.json").read_text())
    assert found["masking"]["rate"] == 0.15 and found["metrics"]["mlm_loss"] > 0 and "nsp_loss" not in found["metrics"]


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("evaluate", ["--data=nowhere"], "error: nowhere"),
        ("score_sentences", ["--input=-", "--long_texts=refuse"], "line 1 has 72 tokens"),
    ],
)
def test_a_model_trained_in_bfloat16_is_computed_in_float32(repository, tmp_path, tool, arguments, message):
    """The model is taken; what follows is refused, so that nothing needs to be compiled."""
    narrow = make_pretrained(tmp_path, compute_dtype="bfloat16", gradient_dtype="bfloat16")
    done = run(repository, tool, f"--checkpoint={narrow}", "--compute_dtype=float32", *arguments, text="ban " * 70)
    assert done.returncode == 1 and message in done.stderr and "gradient_dtype" not in done.stderr


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("score_sentences", [], "--checkpoint is needed"),
        ("score_sentences", ["--checkpoint=x", "--output=docs"], "output docs is a directory; name a file"),
        ("evaluate", ["--checkpoint=x"], "give --data, a prepared data set, or --input"),
        ("evaluate", ["--checkpoint=x", "--data=y", "--max_seq_length=9"], "--max_seq_length has no effect"),
        ("evaluate", ["--checkpoint=x", "--input=y", "--split=train"], "--split has no effect with --input"),
    ],
)
def test_flags_that_do_not_fit_are_one_line(repository, tool, arguments, message):
    done = run(repository, tool, *arguments)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1
