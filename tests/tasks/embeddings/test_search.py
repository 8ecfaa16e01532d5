# SPDX-License-Identifier: Apache-2.0
"""Exact search is a sort of all cosines, in blocks of any size, on any number of devices."""

import numpy as np
import pytest

from bert_jax.data.vectors import open_vectors, quantize, unit, write_codes, write_manifest, write_texts
from bert_jax.tasks.embeddings import search
from bert_jax.tasks.embeddings.search import Nearest, in_blocks, nearest, nearest_vectors


def assert_best(found, scores, k, names=None):
    """Found are the best of all scores, of equal ones the first."""
    order = np.argsort(-scores.round(6), axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(found.numbers, order if names is None else names[order])
    np.testing.assert_allclose(found.scores, np.take_along_axis(scores, order, 1), atol=2e-6)


def drawn(count, queries, size):
    """Returns vectors, some of them equal, and queries, of which the first is one of these."""
    rng = np.random.default_rng(3)
    vectors, asked = (unit(rng.normal(size=(rows, size)).astype(np.float32)) for rows in (count, queries))
    vectors[count // 2 :: 7], asked[0] = vectors[0], vectors[0]
    return vectors, asked


@pytest.mark.parametrize(("count", "queries", "k"), [(100, 13, 7), (5, 3, 9), (1, 1, 1)])
def test_the_nearest_are_those_of_a_sort(monkeypatch, count, queries, k):
    monkeypatch.setattr(search, "BLOCK", 16)
    monkeypatch.setattr(search, "_QUERIES", 8)
    vectors, asked = drawn(count, queries, 6)
    found = nearest(2 * asked, in_blocks(3 * vectors), k)
    there = min(k, count)
    assert_best(Nearest(found.scores[:, :there], found.numbers[:, :there]), asked @ vectors.T, k)
    assert (found.numbers[:, there:] == -1).all() and np.isneginf(found.scores[:, there:]).all()
    assert nearest(np.zeros((0, 6), np.float32), in_blocks(vectors), k).numbers.shape == (0, k)


def write_directory(path, vectors, precision, rows=37):
    """Writes vectors as `write_vectors` does, in shards of so many rows."""
    shards, ranges = [], np.stack([vectors.min(axis=0), vectors.max(axis=0)])
    for number, first in enumerate(range(0, len(vectors), rows)):
        part = vectors[first : first + rows]
        codes = quantize(part, precision, ranges if "int8" in precision else None)
        passages = [(f"d{first + n}", f"text {first + n}") for n in range(len(part))]
        of_texts = write_texts(path, f"texts-{number}.parquet", passages)
        of_vectors = write_codes(path, f"vectors-{number}.npy", codes)
        shards.append({"rows": len(part), "vectors": of_vectors, "texts": of_texts, "ranges": ranges.tolist()})
    write_manifest(path, {"options": {"precision": precision}}, shards)
    return open_vectors(path)


@pytest.mark.parametrize("precision", ["float32", "float16", "int8", "uint8"])
def test_directories_are_searched_by_all_their_numbers(tmp_path, monkeypatch, precision):
    monkeypatch.setattr(search, "BLOCK", 16)
    vectors, asked = drawn(200, 5, 40)
    opened = write_directory(tmp_path, vectors, precision)
    low, high = opened.ranges.astype(float)
    numbers = quantize(vectors, precision, opened.ranges).astype(float)
    if "int8" in precision:
        numbers = low + (numbers + 128 * (precision == "int8")) * (high - low) / 255
    found = nearest_vectors(3 * asked, opened, 9)
    assert_best(found, asked.astype(float) @ numbers.T, 9)
    assert found.numbers[0, :3].tolist() == [0, 100, 107]
    assert opened.passages(found.numbers[0, :3])[107] == ("d107", "text 107")


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
@pytest.mark.parametrize("size", [40, 64])
def test_bits_are_found_by_their_number_and_ordered_by_the_query(tmp_path, monkeypatch, precision, size):
    monkeypatch.setattr(search, "_BITS_BLOCK", 16)
    vectors, asked = drawn(150, 5, size)
    opened = write_directory(tmp_path, vectors, precision)
    bits = (vectors > 0).astype(int)
    for candidates, wide in ((12, 12), (3, 6)):
        found = nearest_vectors(asked, opened, 6, candidates)
        for query, scores, numbers in zip(asked, found.scores, found.numbers):
            different = (bits != (query > 0)).sum(axis=1)
            near = np.sort(np.argsort(different, kind="stable")[:wide])
            assert_best(Nearest(scores[None], numbers[None]), (bits[near] @ query.astype(float))[None], 6, near)
    few = nearest_vectors(vectors[:1], write_directory(tmp_path / "few", vectors[:3], precision), 5)
    assert few.numbers.shape == few.scores.shape == (1, 3) and few.numbers[0, 0] == 0
    assert nearest_vectors(vectors[:0], opened, 5).numbers.shape == (0, 5)
