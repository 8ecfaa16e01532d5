# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of TensorFlow: what it wrote is read exactly, and damage is refused.

`tests/reference/make_bundle_golden.py` made the files in `golden/` with TensorFlow; it is not needed here.
"""

import itertools
import os
import shutil
import struct
from pathlib import Path

import google_files
import numpy as np
import pytest
from builders import message
from google_files import HEADER, write_bundle

from bert_jax.checkpoints import bundle
from bert_jax.checkpoints.bundle import Bundle, data_path, index_path, read_index
from bert_jax.errors import InputError
from bert_jax.storage import files


@pytest.fixture(scope="module")
def golden(repository: Path) -> Path:
    return repository / "tests" / "golden"


def read_all(prefix: Path) -> dict[str, np.ndarray]:
    opened = Bundle(prefix)
    return {name: opened.read(name) for name, entry in opened.entries.items() if entry.dtype and not entry.num_slices}


def refusal(prefix: Path) -> str:
    """Returns the message with which reading fails, which names a file of the checkpoint."""
    found = message(read_all, prefix)
    assert f"{prefix}." in found
    return found


def bits_of(tensors: dict[str, np.ndarray]) -> dict[str, tuple]:
    """Returns what two equal tensors have in common: NaNs and negative zeros count."""
    return {name: (value.dtype, value.shape, value.tobytes()) for name, value in tensors.items()}


# What TensorFlow wrote


@pytest.mark.parametrize("name", ["bundle_kinds", "bundle_parts"])
def test_golden_checkpoints_are_read_as_tensorflow_reads_them(golden, name):
    with np.load(golden / "bundle.npz") as file:
        theirs = {key.removeprefix(f"{name}/"): file[key] for key in file.files if key.startswith(f"{name}/")}
    theirs.pop("table", None)  # a variable in parts, which is refused
    ours = read_all(golden / name)
    assert len(ours) == 24 and len({value.dtype for value in ours.values()}) == 15
    bits = {key: value.view(np.uint16) if value.dtype.name == "bfloat16" else value for key, value in ours.items()}
    assert bits_of(bits) == bits_of(theirs)


def test_partitioned_variables_and_strings_are_refused_by_name(golden):
    opened = Bundle(golden / "bundle_parts")
    with pytest.raises(InputError, match=r"bundle_parts.data.*: tensor table is a text, a quantized one or divided"):
        opened.read("table")
    assert "tensor strings is a text" in message(opened.read, "strings")


# Of any shape


@pytest.mark.parametrize("block_bytes", [1, 300, 5000])
def test_index_of_many_blocks(tmp_path, monkeypatch, block_bytes):
    """Names in any script, one the beginning of another, and long ones."""
    monkeypatch.setattr(google_files, "_BLOCK_BYTES", block_bytes)
    rng = np.random.default_rng(2)
    letters = [*"ab/\x7f\xffßЖ語😀", "layer_"]
    names = {"".join(rng.choice(letters, rng.integers(1, 12))) for _ in range(250)} | {"long" * 100}
    tensors = {name: rng.integers(0, 9, (2,)) for name in names}
    write_bundle(tmp_path / "x", tensors)
    assert bits_of(read_all(tmp_path / "x")) == bits_of(tensors)
    assert list(read_index(tmp_path / "x.index").entries) == sorted(names)


def test_an_empty_checkpoint(tmp_path):
    write_bundle(tmp_path / "x", {})
    assert read_all(tmp_path / "x") == {}


def test_a_tensor_is_read_alone(tmp_path):
    """Neither the damage of others nor their size matters to it."""
    write_bundle(tmp_path / "x", {"a": np.arange(5), "b": np.arange(5)})
    data = data_path(tmp_path / "x")
    data.write_bytes(b"\1" + data.read_bytes()[1:])
    os.truncate(data, 1 << 40)  # a terabyte, were it read
    opened = Bundle(tmp_path / "x")
    assert opened.read("b").tolist() == [0, 1, 2, 3, 4]
    assert "tensor a has another checksum" in message(opened.read, "a")


# Damage


@pytest.fixture
def small(tmp_path) -> Path:
    """Returns a checkpoint whose every byte can be tried."""
    write_bundle(tmp_path / "x", {"a": np.arange(3, dtype=np.float32), "b/c": np.arange(2)})
    return tmp_path / "x"


@pytest.mark.parametrize("file", ["index", "data-00000-of-00001"])
def test_every_flipped_bit_and_every_cut_off_end_is_refused(small, file):
    path = Path(f"{small}.{file}")
    content = path.read_bytes()
    flipped = []
    for place, bit in itertools.product(range(len(content)), range(8)):
        flipped.append(bytearray(content))
        flipped[-1][place] ^= 1 << bit
    for damaged in (*flipped, *(content[:length] for length in range(len(content)))):
        path.write_bytes(damaged)
        assert str(path) in refusal(small)


def test_an_index_with_more_behind_it_is_refused(small):
    index_path(small).write_bytes(index_path(small).read_bytes() + b"\0")
    assert "the last ones do not end a table" in refusal(small)


def test_messages_name_the_tensor_and_the_mend(small, golden, tmp_path):
    data = data_path(small)
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    assert "(it has 27 bytes, and tensor b/c ends at byte 28); copy it again" in refusal(small)
    data.write_bytes(content[:-1] + b"\1")
    assert "damaged or another kind of file (tensor b/c has another checksum); copy it" in refusal(small)
    for path in golden.glob("bundle_parts.*"):
        shutil.copy(path, tmp_path)
    data_path(tmp_path / "bundle_parts", 1, 2).unlink()
    assert "bundle_parts.data-00001-of-00002 does not exist" in refusal(tmp_path / "bundle_parts")


def entry(kind=1, shape=(2,), size=8, **others) -> bytes:
    fields = {"shard": 0, "offset": 0, "checksum": 0, "num_slices": 0} | others
    return google_files.encode_entry(bundle.Entry(kind, shape, size=size, **fields))


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        ([], "it has no header"),
        ([(b"a", entry())], "it has no header"),
        ([(b"", b"\x08\x01\x10\x01")], "its numbers are big-endian"),
        (
            [(b"", HEADER), (b"a", entry(size=7))],
            r"tensor a of shape \(2,\) and type float32 has 7 bytes",
        ),
        ([(b"", HEADER), (b"a", entry(shard=1))], "tensor a is in data file 1 of 1"),
        ([(b"", HEADER), (b"\xff", entry())], "can't decode byte 0xff"),
        ([(b"", HEADER), (b"a", b"\x10\x01")], "field 2 is not a message"),
        ([(b"", HEADER), (b"b", entry()), (b"a", entry())], "key b'a' comes after b'b'"),
    ],
)
def test_an_index_that_contradicts_itself(tmp_path, pairs, problem):
    (tmp_path / "x.index").write_bytes(google_files.encode_table(pairs))
    with pytest.raises(InputError, match=rf"x.index is damaged or another kind of file \(.*{problem}.*\); copy it"):
        read_index(tmp_path / "x.index")


def change_blocks(content: bytes, change) -> bytes:
    """Returns a table of one data block after `change(block with how it is compressed)`, its checksum made right."""
    stop = content.index(struct.pack("<I", files.masked_crc32c(bytes([0] * 4 + [1] + [0] * 4)))) - 13
    block = change(content[:stop])
    assert len(block) == stop
    return block + struct.pack("<I", files.masked_crc32c(block)) + content[stop + 4 :]


@pytest.mark.parametrize("kind", [1, 4])
def test_a_compressed_index_is_refused(small, kind):
    path = index_path(small)
    path.write_bytes(change_blocks(path.read_bytes(), lambda block: block[:-1] + bytes([kind])))
    assert "is compressed, as TensorFlow's are not" in refusal(small)
