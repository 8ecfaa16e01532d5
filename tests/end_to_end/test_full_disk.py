# SPDX-License-Identifier: Apache-2.0
"""A disk that is full: one line, nothing half written, and the same command goes on once there is space."""

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import processes
import pytest
from builders import growing_bert, tiny_run
from commands import run_python
from whole_runs import ONE_DEVICE, train

from bert_jax import InputError, load_pretrained
from bert_jax.checkpoints import arrays
from bert_jax.checkpoints.hf import save_hf
from bert_jax.checkpoints.pretrained import save_pretrained
from bert_jax.data import prepare
from bert_jax.inference import export
from bert_jax.settings.pretraining import EvalConfig, TrainConfig

PAGE = 4096


class SmallDisk:
    """A file system of its own in memory."""

    def __init__(self, path: Path):
        self.path = path

    def resize(self, num_bytes: int) -> None:
        """Gives it as many bytes in all, which must be no fewer than it holds."""
        options = f"remount,size={-(-num_bytes // PAGE) * PAGE}"
        subprocess.run(["mount", "-o", options, str(self.path)], check=True, capture_output=True)

    def used(self) -> int:
        about = os.statvfs(self.path)
        return (about.f_blocks - about.f_bfree) * about.f_frsize


@pytest.fixture
def disk(tmp_path) -> Iterator[SmallDisk]:
    """Returns a file system of 64 MB; skips the test where this user may mount none."""
    path = tmp_path / "disk"
    path.mkdir()
    with contextlib.ExitStack() as stack:
        try:
            command = ["mount", "-t", "tmpfs", "-o", f"size={64 << 20}", "tmpfs", str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"no file system can be mounted here: {error}")
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        stack.callback(subprocess.run, ["umount", "--lazy", str(path)], check=True)
        yield SmallDisk(path)


WRITERS: dict[str, Callable] = {
    "bert_jax": lambda bert, path: save_pretrained(bert, path, replace=False),
    "hf": lambda bert, path: save_hf(path, bert.config, bert.params, bert.tokenizer, bert.task, ()),
    "export": lambda bert, path: export.export_model(bert, path, ("cpu",)),
}


@pytest.mark.parametrize(
    ("form", "free"),
    [("bert_jax", 0), ("hf", 4), ("bert_jax", 16), ("hf", 60), ("export", 60)],
)
def test_a_model_is_whole_or_not_there(disk, form, free, capfd):
    bert = growing_bert()
    disk.resize(free << 10 or PAGE)
    (disk.path / "filler").write_bytes(bytes(PAGE if not free else 0))
    with pytest.raises(InputError, match=r"^cannot write .*/disk/new") as caught:
        WRITERS[form](bert, disk.path / "new")
    assert "\n" not in str(caught.value) and "Traceback" not in capfd.readouterr().err
    assert ("o space left" in str(caught.value) or " are free" in str(caught.value)) and ".tmp" not in str(caught.value)
    assert os.listdir(disk.path) == ["filler"]
    disk.resize(64 << 20)
    WRITERS[form](bert, disk.path / "new")
    assert form == "export" or load_pretrained(disk.path / "new").config.vocab_size == 20


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of threads that end later
def test_a_disk_that_fills_up_while_orbax_writes_is_one_line(disk, monkeypatch, capfd):
    """So it is where the space that was free is gone when it is needed."""
    monkeypatch.setattr("bert_jax.checkpoints.pretrained.check_space", lambda *_: None)
    disk.resize(32 << 10)
    with pytest.raises(InputError, match=r"^cannot write a checkpoint to .*: no space left; what") as caught:
        save_pretrained(growing_bert(), disk.path / "new", replace=False)
    assert "\n" not in str(caught.value) and "_SignalingThread" not in capfd.readouterr().err
    assert not os.listdir(disk.path)


def test_what_is_written_after_the_error_is_removed_too(tmp_path, monkeypatch):
    """TensorStore goes on writing other arrays when one has failed, and makes directories again."""

    class Checkpointer:
        def save(self, path: str, tree) -> None:
            threading.Thread(target=self.go_on, args=(path,)).start()
            raise ValueError("RESOURCE_EXHAUSTED: no space left on device")

        def go_on(self, path: str) -> None:
            for number in range(4):
                time.sleep(0.1)
                Path(f"{path}.orbax-checkpoint-tmp", str(number)).mkdir(parents=True)

    monkeypatch.setattr(arrays, "_checkpointer", lambda alone: contextlib.nullcontext(Checkpointer()))
    with pytest.raises(InputError, match="no space left"):
        save_pretrained(growing_bert(), tmp_path / "new", replace=False)
    time.sleep(0.5)
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_a_disk_that_another_program_fills_ends_a_run_with_one_line_at_the_end(repository, disk, toy_data):
    """The record of a step, TensorBoard's, or the save fails first."""
    workdir = disk.path / "run"
    changes = ("train.num_steps=100000", "eval.every_steps=0", "checkpoint.every_steps=3", "report.tensorboard=True")
    arguments = [*processes.TRAIN, f"--workdir={workdir}", f"--config.data.path={toy_data}"]
    running = processes.start(repository, [*arguments, *(f"--config.{change}" for change in changes)], 2)
    processes.wait_for_lines(workdir / "metrics.jsonl", 6, running)
    with contextlib.suppress(OSError), open(disk.path / "filler", "wb") as stream:
        while True:
            stream.write(bytes(PAGE))
            stream.flush()
    errors = processes.finish(running, expected=1)
    lines = errors[0].splitlines()
    assert lines[-1].startswith("error: ") and str(workdir) in lines[-1], lines[-20:]
    assert "space" in lines[-1]
    assert "Traceback" not in "".join(errors), errors
    assert sum(not line.startswith(("train", "eval")) for line in lines) < 16, lines


@pytest.mark.slow
def test_the_last_save_of_pretraining_is_made_up(disk, toy_data):
    workdir = disk.path / "run"
    config = tiny_run(toy_data, mesh=ONE_DEVICE, train=TrainConfig(num_steps=2), eval=EvalConfig(every_steps=0))
    train(config, workdir)
    shutil.rmtree(workdir / "pretrained")
    checkpoints = sorted(os.listdir(workdir / "checkpoints"))
    disk.resize(disk.used() + (40 << 10))
    with pytest.raises(InputError, match=r"cannot write .*/run/pretrained: it takes .* free some space"):
        train(config, workdir)
    assert not (workdir / "pretrained").exists() and sorted(os.listdir(workdir / "checkpoints")) == checkpoints
    assert not list(workdir.glob(".pretrained*"))
    disk.resize(64 << 20)
    assert train(config, workdir).step == 2
    assert load_pretrained(workdir / "pretrained").config.num_layers == 2


@pytest.mark.parametrize("free", [0, 8])
def test_a_data_set_goes_on_where_it_was(disk, toy_data, tmp_path, free):
    texts = str(toy_data.parent / "text.txt"), str(toy_data.parent / "vocab.txt")
    options = prepare.PrepareOptions(max_seq_length=32, duplicates=2, holdout_rate=0.1)
    output = disk.path / "data"
    disk.resize((free + 1) * PAGE)
    (disk.path / "filler").write_bytes(bytes(PAGE))
    with pytest.raises(InputError, match=r"^cannot write .*/disk/data.*: No space left on device") as caught:
        prepare.prepare(*texts, str(output), options, num_workers=1)
    assert "\n" not in str(caught.value) and not (output / "manifest.json").exists()
    disk.resize(64 << 20)
    prepare.prepare(*texts, str(output), options, num_workers=1)
    for path in toy_data.rglob("*"):
        assert path.is_dir() or (output / path.relative_to(toy_data)).read_bytes() == path.read_bytes()


WRITE = """
import resource, sys
from bert_jax.errors import InputError
from bert_jax.storage import writing
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    with writing.atomic_path(sys.argv[1]) as temporary:
        temporary.write_bytes(bytes(1 << 16))
except InputError as error:
    print(error)
"""


def test_a_file_that_may_not_grow_is_one_line(tmp_path):
    done = run_python(["-c", WRITE, tmp_path / "file"])
    assert done.stdout == f"cannot write {tmp_path}/file: File too large; free some space or choose another place\n"
    assert not os.listdir(tmp_path)
