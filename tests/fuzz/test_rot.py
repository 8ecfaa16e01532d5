# SPDX-License-Identifier: Apache-2.0
"""A bit that flips in a file: found, wherever a format has checksums."""

import random
from pathlib import Path

import jax
import mutations
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from read_models import load_tf1

from bert_jax.data.records import open_dataset
from bert_jax.data.sources.corpus import iterate_documents
from bert_jax.inference.pretrained import load_pretrained
from tests.fuzz.test_fuzz_data import make_data, make_examples, use_examples
from tests.fuzz.test_fuzz_models import make_own, make_tf1, make_workdir

FLIPS = 300


def flips(paths: list[Path], count: int):
    """Yields the file in which a bit is flipped, each bit of all files being as likely; it is whole again after."""
    rng = random.Random(0)
    sizes = [path.stat().st_size for path in paths]
    for _ in range(count):
        (path,) = rng.choices(paths, sizes)
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        yield path
        path.write_bytes(content)


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)


def training_data(path: Path) -> tuple:
    dataset = open_dataset(path)
    rows = [split.gather(np.arange(split.num_rows)).tobytes() for split in (dataset.train, dataset.heldout)]
    return rows, dataset.load_tokenizer().fingerprint, dataset.token_counts.tobytes(), dataset.row_length


def same(one, other) -> bool:
    """Returns whether two models have the same numbers."""
    leaves = [jax.tree.leaves(bert.params) for bert in (one, other)]
    return all(np.array_equal(*pair) for pair in zip(*leaves, strict=True))


@pytest.mark.slow
def test_a_flipped_bit_of_a_data_set_is_found_or_changes_nothing(tmp_path):
    """What it may be: a figure of the manifest for people, or a blank."""
    make_data(tmp_path)
    before, silent = training_data(tmp_path / "data"), 0
    for path in flips(files_of(tmp_path / "data"), FLIPS):
        found = []
        if not mutations.outcome(lambda: found.append(training_data(tmp_path / "data"))):  # noqa: B023 - called at once
            assert path.suffix == ".json" and found == [before]
            silent += 1
    assert silent < FLIPS / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "name", "load"),
    [(make_own, "model", load_pretrained), (make_tf1, "model", load_tf1), (make_workdir, "run", load_pretrained)],
    ids=["own", "tf1", "workdir"],
)
def test_a_flipped_bit_of_a_parameter_is_found(tmp_path, make, name, load):
    """Of a checkpoint of a run its own files; of a model of Google's the index and the data."""
    make(tmp_path)
    directory = tmp_path / name
    inside = directory / "checkpoints" if name == "run" else directory
    paths = [path for path in files_of(inside) if make is not make_tf1 or ".ckpt." in path.name]
    whole = load(directory)
    for path in flips(paths, FLIPS):
        found = []
        if not mutations.outcome(lambda: found.append(load(directory))):  # noqa: B023 - called at once
            assert path.name == "checksums.json" and same(whole, found[0])  # a figure of the seal that nothing reads


@pytest.mark.slow
def test_a_flipped_bit_of_a_tfrecord_is_found(tmp_path):
    make_examples(tmp_path)
    path = tmp_path / "examples.tfrecord"
    for _ in flips([path], FLIPS):
        assert mutations.outcome(lambda: use_examples(path))


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["snappy", "zstd"])
def test_a_flipped_bit_of_parquet_with_checksums_is_found(tmp_path, compression):
    """Its pages have them, if the writer was asked for that; headers and the footer have none, and are small."""
    table = pyarrow.table({"text": [f"The ban {number**3} ran.\nIt sat." for number in range(400)]})
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=150, compression=compression, write_page_checksum=True)
    before, silent = list(iterate_documents(str(path))), 0
    for _ in flips([path], FLIPS):
        found = []
        if not mutations.outcome(lambda: found.append(list(iterate_documents(str(path))))):  # noqa: B023
            silent += found != [before]
    assert silent <= FLIPS / 100
