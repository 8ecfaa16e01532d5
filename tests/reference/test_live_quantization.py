# SPDX-License-Identifier: Apache-2.0
"""Codes of vectors beside sentence-transformers' quantize_embeddings, bit for bit; rescoring beside its formulas."""

import numpy as np
import pytest

from bert_jax import quantize

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("sentence_transformers.util.quantization").quantize_embeddings


def drawn(count, size, dtype):
    rng = np.random.default_rng(size)
    vectors = rng.normal(size=(count, size)) * rng.lognormal(size=size)
    vectors[:, 1] = -0.5  # without a range
    vectors[rng.random(vectors.shape) < 0.05] = 0.0
    return vectors.astype(dtype)


@pytest.mark.parametrize("precision", ["float32", "int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize(("count", "size"), [(500, 384), (101, 13), (0, 13)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_codes_are_the_same_bits(theirs, precision, count, size, dtype):
    vectors = drawn(count, size, dtype)
    own = drawn(200, size, dtype)
    ranges = np.stack([own.min(axis=0), own.max(axis=0)])
    for given in (None, ranges) if count and "int8" in precision else (ranges,):
        expected, codes = theirs(vectors, precision, ranges=given), quantize(vectors, precision, given)
        assert codes.dtype == expected.dtype and codes.shape == expected.shape
        assert codes.tobytes() == expected.tobytes()
