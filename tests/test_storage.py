# SPDX-License-Identifier: Apache-2.0
"""Files are written whole or not at all."""

import gzip
import os

import pytest

from bert_jax import storage
from bert_jax.errors import InputError


def test_globs_are_sorted_and_each_file_comes_once(tmp_path):
    for name in ("b.txt", "a.txt", "c.gz"):
        (tmp_path / name).write_text("x")
    found = storage.expand_globs(f"{tmp_path}/c.gz, {tmp_path}/*.txt,{tmp_path}/a*")
    assert [os.path.basename(path) for path in found] == ["c.gz", "a.txt", "b.txt"]


def test_gzip_is_recognised_by_its_bytes(tmp_path):
    (tmp_path / "zipped").write_bytes(gzip.compress(b"text"))
    (tmp_path / "plain.gz").write_bytes(b"text")
    for name, compressed in (("zipped", True), ("plain.gz", False)):
        path = str(tmp_path / name)
        assert storage.is_compressed(path) == compressed
        with storage.open_binary(path) as stream:
            assert stream.read() == b"text"


def test_what_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*nothing: No such file"):
        storage.open_binary(str(tmp_path / "nothing"))


def test_a_failed_block_leaves_what_was_there(tmp_path):
    path = tmp_path / "folder" / "file"
    with storage.atomic_path(path) as temporary:
        temporary.write_text("first")
    with pytest.raises(RuntimeError), storage.atomic_path(path) as temporary:
        temporary.write_text("sec")
        raise RuntimeError
    assert path.read_text() == "first"
    assert os.listdir(path.parent) == ["file"]


def test_a_full_disk_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="No space left on device; free some space"):
        with storage.atomic_path(tmp_path / "file"):
            raise OSError(28, "No space left on device")
    assert not os.listdir(tmp_path)


def test_json_round_trip_and_damage(tmp_path):
    path = tmp_path / "value.json"
    storage.write_json(path, {"b": [1, "ß"], "a": 0.5})
    assert storage.read_json(path) == {"b": [1, "ß"], "a": 0.5}
    path.write_text(path.read_text()[:-4])
    with pytest.raises(InputError, match="not valid JSON"):
        storage.read_json(path)
    with pytest.raises(InputError, match="does not exist"):
        storage.read_json(tmp_path / "nothing")


def test_sha256(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert storage.sha256_file(tmp_path / "abc").startswith("ba7816bf8f01cfea")


def test_masked_crc32c_is_that_of_tfrecord_files():
    # CRC-32C of "123456789" is 0xE3069283 (RFC 3720, and every catalogue of CRCs); the mask is rotation and sum.
    rotated = (0xE3069283 >> 15) | (0xE3069283 << 17) & 0xFFFFFFFF
    assert storage.masked_crc32c(b"123456789") == (rotated + 0xA282EAD8) % 2**32
    # The length field of a first record of 0 bytes, as TensorFlow writes it.
    assert storage.masked_crc32c(bytes(8)).to_bytes(4, "little").hex() == "29039807"
