# SPDX-License-Identifier: Apache-2.0
"""Uploads to a hub on this machine, by the command, and what it says where the hub refuses."""

import json
import os
import shutil
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from builders import make_pretrained
from fake_hub import READER, WRITER, serve

from bert_jax import InputError, load_pretrained
from bert_jax.checkpoints.hub import parse_url


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Returns a work directory with a model, a revision of step 5, and records; shared, so not to be changed."""
    root = tmp_path_factory.mktemp("run")
    model = make_pretrained(root)
    shutil.copytree(model, root / "run" / "pretrained")
    revision = root / "run" / "revisions" / "00000005"
    shutil.copytree(model, revision)
    (root / "run" / "config.json").write_text(
        json.dumps({"run": {"train": {"num_steps": 12}, "data": {"path": "wiki"}}})
    )
    return root / "run"


def convert(repository, tmp_path, url, token, *flags):
    """Returns status, stdout and stderr of convert_checkpoint, with `token` and nothing else of the user's."""
    line = [sys.executable, "-m", "bert_jax.tools.convert_checkpoint", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environment |= {"HF_TOKEN": token} if token else {}
    done = subprocess.run(line, text=True, capture_output=True, cwd=repository, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_model_and_its_revisions_are_uploaded_and_read_again(repository, workdir, tmp_path):
    with serve() as (hub, url):
        status, out, error = convert(
            repository, tmp_path, url, WRITER, f"--input={workdir}/pretrained", "--output=hf://me/bert"
        )
        assert status == 0, error
        assert f"uploaded to {url}/me/bert/commit/" in out
        revision = [f"--input={workdir}@5", "--output=hf://me/bert", "--revision=step5", "--noprivate", "--verify"]
        for _ in range(2):  # again: the branch is there now
            status, out, error = convert(repository, tmp_path, url, WRITER, *revision)
            assert status == 0 and "largest difference" in out, error
        assert sorted(hub.repositories["me/bert"]) == ["main", "step5"] and hub.private == {"me/bert"}
        files = hub.files("me/bert", "step5")
        assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "vocab.txt"} <= files.keys()
        card = files["README.md"].decode()
        assert "# bert\n" in card and "| train.num_steps | 12 |" in card and "# license: choose one" in card
        # It comes back by its name.
        status, _, error = convert(
            repository,
            tmp_path,
            url,
            "",
            "--input=hf://me/bert@step5",
            f"--output={tmp_path / 'back'}",
            "--to=bert_jax",
        )
        assert status == 0, error
    ours, theirs = (load_pretrained(path).params for path in (tmp_path / "back", workdir / "pretrained"))
    jax.tree.map(np.testing.assert_array_equal, ours["encoder"]["layers"], theirs["encoder"]["layers"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "flags", "message"),
    [
        ("", [], "error: hf://me/bert needs a token that may write; make one at http"),
        (READER, [], "error: cannot upload to hf://me/bert (403): Forbidden: you must use a write token; use a token"),
        (
            "hf_old",
            [],
            "error: cannot upload to hf://me/bert (401): Invalid username or password.; log in",
        ),
        (WRITER, ["--to=bert_jax"], "error: --to=bert_jax cannot be uploaded"),
        (WRITER, ["--output=hf://bert"], "error: hf://bert names no repository of the hub"),
        (WRITER, ["--output=hf://me/bert@a", "--revision=b"], "name two revisions; give one of them"),
        (WRITER, ["--output=here"], "error: --to is needed"),
        (WRITER, ["--output=here", "--to=hf", "--revision=a"], "error: --revision=a is of a repository of the hub"),
    ],
)
def test_what_is_refused_is_one_line(repository, workdir, tmp_path, token, flags, message):
    with serve() as (hub, url):
        flags = [f"--input={workdir}/pretrained", "--output=hf://me/bert", *flags]
        status, _, error = convert(repository, tmp_path, url, token, *flags)
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert status == 1 and len(lines) == 1 and message in lines[0] and "Traceback" not in error, error
    assert not hub.repositories


@pytest.mark.slow
def test_no_network_is_one_line(repository, workdir, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    status, _, error = convert(
        repository, tmp_path, url, WRITER, f"--input={workdir}/pretrained", "--output=hf://me/bert"
    )
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert status == 1 and "cannot upload to hf://me/bert" in line and f"the network and {url}" in line
    assert "Traceback" not in error


def test_names_of_repositories():
    assert parse_url("hf://me/bert") == ("me/bert", "")
    assert parse_url("hf://me/bert@v1") == parse_url("hf://me/bert", "v1") == ("me/bert", "v1")
    for url in ("hf://", "hf://me", "hf://me/", "hf:///bert", "hf://a/b/c", "hf://me/../bert", "hf://me/be rt"):
        with pytest.raises(InputError, match="names no repository"):
            parse_url(url)
