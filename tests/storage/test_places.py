# SPDX-License-Identifier: Apache-2.0
"""Places in an object store, leases and uploads; fsspec's file system in memory stands for the store."""

import contextlib
import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from builders import message, write

from bert_jax.errors import InputError, StoppedError, without_secrets
from bert_jax.storage import answers, leases, stores, writing
from bert_jax.storage.files import read_json
from bert_jax.storage.locks import writing as locked
from bert_jax.storage.places import UNFINISHED, RemotePath, is_taken, to_place, upload_directory
from bert_jax.storage.resolve import resolve
from bert_jax.storage.urls import local_copy, local_directory


@pytest.fixture
def root(memory):
    """Returns a place of this test's own."""
    return RemotePath("memory://test/run")


@pytest.fixture
def soon(monkeypatch):
    """Makes leases be renewed every 0.1 s and expire after 0.6 s."""
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(leases, "EXPIRE_SECONDS", 0.6)


def test_a_url_is_a_remote_place_and_a_path_is_not(tmp_path):
    assert isinstance(to_place("gs://bucket/run"), RemotePath) and to_place(tmp_path) is tmp_path
    assert str(to_place("gs://bucket/run/") / "a" / "b") == "gs://bucket/run/a/b"
    place = to_place("gs://bucket/run/a.txt")
    assert (place.name, str(place.parent), to_place(place)) == ("a.txt", "gs://bucket/run", place)
    assert str(to_place("gs://bucket").parent) == "gs://bucket"
    with pytest.raises(TypeError):
        os.fspath(place)  # so that open() and pathlib never take it for a local name


@pytest.mark.parametrize("url", ["gs://", "gs:///", "gs:///run", "s3://", "gcs:///a/b", "hf://", "https:///a.txt"])
def test_a_url_without_a_bucket_is_refused_at_the_door(url):
    """The libraries of stores would ask for the empty bucket for ever."""
    for ask in (to_place, stores.info_of, local_copy, resolve):
        with pytest.raises(InputError, match=f"^{url} names no bucket or host; write it after "):
            ask(url)


def test_what_is_there(root):
    assert not root.exists() and list(root.iterdir()) == [] and root.listing() == {}
    file = root / "a/b.txt"
    file.write_bytes("grün".encode())
    assert root.is_dir() and not root.is_file() and file.is_file() and not (root / "a/c").exists()
    assert file.read_text() == "grün" and root.listing() == {"a/b.txt": {"bytes": 5}}
    assert list(root.iterdir()) == [root / "a"] and list((root / "a").glob("*.txt")) == [file]
    for _ in range(2):
        file.unlink()
    assert root.listing() == {}
    with pytest.raises(InputError, match=r"memory://.*/none does not exist; check the address"):
        (root / "none").read_bytes()


def test_json_is_written_whole_or_not_at_all(root):
    writing.write_json(root / "x.json", {"a": 1})
    with pytest.raises(RuntimeError), writing.atomic_path(root / "x.json") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert read_json(root / "x.json") == {"a": 1}
    assert "none.json does not exist" in message(read_json, root / "none.json")
    (root / "bad.json").write_bytes(b"{")
    assert "is damaged or another kind of file" in message(read_json, root / "bad.json")


def test_a_directory_is_uploaded_with_its_checksums_last_and_half_of_one_may_be_replaced(root, monkeypatch):
    target, sent, put = root / "model", [], stores.put_file

    def replace(*names):
        with writing.new_directory(target, lambda _: True) as folder:
            for name in names:
                write(folder / name, "new")

    monkeypatch.setattr(stores, "put_file", lambda path, url: (sent.append(url.rpartition("/")[2]), put(path, url)))
    replace("checksums.json", "a", "z", "params/d")
    assert sent[-1] == "checksums.json" and sorted(sent) == ["a", "checksums.json", "d", "z"]
    assert list(target.listing()) == ["a", "checksums.json", "params/d", "z"]
    with pytest.raises(InputError, match="exists; give a directory that does not"), writing.new_directory(target):
        pass

    def stop(path, url):
        if url.endswith("/z"):
            raise StoppedError("stopped")
        put(path, url)

    monkeypatch.setattr(stores, "put_file", stop)
    with pytest.raises(StoppedError):
        replace("z", "checksums.json")
    assert "checksums.json" not in target.listing() and UNFINISHED in target.listing() and not is_taken(target)
    with pytest.raises(InputError, match="is half a directory: its upload was stopped"):
        local_directory(target)
    monkeypatch.setattr(stores, "put_file", put)
    with writing.new_directory(target) as folder:
        write(folder / "z", "newer")
    assert list(target.listing()) == ["z"] and (target / "z").read_text() == "newer"


def test_a_directory_is_copied_here_once_and_again_when_it_changes(root):
    model = root / "m"
    for name in ("vocab.txt", "deep/er.txt"):
        (model / name).write_bytes(b"1")
    folder = resolve(model).on_this_machine()
    assert folder.name == "m" and (folder / "deep" / "er.txt").read_text() == "1"
    assert resolve(model).on_this_machine() == resolve(folder).on_this_machine() == folder
    (model / "vocab.txt").write_bytes(b"22")
    assert (resolve(model).on_this_machine() / "vocab.txt").read_text() == "22"
    assert resolve(model / "vocab.txt").on_this_machine().read_text() == "22"
    assert "does not exist or is empty" in message(local_directory, root / "nothing")


def test_a_conditional_write_succeeds_once(root):
    url = str(root / "x")
    first = stores.write_if(url, b"1", "")
    assert first and not stores.write_if(url, b"2", "")
    second = stores.write_if(url, b"2", first)
    assert second and not stores.write_if(url, b"3", first)
    assert stores.read_version(url)[:2] == (b"2", second)
    # none writes what is there already: where a version is a checksum, it would stay the same
    with ThreadPoolExecutor(9) as pool:
        won = list(pool.map(lambda number: stores.write_if(url, b"by %d" % number, second), range(9)))
    assert sum(map(bool, won)) == 1


def test_a_live_lease_refuses_and_a_released_one_does_not(root, soon):
    url = str(root / leases.LEASE)
    with leases.lease(url, str(root), doing=lambda: "saving for 3 s") as holder:
        assert holder == "" and json.loads((root / leases.LEASE).read_bytes())["pid"] == os.getpid()
        began = time.monotonic()
        with leases.lease(url, str(root)) as second:
            assert f"process {os.getpid()} on " in second and "renewed 0 s ago, saving for 3 s" in second
        assert time.monotonic() - began < 0.6
        time.sleep(0.8)  # renewed meanwhile
        leases.check_held(str(root / "x"))
    assert not (root / leases.LEASE).exists()


def test_a_lease_of_another_machine_is_taken_over_when_it_expires(root, soon, capsys):
    about = {"name": "other", "pid": 7, "host": "elsewhere", "machine": "another", "expire_seconds": 0.6}
    (root / leases.LEASE).write_bytes(json.dumps(about).encode())
    began = time.monotonic()
    with leases.lease(str(root / leases.LEASE), str(root)) as holder:
        assert holder == "" and 0.5 < time.monotonic() - began < 5
    assert "is held by process 7 on elsewhere, renewed 0 s ago; waiting 1 s at most" in capsys.readouterr().err


@pytest.mark.parametrize("ahead", [-3600, 365 * 86400])
def test_a_live_lease_is_not_taken_whatever_the_clocks_say(root, soon, monkeypatch, ahead):
    """The other machine's clock is ahead of the store's, or behind it."""
    url = str(root / leases.LEASE)
    with leases.lease(url, str(root)):
        monkeypatch.setattr(stores.time, "time", lambda now=time.time: now() + ahead)
        another = leases._this_process() | {"host": "another"}
        monkeypatch.setattr(leases, "_this_process", lambda: another)
        with leases.lease(url, str(root)) as second:
            assert f"process {os.getpid()} on " in second
        leases.check_held(str(root / "x"))


def test_the_clock_of_a_lease_goes_on_in_a_suspended_machine(root, monkeypatch):
    """CLOCK_MONOTONIC stands still then: the holder would write without asking whether it still has the lease."""
    monkeypatch.setattr(leases, "RENEW_SECONDS", 100.0)
    with leases.lease(str(root / leases.LEASE), str(root)):
        (root / leases.LEASE).write_bytes(b'{"name": "other"}')
        before = time.clock_gettime
        asleep = {time.CLOCK_BOOTTIME: 3600.0}
        monkeypatch.setattr(leases.time, "clock_gettime", lambda clock: before(clock) + asleep.get(clock, 0.0))
        with pytest.raises(StoppedError, match="is now held by"):
            (root / "x").write_bytes(b"2")


HERE = {"machine": leases._machine(), "pid": os.getpid(), "began": leases._began(os.getpid())}


@pytest.mark.parametrize(
    ("content", "age", "seconds"),
    [
        *((content, 0, 60) for content in (b"", b"[]", b"not JSON", b"[" * 200_000, b'{"pid": "\\u0000"}')),
        *((b'{"expire_seconds": %s}' % wrong, 0, 60)
          for wrong in (b"null", b'"soon"', b'"inf"', b"Infinity", b"NaN", b"-1", b"0", b"1e9", b"3601")),
        (b'{"expire_seconds": 3600}', 0, 3600),
        (b'{"expire_seconds": 0.5}', 0, 15),
        (b'{"expire_seconds": 40}', 10, 30),
        (b'{"expire_seconds": 40}', 39, 15),  # clocks may differ: one and a half times the time between renewals
        (HERE | {"expire_seconds": 40}, 10, 30),
        (HERE | {"expire_seconds": 40, "began": "7"}, 10, 0),  # another process had this number
        (HERE | {"machine": "", "began": "7"}, 0, 60),
        (HERE | {"machine": "other", "began": "7"}, 0, 60),
        ({"machine": HERE["machine"], "began": "7"}, 0, 0),
    ],
)  # fmt: skip
def test_how_long_a_lease_is_watched(content, age, seconds):
    about = leases._read(json.dumps(content).encode() if isinstance(content, dict) else content)
    assert about["name"] == "" and leases._patience(about, age) == seconds


def test_who_holds_a_lease_is_told():
    assert leases._describe({}, 0.4) == "process ? on an unknown host, renewed 0 s ago"
    about = {"pid": 7, "host": "there", "doing": "x" * 300}
    assert leases._describe(about, 12.6) == f"process 7 on there, renewed 13 s ago, {'x' * 200}"
    assert leases._began(2**30) == "" and len(HERE["machine"]) > 40
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert leases._began(os.getpid()) == fields[19]
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert leases._began(ended.pid) == ""  # though its number is still taken
    ended.wait()


@pytest.mark.parametrize(("age", "lost", "asks"), [(25, "", 0), (30, "", 0), (30.5, "", 1), (99, "lost", 0)])
def test_a_lease_is_renewed_before_a_write_where_that_is_overdue(monkeypatch, age, lost, asks):
    now, asked = [1000.0], []
    monkeypatch.setattr(leases, "_now", lambda: now[0])
    held = leases.Lease("memory://b/.lease", print, str)
    held._renew, held._lost = lambda: asked.append(1), lost
    now[0] += age
    with pytest.raises(StoppedError, match="lost") if lost else contextlib.nullcontext():
        held.check()
    assert len(asked) == asks


def test_who_is_told_of_a_lost_lease_may_release_it(root, soon):
    ended = []
    held = leases.Lease(str(root / leases.LEASE), lambda line: (held.release(), ended.append(line)), str)
    assert held.take() == ""
    (root / leases.LEASE).write_bytes(b'{"name": "other"}')
    held._thread.join(5)
    assert ended and (root / leases.LEASE).exists()


def test_a_lost_lease_is_told_and_stops_every_write_below_it(root, soon):
    lost = []
    with leases.lease(str(root / leases.LEASE), str(root), on_loss=lost.append):
        other = json.dumps({"name": "other", "pid": 7, "host": "elsewhere"}).encode()
        (root / leases.LEASE).write_bytes(other)
        deadline = time.monotonic() + 5
        while not lost and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "is now held by process 7 on elsewhere" in lost[0] and "this run stops and writes no more" in lost[0]
        with pytest.raises(StoppedError, match="is now held by process 7"):
            (root / "metrics.jsonl").write_bytes(b"x")
        (root.parent / "elsewhere").write_bytes(b"x")
    assert (root / leases.LEASE).read_bytes() == other and not (root / "metrics.jsonl").exists()


def test_a_lost_answer_to_a_write_is_no_lost_lease(root, soon, monkeypatch):
    write, lost = stores.write_if, []

    def forgetful(url, content, token):
        write(url, content, token)
        return ""

    with leases.lease(str(root / leases.LEASE), str(root), on_loss=lost.append):
        monkeypatch.setattr(stores, "write_if", forgetful)
        time.sleep(0.5)
        monkeypatch.setattr(stores, "write_if", write)
        leases.check_held(str(root / "x"))
    assert not lost and not (root / leases.LEASE).exists()


def test_two_commands_do_not_write_one_output(root, soon):
    told = r"is being written by another command \(process"
    with locked(root / "out"), locked(root / "out2"), pytest.raises(InputError, match=told), locked(root / "out"):
        pass
    with pytest.raises(InputError, match="cannot read http://localhost/run/"):
        with leases.lease("http://localhost/run/.lease", "http://localhost/run"):
            pass


class _Refusal(Exception):
    def __init__(self, text, code=None):
        super().__init__(text)
        self.code = code


@pytest.mark.parametrize(
    ("verb", "error", "expected"),
    [
        ("write", _Refusal("Invalid Credentials, 401", 401), "there are no valid credentials for gs://b .*gcloud auth"),
        ("read", _Refusal("Anonymous caller does not have storage.objects.get access"), "no valid credentials for gs://b"),
        ("write", OSError("Forbidden: b/o\nno access"), "do not permit it .*storage.objectUser"),
        ("read", PermissionError("Forbidden"), "do not permit it .*storage.objectViewer"),
        ("write", _Refusal("x, 429", 429), "a quota of gs://b is used up .*; raise it"),
        ("write", _Refusal("Insufficient Storage, 507", 507), "a quota of gs://b is used up"),
        ("write", ValueError("PERMISSION_DENIED: Error writing [HTTP response code: 403]"), "do not permit it"),
        ("write", FileNotFoundError("b/o"), "there is no bucket gs://b; check its name, or make it first"),
        ("write", OSError("NOT_FOUND: gs://429/quota [http_response_code='404']"), "there is no bucket gs://b"),
        ("read", FileNotFoundError("b/o"), "gs://b/o does not exist; check the address"),
        ("write", _Refusal(""), "cannot write gs://b/o: _Refusal; check the address, your rights and the network"),
        ("read", ImportError("no gcsfs"), r"cannot be read .*pip install 'bert_jax\[gcs\]'"),
    ],
)  # fmt: skip
def test_errors_have_the_value_the_reason_and_the_fix(verb, error, expected):
    with pytest.raises(InputError, match=expected) as caught, stores.remote_errors("gs://b/o", verb):
        raise error
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, StoppedError) == (verb == "write" and not isinstance(error, ImportError))


def test_a_full_local_disk_is_not_blamed_on_the_bucket():
    with pytest.raises(OSError, match="No space"), stores.remote_errors("gs://b/o", "write"):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["run [1]", "a\\b", "run*", "what?"])
def test_a_url_that_is_a_pattern_is_refused_before_anything_is_written(root, name):
    """Objects with such names are not found when they are to be deleted."""
    for ask in (
        lambda: writing.write_json(f"{root}/{name}", {}),
        lambda: stores.check_writable(f"{root}/{name}"),
        lambda: to_place(f"{root}/{name}/x").touch(),
        lambda: writing.new_directory(f"{root}/{name}").__enter__(),
        lambda: leases.lease(f"{root}/{name}/.lease", f"{root}/{name}").__enter__(),
    ):
        assert "is read as a pattern" in message(ask)
    assert not list(to_place(root).iterdir())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:p@ss@host/a.txt?token=abc&x=1; check", "https://...@host/a.txt?...; check"),
        ("'https://TOKEN@host/x' (http://host/p#token=zz)", "'https://...@host/x' (http://host/p#...)"),
        ("s3://KEY:SECRET@bucket/x", "s3://...@bucket/x"),
        ("https://h/a?X-Amz-Signature=ab%20c&X-Amz-Date=5. Next", "https://h/a?.... Next"),
        ("URL('http://u:p@h:80/x?sig=a')", "URL('http://...@h:80/x?...')"),
        ("gs://bucket@100, hf://ORG/NAME@rev, gs://b/file?.txt, http://localhost:80/a: no, a:b@c, x?y=z", ""),
    ],
)
def test_secrets_of_urls_are_in_no_message(text, expected):
    said = str(InputError(text))
    assert said == (text if expected == "" else expected)
    assert "abc" not in said
    assert without_secrets({"a": [text, 1, None], "b": (2.0, True)}) == {"a": [said, 1, None], "b": (2.0, True)}


def test_a_web_server_that_refuses_is_not_a_file_that_is_not_there():
    url = "http://user:hidden@127.0.0.1:1/model"
    for read in (stores.info_of, stores.read_bytes, lambda url: to_place(url).exists()):
        with pytest.raises(InputError, match="check the address, your rights and the network") as caught:
            read(url)
        assert "does not exist" not in str(caught.value) and "hidden" not in str(caught.value)


def test_a_store_that_lets_wait_is_told_of_once_a_minute(capsys, monkeypatch):
    monkeypatch.setattr(answers, "_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(answers, "_told", {})
    for url, wait in (("gs://bucket/a?token=abc", 0.2), ("gs://bucket/b", 0.2), ("/a/file", 0.2), ("gs://other/b", 0)):
        with answers.told_if_slow(url):
            time.sleep(wait)
    time.sleep(0.2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("still waiting for gs://bucket/a") and "(429, 503)" in line and "abc" not in line


def test_a_directory_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """If the power fails, it is whole or not there."""
    synced, sync = [], writing.sync
    monkeypatch.setattr(writing, "sync", lambda path: (synced.append((path.name, goal.exists())), sync(path)))
    goal = tmp_path / "goal"
    with writing.new_directory(goal) as temporary:
        (temporary / "a").mkdir()
        (temporary / "a" / "file").write_bytes(b"x")
    before = {name for name, there in synced if not there}
    assert before >= {"a", "file", temporary.name} and (tmp_path.name, True) in synced


@pytest.mark.parametrize("arrives", [True, False])
def test_an_upload_whose_answer_was_lost_is_not_a_missing_bucket(root, tmp_path, monkeypatch, arrives):
    """Gcsfs asks again for an upload in parts that has ended, and the store does not know it any more."""
    (tmp_path / "file").write_bytes(b"content")
    store = type(stores.file_system(str(root))[0])
    put, calls = store.put_file, []

    def forgetful(*arguments, **options):
        calls.append(arguments)
        if arrives or len(calls) > 1:
            put(*arguments, **options)
        if len(calls) == 1:
            raise FileNotFoundError("upload_id=7")

    monkeypatch.setattr(store, "put_file", forgetful)
    (root / "file").put(tmp_path / "file")
    assert (root / "file").read_bytes() == b"content" and len(calls) == (1 if arrives else 2)


def test_stale_objects_of_a_replaced_directory_are_deleted(root, tmp_path):
    for number, files in enumerate(("ab", "bc")):
        for name in files:
            write(tmp_path / f"{number}" / name, str(number))
        upload_directory(tmp_path / f"{number}", root / "out", ("c",))
    assert list((root / "out").listing()) == ["b", "c"] and (root / "out/b").read_text() == "1"
