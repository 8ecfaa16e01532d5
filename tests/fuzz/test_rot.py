# SPDX-License-Identifier: Apache-2.0
"""A bit that flips in a file: found, wherever a format has checksums."""

import random
from pathlib import Path

import jax
import mutations
import numpy as np
import pytest

from bert_jax.data.records import open_dataset
from bert_jax.inference.pretrained import load_pretrained
from tests.fuzz.test_fuzz_data import make_data
from tests.fuzz.test_fuzz_models import make_own, make_workdir

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


def parameters(path: Path) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(load_pretrained(path).params)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "name", "inside", "load"),
    [
        (make_data, "data", "", training_data),
        (make_own, "model", "", parameters),
        (make_workdir, "run", "checkpoints", parameters),  # what is read of a run
    ],
    ids=["data", "own", "workdir"],
)
def test_a_flipped_bit_is_found_or_changes_nothing(tmp_path, make, name, inside, load):
    """What it may be: a figure of the manifest or of the seal for people, or a blank."""
    make(tmp_path)
    before, silent = load(tmp_path / name), 0
    for path in flips(files_of(tmp_path / name / inside), FLIPS):
        found = []
        if not mutations.outcome(lambda: found.append(load(tmp_path / name))):  # noqa: B023 - called at once
            assert path.suffix == ".json" and found == [before]
            silent += 1
    assert silent < FLIPS / 4
