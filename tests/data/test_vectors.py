# SPDX-License-Identifier: Apache-2.0
"""Codes of vectors, by formulas of this file's own: floors of steps, and bits of signs."""

import math

import numpy as np
import pytest
from builders import message

from bert_jax import quantize
from bert_jax.data.vectors import unit


@pytest.mark.parametrize("of", [slice(None), slice(20)], ids=["of all", "given"])
def test_codes_are_steps_between_the_ranges(of):
    vectors = np.random.default_rng(0).normal(size=(50, 11)).astype(np.float32)
    vectors[:, 3] = 0.25  # a dimension without a range
    low, high = ranges = np.stack([vectors[of].min(axis=0), vectors[of].max(axis=0)])
    steps = [np.float32(each) / np.float32(255) or np.float32(1) for each in high - low]
    expected = np.clip([[math.floor(each) for each in row] for row in (vectors - low) / steps], 0, 255)
    given = None if of == slice(None) else ranges
    codes, less = quantize(vectors, "uint8", given), quantize(vectors, "int8", given)
    assert codes.dtype == np.uint8 and codes.tolist() == expected.tolist()
    assert less.dtype == np.int8 and (less.astype(int) + 128).tolist() == expected.tolist()
    assert codes.min() == 0 and codes.max() == 255 and not codes[:, 3].any()


def test_a_bit_is_whether_a_number_is_above_0():
    vectors = np.random.default_rng(1).normal(size=(7, 11)).astype(np.float32)
    vectors[0, :4] = 0.0
    bits = quantize(vectors, "ubinary")
    assert bits.shape == (7, 2) and bits.dtype == np.uint8
    for row, codes in zip(vectors, bits):
        text = "".join(map("{:08b}".format, codes))  # the highest bit first
        assert text == "".join(str(int(value > 0)) for value in row) + "00000"
    less = quantize(vectors, "binary")
    assert less.dtype == np.int8 and (less.astype(int) + 128 == bits).all()
    assert (quantize(vectors, "float16") == vectors.astype(np.float16)).all()


def test_what_has_no_codes_is_refused():
    assert "precision 'int4' is unknown; use float32, float16, int8" in message(
        quantize, np.zeros((2, 3), np.float32), "int4"
    )
    for count in (0, 1):
        assert "one vector has no ranges; give `ranges`" in message(quantize, np.zeros((count, 3), np.float32), "int8")
    for value, precision in ((np.nan, "int8"), (np.inf, "binary"), (1e5, "float16")):
        assert f"numbers that {precision} does not hold" in message(quantize, [[value, 1.0], [0.0, 1.0]], precision)


def test_vectors_of_length_1_keep_their_bits():
    vectors = np.random.default_rng(2).normal(size=(9, 5)).astype(np.float32)
    vectors[4] = 0
    once = unit(vectors)
    assert once.dtype == np.float32 and not once[4].any()
    np.testing.assert_allclose(np.linalg.norm(np.delete(once, 4, 0), axis=1), 1, atol=1e-6)
    assert (unit(once) == once).all()
