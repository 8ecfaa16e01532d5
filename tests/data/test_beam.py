# SPDX-License-Identifier: Apache-2.0
"""The pipeline makes the bytes of `prepare_corpus`; without Beam the command says what to install."""

import importlib.util
import os
import subprocess
import sys

import pytest

from bert_jax.data.prepare import PrepareOptions, prepare
from bert_jax.storage.places import to_place
from tests.data.test_prepare import ENDINGS, WORDS, contents, write_text

HAS_BEAM = importlib.util.find_spec("apache_beam") is not None
needs_beam = [pytest.mark.slow, pytest.mark.skipif(not HAS_BEAM, reason="needs pip install 'bert_jax[beam]'")]
OPTIONS = ["--max_seq_length=32", "--holdout_rate=0.1", "--duplicates=2"]
TWO_WORKERS = "--pipeline_options=--direct_num_workers=2 --direct_running_mode=multi_processing"


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """Returns the flags of text and vocabulary."""
    folder = tmp_path_factory.mktemp("beam")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS, *(f"##{ending}" for ending in ENDINGS)]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    text = write_text(folder / "text")
    copied = (folder / "text" / "0.txt").read_text()  # documents of one hash keep their order
    (folder / "text" / "copy.txt").write_text(copied + "\n" + copied)
    return [f"--input={text}", f"--tokenizer={folder}/vocab.txt"]


def run_tool(tool: str, *flags: str) -> subprocess.CompletedProcess:
    # A process of its own: Beam sets up logging, and its imports warn of deprecations.
    command = [sys.executable, "-m", f"bert_jax.tools.{tool}", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})


@pytest.mark.parametrize("options", [pytest.param(["--shards=3", "--pack=2"], marks=needs_beam)])
def test_a_pipeline_cuts_the_same_passages(tmp_path, flags, options):
    """Of three files without blank lines, two of them the same, with a line at which the splitter panicked."""
    (tmp_path / "text").mkdir()
    for name, words in (("0", WORDS[:35]), ("1", WORDS[35:]), ("copy", WORDS[:35])):
        lines = [" ".join(words[place % 35] for place in range(start, start + 9)) for start in range(2500)]
        (tmp_path / "text" / f"{name}.txt").write_text(" C\u00a0.\n".join(lines))
    flags = [f"--input={tmp_path}/text/*.txt", flags[1], *OPTIONS, *options]
    for tool, place, workers in (("prepare_corpus", "one", "--workers=2"), ("prepare_beam", "other", TWO_WORKERS)):
        done = run_tool(tool, *flags, f"--output={tmp_path}/{place}", workers)
        assert done.returncode == 0 and "long documents were cut" in done.stderr, done.stderr
    assert contents(tmp_path / "other") == contents(tmp_path / "one")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, marks=needs_beam)
        for options in (
            ["--shards=3"],
            ["--shards=2", "--pack=3"],
            ["--next_sentence=none", "--pack=4"],
            ["--next_sentence=none", "--holdout_rate=0"],
        )
    ],
)
def test_a_pipeline_makes_the_same_bytes(tmp_path, flags, options):
    flags = [*flags, *OPTIONS, *options]
    done = run_tool("prepare_corpus", *flags, f"--output={tmp_path}/one", "--workers=1")
    assert done.returncode == 0, done.stderr
    done = run_tool("prepare_beam", *flags, f"--output={tmp_path}/other", TWO_WORKERS)
    assert done.returncode == 0, done.stderr
    assert "exact copies: 80 documents" in done.stderr
    assert contents(tmp_path / "other") == contents(tmp_path / "one")


@pytest.mark.parametrize("shards", [pytest.param(3, marks=needs_beam)])
def test_in_a_bucket_a_worker_leaves_alone_what_others_have_written(tmp_path, flags, shards):
    from bert_jax.data.beam import prepare_with_beam

    inputs, tokenizer = (flag.partition("=")[2] for flag in flags)
    options = PrepareOptions(max_seq_length=32, duplicates=1, shards=shards)
    threads = "--direct_num_workers=2 --direct_running_mode=multi_threading"
    prepare(inputs, tokenizer, str(tmp_path / "one"), options, num_workers=1)
    prepare_with_beam(inputs, tokenizer, f"memory://{tmp_path.name}", options, threads)
    for name, content in contents(tmp_path / "one").items():
        assert (to_place(f"memory://{tmp_path.name}") / str(name)).read_bytes() == content


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        pytest.param(options, reason, marks=needs_beam)
        for options, reason in [
            (["--shards=5000"], "shards 5000 is too many"),
            (["--pipeline_options=--direct_workers=2"], "--direct_workers is not Beam's"),
            (["--pipeline_options=--direct_num_workers=two"], "are not Beam's"),
            (["--input=nowhere/*.txt"], "matches no file"),
        ]
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, flags, options, reason):
    done = run_tool("prepare_beam", *flags, *OPTIONS, f"--output={tmp_path}/data", *options)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and reason in last and "[while running" not in last
    assert not (tmp_path / "data").exists()


def test_without_beam_the_command_says_what_to_install(tmp_path):
    (tmp_path / "apache_beam.py").write_text("raise ImportError('no beam here')\n")
    program = "import runpy, sys; runpy.run_module('bert_jax.tools.prepare_beam', run_name='__main__')"
    flags = ["--input=a", "--tokenizer=b", f"--output={tmp_path}/data", "--pipeline_options=--runner=DirectRunner"]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: Apache Beam cannot be imported (no beam here); pip install")
