# SPDX-License-Identifier: Apache-2.0
"""A directory is listed once, and each of its files is read once."""

import os
import subprocess
import sys

import pytest
from builders import message, write

from bert_jax.storage.files import LARGEST
from bert_jax.storage.folder import Folder, open_folder

COUNT = """
import os, sys
import bert_jax
from bert_jax.checkpoints import pretrained
target, asked = sys.argv[1], []
def hook(event, args):
    if event in ("open", "os.listdir", "os.scandir") and args and str(args[0]).startswith(target):
        asked.append(event)
def counted(name):
    function = getattr(os, name)
    def count(path, *args, **options):
        if str(path).startswith(target):
            asked.append(name)
        return function(path, *args, **options)
    setattr(os, name, count)
sys.addaudithook(hook)
for name in ("stat", "lstat", "access"):
    counted(name)
bert_jax.load_pretrained(target)
print(len(asked), *asked)
"""


def test_the_model_in_the_box_is_read_with_eight_questions_to_the_disk(repository):
    """One more than are counted here: safetensors opens its file by itself."""
    run = [sys.executable, "-c", COUNT, str(repository / "models" / "bert-mini-en")]
    done = subprocess.run(run, text=True, capture_output=True, cwd=repository)
    assert done.returncode == 0 and int(done.stdout.split()[0]) <= 7, done.stdout + done.stderr


def test_a_folder_is_what_was_there_when_it_was_listed(tmp_path):
    for name, content in (("a.json", '{"x": 1}'), ("b.json", "[1]"), ("inner/b.bin", "b")):
        write(tmp_path / name, content)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    folder = open_folder(tmp_path)
    assert folder.names == ["a.json", "b.json", "gone", "inner"] and folder.matching("*") == ["a.json", "b.json"]
    assert "a.json" in folder and "inner" not in folder and "gone" not in folder
    assert folder.object("a.json") is folder.json("a.json") and folder.object("other.json") == {}
    assert folder.inside("inner").read_bytes("b.bin") == b"b" and folder.inside("") is folder
    assert folder.inside("nowhere").names == folder.inside("a.json").names == []
    assert folder.large("a.json") == folder / "a.json" == tmp_path / "a.json"
    assert "other.json does not exist" in message(folder.json, "other.json")
    assert "b.json is not a JSON object; copy it again" in message(folder.object, "b.json")


def test_what_is_not_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "wait").symlink_to("/dev/zero")
    for name in ("pipe", "wait"):
        for read in (lambda name=name: Folder(tmp_path).read_bytes(name), lambda: open_folder(tmp_path)):
            assert f"{name} is not a file, but a directory, a pipe or a device; give a" in message(read)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("read", ["read_bytes", "json", "large"])
def test_what_is_not_the_file_itself_is_refused(tmp_path, read):
    (tmp_path / "pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4\nsize 9\n")
    assert "pointer is a pointer of Git LFS in place of the file; fetch it" in message(
        getattr(open_folder(tmp_path), read), "pointer"
    )
    if read != "large":
        with open(tmp_path / "large", "wb") as stream:
            stream.truncate(1 << 40)  # without a block on the disk
        assert f"large has {1 << 40} bytes; give a file of at most {LARGEST} bytes" in message(
            getattr(open_folder(tmp_path), read), "large"
        )
