# SPDX-License-Identifier: Apache-2.0
"""Files are written whole or not at all."""

import contextlib
import errno
import gzip
import os
import random
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from builders import message

from bert_jax.errors import InputError
from bert_jax.storage import files, urls, writing
from bert_jax.storage.files import zstd
from bert_jax.storage.places import RemotePath
from bert_jax.storage.writing import check_file, write_json


def test_a_place_that_another_user_may_not_look_into_is_one_line(tmp_path):
    """Before, looking for a file above the place failed as the place did."""
    (tmp_path / "closed").mkdir(mode=0o000)
    code = """
import os, sys
from bert_jax.storage.writing import InputError, check_file, write_json
os.geteuid() or os.seteuid(65534)
for function, *rest in ((check_file,), (write_json, 1)):
    try:
        function(sys.argv[1], *rest)
    except InputError as error:
        print(error)
"""
    path = str(tmp_path / "closed" / "a" / "out.json")
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    (tmp_path / "closed").chmod(0o700)
    assert run.stdout == f"cannot write {path}: Permission denied; check its permissions or choose another place\n" * 2


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_said_with_what_helps(number):
    with pytest.raises(InputError, match=r"cannot read x\.txt: .*; raise the limit, for example with ulimit -n 65536"):
        with files.reading("x.txt"):
            raise OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("name", "compress"), [("x", gzip.compress), ("x", zstd.compress), ("x.gz", bytes), ("x.zst", bytes)]
)
def test_compression_is_recognised_by_the_first_bytes(tmp_path, name, compress):
    (tmp_path / name).write_bytes(compress(b"text"))
    assert files.is_compressed(str(tmp_path / name)) == (compress is not bytes)
    with files.open_binary(str(tmp_path / name)) as stream:
        assert stream.read() == b"text"


def test_zstd_with_a_long_window_and_skippable_frames(tmp_path):
    text = bytes(random.Random(0).choices(b"abcdef \n", k=3 << 20))
    skippable = b"\x5a\x2a\x4d\x18" + (70_000).to_bytes(4, "little") + bytes(70_000)
    path = tmp_path / "long"
    path.write_bytes(skippable)
    options = {zstd.CompressionParameter.window_log: 31, zstd.CompressionParameter.enable_long_distance_matching: 1}
    with zstd.ZstdFile(path, "a", options=options) as writer:
        for _ in range(2):  # so that the frame does not say how long it is
            writer.write(text)
    with pytest.raises(zstd.ZstdError, match="too much memory"), zstd.ZstdFile(path) as stream:
        stream.read()  # what is read without the option
    whole = path.read_bytes() + skippable
    for end in (b"", b"x", bytes(4), b"no frame at all"):
        path.write_bytes(whole + end)
        with pytest.raises(InputError, match="long is damaged or another") if end else contextlib.nullcontext():
            assert files.read_whole(str(path), "long") == text + text


def test_a_failed_block_leaves_what_was_there(tmp_path):
    path = tmp_path / "folder" / "file"
    with writing.atomic_path(path) as temporary:
        temporary.write_text("first")
    with pytest.raises(InputError, match="No space left"), writing.atomic_path(path) as temporary:
        temporary.write_text("sec")
        raise OSError(28, "No space left on device")
    assert path.read_text() == "first"
    assert os.listdir(path.parent) == ["file"]


FREE = "free some space or choose another place"


@pytest.mark.parametrize(
    ("error", "place", "expected"),
    [
        (PermissionError(errno.EACCES, "No"), "out", "No; check its permissions or choose another place"),
        (OSError(errno.EROFS, "Read-only"), "out", "Read-only; check its permissions or choose another place"),
        (FileNotFoundError(errno.ENOENT, "None"), "out", "None; correct the path"),
        (OSError(errno.ENOSPC, "No space"), "out", f"No space; {FREE}"),
        (OSError("4096 requested and 0 written"), "out", f"No space left on device; {FREE}"),
        (ValueError("x" * 300), "out", f"{'x' * 200}; {FREE}"),
        (OSError(errno.ENOTEMPTY, "Full"), "file/out", "something else has made it meanwhile; choose another place"),
        (OSError(errno.EEXIST, "There"), "out", "something else has made it meanwhile; choose another place"),
        (OSError(errno.EEXIST, "There"), "file/a/out", "{}/file is a file; correct the path"),
        (OSError(errno.ENOTDIR, "No directory"), "file/out", "{}/file is a file; correct the path"),
        (OSError(errno.EEXIST, "There"), "gs://b/o", "something else has made it meanwhile; choose another place"),
    ],
)
def test_why_something_cannot_be_written(tmp_path, error, place, expected):
    (tmp_path / "file").touch()
    place = place if "://" in place else f"{tmp_path}/{place}"
    assert str(writing.cannot_write(place, error)) == f"cannot write {place}: {expected.format(tmp_path)}"


def test_room_is_asked_for_before_it_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: SimpleNamespace(free=2_000_000))
    writing.check_space(tmp_path, 2_000_000)
    with pytest.raises(InputError, match=r"cannot write .*: it takes 2.0 MB and 2.0 MB are free; free some space"):
        writing.check_space(tmp_path, 2_000_001)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_sync_is_none_that_fails(tmp_path, monkeypatch, number):
    synced = []

    def fsync(descriptor):
        synced.append(descriptor)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(InputError, match="Input/output error") if number == errno.EIO else contextlib.nullcontext():
        write_json(tmp_path / "a", {})
    assert synced
    synced.clear()
    write_json(tmp_path / "b", {"b": 1, "a": "ä"}, durable=False)
    writing.write_array(tmp_path / "c.npy", np.arange(3), durable=False)
    assert not synced and (tmp_path / "b").read_text() == '{\n "a": "ä",\n "b": 1\n}\n'
    assert np.load(tmp_path / "c.npy").tolist() == [0, 1, 2]


def test_anything_is_removed_and_a_link_alone(tmp_path):
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "file").touch()
    for name in ("link", "file", "none"):
        writing.remove(tmp_path / name)
    assert os.listdir(tmp_path) == ["folder"] and (tmp_path / "folder" / "inside").is_dir()
    writing.remove(tmp_path / "folder")
    assert not os.listdir(tmp_path)


def test_json_round_trip_and_damage(tmp_path):
    path = tmp_path / "value.json"
    writing.write_json(path, {"b": [1, "ß"], "a": 0.5})
    assert files.read_json(path) == {"b": [1, "ß"], "a": 0.5}
    path.write_text(path.read_text()[:-4])
    for place, told in ((path, "damaged or another kind of file"), (tmp_path / "nothing", "does not exist")):
        with pytest.raises(InputError, match=told):
            files.read_json(place)


def test_sha256(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert files.sha256_file(tmp_path / "abc").startswith("ba7816bf8f01cfea")


def test_masked_crc32c_is_that_of_tfrecord_files():
    # CRC-32C of "123456789" is 0xE3069283 (RFC 3720, and every catalogue of CRCs); the mask is rotation and sum.
    rotated = (0xE3069283 >> 15) | (0xE3069283 << 17) & 0xFFFFFFFF
    assert files.masked_crc32c(b"123456789") == (rotated + 0xA282EAD8) % 2**32
    # The length field of a first record of 0 bytes, as TensorFlow writes it.
    assert files.masked_crc32c(bytes(8)).to_bytes(4, "little").hex() == "29039807"


# Files behind URLs


def files_below(folder: Path) -> list[str]:
    """Returns the names of all files below a folder but those of locks."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_globs_of_urls(memory, tmp_path):
    memory.pipe({"/b/text/2.txt": b"2", "/b/text/1.txt": b"1", "/b/text/sub/3.txt": b"3", "/b/other": b""})
    (tmp_path / "4.txt").write_text("4")
    found = files.expand_globs(f"memory://b/text/*.txt,{tmp_path}/4.txt,file://{tmp_path}/*.txt,memory:///b/text/1.txt")
    assert found == [
        "memory:///b/text/1.txt", "memory:///b/text/2.txt", f"{tmp_path}/4.txt", f"file://{tmp_path}/4.txt"
    ]  # fmt: skip
    assert len(files.expand_globs("memory://b/**/*.txt")) == 3
    for pattern in ("memory://b/none*", "memory://b/text", "memory://none/1"):
        assert "matches no file" in message(files.expand_globs, pattern)


def test_a_copy_is_kept_until_the_file_changes(memory, cache, monkeypatch):
    memory.pipe("/b/text.txt", b"first")
    path = urls.local_copy("memory://b/text.txt")
    assert Path(path).read_bytes() == b"first" and Path(path).name == "text.txt" and Path(path).is_relative_to(cache)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "get_file", None)  # would fail
        assert urls.local_copy("memory://b/text.txt") == path
    memory.pipe("/b/text.txt", b"other")
    assert Path(urls.local_copy("memory://b/text.txt")).read_bytes() == b"other"
    assert urls.local_copy("/some/path") == "/some/path"


@pytest.fixture
def web():
    """Yields the files of a web server by their paths, the headers that it sends with each, and its address."""
    contents: dict[str, bytes] = {}
    headers: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = contents.get(self.path)
            self.send_response(404 if content is None else 200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content or b"")

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield contents, headers, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("field", ["Last-Modified", "ETag", "Content-MD5"])
def test_a_file_behind_http_that_changed_is_copied_again(cache, web, field):
    contents, headers, url = web
    for version, content in (("Mon, 01 Jan 2024 00:00:00 GMT", b"one"), ("Tue, 02 Jan 2024 00:00:00 GMT", b"two")):
        contents["/text.txt"], headers[field] = content, version
        path = urls.local_copy(f"{url}/text.txt")
        assert Path(path).read_bytes() == content
    contents["/text.txt"] = b"new"  # which the server does not tell
    assert urls.local_copy(f"{url}/text.txt") == path


def test_the_name_of_a_copy_holds_no_secret(cache, web):
    contents, _, address = web
    contents["/a/b.txt?token=secret/x"] = contents["/?token=secret"] = b"text"
    for asked, name in (("/a/b.txt?token=secret/x", "b.txt"), ("/?token=secret", "file")):
        copy = Path(urls.local_copy(address + asked))
        assert copy.name == name and copy.read_bytes() == b"text" and "secret" not in str(copy)


def test_a_directory_behind_http_is_refused_in_one_line(web):
    contents, headers, url = web
    headers["Content-Type"] = "text/html"
    contents["/model"] = contents["/model/"] = b'<a href="vocab.txt">vocab.txt</a>'
    assert "says no sizes; copy the directory to this machine" in message(
        urls.local_directory, RemotePath(f"{url}/model")
    )


def test_a_file_behind_http_without_a_version_is_copied_by_each_process(cache, web):
    contents, _, url = web
    contents["/text.txt"] = b"one"
    path = urls.local_copy(f"{url}/text.txt")
    contents["/text.txt"] = b"two"
    assert urls.local_copy(f"{url}/text.txt") == path  # this process goes on with what it has begun with
    program = f"from bert_jax.storage import urls; print(urls.local_copy('{url}/text.txt'))"
    other = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
    assert Path(other).read_bytes() == b"two" and Path(path).read_bytes() == b"one"
    assert files_below(cache) == ["text.txt", "text.txt"]


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (None, "memory://b/text.txt has 10 bytes, 5 arrived; try again"),
        (
            ConnectionResetError(104, "Connection reset\nby peer"),
            r"cannot read memory://b/text.txt: .*Connection reset by",
        ),
        (OSError(28, "No space left on device"), r"cannot write .*text.txt: No space left on device; free some space"),
    ],
)
def test_a_copy_that_breaks_off_leaves_nothing(memory, cache, monkeypatch, error, problem):
    memory.pipe("/b/text.txt", b"0123456789")

    def get_file(remote, local):
        Path(local).write_bytes(b"01234")
        if error:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(memory, "get_file", get_file)
        with pytest.raises(InputError, match=problem) as caught:
            urls.local_copy("memory://b/text.txt")
    assert "\n" not in str(caught.value) and not files_below(cache)
    assert Path(urls.local_copy("memory://b/text.txt")).read_bytes() == b"0123456789"


def test_what_a_killed_process_left_is_cleared_away(memory, cache):
    memory.pipe("/b/text.txt", b"x")
    path = Path(urls.local_copy("memory://b/text.txt"))
    path.unlink()
    path.with_name(".text.txt.123.tmp").write_text("half")
    assert urls.local_copy("memory://b/text.txt") == str(path) and files_below(cache) == ["text.txt"]


COPY_WHEN_TOLD = """
import sys, time
import fsspec.implementations.local as local
from bert_jax.storage import urls

source, log = sys.argv[1:]
get_file = local.LocalFileSystem.get_file

def logged_get_file(self, remote, target, **options):
    with open(log, "a") as stream:
        stream.write("copied\\n")
    time.sleep(0.2)
    return get_file(self, remote, target, **options)

local.LocalFileSystem.get_file = logged_get_file
print("ready", flush=True)
sys.stdin.readline()
assert open(urls.local_copy(source)).read() == "text"
"""


def test_processes_that_ask_at_once_make_one_copy(cache, tmp_path):
    (tmp_path / "text").write_text("text")
    command = [sys.executable, "-c", COPY_WHEN_TOLD, f"file://{tmp_path}/text", str(tmp_path / "log")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert (tmp_path / "log").read_text() == "copied\n" and files_below(cache) == ["text"]


def test_files_are_copied_beside_the_first(memory, cache):
    memory.pipe({"/b/index": b"1", "/b/words/words_list": b"2", "/b/words/deep/x": b"3", "/b/data": b"4", "/b/no": b""})
    first = urls.local_copy("memory://b/index")
    urls.copy_beside(first, "memory://b/", ["data", "words/"])
    folder = Path(first).parent
    assert files_below(folder) == ["data", "index", "words_list", "x"]
    assert (folder / "words" / "deep" / "x").read_bytes() == b"3" and (folder / "data").read_bytes() == b"4"
    assert "memory://b/missing does not exist" in message(urls.copy_beside, first, "memory://b", ["missing"])
    assert "names a file '../../x' outside its directory" in message(urls.copy_beside, first, "memory://b", ["../../x"])


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("memory://b/none", "memory://b/none does not exist; check the address"),
        ("nope://b/x", "cannot read nope://b/x: Protocol not known: nope"),
        ("gs://b/x", r"gs://b/x cannot be read .*: pip install 'bert_jax\[gcs\]'"),
        ("https://b/x", r"https://b/x cannot be read .*: pip install 'bert_jax\[http\]'"),
    ],
)
def test_what_a_url_lacks_is_said(cache, monkeypatch, url, problem):
    for package in ("gcsfs", "aiohttp", "fsspec.implementations.http"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=problem) as caught:
        urls.local_copy(url)
    assert "\n" not in str(caught.value) and not cache.exists()


def test_a_kill_while_a_directory_is_replaced_leaves_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "model"

    def write(content):
        with writing.new_directory(path, lambda _: True) as temporary:
            (temporary / "content").write_text(content)

    write("old")
    rename, calls = Path.rename, []

    def killed(self, target):
        calls.append(target)
        if len(calls) > 1:
            raise KeyboardInterrupt  # of what a kill does, that nothing after it happens
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        write("new")
    assert not path.exists()  # between the two renames: the old one waits for the next who writes there
    write("newer")
    assert (path / "content").read_text() == "newer" and [each.name for each in tmp_path.iterdir()] == ["model"]
    path.rename(tmp_path / ".model.old")
    with pytest.raises(ZeroDivisionError), writing.new_directory(path, lambda _: True):
        raise ZeroDivisionError
    assert (path / "content").read_text() == "newer"


def test_an_output_is_tried_before_any_work_and_replaces_no_input(tmp_path):
    (text := tmp_path / "text.txt").write_text("mine")
    (tmp_path / "link").symlink_to(text)
    for output, inputs in ((text, [str(text)]), (tmp_path / "link", ["-", str(text)]), ("gs://b/x", ["gs://b/x"])):
        assert f"output {output} is the input too; name another file" in message(check_file, output, *inputs)
    check_file(tmp_path / "new" / "out.json", str(text), "", "a*b", "gs://b/x")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "new", "text.txt"]
    for output, problem in (
        (tmp_path, "is a directory; name a file, such as"),
        ("/dev/null", "is a device or a pipe; name a file"),
        (text / "out.json", r"cannot write .*/text.txt/out.json: .*text.txt is a file; correct the path"),
        ("/proc/out.json", "cannot write /proc/out.json: No such file or directory; correct the path"),
    ):
        with pytest.raises(InputError, match=problem):
            check_file(output)
    with pytest.raises(InputError, match=r"cannot write .*/text.txt/out.json: .*text.txt is a file; correct the path"):
        write_json(text / "out.json", {})  # the error is not that of the clean-up
    assert text.read_text() == "mine"
