# SPDX-License-Identifier: Apache-2.0
"""Of several commands that would write one output one does, and the others say who it is; nothing is half written."""

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from builders import growing_bert, message, write_corpus, write_vocab

from bert_jax import InputError, load_pretrained
from bert_jax.checkpoints.pretrained import save_pretrained
from bert_jax.data import building, prepare, records
from bert_jax.data.prepare import PrepareOptions
from bert_jax.storage import locks, writing
from bert_jax.storage.places import RemotePath

OPTIONS = PrepareOptions(max_seq_length=32, duplicates=1, holdout_rate=0.1)


def busy() -> str:
    """Returns what others are told of this process, which may be a fork of the one that has imported this module."""
    return rf"is being written by another command \(process {os.getpid()} on {socket.gethostname()}\); choose another"


def names(folder: Path) -> list[str]:
    """Returns the names of all files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def text(tmp_path) -> tuple[str, str]:
    """Returns a file of text and a vocabulary for it."""
    write_corpus(tmp_path / "text.txt")
    write_vocab(tmp_path / "vocab.txt")
    return str(tmp_path / "text.txt"), str(tmp_path / "vocab.txt")


@pytest.mark.parametrize("inside", [False, True])
def test_an_output_has_one_writer_and_no_lock_is_left(tmp_path, inside):
    output = tmp_path / "deep" / "output"
    with locks.writing(output, inside):
        with pytest.raises(InputError, match=busy()), locks.writing(output, inside):
            pass
    assert not names(tmp_path)
    with locks.writing(output, inside):
        (name,) = names(tmp_path)
        assert name == f"deep/{f'output/{locks.LOCK}' if inside else '.output.lock'}"
        assert not (tmp_path / name).stat().st_mode & 0o111


@pytest.mark.parametrize("inside", [False, True])
def test_an_output_in_a_store_has_a_lease(tmp_path, inside):
    root = RemotePath(f"memory://{tmp_path.name}")
    with locks.writing(root / "output", inside):
        assert list(root.listing()) == ["output/.lease" if inside else ".output.lease"]
    assert not root.listing()
    with locks.writing("http://localhost:1/output", inside):  # where nothing can be written
        pass


@pytest.mark.parametrize(("failures", "is_found"), [(3, True), (locks._MOST_VANISHED, False)])
def test_a_directory_that_vanishes_is_made_again_a_hundred_times(tmp_path, monkeypatch, failures, is_found):
    opened, tried = os.open, []

    def vanish(path, *more):
        tried.append(path)
        if len(tried) <= failures:
            raise FileNotFoundError(2, "No such file or directory")
        return opened(path, *more)

    monkeypatch.setattr(locks.os, "open", vanish)
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: None)
    with contextlib.nullcontext() if is_found else pytest.raises(FileNotFoundError):
        with locks.lock_file(tmp_path / "lock") as holder:
            assert not holder
    assert len(tried) == failures + is_found


def take_turns(folder: Path, rounds: int, all_there: Barrier) -> None:
    """Counts in a file, each time alone with it, and removes the lock's file after each turn."""
    all_there.wait(60)
    for _ in range(rounds):
        with locks.lock_file(folder / "lock", wait=True) as holder:
            assert not holder
            number = int((folder / "count").read_text())
            (folder / "count").write_text("damaged")
            time.sleep(0.001)
            (folder / "count").write_text(str(number + 1))


def test_processes_that_wait_take_turns_though_the_file_is_removed_each_time(tmp_path):
    (tmp_path / "count").write_text("0")
    context = multiprocessing.get_context("fork")
    all_there = context.Barrier(3)
    processes = [context.Process(target=take_turns, args=(tmp_path, 20, all_there)) for _ in range(2)]
    for process in processes:
        process.start()
    take_turns(tmp_path, 20, all_there)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "count").read_text() == "60" and names(tmp_path) == ["count"]


def test_what_cannot_be_locked_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .*file/out: (Not a directory|File exists); check the place"):
        with locks.writing(tmp_path / "file" / "out"):
            pass


def test_where_no_file_can_be_made_nobody_waits_for_ever(tmp_path, monkeypatch):
    (tmp_path / locks.LOCK).symlink_to(tmp_path / "gone" / "lock")
    with pytest.raises(InputError, match=r"cannot write .*: No such file or directory; check the place"):
        with locks.writing(tmp_path, inside=True):
            pass
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    with pytest.raises(InputError, match="cannot write model: No such file or directory"):
        with writing.new_directory("model"):
            pass


def test_a_link_is_replaced_as_often_as_one_likes(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "elsewhere")
    for content in ("one", "two"):
        with writing.new_directory(tmp_path / "model", lambda _: True) as folder:
            (folder / "file").write_text(content)
        assert (tmp_path / "model" / "file").read_text() == content
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "model"]


def test_a_directory_has_one_writer_who_finds_no_remains(tmp_path):
    for remains in (".new.123.tmp", ".new.123-0a1b2c3d.tmp", ".new.tmp", ".new.er.123.tmp"):  # the last of another
        (tmp_path / remains / "half").mkdir(parents=True)
    with writing.new_directory(tmp_path / "new") as folder:
        (folder / "file").touch()
        with pytest.raises(InputError, match=busy()), writing.new_directory(tmp_path / "new"):
            pass
        assert (folder / "file").is_file()
    assert sorted(os.listdir(tmp_path)) == [".new.er.123.tmp", "new"]


def test_a_directory_that_appears_meanwhile_is_kept_and_no_matter_of_space(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="new exists; give a directory that does not"):
        with writing.new_directory(tmp_path / "new"):
            (tmp_path / "new").mkdir()
            (tmp_path / "new" / "file").touch()
    monkeypatch.setattr(writing, "_check_free", lambda *_: None)
    monkeypatch.setattr(writing.shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(InputError, match="something else has made it meanwhile; choose another place"):
        with writing.new_directory(tmp_path / "new"):
            pass
    assert "new/file" in names(tmp_path)


def test_temporary_names_differ_though_process_numbers_do_not(tmp_path):
    with writing.atomic_path(tmp_path / "file") as one, writing.atomic_path(tmp_path / "file") as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert (tmp_path / "file").read_text() == "one"


def test_a_model_has_one_writer(tmp_path):
    bert = growing_bert()
    with locks.writing(tmp_path / "new"), pytest.raises(InputError, match=busy()):
        save_pretrained(bert, tmp_path / "new")
    save_pretrained(bert, tmp_path / "new", replace=False)
    assert "new exists; give a directory that does not" in message(
        save_pretrained, bert, tmp_path / "new", replace=False
    )
    save_pretrained(bert, tmp_path / "new")  # which replaces a model
    assert load_pretrained(tmp_path / "new").config == bert.config
    (tmp_path / "other").mkdir()
    assert "other exists; give a directory that does not" in message(save_pretrained, bert, tmp_path / "other")


# Data sets


def test_a_data_set_in_the_making_is_left_alone_by_a_second_command(tmp_path, text):
    """Before, it deleted the files that the first was about to rename, or all of them."""
    output = tmp_path / "data"
    with building.alone(output):
        writing.write_json(output / building.WORK / "options.json", {})
        (output / building.WORK / ".half.1.tmp").touch()
        before = names(output)
        with pytest.raises(InputError, match=busy()):
            prepare.prepare(*text, str(output), OPTIONS, num_workers=1)
        assert names(output) == before


def test_a_data_set_that_is_finished_while_another_command_begins_is_left_alone(tmp_path, text, monkeypatch):
    output = str(tmp_path / "data")
    finished = building.finished_manifest

    def finished_too_late(path, identity):
        monkeypatch.setattr(prepare, "finished_manifest", finished)
        assert finished(path, identity) is None
        prepare.prepare(*text, output, OPTIONS, num_workers=1)

    monkeypatch.setattr(prepare, "finished_manifest", finished_too_late)
    assert "data has just been finished by another command; use it" in message(
        prepare.prepare, *text, output, OPTIONS, num_workers=1
    )
    assert records.open_dataset(output) and building.WORK not in os.listdir(output)


@pytest.mark.slow
def test_commands_that_prepare_one_data_set_at_once(tmp_path, text):
    for number in range(3):
        output = tmp_path / f"data{number}"
        command = [sys.executable, "-m", "bert_jax.tools.prepare_corpus", f"--input={text[0]}"]
        command += [f"--tokenizer={text[1]}", f"--output={output}", "--max_seq_length=32", "--workers=2"]
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        for process in processes:
            told = process.communicate(timeout=300)[1]
            assert "Traceback" not in told
            assert process.returncode == 0 or ("error: " in told and " another command" in told), told
        assert 0 in {process.returncode for process in processes}
        assert records.open_dataset(output).train.num_rows
        assert names(output) == [
            "heldout-00000-of-00001.npy", "manifest.json", "token_counts.npy", "tokenizer/tokenizer_config.json",
            "tokenizer/vocab.txt", "train-00000-of-00001.npy"
        ]  # fmt: skip
