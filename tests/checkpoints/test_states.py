# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole, named when damaged, and kept as asked."""

import contextlib
import json
import math
import os
import shutil
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from builders import assert_same, message

from bert_jax.checkpoints import remains, sealed
from bert_jax.checkpoints.arrays import cannot_write_checkpoint, check_arrays, describe, state_bytes
from bert_jax.checkpoints.sealed import (
    SEAL,
    checkpoint_steps,
    find_damage,
    newest_whole,
    read_newest,
    read_seal,
    seal,
    write_seal,
)
from bert_jax.checkpoints.states import Checkpoints
from bert_jax.devices.sharding import make_mesh, replicated
from bert_jax.errors import InputError
from bert_jax.settings.pretraining import MeshConfig
from bert_jax.storage.files import sha256_file
from bert_jax.storage.places import RemotePath
from bert_jax.storage.stores import crc32c_of

# Seals of any files

ABOUT = {"arrays": {"x": ["float32", [0, 2]]}}


@pytest.fixture(params=["here", "bucket"])
def sealed_place(request, tmp_path, memory):
    """Returns a sealed directory, on this machine or in an object store."""
    place = tmp_path / "sealed" if request.param == "here" else RemotePath("memory://sealed")
    for name in ("a", "state/b"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"abc")
    seal(place, ABOUT)
    return place


def test_a_seal_names_every_file_and_each_damage_is_told(sealed_place):
    content = read_seal(sealed_place)
    assert content["format"] == 2
    assert find_damage(sealed_place) is None
    assert content["files"] == {name: {"bytes": 3, "sha256": sha256(b"abc").hexdigest()} for name in ("a", "state/b")}
    seal(sealed_place, ABOUT, "state/")  # in a bucket, where others may write, without what is not below
    assert ("a" in read_seal(sealed_place)["files"]) == isinstance(sealed_place, Path)
    seal(sealed_place, ABOUT)
    for damage, expected in [
        (b"abd", "file a has another checksum than when it was written"),
        (b"abcd", "file a has 4 bytes in place of 3"),
        (None, "file a is missing"),
    ]:
        (sealed_place / "a").unlink() if damage is None else (sealed_place / "a").write_bytes(damage)
        assert find_damage(sealed_place) == expected
    seal(sealed_place, ABOUT)  # again, without its own file
    assert read_seal(sealed_place)["files"].keys() == {"state/b"} and find_damage(sealed_place) is None
    seal(sealed_place, {"arrays": {}})
    assert find_damage(sealed_place) == f"{SEAL} names no arrays"
    seal(sealed_place, {"arrays": {"x": ["float32", [2**31]]}})
    assert "Expected `int` <= 2147483647" in find_damage(sealed_place)
    (sealed_place / SEAL).unlink()
    assert find_damage(sealed_place) == f"{SEAL} is missing, so it was never finished"


def test_every_flipped_bit_of_a_seal_is_damage(tmp_path):
    """Also those in the metric, the notes, the step, the shapes, and the digest itself."""
    (tmp_path / "a").write_bytes(b"abc")
    seal(tmp_path, ABOUT | {"step": 2, "metric": 0.5, "notes": {"from": 2}})
    content, whole = (tmp_path / SEAL).read_bytes(), json.loads((tmp_path / SEAL).read_text())
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (tmp_path / SEAL).write_bytes(changed)
        assert find_damage(tmp_path) or json.loads(changed) == whole, (place, bytes(changed[place - 20 : place + 20]))


@pytest.mark.parametrize("kinds", [("crc32c",), ("sha256",), ("crc32c", "sha256"), ()])
def test_a_checksum_of_any_kind_is_checked(sealed_place, tmp_path, kinds):
    """Seals are copied with their files, from a bucket and to one; sizes alone are those of a bucket without sums."""
    (tmp_path / "abc").write_bytes(b"abc")
    sums = {"crc32c": crc32c_of(tmp_path / "abc"), "sha256": sha256(b"abc").hexdigest()}
    about = ABOUT | {"files": {"a": {"bytes": 3} | {kind: sums[kind] for kind in kinds}}}
    write_seal(sealed_place, about)
    assert find_damage(sealed_place) is None
    (sealed_place / "a").write_bytes(b"abd")
    assert (find_damage(sealed_place) is None) == (not kinds)


def test_the_sums_of_a_store_are_taken_as_they_are(memory, monkeypatch):
    place = RemotePath("memory://sealed")
    for name in ("a", "b"):
        (place / name).write_bytes(b"abc")
    sums = {"a": {"bytes": 3, "crc32c": "x"}, "b": {"bytes": 3, "etag": "y"}}
    monkeypatch.setattr(RemotePath, "listing", lambda place: sums)
    seal(place, ABOUT)
    of_content = {"bytes": 3, "sha256": sha256(b"abc").hexdigest()}
    assert read_seal(place)["files"] == {"a": sums["a"], "b": of_content} and find_damage(place) is None
    sums["a"] = {"bytes": 3, "crc32c": "z"}
    assert find_damage(place) == "file a has another checksum than when it was written"


def test_only_directories_of_steps_are_checkpoints(tmp_path):
    for name in ("00000012", "00000003", "7", "00000005.tmp", "x"):  # 7: a copy, and no run could go on from there
        (tmp_path / name).mkdir()
    (tmp_path / "00000004").touch()
    assert checkpoint_steps(tmp_path) == [3, 12] and checkpoint_steps(tmp_path / "none") == []
    with pytest.raises(InputError, match=r"holds no whole checkpoint; .*00000012 is not used: .*; .*00000003 is not"):
        newest_whole(tmp_path)


@pytest.mark.parametrize(
    ("fails", "deletions", "times", "ends"),
    [
        (True, 0, 1, pytest.raises(KeyError)),
        (True, 9, 5, pytest.raises(KeyError)),
        (False, 9, 5, pytest.raises(InputError, match="are deleted while they are read; try again when")),
        (True, 1, 2, contextlib.nullcontext()),
        (False, 1, 2, contextlib.nullcontext()),
    ],
)
def test_a_read_is_tried_again_where_a_run_deletes_its_checkpoint(tmp_path, fails, deletions, times, ends):
    read = []

    def save(step):
        (path := tmp_path / f"{step:08d}").mkdir()
        (path / "a").touch()
        seal(path, ABOUT)

    def read_one(path):
        read.append(path)
        if len(read) <= deletions:
            save(int(path.name) + 1)
            shutil.rmtree(path)
        if fails and (not deletions or len(read) <= deletions):
            raise KeyError(path.name)
        return int(path.name)

    save(1)
    (tmp_path / "00000099").mkdir()
    with ends:
        found, passed_over = read_newest(tmp_path, read_one)
        assert (
            found == 2 and len(passed_over) == 1 and "00000099 is not used: checksums.json is missing" in passed_over[0]
        )
    assert len(read) == times


# Checkpoints of states


def make_state(value):
    return {"params": {"kernel": jnp.full((64, 8), value), "bias": jnp.arange(8.0)}, "step": jnp.int32(value)}


@pytest.fixture(scope="module")
def abstract():
    sharding = replicated(make_mesh(MeshConfig(), jax.devices()[:1]))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), make_state(0))


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "c"


def save_all(directory, metrics, **keep):
    """Saves checkpoints with these metrics by their steps, or so many without."""
    if isinstance(metrics, int):
        metrics = dict.fromkeys(range(1, metrics + 1))
    checkpoints = Checkpoints(directory, **keep)
    for step, metric in metrics.items():
        checkpoints.save(step, make_state(step), metric, {"from": step})
    checkpoints.close()
    return Checkpoints(directory, **keep)


def data_files(directory, step):
    """Returns the files that hold array bytes, largest first."""
    files = [path for path in (directory / f"{step:08d}").rglob("*") if path.is_file() and path.name != SEAL]
    return sorted(files, key=lambda path: -path.stat().st_size)


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_what_is_saved_comes_back(tmp_path, directory, abstract):
    assert Checkpoints(directory).restore(abstract).state is None
    save_all(directory, 2).close()
    directory.rename(tmp_path / "c [1]")  # which Orbax takes for a pattern
    restored = Checkpoints(tmp_path / "c [1]").restore(abstract)
    assert_same(restored.state, make_state(2))
    assert restored.passed_over == [] and restored.notes == {"from": 2}


def test_a_seal_that_was_changed_is_damage_and_an_older_checkpoint_is_used(directory, abstract):
    checkpoints = save_all(directory, {1: 0.25, 2: 0.5})
    path = directory / "00000002" / SEAL
    path.write_bytes(path.read_bytes().replace(b'"metric": 0.5', b'"metric": 0.1'))
    assert checkpoints.best_step() == 1
    restored = checkpoints.restore(abstract)
    assert_same(restored.state, make_state(1))
    assert len(restored.passed_over) == 1 and "checksums.json is damaged: it has another" in restored.passed_over[0]


def test_a_seal_of_an_earlier_version_has_no_digest_and_is_read(sealed_place):
    content = read_seal(sealed_place)
    del content["digest"], content["format"]
    for older in (content, content | {"format": 1}):
        (sealed_place / SEAL).write_bytes(json.dumps(older).encode())
        assert read_seal(sealed_place) == older and find_damage(sealed_place) is None


def test_arrays_that_cannot_be_found_again_are_not_sealed(tmp_path, abstract):
    """Orbax takes such a path for a pattern, and does not merge what it wrote."""
    directory = tmp_path / "run [1]" / "c"
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, make_state(1))
    assert "cannot be restored" in message(checkpoints.wait)
    assert not list(directory.rglob(SEAL))


@pytest.mark.parametrize(
    ("metrics", "keep", "steps", "best"),
    [
        ({1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 4.0}, {}, [2, 4, 5], 2),
        ({1: 1.0, 2: 2.0, 3: None, 4: 9.0}, {}, [1, 3, 4], 1),  # one without a metric is never best
        ({1: math.nan, 2: 0.5, 3: 0.5, 4: math.nan}, {}, [2, 3, 4], 2),
        ({1: 1.0, 2: 2.0, 3: 3.0}, {"keep_last": 1, "keep_best": 0}, [3], 3),
    ],
)
def test_last_and_best_are_kept_together(directory, metrics, keep, steps, best):
    checkpoints = save_all(directory, metrics, **keep)
    assert checkpoints.steps() == steps and checkpoints.best_step() == best


def test_losses_of_different_phases_are_not_compared(directory):
    """A second phase on longer rows may have higher losses; its best is kept all the same."""
    checkpoints = Checkpoints(directory, keep_last=2, keep_best=1)
    for step, (metric, phase) in enumerate([(0.5, 0), (2.0, 1), (1.5, 1), (1.8, 1), (1.9, 1)], 1):
        checkpoints.save(step, make_state(step), metric, {}, phase)
    assert checkpoints.best_step() == 3
    checkpoints.close()
    assert checkpoints.steps() == [3, 4, 5]


def test_damage_is_named_and_the_one_before_is_used(tmp_path, directory, abstract):
    checkpoints = save_all(directory, 3, keep_last=3)
    victim = data_files(directory, 3)[0]
    flip_a_byte(victim)
    state, _, notes = checkpoints.restore(abstract)
    assert int(state["step"]) == 2
    assert len(notes) == 1 and "00000003 is not used" in notes[0] and victim.name in notes[0]
    # It is set aside, not deleted, and its step can be saved again.
    assert (tmp_path / "damaged" / "00000003").is_dir()
    checkpoints.save(3, make_state(33))
    checkpoints.close()
    assert int(Checkpoints(directory).restore(abstract).state["step"]) == 33


def test_a_file_on_a_bad_sector_is_damage_and_one_of_another_user_is_not(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"abc")
    seal(tmp_path, ABOUT)
    errors = OSError(5, "Input/output error"), PermissionError(13, "Permission denied")
    monkeypatch.setattr(sealed, "sha256_file", mock.Mock(side_effect=errors))
    assert find_damage(tmp_path) == "file a cannot be read: Input/output error"
    with pytest.raises(PermissionError):
        find_damage(tmp_path)


def test_no_whole_checkpoint_is_an_error_and_not_a_new_start(directory, abstract):
    """Also where one of them was never finished."""
    checkpoints = save_all(directory, 2)
    flip_a_byte(data_files(directory, 1)[0])
    (directory / "00000002" / SEAL).unlink()
    with pytest.raises(InputError, match=r"holds no whole checkpoint; .*00000002 is not used.*00000001 is not used"):
        checkpoints.restore(abstract)
    assert checkpoints.steps() == [1, 2]


def test_a_first_save_that_was_killed_is_set_aside_for_a_new_start(tmp_path, directory, abstract):
    save_all(directory, 1).close()
    (directory / "00000001" / SEAL).unlink()
    checkpoints = Checkpoints(directory)
    state, notes, passed_over = checkpoints.restore(abstract)
    assert state is None and notes == {}
    assert len(passed_over) == 1 and "so it was never finished" in passed_over[0]
    assert (tmp_path / "damaged" / "00000001").is_dir() and checkpoints.steps() == []
    checkpoints.save(1, make_state(11))  # as it can
    checkpoints.close()


def test_a_directory_without_files_is_not_sealed_and_not_whole(tmp_path):
    about = {"step": 1, "metric": None, "arrays": {"x": ["float32", [1]]}, "notes": {}}
    assert "something else moved it" in message(seal, tmp_path / "moved", about)
    assert not (tmp_path / "moved").exists()
    (tmp_path / SEAL).write_text(json.dumps(about | {"files": {}}))
    assert find_damage(tmp_path) == f"{SEAL} names no files"


def test_an_older_seal_that_cannot_be_read_stops_no_save(directory):
    checkpoints = save_all(directory, {1: 1.0, 2: 2.0}, keep_last=2)
    (directory / "00000001" / SEAL).write_text('{"half')
    checkpoints.save(3, make_state(3), 2.0)
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3] and checkpoints.best_step() == 2
    for step in (2, 3):
        (directory / f"{step:08d}" / SEAL).write_text("{}")
    assert "has a metric that can be read" in message(checkpoints.best_step)


def test_a_clean_up_that_fails_stops_no_save(directory, monkeypatch):
    checkpoints = save_all(directory, 1, keep_last=1)

    def no_right(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(remains, "delete", no_right)
        checkpoints.save(2, make_state(2))
        checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    checkpoints.save(3, make_state(3))
    checkpoints.close()
    assert checkpoints.steps() == [3]


def test_a_failure_waits_for_what_is_being_sealed(directory):
    with pytest.raises(KeyError), Checkpoints(directory, about={"tokenizer": "abc"}) as checkpoints:
        checkpoints.save(1, make_state(1))
        raise KeyError
    about = read_seal(directory / "00000001")
    assert about["tokenizer"] == "abc" and "phase" not in about


def test_another_mesh_restores_the_same_bits(directory):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", "tensor"))
    array = jax.device_put(jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32), spec)
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, {"x": array})
    checkpoints.close()
    other = replicated(make_mesh(MeshConfig(), jax.devices()[:1]))
    abstract = {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=other)}
    restored = Checkpoints(directory).restore(abstract).state["x"]
    assert_same(restored, array)
    assert restored.sharding == other


def test_other_shapes_and_types_are_refused_with_the_name(tmp_path, directory, abstract):
    checkpoints = save_all(directory, 1)
    assert "extra is missing" in message(checkpoints.restore, abstract | {"extra": abstract["step"]})
    there = describe(make_state(1))
    for other, told in (
        (["float32", [64, 9]], r"params/kernel is .*64, 8.* there and .*64, 9.* here"),
        (["bfloat16", [64, 8]], "params/kernel"),  # Orbax alone would cast
    ):
        with pytest.raises(InputError, match=told):
            check_arrays(tmp_path, there, there | {"params/kernel": other})


def test_a_save_that_fails_is_one_clear_line_and_the_old_one_stays(directory, abstract, monkeypatch):
    checkpoints = save_all(directory, 1)

    def full_disk(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bert_jax.checkpoints.sealed.write_json", full_disk)
    checkpoints.save(2, make_state(2))
    with pytest.raises(InputError, match=r"cannot write a checkpoint .*No space left on device"):
        checkpoints.wait()
    monkeypatch.undo()
    state, _, notes = Checkpoints(directory).restore(abstract)
    assert int(state["step"]) == 1 and "00000002" in notes[0]


def test_a_checkpoint_that_does_not_fit_is_not_begun(directory, monkeypatch):
    checkpoints = Checkpoints(directory)
    disk = SimpleNamespace(free=state_bytes(make_state(2)) - 1)
    monkeypatch.setattr("bert_jax.checkpoints.states.shutil.disk_usage", lambda _: disk)
    assert "MB free; what was saved" in message(checkpoints.save, 2, make_state(2))
    assert not list(directory.iterdir())
    disk.free += 1
    checkpoints.save(2, make_state(2))
    checkpoints.close()
    assert checkpoints.steps() == [2]


def test_a_step_is_saved_once_and_again_if_it_was_not_sealed(directory, abstract, monkeypatch):
    checkpoints = save_all(directory, 1)
    checkpoints.save(1, make_state(5))
    assert int(checkpoints.restore(abstract).state["step"]) == 1
    (directory / "00000001" / SEAL).unlink()
    monkeypatch.setattr(checkpoints._manager, "save", raises := mock.Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):  # of a disk it would be an `OSError`
        checkpoints.save(1, make_state(5))
    assert raises.called and not (directory / "00000001").exists()


def test_all_files_are_on_the_disk_before_the_seal_is(directory, monkeypatch):
    synced, fsync = [], os.fsync

    def note(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    save_all(directory, 1)
    place = directory / "00000001"
    (last,) = [number for number, path in enumerate(synced) if path.startswith(f"{place}/.{SEAL}.")]
    expected = {place, place.parent, *place.rglob("*")} - {place / SEAL}
    assert set(map(str, expected)) <= set(synced[:last])


def test_what_a_kill_leaves_of_a_deletion_is_swept(directory, monkeypatch):
    save_all(directory, 2).close()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(remains.shutil, "rmtree", mock.Mock(side_effect=[None, KeyboardInterrupt]))
        remains.delete(directory / "00000001")
    left = {".00000001.deleted", "00000002"}
    assert {path.name for path in directory.iterdir()} == left
    with monkeypatch.context() as patch:
        patch.setattr("bert_jax.devices.job.Job.is_first", False)
        Checkpoints(directory)
        assert {path.name for path in directory.iterdir()} == left  # the first process alone sweeps
    Checkpoints(directory)
    assert [path.name for path in directory.iterdir()] == ["00000002"]


def test_what_older_versions_left_of_a_deletion_is_swept(directory, abstract):
    """They deleted in place. A checkpoint with a damaged file is not one of these, and stays."""
    save_all(directory, 3, keep_last=3).close()
    (directory / "00000001" / SEAL).unlink()
    flip_a_byte(data_files(directory, 2)[0])
    checkpoints = Checkpoints(directory, keep_last=3)
    assert checkpoints.steps() == [2, 3] and int(checkpoints.restore(abstract).state["step"]) == 3


def test_of_damaged_checkpoints_the_newest_two_stay(tmp_path, directory, abstract):
    save_all(directory, dict.fromkeys(range(1, 6)), keep_last=5).close()
    for step in (5, 4, 3, 2):
        (directory / f"{step:08d}" / SEAL).unlink()
        assert int(Checkpoints(directory, keep_last=5).restore(abstract).state["step"]) == step - 1
    assert sorted(path.name for path in (tmp_path / "damaged").iterdir()) == ["00000002", "00000003"]


def test_a_checkpoint_that_vanishes_while_it_is_checked_is_no_damage(tmp_path, directory, monkeypatch):
    save_all(directory, {1: None, 3: None}, keep_last=3).close()
    later = tmp_path / "later"
    (directory / "00000003").rename(later)

    def delete_meanwhile(path):
        if later.exists():
            later.rename(directory / "00000003")
            remains.delete(directory / "00000001")
        return sha256_file(path)

    monkeypatch.setattr("bert_jax.checkpoints.sealed.sha256_file", delete_meanwhile)
    path, passed_over = newest_whole(directory)
    assert path.name == "00000003" and passed_over == []


def hear(monkeypatch, *answers):
    """Makes this process one that hears these answers of the first."""
    told = iter([json.dumps([False, answer]) for answer in answers])
    monkeypatch.setattr("bert_jax.devices.job.Job.is_first", False)
    monkeypatch.setattr("bert_jax.devices.job.Job.broadcast_text", lambda job, topic, text: next(told))


def test_a_second_process_goes_by_the_word_of_the_first(tmp_path, directory, abstract, monkeypatch):
    """Its own listing of the directory is older: it has neither the best checkpoint nor the one to be saved."""
    checkpoints = save_all(directory, {1: 1.0, 2: 2.0}, keep_last=5)
    monkeypatch.setattr(checkpoints._manager, "save", saved := mock.Mock())
    with monkeypatch.context() as patch:
        hear(patch, 3, True, -1)
        assert checkpoints.best_step() == 3
        checkpoints.save(9, make_state(9))
        assert "has a metric that can be read" in message(checkpoints.best_step)
        hear(patch, True, "file x is missing")
        checkpoints._set_aside(0)
        assert "is damaged: file x is missing" in message(checkpoints.restore_at, 2, abstract)
        hear(patch, None, "state")
        (checkpoints._path(2) / SEAL).unlink()  # which a file system may show late
        assert int(checkpoints.restore_at(2, abstract)["step"]) == 2
    assert not saved.called and checkpoints.steps() == [1, 2] and not (tmp_path / "damaged").exists()


def test_a_checkpoint_that_was_copied_from_a_bucket_is_restored(directory, abstract):
    """There a run's own name is in that of the state; see `test_bucket_states`."""
    with Checkpoints(directory) as checkpoints:
        checkpoints._name = "state-0123abcd"
        checkpoints.save(1, make_state(1))
        checkpoints.close()
    with Checkpoints(directory) as checkpoints:
        assert int(checkpoints.restore(abstract).state["step"]) == 1
        assert int(checkpoints.restore_at(1, {"step": abstract["step"]})["step"]) == 1


def test_the_notes_of_a_checkpoint_are_those_that_the_first_process_reads(directory, abstract, monkeypatch):
    """A seal is replaced when an evaluation was made up for; another host may see the old one for a while."""
    checkpoints = save_all(directory, 1)
    arrays = read_seal(directory / "00000001")["arrays"]
    (directory / "00000001" / SEAL).unlink()  # or none yet
    hear(monkeypatch, [1, []], [arrays, {"from": 5}], False, "state")
    assert checkpoints.restore(abstract).notes == {"from": 5}


def test_what_another_process_could_not_write_ends_this_one_too(directory, monkeypatch):
    checkpoints = save_all(directory, 1)
    checkpoints.save(2, make_state(2))
    monkeypatch.setattr("bert_jax.devices.job.Job.any_process", lambda job, topic, value: True)
    assert "another process could not write a checkpoint to" in message(checkpoints.wait)


@pytest.mark.parametrize("ends_all", [False, True])
def test_a_failure_is_told_before_the_next_save_where_it_ends_all(directory, monkeypatch, ends_all):
    """In a program that has joined the processes itself, the others would wait for this one in the next step."""
    checkpoints = Checkpoints(directory)
    monkeypatch.setattr("bert_jax.devices.job.Job.ends_all", ends_all)
    checkpoints.check()
    checkpoints._failure = OSError(28, "No space left on device")
    with pytest.raises(InputError, match="No space left") if ends_all else contextlib.nullcontext():
        checkpoints.check()


def test_the_reason_is_told_where_tensorstore_says_it_last(tmp_path):
    (tmp_path / "file").write_text("")
    store = {"driver": "ocdbt", "base": f"file://{tmp_path}/file/{'x' * 200}/"}
    with pytest.raises(ValueError, match="zarr") as raised:
        tensorstore.open({"driver": "zarr", "kvstore": store}, create=True, dtype="float32", shape=[4]).result()
    error = cannot_write_checkpoint(
        tmp_path, ValueError(f"PERMISSION_DENIED: Error writing {'x' * 400}: {raised.value}")
    )
    assert str(error) == f"cannot write a checkpoint to {tmp_path}: Not a directory; what was saved before is untouched"


def test_the_probe_of_a_run_that_was_killed_there_goes(directory):
    checkpoints = Checkpoints(directory)
    checkpoints._check_writable(0)
    left = directory / ".probe-0"
    left.write_text("")
    checkpoints._check_writable(0)
    assert not left.exists()
