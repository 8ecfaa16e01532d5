# SPDX-License-Identifier: Apache-2.0
"""Rows come back as they were written, and damage is found when the data set is opened."""

import json
import os
import shutil
from hashlib import sha256
from types import SimpleNamespace

import mutations
import numpy as np
import pytest

from bert_jax.data import records
from bert_jax.errors import InputError
from bert_jax.storage.resolve import resolve
from bert_jax.tokenizing import load_tokenizer

ROW_LENGTH, VOCAB_SIZE = 16, 300


def random_rows(num_rows: int, seed: int, max_sequences: int = 1, predictions: int = 0) -> np.ndarray:
    """Returns rows of random bytes: the format must not care what they mean."""
    dtype = records.row_dtype(ROW_LENGTH, max_sequences, VOCAB_SIZE, predictions)
    return np.frombuffer(np.random.default_rng(seed).bytes(num_rows * dtype.itemsize), dtype)


TOKENIZER = SimpleNamespace(
    fingerprint="f" * 64, vocab_size=VOCAB_SIZE, pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4
)
IDENTITY = {"options": {"next_sentence": "nsp"}}


def write_dataset(path, shards: list[np.ndarray], **row: int) -> np.ndarray:
    """Writes a data set with these training shards and returns all their rows; `row` are more words on their shape."""
    path.mkdir()
    written = [
        records.write_shard(
            path / records.shard_name("train", index, len(shards)), rows.dtype, len(rows), [rows[:3], rows[3:]]
        )
        for index, rows in enumerate(shards)
    ]
    row = {"length": ROW_LENGTH, "max_sequences": shards[0]["lengths"].shape[1]} | row
    train = {"sequences": sum(map(len, shards)), "shards": written}
    splits = {"train": train, "heldout": {"sequences": 0, "shards": []}}
    made_with = {"numpy": "1.0"}
    made = records.finish_dataset(path, IDENTITY, row, TOKENIZER, splits, np.arange(VOCAB_SIZE), made_with, note=7)
    assert made == json.loads((path / records.MANIFEST).read_text())
    return np.concatenate(shards)


@pytest.mark.parametrize(("sizes", "max_sequences"), [([10], 1), ([7, 3, 5, 4], 3)])
def test_gather_returns_the_rows_asked_for_in_their_order(tmp_path, sizes, max_sequences):
    rows = write_dataset(tmp_path / "data", [random_rows(size, seed, max_sequences) for seed, size in enumerate(sizes)])
    train = records.open_dataset(tmp_path / "data").train
    assert train.num_rows == len(rows) == train.num_sequences
    wanted = np.random.default_rng(0).integers(0, len(rows), 100)
    for indices in (wanted, np.arange(len(rows)), wanted[:0]):
        got = train.gather(indices)
        assert got.dtype == rows.dtype and got.tobytes() == rows[indices].tobytes()
    got["lengths"] = 0  # a copy, not the file


def test_gather_refuses_rows_that_do_not_exist(tmp_path):
    write_dataset(tmp_path / "data", [random_rows(10, 0)])
    dataset = records.open_dataset(tmp_path / "data")
    for index in (-1, 10):
        with pytest.raises(IndexError, match=r"not in \[0, 10\)"):
            dataset.train.gather(np.array([3, index]))
    assert dataset.heldout.num_rows == 0
    with pytest.raises(IndexError):
        dataset.heldout.gather(np.array([0]))


def test_rows_without_predictions_are_those_of_before():
    """Byte for byte: the record of docs/decisions/0004-row-format.md, written out."""
    fields = [("token_ids", "<u2", (128,)), ("word_starts", "u1", (16,)), ("lengths", "<u2", (3,)),
              ("first_lengths", "<u2", (3,)), ("labels", "i1", (3,)), ("numbers", "<u4", (3,))]  # fmt: skip
    predictions = [("mlm_positions", "<u2", (20,)), ("mlm_labels", "<u2", (20,)), ("mlm_counts", "<u2")]
    assert records.NO_LABEL == -1 and records.row_dtype(128, 3, 30522) == np.dtype(fields)
    assert records.row_dtype(128, 3, 30522, predictions=20) == np.dtype(fields + predictions)


def test_rows_with_predictions_come_back(tmp_path):
    rows = write_dataset(tmp_path / "data", [random_rows(8, 0, predictions=5)], predictions=5)
    train = records.open_dataset(tmp_path / "data").train
    assert train.dtype == rows.dtype and train.gather(np.arange(8)).tobytes() == rows.tobytes()
    write_dataset(tmp_path / "other", [random_rows(8, 0, predictions=5)], predictions=4)
    assert "does not hold 8 rows" in refusal(tmp_path / "other")


@pytest.mark.parametrize(("vocab_size", "bytes_each"), [(256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_ids_take_the_smallest_type_that_holds_the_vocabulary(vocab_size, bytes_each):
    assert records.row_dtype(8, 1, vocab_size)["token_ids"].base.itemsize == bytes_each


@pytest.mark.parametrize("row_length", [8, 13])
def test_word_starts_survive_packing(row_length):
    bits = np.random.default_rng(row_length).random((5, row_length)) < 0.5
    packed = records.pack_word_starts(bits)
    assert packed.shape == (5, records.row_dtype(row_length, 1, 9)["word_starts"].shape[0])
    assert (records.unpack_word_starts(packed, row_length) == bits).all()


@pytest.fixture
def dataset(tmp_path):
    """Returns the path of a good data set of two shards."""
    write_dataset(tmp_path / "data", [random_rows(8, 0), random_rows(9, 1)])
    return tmp_path / "data"


def refusal(path, **options) -> str:
    """Returns the message with which opening fails: one line."""
    with pytest.raises(InputError) as caught:
        records.open_dataset(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read_manifest(path) -> dict:
    return json.loads((path / records.MANIFEST).read_text())


def write_manifest(path, content) -> None:
    (path / records.MANIFEST).write_bytes(mutations.dump(content))


def change_manifest(path, **changes) -> None:
    write_manifest(path, read_manifest(path) | changes)


def test_a_manifest_says_all_that_it_was_told(dataset):
    manifest = read_manifest(dataset)
    numbers = manifest["splits"].pop("train")
    assert numbers["sequences"] == 17
    for shard, rows in zip(numbers["shards"], (8, 9), strict=True):
        assert shard.keys() == {"name", "rows", "bytes", "sha256", "blocks"}
        content = (dataset / shard["name"]).read_bytes()
        assert (shard["rows"], shard["bytes"], shard["sha256"]) == (rows, len(content), sha256(content).hexdigest())
    counts = (dataset / "token_counts.npy").read_bytes()
    assert manifest == {
        "format": "bert_jax rows",
        "version": 1,
        "identity": IDENTITY,
        "row": {"length": 16, "max_sequences": 1},
        "tokenizer": vars(TOKENIZER),
        "splits": {"heldout": {"sequences": 0, "shards": []}},
        "token_counts": {"name": "token_counts.npy", "bytes": len(counts), "sha256": sha256(counts).hexdigest()},
        "made_with": {"numpy": "1.0"},
        "note": 7,
    }
    opened, about = records.open_dataset(dataset), records.open_about(resolve(dataset))
    assert (opened.token_counts == np.arange(VOCAB_SIZE)).all() and opened.tokenizer_path == str(dataset / "tokenizer")
    assert about.shards == numbers["shards"] and about.url == ""
    assert about.num_bytes == sum(shard["bytes"] for shard in numbers["shards"])


def test_a_data_set_at_a_url_is_copied(dataset, memory):
    url = "memory://test/data"
    memory.put(str(dataset), url, recursive=True)
    memory.pipe(f"{url}/tokenizer/vocab.txt", b"x")
    opened, here = records.open_dataset(url), records.open_dataset(dataset)
    memory.rm(url, recursive=True)
    assert opened.path != dataset and "vocab.txt" in os.listdir(opened.tokenizer_path)
    assert opened.train.gather(np.arange(17)).tobytes() == here.train.gather(np.arange(17)).tobytes()
    for each in (opened, here):
        each.close()


@pytest.mark.parametrize(("task", "special"), [("nsp", 3), ("sop", 3), ("none", 2)])
def test_the_words_of_a_row_leave_out_what_is_no_text(dataset, task, special):
    manifest = read_manifest(dataset)
    manifest["identity"]["options"]["next_sentence"] = task
    write_manifest(dataset, manifest)
    with pytest.raises(InputError, match="does not say how many words its text has"):
        records.open_dataset(dataset).words_of_row  # noqa: B018
    manifest["splits"]["train"] |= {"words": 500, "fill": 0.75, "rows": 17, "tokens": 1000}
    write_manifest(dataset, manifest)
    tokens = 0.75 * 17 * ROW_LENGTH - special * 17  # of the text; half as many words
    assert records.open_dataset(dataset).words_of_row == pytest.approx(tokens / 2 / 17)


def test_the_tokenizer_is_the_one_that_the_manifest_names(dataset):
    (dataset / "tokenizer").mkdir()
    (dataset / "tokenizer" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na")
    told = r'tokenizer is damaged or was replaced: .*\(fingerprint \w{12}, not "f{12}"\)'
    with pytest.raises(InputError, match=told):
        records.open_dataset(dataset).load_tokenizer()
    tokenizer = load_tokenizer(dataset / "tokenizer")
    change_manifest(dataset, tokenizer=vars(TOKENIZER) | {"fingerprint": tokenizer.fingerprint})
    assert records.open_dataset(dataset).load_tokenizer().vocab == tokenizer.vocab


@pytest.mark.parametrize(
    ("change", "is_read"),
    [
        ({}, True),
        ({"rows": 1.5}, True),
        ({"bytes": "8"}, False),
        ({"sha256": "x"}, False),
        ({"rows": None}, False),
        ({"file": {}}, False),
        ({"shards": [{}]}, False),
        (None, False),
    ],
)
def test_the_record_of_a_part_is_whole_or_made_again(dataset, change, is_read):
    path = dataset / "part.json"
    shard = read_manifest(dataset)["splits"]["train"]["shards"][0]
    record = shard | {"file": shard, "shards": [shard]} | (change or {})
    del record["blocks"]
    path.write_text("{" if change is None else json.dumps(record))
    assert records.read_part(path, record) == (record if is_read else None)
    assert records.read_part(dataset / "none.json", record) is None


def test_missing_directory_or_manifest(tmp_path, dataset):
    assert "nothing does not exist; give a data set, as bert_jax prepare_corpus" in refusal(tmp_path / "nothing")
    (dataset / records.MANIFEST).unlink()
    assert "holds no manifest.json, so no finished data set; give" in refusal(dataset)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[]", "does not describe 'bert_jax rows'"),
        ('{"format": "bert_jax', "damaged or another kind of file"),
        ({"format": "somebody else's"}, "does not describe 'bert_jax rows'"),
        ({"version": 2}, "has format version 2, not 1"),
        ({"row": {"length": ROW_LENGTH - 2, "max_sequences": 1}}, "does not hold 8 rows; prepare it again"),
        ({"inputs": {"names": [1], "files": 1, "bytes": 8}}, "`$.inputs.names[0]`"),
        ({"tokenizer": vars(TOKENIZER) | {"vocab_size": 301}}, "does not hold the counts of 301 tokens; prepare"),
        ({"tokenizer": vars(TOKENIZER) | {"fingerprint": "a" * 64}}, "tokenizer aaaaaaaaaaaa, not ffffffffffff; use"),
    ],
)
def test_a_manifest_of_something_else_is_refused(dataset, content, expected):
    if isinstance(content, dict):
        change_manifest(dataset, **content)
    else:
        (dataset / records.MANIFEST).write_text(content)
    assert expected in refusal(dataset, tokenizer_fingerprint="f" * 64)


@pytest.mark.parametrize("name", ["train-00000-of-00002.npy", records.TOKEN_COUNTS])
def test_a_missing_shard_is_named_before_a_damaged_one(dataset, name):
    """Sizes cost nothing, and checksums read all bytes."""
    content = (dataset / name).read_bytes()
    (dataset / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"{dataset / name} is damaged" in refusal(dataset)
    records.open_dataset(dataset, verify=False)  # what is not asked for is not read
    (dataset / name).write_bytes(content)
    other = dataset / records.shard_name("train", 1, 2)
    os.truncate(other, other.stat().st_size - 1)
    assert f"{other} has" in refusal(dataset, verify=False)
    other.unlink()
    assert f"{other} is missing" in refusal(dataset)


def test_the_fingerprint_is_of_the_contents(tmp_path, dataset):
    shutil.copytree(dataset, tmp_path / "copy")
    write_dataset(tmp_path / "other", [random_rows(8, 0), random_rows(9, 2)])
    ours, copied, other = (records.open_dataset(tmp_path / name).fingerprint for name in ("data", "copy", "other"))
    assert ours == copied != other


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_a_write_error_leaves_nothing_behind(tmp_path, monkeypatch):
    rows = random_rows(40_000, 0)
    monkeypatch.setattr(records, "open", lambda path, mode: open("/dev/full", mode), raising=False)
    with pytest.raises(InputError, match=r"cannot write .*shard.npy: No space left on device"):
        records.write_shard(tmp_path / "shard.npy", rows.dtype, len(rows), [rows])
    assert not os.listdir(tmp_path)


def test_too_few_rows_are_a_bug_that_is_noticed(tmp_path):
    rows = random_rows(4, 0)
    with pytest.raises(ValueError, match="4 rows were promised"):
        records.write_shard(tmp_path / "shard.npy", rows.dtype, 4, [rows[:3]])
    assert not os.listdir(tmp_path)


def test_every_wrong_type_in_a_manifest_is_one_line(dataset):
    """Each value of it in turn is another one, or missing: a data set that opens, or a line for the user."""
    manifest = read_manifest(dataset)
    del manifest["made_with"], manifest["note"]  # for people
    messages = []
    for path in mutations.places(manifest):
        changed = [mutations.replaced(manifest, path, wrong) for wrong in mutations.WRONG]
        for content in [*changed, *([mutations.without(manifest, path)] if path else [])]:
            write_manifest(dataset, content)
            messages.append(mutations.outcome(lambda: pretrain_reads(dataset)))
    assert sum(map(bool, messages)) > 0.9 * len(messages)


def pretrain_reads(path) -> None:
    """Opens a data set and asks of it what training does."""
    opened = records.open_dataset(path)
    assert opened.fingerprint and opened.tokenizer_path
    assert opened.manifest["identity"]["options"].get("next_sentence", "nsp") in ("nsp", "sop", "none")
    opened.train.gather(np.arange(min(3, opened.train.num_rows)))


@pytest.mark.parametrize(
    ("path", "wrong", "expected"),
    [
        (("row", "length"), "x", "Expected `int`, got `str`"),
        (("row", "length"), 0, "Expected `int` >= 1"),
        (("row", "length"), 2**16, "Expected `int` <= 65535"),
        (("row", "max_sequences"), 0, "Expected `int` >= 1"),
        (("row", "max_sequences"), 2**16, "Expected `int` <= 65535"),
        (("row", "predictions"), -1, "Expected `int` >= 0"),
        (("row", "predictions"), 2**16, "Expected `int` <= 65535"),
        (("tokenizer", "vocab_size"), 0, "Expected `int` >= 1"),
        (("tokenizer", "vocab_size"), 2**31, "Expected `int` <= 2147483647"),
        (("splits", "train", "shards", 0, "blocks", "rows"), 0, "Expected `int` >= 1"),
        (("splits", "train", "shards", 1, "sha256"), [], "Expected `str`, got `array`"),
        (("splits", "train", "shards", 0, "rows"), 10**300, "Expected `int` <= 9007199254740991"),
        (("token_counts", "name"), None, "Expected `str`, got `null`"),
    ],
)
def test_a_manifest_says_what_stands_where(dataset, path, wrong, expected):
    manifest = read_manifest(dataset)
    write_manifest(dataset, mutations.replaced(manifest, path, wrong))
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    assert f"{dataset / records.MANIFEST}: {expected} - at `${place}`" in refusal(dataset)


def test_the_smallest_manifest_is_read_and_one_that_lacks_a_field_is_not(dataset):
    manifest = read_manifest(dataset)
    write_manifest(dataset, mutations.without(manifest, ("row", "length")))
    assert "manifest.json: Object missing required field `length` - at `$.row`" in refusal(dataset)
    manifest["row"] = {"length": 1, "max_sequences": 1, "predictions": 0}
    manifest["tokenizer"]["vocab_size"] = 1
    manifest["splits"]["train"]["shards"][0]["blocks"] = {"rows": 1, "crc32c": ""}
    write_manifest(dataset, manifest)
    assert "does not hold the counts of 1 tokens" in refusal(dataset)


@pytest.mark.parametrize("name", ["../outside.npy", "{absolute}", "a/../../outside.npy", "x\0y"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(dataset, name):
    """Also where the file is there and has the checksum."""
    manifest = read_manifest(dataset)
    shard = manifest["splits"]["train"]["shards"][0]
    outside = dataset.parent / "outside.npy"
    shutil.copy(dataset / shard["name"], outside)
    shard["name"] = name.format(absolute=outside)
    write_manifest(dataset, manifest)
    assert "at `$.splits.train.shards[0].name`" in refusal(dataset)


@pytest.mark.parametrize(
    ("name", "header"),
    [("train-00001-of-00002.npy", header) for header in (b"{'descr': (", b"[" * 60 + b"]", b"{'shape': (-1,), ")]
    + [(records.TOKEN_COUNTS, b"\0" * 20)],
)
def test_a_header_that_is_no_header_is_one_line(dataset, name, header):
    content = bytearray((dataset / name).read_bytes())
    content[10 : 10 + len(header)] = header
    (dataset / name).write_bytes(content)
    assert f"{dataset / name} is damaged or another kind of file (" in refusal(dataset, verify=False)
