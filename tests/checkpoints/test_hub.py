# SPDX-License-Identifier: Apache-2.0
"""Uploads to a hub on this machine, by the command, and what it says where the hub refuses."""

import os
import shutil
import subprocess
import sys

import pytest
from buckets import free_port
from builders import assert_same, make_pretrained
from commands import assert_one_line
from fake_hub import READER, WRITER, serve

from bert_jax import InputError, load_pretrained
from bert_jax.checkpoints.hub import parse_url


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Returns a work directory with a model, a revision of step 5, and records; shared, so not to be changed."""
    root = tmp_path_factory.mktemp("run")
    model = make_pretrained(root)
    for place in ("pretrained", "revisions/00000005"):
        shutil.copytree(model, root / "run" / place)
    (root / "run" / "config.json").write_text('{"run": {"train": {"num_steps": 12}, "data": {"path": "wiki"}}}')
    return root / "run"


@pytest.fixture
def convert(repository, workdir, tmp_path):
    """Returns a function that runs convert_checkpoint with `token` and nothing else of the user's."""

    def run(url, token, *flags):
        line = [sys.executable, "-m", "bert_jax.tools.convert_checkpoint", f"--input={workdir}/pretrained"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        environment |= {"HF_TOKEN": token} if token else {}
        line += ["--output=hf://me/bert", *flags]  # the last of a flag counts
        return subprocess.run(line, text=True, capture_output=True, cwd=repository, env=environment)

    return run


@pytest.mark.slow
def test_a_model_and_its_revisions_are_uploaded_and_read_again(workdir, convert, tmp_path):
    with serve() as (hub, url):
        done = convert(url, WRITER)
        assert done.returncode == 0 and f"uploaded to {url}/me/bert/commit/" in done.stdout, done.stderr
        for _ in range(2):  # again: the branch is there now
            done = convert(url, WRITER, f"--input={workdir}@5", "--revision=step5", "--noprivate", "--verify")
            assert done.returncode == 0 and "largest difference" in done.stdout, done.stderr
        assert sorted(hub.repositories["me/bert"]) == ["main", "step5"] and hub.private == {"me/bert"}
        files = hub.files("me/bert", "step5")
        assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "vocab.txt"} <= files.keys()
        card = files["README.md"].decode()
        assert "# bert\n" in card and "| train.num_steps | 12 |" in card and "# license: choose one" in card
        # It comes back by its name.
        done = convert(url, "", "--input=hf://me/bert@step5", f"--output={tmp_path / 'back'}", "--to=bert_jax")
        assert done.returncode == 0, done.stderr
    ours, theirs = (load_pretrained(path).params for path in (tmp_path / "back", workdir / "pretrained"))
    assert_same(ours["encoder"]["layers"], theirs["encoder"]["layers"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "flags", "message"),
    [
        ("", [], "error: hf://me/bert needs a token that may write; make one at http"),
        (READER, [], "error: cannot upload to hf://me/bert (403): Forbidden: you must use a write token; use a token"),
        ("hf_old", [], "error: cannot upload to hf://me/bert (401): Invalid username or password.; log in"),
        (WRITER, ["--to=bert_jax"], "error: --to=bert_jax cannot be uploaded"),
        (WRITER, ["--output=hf://bert"], "error: hf://bert names no repository of the hub"),
        (WRITER, ["--output=hf://me/bert@a", "--revision=b"], "name two revisions; give one of them"),
        (WRITER, ["--output=here"], "error: --to is needed"),
        (WRITER, ["--output=here", "--to=hf", "--revision=a"], "error: --revision=a is of a repository of the hub"),
    ],
)
def test_what_is_refused_is_one_line(convert, token, flags, message):
    with serve() as (hub, url):
        assert_one_line(convert(url, token, *flags), message)
    assert not hub.repositories


@pytest.mark.slow
def test_no_network_is_one_line(convert):
    url = f"http://127.0.0.1:{free_port()}"
    assert_one_line(convert(url, WRITER), "cannot upload to hf://me/bert", f"the network and {url}")


def test_names_of_repositories():
    assert parse_url("hf://me/bert") == ("me/bert", "")
    assert parse_url("hf://me/bert@v1") == parse_url("hf://me/bert", "v1") == ("me/bert", "v1")
    for url in ("hf://", "hf://me", "hf://me/", "hf:///bert", "hf://a/b/c", "hf://me/../bert", "hf://me/be rt"):
        with pytest.raises(InputError, match="names no repository"):
            parse_url(url)
