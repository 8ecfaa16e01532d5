# SPDX-License-Identifier: Apache-2.0
"""Plans use every sequence once and waste little; packed data sets hold the same sequences as before."""

import hashlib
import itertools
import time

import numpy as np
import pytest
from builders import make_dataset, message

from bert_jax.data import records
from bert_jax.data.packing import EMPTY, assign, plan_packing, shard_seed
from bert_jax.data.prepare import PrepareOptions
from bert_jax.storage import files


def random_lengths(rng: np.random.Generator, row_length: int) -> np.ndarray:
    """Returns up to a thousand lengths: even, clustered, or all equal."""
    count, kind = int(rng.choice([1, 2, 30, 1000])), rng.integers(3)
    if kind == 0:
        lengths = rng.integers(1, row_length + 1, count)
    elif kind == 1:
        lengths = rng.normal(row_length * rng.random(), row_length / 8, count).astype(int)
    else:
        lengths = np.full(count, rng.integers(1, row_length + 1))
    return np.clip(lengths, 1, row_length)


@pytest.mark.parametrize("max_per_row", [1, 2, 3, 4, 8])
def test_every_sequence_has_one_place_and_no_row_is_overfull(max_per_row):
    rng = np.random.default_rng(max_per_row)
    for _ in range(25):
        row_length = int(rng.choice([8, 32, 100]))
        lengths = random_lengths(rng, row_length)
        plan = plan_packing(np.bincount(lengths), row_length, max_per_row)
        assert plan.combinations.shape[1] == max_per_row and (plan.counts > 0).all()
        assert len(np.unique(plan.combinations, axis=0)) == len(plan.combinations)
        rows = assign(lengths, plan, seed=1)
        assert rows.shape == (plan.num_rows, max_per_row)
        assert np.array_equal(np.sort(rows[rows != EMPTY]), np.arange(len(lengths)))
        assert (np.where(rows == EMPTY, 0, lengths[rows]).sum(axis=1) <= row_length).all()
        assert (rows[:, 0] != EMPTY).all() and ((rows[:, 1:] == EMPTY) >= (rows[:, :-1] == EMPTY)).all()
        assert plan.combinations.sum(axis=1) @ plan.counts == lengths.sum()


def wikipedia_like(num_sequences: int) -> np.ndarray:
    """Returns a histogram like that of Wikipedia at 512: a quarter full, the others mostly short, half padding."""
    lengths = np.arange(1, 513)
    shape = np.minimum(lengths / 50, 1) ** 2 / lengths**0.85
    shape[:4], shape[-1] = 0, 0
    shape[-1] = 0.234 / 0.766 * shape.sum()
    return np.round(np.concatenate([[0], num_sequences * shape / shape.sum()])).astype(np.int64)


def test_rows_of_512_are_full_with_three_sequences_and_planned_in_a_second():
    """Of as many sequences as all of Wikipedia has."""
    histogram = wikipedia_like(16_000_000)
    tokens = histogram @ np.arange(513)
    assert 0.48 < tokens / (512 * histogram.sum()) < 0.53
    started = time.process_time()
    plan = plan_packing(histogram, 512, 3)
    assert time.process_time() - started < 1  # measured: 0.1
    assert tokens / (512 * plan.num_rows) > 0.993


def test_rows_are_those_of_earlier_versions():
    """Equal options give equal data sets, whoever makes them: the rows are part of the format."""
    digest = hashlib.sha256()
    for max_per_row, longest, count in itertools.product((1, 2, 3, 5, 8), (4, 9, 20, 48), (1, 7, 60, 900)):
        raw = np.random.PCG64(count).random_raw(count)  # of a Generator, other versions of NumPy may draw others
        lengths = (raw % longest + 1).astype(np.int64)
        rows = assign(lengths, plan_packing(np.bincount(lengths), 48, max_per_row), [1, 0, 2])
        digest.update(rows.astype("<i8").tobytes())
    lengths = np.arange(513)
    histogram = np.where(lengths > 3, 20_000 // np.maximum(lengths, 1), 0) + 3000 * (lengths == 512)
    for max_per_row in (3, 8):
        plan = plan_packing(histogram, 512, max_per_row)
        digest.update(plan.combinations.astype("<i8").tobytes() + plan.counts.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "11a99f20aee7dc98"


def test_nothing_is_packed_into_no_rows():
    plan = plan_packing(np.zeros(17, int), 16, 3)
    assert plan.num_rows == 0 and assign(np.zeros(0, int), plan, 0).shape == (0, 3)


def test_the_seed_decides_who_stands_together_and_neighbours_do_not():
    lengths = np.random.default_rng(0).integers(5, 60, 3000)
    plan = plan_packing(np.bincount(lengths), 64, 3)
    rows, others = assign(lengths, plan, 1), assign(lengths, plan, 2)
    assert (rows != others).any()
    together = rows[(rows != EMPTY).sum(axis=1) > 1]
    assert (abs(together[:, 0] - together[:, 1]) < 10).mean() < 0.03  # by chance: 0.7 %
    with pytest.raises(ValueError, match="of other lengths"):
        assign(lengths + 1, plan, 1)


# Data sets

PADDED = {"shards": 3, "short_seq_rate": 0.6, "holdout_rate": 0.2}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Returns a toy data set of three training shards."""
    return make_dataset(tmp_path_factory.mktemp("unpacked"), **PADDED)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("packed"), pack=3, **PADDED)


def sequences(dataset: records.Dataset, split: str) -> dict[int, tuple]:
    """Returns the sequences of a split by their numbers, checking that the rest of each row is empty."""
    part = getattr(dataset, split)
    found = {}
    for row in part.gather(np.arange(part.num_rows)):
        starts = records.unpack_word_starts(row["word_starts"], dataset.row_length)
        at = 0
        about = (row[name] for name in ("lengths", "first_lengths", "labels", "numbers"))
        for length, first, label, number in zip(*about, strict=True):
            if not length:
                assert (first, label, number) == (0, records.NO_LABEL, 0)
                continue
            stop = at + int(length)
            assert number not in found
            found[int(number)] = (row["token_ids"][at:stop].tolist(), starts[at:stop].tolist(), int(first), int(label))
            at = stop
        assert (row["token_ids"][at:] == dataset.manifest["tokenizer"]["pad_id"]).all() and not starts[at:].any()
    return found


def test_a_packed_data_set_has_the_same_sequences_in_fewer_rows(unpacked, packed):
    before, after = records.open_dataset(unpacked), records.open_dataset(packed)
    assert after.fingerprint != before.fingerprint and (after.token_counts == before.token_counts).all()
    assert after.manifest["row"] == {"length": 32, "max_sequences": 3}
    for split in ("train", "heldout"):
        assert sequences(before, split) == sequences(after, split)
        rows, said = getattr(after, split), after.manifest["splits"][split]
        assert rows.num_rows < getattr(before, split).num_rows and rows.num_sequences == len(sequences(after, split))
        filled = rows.gather(np.arange(rows.num_rows))["lengths"].sum()
        assert (said["rows"], said["sequences"]) == (rows.num_rows, rows.num_sequences)
        assert said["fill"] == round(filled / (rows.num_rows * 32), 4) > before.manifest["splits"][split]["fill"]
    assert len(after.train.shards) == len(before.train.shards) == 3


def test_options_name_packing_only_where_rows_are_packed(unpacked, packed):
    """So data sets that were made before packing was added are the same as ever."""
    before = files.read_json(unpacked / records.MANIFEST)["identity"]["options"]
    assert "pack" not in before
    assert before == PrepareOptions(**before).identity() == PrepareOptions(**before, pack=0).identity()
    assert files.read_json(packed / records.MANIFEST)["identity"]["options"] == before | {"pack": 3}
    assert "pack 65 is not" in message(PrepareOptions(pack=65).validate)


def test_each_shard_of_a_split_has_a_seed_of_its_own():
    assert shard_seed(-1, "train", 2) == [2**64 - 1, 0, 2]
    assert shard_seed(5, "heldout", 0) == [5, 1, 0]
