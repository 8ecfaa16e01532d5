# SPDX-License-Identifier: Apache-2.0
"""Damaged data sets and examples: read, or refused in one line."""

import json
import shutil
from pathlib import Path

import google_files
import numpy as np
import pytest
from builders import make_dataset
from conftest import ROOT
from fuzzing import Reader, make_tests

from bert_jax.batches.load import rows_to_batch
from bert_jax.data import records
from bert_jax.data.building import finished_manifest
from bert_jax.data.google import tfrecord
from bert_jax.data.google.examples import check_examples, examples_to_rows, read_examples
from bert_jax.storage.files import sha256_file
from bert_jax.tokenizing import load_tokenizer

FILES = ("data/manifest.json", "data/*.npy", "data/tokenizer/*")


def use_dataset(path: Path, verify: bool = True) -> None:
    """Opens a data set, its tokenizer too, and takes rows as training does."""
    dataset = records.open_dataset(path, verify=verify)
    assert len(dataset.fingerprint) == 64 and dataset.row_length
    assert dataset.manifest["identity"]["options"].get("next_sentence", "nsp") in ("nsp", "sop", "none")
    for split in (dataset.train, dataset.heldout):
        rows = split.gather(np.arange(min(4, split.num_rows)))
        rows_to_batch(rows, np.zeros(len(rows), np.int32))
    assert len(dataset.token_counts) == dataset.manifest["tokenizer"]["vocab_size"]
    load_tokenizer(dataset.tokenizer_path)


def make_data(directory: Path) -> None:
    (directory / "made").mkdir()
    made = make_dataset(directory / "made")
    shutil.copytree(made, directory / "data")


def make_packed(directory: Path) -> None:
    (directory / "made").mkdir()
    shutil.copytree(make_dataset(directory / "made", pack=3), directory / "data")


def use_sealed_anew(path: Path) -> None:
    """Reads a data set whose shards were changed before their checksums were taken."""
    manifest = path / "data" / records.MANIFEST
    content = manifest.read_bytes()
    about = json.loads(content)
    files = [about["token_counts"], *(shard for split in about["splits"].values() for shard in split["shards"])]
    for file in files:
        found = path / "data" / file["name"]
        file |= {"bytes": found.stat().st_size, "sha256": sha256_file(found)}
    manifest.write_text(json.dumps(about))
    try:
        use_dataset(path / "data")
    finally:
        manifest.write_bytes(content)


def use_finished(path: Path) -> None:
    """Reads a data set that may be the one that is asked for."""
    identity = json.loads((path / "made/data" / records.MANIFEST).read_text())["identity"]
    finished_manifest(path / "data", identity)


def make_examples(directory: Path) -> None:
    with np.load(ROOT / "tests" / "golden" / "google_examples.npz") as golden:
        (directory / "vocab.txt").write_text("".join(f"{token}\n" for token in golden["vocab"]), encoding="utf-8")
    examples = tfrecord.read_records(str(ROOT / "tests" / "golden" / "google_examples.tfrecord"))
    first = [next(examples) for _ in range(3)]
    google_files.write_records(directory / "examples.tfrecord", first)
    (directory / "example").write_bytes(first[0])


def use_examples(path: Path) -> None:
    tokenizer = load_tokenizer(path.parent / "vocab.txt")
    for first, columns in read_examples(str(path)):
        check_examples(str(path), first, columns, tokenizer)
        predictions = columns["masked_lm_ids"].shape[1]
        dtype = records.row_dtype(columns["input_ids"].shape[1], 1, tokenizer.vocab_size, predictions)
        examples_to_rows(columns, np.arange(len(columns["input_ids"])), tokenizer, dtype)


def use_example(path: Path) -> None:
    """Reads an example whose record has the checksum of what it is now."""
    google_files.write_records(path / "one.tfrecord", [(path / "example").read_bytes()])
    use_examples(path / "one.tfrecord")


READERS = [
    Reader("manifest", make_data, lambda path: use_dataset(path / "data"), ("data/manifest.json",), 700),
    Reader("dataset", make_data, lambda path: use_dataset(path / "data"), FILES, 200),
    Reader("unverified", make_data, lambda path: use_dataset(path / "data", False), ("data/*.npy",), 250),
    Reader("sealed-anew", make_data, use_sealed_anew, ("data/*.npy",), 250),
    Reader("packed", make_packed, lambda path: use_dataset(path / "data"), ("data/manifest.json", "data/*.npy"), 250),
    Reader("finished", make_data, use_finished, ("data/manifest.json",), 200),
    Reader("tfrecord", make_examples, lambda path: use_examples(path / "examples.tfrecord"), ("*.tfrecord",), 250),
    Reader("example", make_examples, use_example, ("example",), 500),
]

test_some_damage, test_much_damage = make_tests(READERS)


@pytest.fixture(autouse=True)
def quiet(capfd):
    """Keeps what packing says out of the report of a failure."""
    yield
    capfd.readouterr()
